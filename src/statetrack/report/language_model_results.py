"""What the language-model experiment left behind, read and compared by the rule of its plan."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from statetrack.errors import UserError
from statetrack.experiments.item import LabelledRun, range_label
from statetrack.experiments.language_models import (
    MODELS,
    PAST,
    RANGES,
    SEEDS,
    WITHIN,
    Differences,
    Verdict,
    spikes,
    verdicts,
)
from statetrack.lm.compare import Difference, compare
from statetrack.lm.measured import Measured, Perplexities, in_window, read_perplexities
from statetrack.lm.spectrum import SpectrumUse

RESAMPLES = 10_000
BOOTSTRAP_SEED = 20_261_116


@dataclass(frozen=True)
class LanguageModelRun:
    """One run with its metrics; `done` is None while it is unfinished or after it diverged."""

    run: LabelledRun
    done: dict[str, Any] | None
    diverged: str | None
    rows: list[dict[str, Any]]

    @property
    def name(self) -> str:
        return f"{self.run.label}, seed {self.run.spec.seed}"


@dataclass(frozen=True, eq=False)
class LanguageModelResults:
    """The content of a results folder. `spectra` are by label and seed."""

    runs: list[LanguageModelRun]
    perplexities: Perplexities
    spectra: dict[tuple[str, int], list[SpectrumUse]]

    @property
    def within(self) -> tuple[int, int]:
        """Positions within the training length."""
        return 0, self.perplexities.models[0].context

    @property
    def past(self) -> tuple[int, int]:
        """Positions past it."""
        length = next(iter(self.perplexities.layouts.values())).length
        return self.perplexities.models[0].context, length

    def missing(self) -> list[str]:
        """Runs of the plan without a result."""
        there = {(r.run.label, r.run.spec.seed) for r in self.runs if r.done or r.diverged}
        planned = [(range_label(m, e), seed) for m in MODELS for seed in range(SEEDS) for e in RANGES]
        return [f"{label}, seed {seed}" for label, seed in planned if (label, seed) not in there]


def read_results(folder: Path) -> LanguageModelResults:
    """The files that tools/lm_experiment.py wrote: runs.jsonl, perplexity.json, spectrum.json."""
    perplexities = read_perplexities(folder / "perplexity.json")
    if not perplexities.models:
        raise UserError(f"{folder / 'perplexity.json'} holds no model: no run is finished.")
    try:
        lines = (folder / "runs.jsonl").read_text().splitlines()
        runs = [_run(json.loads(line)) for line in lines]
        listed = json.loads((folder / "spectrum.json").read_text())
        spectra = {(e["label"], e["seed"]): [_use(use) for use in e["uses"]] for e in listed}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder} cannot be read as results of the language models: {error!r}") from error
    return LanguageModelResults(runs, perplexities, spectra)


def _run(data: dict[str, Any]) -> LanguageModelRun:
    return LanguageModelRun(LabelledRun.from_dict(data), data["done"], data["diverged"], data["rows"])


def _use(data: dict[str, Any]) -> SpectrumUse:
    """Lists become the tuples they were."""
    fixed: dict[str, Any] = {name: tuple(data[name]) for name in ("negative", "negative_part")}
    fixed["quantiles"] = tuple(map(tuple, data["quantiles"]))
    return SpectrumUse(**data | fixed)


def differences(results: LanguageModelResults, unit: str = "sequence") -> Differences:
    """[-1,1] minus [0,1] by model, set and positions, for every model with a pair of finished runs."""
    found = {}
    for model in _paired(results.perplexities):
        rows = compare(
            results.perplexities,
            range_label(model, RANGES[0]),
            range_label(model, RANGES[1]),
            windows=[results.within, results.past],
            unit=unit,  # type: ignore[arg-type]
            resamples=RESAMPLES,
            seed=BOOTSTRAP_SEED,
        )
        found |= {(model, row.split, (row.low, row.high)): row for row in rows}
    return found


def _paired(perplexities: Perplexities) -> list[str]:
    seeds = {m: [_seeds(perplexities, range_label(m, e)) for e in RANGES] for m in MODELS}
    return [model for model, (low, high) in seeds.items() if low & high]


def _seeds(perplexities: Perplexities, label: str) -> set[int]:
    return {model.seed for model in perplexities.models if model.label == label}


def contrast(results: LanguageModelResults, model: str = "DeltaNet") -> Difference | None:
    """Claim X: (d of code + d of math) / 2 - d of recall, within the training length.

    Sequences of the three sets are resampled apart, seeds for all three together.
    """
    perplexities = results.perplexities
    if model not in _paired(perplexities):
        return None
    first, second = (range_label(model, e) for e in RANGES)
    by = {(m.label, m.seed): m for m in perplexities.models}
    common = sorted(_seeds(perplexities, first) & _seeds(perplexities, second))
    weights = {"heldout-code": 0.5, "heldout-math": 0.5, "heldout-recall": -1.0}
    if not weights.keys() <= perplexities.layouts.keys():
        return None
    generator = np.random.default_rng(BOOTSTRAP_SEED)
    drawn_seeds = generator.integers(len(common), size=(RESAMPLES, len(common)))
    drawn, by_seed, own, units = np.zeros(RESAMPLES), np.zeros(len(common)), np.zeros((2, len(common))), 0
    for split, weight in weights.items():
        losses = np.array(
            [
                [_by_sequence(perplexities, by[label, seed], split, results.within) for seed in common]
                for label in (first, second)
            ]
        )  # (ranges, seeds, sequences)
        d, n = losses[1] - losses[0], losses.shape[2]
        means = d[:, generator.integers(n, size=(RESAMPLES, n))].mean(2)  # (seeds, resamples)
        drawn += weight * np.take_along_axis(means.T, drawn_seeds, axis=1).mean(1)
        by_seed += weight * d.mean(1)
        own += weight * losses.mean(2)
        units += n
    lower, upper = np.quantile(drawn, [0.025, 0.975])
    spread = own.std(1, ddof=1) if len(common) > 1 else np.full(2, np.nan)
    return Difference(
        split="(code + math) / 2 - recall",
        first=first,
        second=second,
        low=results.within[0],
        high=results.within[1],
        mean=float(by_seed.mean()),
        lower=float(lower),
        upper=float(upper),
        by_seed=tuple(by_seed.tolist()),
        spread=(float(spread[0]), float(spread[1])),
        units=units,
        tokens=units * (results.within[1] - results.within[0]),
    )


def _by_sequence(
    perplexities: Perplexities, model: Measured, split: str, positions: tuple[int, int]
) -> np.ndarray:
    """The mean loss of every sequence at these positions, (sequences,)."""
    layout = perplexities.layouts[split]
    inside = in_window(layout, *positions)
    sums = np.bincount(layout.sequence[inside], model.losses[split][inside], len(layout.starts))
    return sums / (positions[1] - positions[0])


def stability(runs: Sequence[LanguageModelRun]) -> list[tuple[str, int, int | None]]:
    """For each pair of runs that ended: its name, spikes with [0,1] and with [-1,1], None if it diverged."""
    ended = {(r.run.family, r.run.spec.seed, r.run.eigenvalues): r for r in runs if r.done or r.diverged}
    found = []
    for model, seed in dict.fromkeys((model, seed) for model, seed, _ in ended):
        pair = [ended.get((model, seed, e)) for e in RANGES]
        if pair[0] is None or pair[1] is None or pair[0].diverged:
            continue
        counts = [spikes(r.rows, _warmup(r)) for r in pair if r is not None]
        found.append((f"{model}, seed {seed}", counts[0], None if pair[1].diverged else counts[1]))
    return found


def _warmup(run: LanguageModelRun) -> float:
    return run.run.spec.training.warmup * run.run.spec.training.steps


def judge(results: LanguageModelResults, found: Differences) -> list[Verdict]:
    """The verdicts of the plan on these results, whatever their lengths."""
    renamed = {results.within: WITHIN, results.past: PAST}
    named = {(model, split, renamed[positions]): d for (model, split, positions), d in found.items()}
    return verdicts(named, contrast(results), stability(results.runs))

"""The page docs/results/language-models: figures, tables and the verdicts of the plan, from result files."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from statetrack.experiments.item import range_label
from statetrack.experiments.language_models import (
    MODELS,
    RANGES,
    SPECTRUM_PIECES,
    UNUSED,
    Differences,
    Verdict,
    answer,
    kind_of,
)
from statetrack.files import write_atomically, write_text
from statetrack.lm.compare import Difference
from statetrack.lm.spectrum import SpectrumUse
from statetrack.report import figures, language_models
from statetrack.report.language_model_results import (
    LanguageModelResults,
    contrast,
    differences,
    judge,
    read_results,
)
from statetrack.report.language_models import TrainingCurve, domain

__all__ = ["write_language_models"]

SENTENCES = {
    "yes, as in the paper": "**Yes, as in the paper**: the validation loss is comparable or slightly "
    "worse, and both code and mathematics are predicted better with [-1,1].",
    "in part": "**In part**: not every one of the claims about validation, code and mathematics holds here.",
    "no": "**No**: neither code nor mathematics is predicted better with [-1,1] at this size.",
    "undecided": "**Undecided**: these runs do not separate the two ranges on code and mathematics.",
}


def write_language_models(results_folder: Path, out: Path) -> Path:
    """Write README.md and its figures into `out`, from the files of tools/lm_experiment.py."""
    results = read_results(results_folder)
    found = differences(results)
    for name, figure in _figures(results, found):
        write_atomically(out / f"{name}.svg", [figures.save(figure, "svg")])
    write_text(out / "README.md", page_text(results, found))
    return out / "README.md"


def page_text(results: LanguageModelResults, found: Differences) -> str:
    """The page in Markdown; `found` are the `differences` of the results."""
    return "\n".join(_page(results, found, judge(results, found))) + "\n"


def _page(results: LanguageModelResults, found: Differences, judged: Sequence[Verdict]) -> Iterable[str]:
    yield "# DeltaNet and Mamba as language models in both ranges\n"
    yield (
        "Built by `python tools/lm_experiment_page.py` from the files beside it; the sentences follow the "
        "[plan](PLAN.md), which was written before the runs.\n"
    )
    yield "## Answer\n"
    yield (
        "Validation slightly worse, better on code and mathematics with [-1,1]? "
        + SENTENCES[answer(judged)]
        + "\n"
    )
    lines = [[f"{v.name}", v.claim, f"**{v.answer}**", v.because] for v in judged]
    yield from table(("", "claim of the paper", "here", "because"), lines)
    yield (
        "\nd is the loss with [-1,1] minus the loss with [0,1] in nats per token, with its 95 % interval; "
        "negative: [-1,1] is better; 0.01 is 1 % of perplexity. C and M are the primary claims; the others "
        "are not corrected for their number.\n"
    )
    yield from _training(results)
    yield from _losses(results, found)
    yield from _spectrum(results)
    yield from _not_here(results, found)


def _training(results: LanguageModelResults) -> Iterable[str]:
    yield "## Training\n"
    yield "![Training loss of all runs](training.svg)\n"
    lines = []
    for r in results.runs:
        steps = r.rows[-1]["step"] if r.rows else 0
        state = "finished" if r.done else "diverged" if r.diverged else f"stopped at step {steps}"
        seconds = f"{r.done['seconds']:.0f}" if r.done else ""
        tokens = steps * r.run.spec.training.batch * r.run.spec.training.train_lengths[1]  # type: ignore[index]
        last = f"{np.mean([row['loss'] for row in r.rows[-5:]]):.4f}" if r.rows else ""
        lines.append([r.run.label, f"{r.run.spec.seed}", r.run.id, state, f"{tokens:,}", last, seconds])
    yield from table(("model", "seed", "run", "state", "tokens", "training loss, end", "seconds"), lines)
    yield "\nThe training loss at the end is the mean of the last five logged values, each of fresh text.\n"
    machines = sorted(
        {
            f"{r.done['machine']['device']}, torch {r.done['machine']['torch']}, commit {r.done['commit']}"
            for r in results.runs
            if r.done
        }
    )
    yield "Carried out on:\n\n" + "".join(f"- {machine}\n" for machine in machines)


def _losses(results: LanguageModelResults, found: Differences) -> Iterable[str]:
    p = results.perplexities
    yield "## Held-out text\n"
    lines = []
    for split, layout in p.layouts.items():
        for model in p.models:
            low, high = (p.mean_loss(model, split, *window) for window in (results.within, results.past))
            cells = [f"{low:.4f}", f"{np.exp(low):.2f}", f"{high:.4f}", f"{np.exp(high):.2f}"]
            lines.append([domain(split), model.label, f"{model.seed}", f"{len(layout.starts)}", *cells])
    within, past = (f"{a + 1:,} to {b:,}" for a, b in (results.within, results.past))
    head = (
        "set",
        "model",
        "seed",
        "sequences",
        f"loss, {within}",
        "perplexity",
        f"loss, {past}",
        "perplexity",
    )
    yield from table(head, lines)
    for model in _models(found):
        yield f"\n### {model}\n"
        yield f"![Perplexity of {model} by position]({_file(model, 'position')})\n"
        yield f"![Differences of {model} with intervals]({_file(model, 'differences')})\n"
        rows = [d for (name, _, _), d in found.items() if name == model]
        yield "Resampling sequences and seeds:\n"
        yield from table(DIFFERENCES, [_difference(d) for d in rows])
        yield "\nResampling documents (files, chapters, speeches, headwords, books) instead of sequences:\n"
        by_document = differences(results, unit="document")
        yield from table(DIFFERENCES, [_difference(d) for k, d in by_document.items() if k[0] == model])
    combined = contrast(results)
    if combined is not None:
        yield "\nClaim X, the gain on code and mathematics beside that on recall:\n"
        yield from table(DIFFERENCES, [_difference(combined)])


DIFFERENCES = ("set", "positions", "units", "d", "95 % interval", "d by seed", "spread of seeds", "rule")


def _difference(d: Difference) -> list[str]:
    spread = "unknown" if np.isnan(d.spread).any() else f"{max(d.spread):.4f}"
    interval, seeds = f"{d.lower:+.4f} to {d.upper:+.4f}", " ".join(f"{x:+.4f}" for x in d.by_seed)
    positions = f"{d.low + 1:,} to {d.high:,}"
    return [domain(d.split), positions, f"{d.units}", f"{d.mean:+.4f}", interval, seeds, spread, kind_of(d)]


def _spectrum(results: LanguageModelResults) -> Iterable[str]:
    yield "\n## Use of the negative half\n"
    wide = {
        f"{label}, seed {seed}": uses for (label, seed), uses in results.spectra.items() if "[-1,1]" in label
    }
    if not wide:
        yield "Not measured: no model with [-1,1] is there.\n"
        return
    yield "![Share of eigenvalues below 0 by layer and set](spectrum.svg)\n"
    splits = list(results.perplexities.layouts)
    lines = [
        [name, *(f"{_share(uses, split):.1%}" for split in splits), f"{_share(uses):.1%}"]
        for name, uses in wide.items()
    ]
    yield from table(("model", *map(domain, splits), "all"), lines)
    yield (
        "\nShare of eigenvalues below 0, over layers and heads (in Mamba: channels and states), on "
        f"{SPECTRUM_PIECES} pieces of {results.within[1]:,} tokens of each set.\n"
    )
    unused = [name for name, uses in wide.items() if _share(uses) < UNUSED]
    if unused:
        yield (
            f"Less than {UNUSED:.0%} of the eigenvalues are negative in {', '.join(unused)}: the comparison "
            "says little about negative eigenvalues there.\n"
        )


def _share(uses: Sequence[SpectrumUse], split: str | None = None) -> float:
    """The share of eigenvalues below 0, in one set or all, every layer counted the same."""
    return float(np.mean([np.mean(use.negative) for use in uses if split in (None, use.split)]))


def _not_here(results: LanguageModelResults, found: Differences) -> Iterable[str]:
    yield "## What this page does not contain\n"
    missing = results.missing()
    if missing:
        yield f"- {len(missing)} of the planned runs: {'; '.join(missing)}."
    for model in MODELS:
        pairs = next((len(d.by_seed) for (name, _, _), d in found.items() if name == model), 0)
        if pairs == 1:
            yield f"- The spread between seeds of {model}: only one seed has both ranges."
    yield (
        "- Other learning rates, sizes or numbers of tokens: each model was trained at one learning rate, "
        "chosen beforehand, with far fewer tokens than in the paper. A claim that fails here is not "
        "refuted at the paper's size."
    )
    yield "- The paper's data sets: the held-out sets stand for them, as the plan says."
    yield "- lm-evaluation-harness: models of this size are near chance on most of its tasks."
    yield (
        "- Near duplicates: only documents equal but for white space were removed, so a held-out document "
        "may resemble one that was trained on. That holds for both ranges."
    )


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    rows = [head, ["---"] * len(head), *lines]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def _figures(results: LanguageModelResults, found: Differences):
    """(name, figure) of every picture of the page."""
    curves: dict[str, list[TrainingCurve]] = {}
    for r in results.runs:
        tokens = r.run.spec.training.batch * r.run.spec.training.train_lengths[1] / 1e6  # type: ignore[index]
        if r.rows:
            curve = TrainingCurve([row["step"] * tokens for row in r.rows], [row["loss"] for row in r.rows])
            curves.setdefault(r.run.label, []).append(curve)
    yield "training", language_models.training_curves(curves, x="million tokens")
    panels = language_models.position_panels(results.perplexities)
    for model in _models(found):
        labels = [range_label(model, e) for e in RANGES]
        own = {split: {k: v for k, v in of.items() if k in labels} for split, of in panels.items()}
        context = results.within[1]
        yield _file(model, "position")[:-4], language_models.loss_by_position(own, context, columns=3)
        rows = [d for (name, _, _), d in found.items() if name == model]
        yield _file(model, "differences")[:-4], language_models.differences(rows)
    wide = _first_seeds(results.spectra)
    if wide:
        yield "spectrum", language_models.spectrum_use(wide)


def _first_seeds(spectra: Mapping[tuple[str, int], list[SpectrumUse]]) -> dict[str, list[SpectrumUse]]:
    """One model of each kind with [-1,1]: seeds look alike."""
    first: dict[str, list[SpectrumUse]] = {}
    for (label, _), uses in sorted(spectra.items()):
        if "[-1,1]" in label:
            first.setdefault(label, uses)
    return first


def _models(found: Differences) -> list[str]:
    return list(dict.fromkeys(model for model, _, _ in found))


def _file(model: str, what: str) -> str:
    return f"{what}-{model.lower()}.svg"

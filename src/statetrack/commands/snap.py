"""statetrack snap: a trained group tracker, rounded to exact permutations or rotations."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from statetrack.commands.flags import parse, take_first, take_plugins
from statetrack.errors import UserError
from statetrack.files import save_tensors, write_json
from statetrack.run import load_run
from statetrack.snapping import Check, Snapped, check, snap
from statetrack.snapping.snap import TOLERANCE
from statetrack.spec import RunSpec, check_seed

REPORT = "snap.json"


@dataclass(frozen=True)
class SnapOptions:
    """Round what a run has learned to exact permutations or rotations: `statetrack snap RUN`.

    Writes a folder that `load_run` reads, and checks it on fresh sequences of the run's task. --plugin
    FILE.py, or a module, registers the task or the mixer of a run that has its own.
    """

    out: Path | None = None  # folder of the snapped model; RUN-snapped when None
    tolerance: float = TOLERANCE  # largest distance of a token's transition from its exact one
    length: int = 100_000  # tokens of the sequences it is checked on
    sequences: int = 4  # number of sequences it is checked on
    seed: int = 0  # of these sequences


def main(arguments: Sequence[str]) -> None:
    run, flags = take_first(take_plugins(arguments))
    options = parse(SnapOptions, flags, "statetrack snap RUN")
    if run is None:
        raise UserError("snap: give the folder of a finished run first.")
    for name, value in (("length", options.length), ("sequences", options.sequences)):
        if value < 1:
            raise UserError(f"snap: {name} is {value}, expected at least 1.")
    check_seed("snap: seed", options.seed)
    out = options.out or Path(run.rstrip("/") + "-snapped")
    if (out / "spec.json").exists() and not (out / REPORT).exists():
        raise UserError(f"snap: {out} holds a run, which would be overwritten. Choose another --out.")
    spec, model = load_run(run)
    snapped = snap(model, spec, options.tolerance)
    drawn = options.length, options.sequences, options.seed
    before, after = check(model, spec, *drawn), check(snapped.model, spec, *drawn, snapped.states)
    print("\n".join([*_heads(snapped), *_changes(snapped), *_checks(before, after, options)]))
    if after.first_error is not None:
        raise UserError(
            f"snap: the snapped model is wrong at token {after.first_error:,}, so it was not written. For "
            "longer sequences, `statetrack compile --group` makes a network that does not round."
        )
    checks = {"sequences": options.sequences, "seed": options.seed}
    checks |= {"trained": asdict(before), "snapped": asdict(after)}
    _write(out, spec, snapped, {"run": run, "tolerance": options.tolerance, "check": checks})
    print(f"Written to {out}.")


def _heads(snapped: Snapped) -> list[str]:
    lines = []
    for h in snapped.heads:
        angles = ", its keys' angles alone give the swaps" if h.swaps_from_angles else ""
        found = f"rounded: within {h.misfit:.3f} of the {h.representation}{angles}"
        lines.append(f"head {h.head}    {found if not h.refused else f'silenced: {h.refused}'}")
    return lines


def _changes(snapped: Snapped) -> list[str]:
    share, margin = snapped.learned_right, snapped.learned_margin
    return [
        f"transitions    exact up to {snapped.transition_error:.1e} in float32",
        f"read-out       {snapped.read_out}: the learned one is right on {share:.2%} of all (state, token) "
        f"(commonest answer {snapped.commonest:.2%}), least margin {margin:.2f}; now {snapped.margin:.2f}",
    ]


def _checks(before: Check, after: Check, options: SnapOptions) -> list[str]:
    lines = ["", f"On {options.sequences} fresh sequences of {options.length:,} tokens:"]
    for name, done in (("trained", before), ("snapped", after)):
        at = done.first_error
        said = "right at every token" if at is None else f"first wrong answer at token {at:,}"
        lines.append(f"  {name}    {said}")
    if after.drift:
        horizon = _rounded(after.length / after.drift)
        lines.append(
            f"Float32 rounding has moved its states by {100 * after.drift:.2g} % of half the distance to "
            f"another. This grows with the length: expect errors after about {horizon} tokens."
        )
    return lines


def _rounded(count: float) -> str:
    """A count with one significant digit: 12,345,678 is 10 million."""
    count = float(f"{count:.1g}")
    return f"{count / 1e6:,.0f} million" if count >= 1e6 else f"{count:,.0f}"


def _write(folder: Path, spec: RunSpec, snapped: Snapped, about: dict[str, Any]) -> None:
    """spec.json and model.safetensors as a run has them; no done.json, since these are no trained weights."""
    numbers = "read_out", "learned_right", "commonest", "learned_margin", "margin", "transition_error"
    report = {"heads": [asdict(h) for h in snapped.heads]} | {n: getattr(snapped, n) for n in numbers}
    write_json(folder / REPORT, about | report)
    write_json(folder / "spec.json", replace(spec, model=snapped.model.config).to_dict())
    save_tensors(folder / "model.safetensors", snapped.model.state_dict(), {"snapped": "true"})

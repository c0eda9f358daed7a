"""statetrack snap: a trained group tracker with its learned reflections rounded to exact permutations."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from statetrack.commands.flags import parse, take_first
from statetrack.errors import UserError
from statetrack.files import save_tensors, write_json
from statetrack.run import load_run
from statetrack.snapping import Snapped, first_error, snap
from statetrack.snapping.snap import TOLERANCE
from statetrack.spec import RunSpec

REPORT = "snap.json"


@dataclass(frozen=True)
class SnapOptions:
    """Round the learned reflections of a run to exact permutations: `statetrack snap RUN`.

    Writes a folder that `load_run` reads, and checks it on fresh sequences of the run's task.
    """

    out: Path | None = None  # folder of the snapped model; RUN-snapped when None
    tolerance: float = TOLERANCE  # largest distance of a token's transition from its permutation
    length: int = 100_000  # tokens of the sequences it is checked on
    sequences: int = 4
    seed: int = 0


def main(arguments: Sequence[str]) -> None:
    run, flags = take_first(arguments)
    options = parse(SnapOptions, flags, "statetrack snap RUN")
    if run is None:
        raise UserError("snap: give the folder of a finished run first.")
    for name, value in (("length", options.length), ("sequences", options.sequences)):
        if value < 1:
            raise UserError(f"snap: {name} is {value}, expected at least 1.")
    out = options.out or Path(run.rstrip("/") + "-snapped")
    if (out / "spec.json").exists() and not (out / REPORT).exists():
        raise UserError(f"snap: {out} holds a run, which would be overwritten. Choose another --out.")
    spec, model = load_run(run)
    snapped = snap(model, spec, options.tolerance)
    checked = (options.length, options.sequences, options.seed)
    before, after = (first_error(m, spec, *checked) for m in (model, snapped.model))
    print("\n".join([*_heads(snapped), *_changes(snapped), *_checks(before, after, options)]))
    if after is not None:
        raise UserError(f"snap: the snapped model is wrong at token {after}, so it was not written.")
    _write(out, spec, snapped, {"run": run, "first_error_before": before, "checked": asdict(options)})
    print(f"Written to {out}.")


def _heads(snapped: Snapped) -> list[str]:
    lines = []
    for h in snapped.heads:
        angles = ", its keys' angles alone give the swaps" if h.swaps_from_angles else ""
        found = f"rounded: within {h.misfit:.3f} of the {h.representation} representation{angles}"
        lines.append(f"head {h.head}    {found if not h.refused else f'silenced: {h.refused}'}")
    return lines


def _changes(snapped: Snapped) -> list[str]:
    share, margin = snapped.learned_right, snapped.learned_margin
    return [
        f"transitions    exact up to {snapped.transition_error:.1e} in float32",
        f"read-out       {snapped.read_out}: the learned one is right on {share:.1%} of all exact states and "
        f"last tokens, margin {margin:.2f}; now margin {snapped.margin:.2f}",
    ]


def _checks(before: int | None, after: int | None, options: SnapOptions) -> list[str]:
    what = f"{options.sequences} sequences of {options.length:,} tokens"

    def said(error: int | None) -> str:
        return "right at every token" if error is None else f"first error at token {error:,}"

    return [f"{what}    trained: {said(before)}    snapped: {said(after)}"]


def _write(folder: Path, spec: RunSpec, snapped: Snapped, about: dict[str, Any]) -> None:
    """spec.json and model.safetensors as a run has them; no done.json, since these are no trained weights."""
    report = {f: getattr(snapped, f) for f in snapped.__dataclass_fields__ if f not in ("model", "heads")}
    report |= {"heads": [asdict(h) for h in snapped.heads]} | about
    report["checked"] = {k: v for k, v in report["checked"].items() if k != "out"}
    write_json(folder / REPORT, report)
    write_json(folder / "spec.json", spec.to_dict())
    save_tensors(folder / "model.safetensors", snapped.model.state_dict(), {"snapped": "true"})

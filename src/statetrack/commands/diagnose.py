"""statetrack diagnose: predict and measure the length at which a trained group tracker fails."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from statetrack.commands.flags import parse, take_first, take_plugins
from statetrack.errors import UserError
from statetrack.horizon import BREAK, Diagnosis, diagnose
from statetrack.run import load_run
from statetrack.spec import check_seed

SHOWN = 12  # rows of the table


@dataclass(frozen=True)
class DiagnoseOptions:
    """Predict the length at which a group tracker fails, and measure it: `statetrack diagnose RUN`.

    --plugin FILE.py, or a module, registers the mixer of a run that has its own.
    """

    longest: int | None = None  # tokens to measure to; 32 training lengths when None
    sequences: int = 256  # number of sequences to measure on
    seed: int = 0  # of these sequences


def main(arguments: Sequence[str]) -> None:
    run, flags = take_first(take_plugins(arguments))
    options = parse(DiagnoseOptions, flags, "statetrack diagnose RUN")
    if run is None:
        raise UserError("diagnose: give the folder of a finished run first.")
    if options.sequences < 8:
        raise UserError(f"diagnose: sequences is {options.sequences}, expected at least 8.")
    check_seed("diagnose: seed", options.seed)
    spec, model = load_run(run)
    longest = options.longest
    if longest is None:
        longest = 32 * (spec.training.train_lengths or (0, 32))[1]
    print(as_text(diagnose(model, spec, longest, options.sequences, options.seed)))


def as_text(found: Diagnosis) -> str:
    """The measurements by length, then prediction and measurement side by side."""
    lines = [
        f"Trained to length {found.train_length}. Different states lie {found.separation:.3g} apart "
        "(median distance to the nearest other).",
        "",
        f"{'length':>8}{'spread':>12}{'closeness':>12}{'accuracy':>12}{'majority':>12}",
    ]
    every = max(1, len(found.positions) // SHOWN)
    columns = found.positions, found.spread, found.closeness, found.accuracy, found.majority
    for t, spread, closeness, accuracy, majority in list(zip(*columns, strict=True))[::-every][::-1]:
        lines.append(f"{t:>8}{spread:>12.3g}{closeness:>12.3f}{accuracy:>12.3f}{majority:>12.3f}")
    lines += [
        "",
        "spread: distance of the states of one element from their centre; closeness: 90 % quantile of the "
        "way towards the nearest wrong centre, 0.5 on the border; majority: the accuracy of always "
        "giving the most frequent answer.",
    ]
    lines += ["", *_verdict(found)]
    return "\n".join(lines)


def _verdict(found: Diagnosis) -> list[str]:
    longest = found.positions[-1]
    measured = f"beyond {longest}" if found.measured is None else str(found.measured)
    if found.growth is None:
        return [
            f"The run has not learned its training length: accuracy is below {BREAK:g} from "
            f"length {measured} on."
        ]
    growth = found.growth
    predicted = "never" if math.isinf(found.predicted) else f"{found.predicted:.0f}"
    if found.predicted > 1e6 and not math.isinf(found.predicted):
        predicted = "beyond a million"
    return [
        f"closeness = {growth.floor:.3g} + {growth.scale:.3g} length^{growth.exponent:.2f}, fitted up to "
        f"length {found.fitted_to}",
        f"accuracy falls below {BREAK:g}:   predicted at length {predicted}   measured at length {measured}",
    ]

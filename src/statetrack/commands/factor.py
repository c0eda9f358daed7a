"""statetrack factor: a matrix in a .npy file as generalised Householder factors."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from statetrack.automata import Factorisation, factor
from statetrack.commands.flags import parse
from statetrack.errors import UserError

SHOWN = 40


@dataclass(frozen=True)
class FactorOptions:
    """Write a matrix of norm at most 1 as a product of generalised Householder matrices I - beta v v^T."""

    file: Path  # a square matrix saved with numpy.save
    json: bool = False  # print every beta and v as JSON


def main(arguments: Sequence[str]) -> None:
    options = parse(FactorOptions, arguments, "statetrack factor", positional=True)
    found = factor(_load(options.file))
    if options.json:
        record = {
            "kind": found.kind,
            "size": found.vectors.shape[-1],
            "betas": found.betas.tolist(),
            "vectors": found.vectors.tolist(),
            "error": found.error,
        }
        print(json.dumps(record))
    else:
        print(_text(options.file.name, found))


def _load(path: Path) -> np.ndarray:
    try:
        found = np.load(path, allow_pickle=False)
    except OSError as error:
        raise UserError(f"factor: {path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, EOFError) as error:
        raise UserError(f"factor: {path} is not a plain .npy file of numbers: {error}") from error
    if not isinstance(found, np.ndarray):
        found.close()
        raise UserError(f"factor: {path} is an archive of arrays, expected one matrix saved with numpy.save.")
    return found


def _text(name: str, found: Factorisation) -> str:
    unit, n = found.unit(), found.vectors.shape[-1]
    bound = {"permutation": "n - cycles", "orthogonal": "rank(M - I)", "contraction": "at most 2n"}[
        found.kind
    ]
    lines = [
        f"{name}: a {found.kind} of size {n}",
        f"{len(found)} factor{'s' if len(found) != 1 else ''} ({bound}), largest error {found.error:.1e}",
    ]
    if len(found):
        lines.append(f"\n{'factor':>6} {'beta':>9} {'eigenvalue':>11}  v")
    for i, (beta, v) in enumerate(unit):
        if i == SHOWN:
            lines.append(f"   ... and {len(found) - SHOWN} more; --json prints them all")
            break
        shown = " ".join(f"{x:.4g}" for x in v + 0.0)
        lines.append(
            f"{i + 1:>6} {beta:>9.6f} {1 - beta:>11.6f}  {shown if len(shown) < 70 else shown[:66] + ' ...'}"
        )
    return "\n".join(lines)

"""Join the results of tools/lm_experiment.py from several machines, for the page of all of them.

    python tools/lm_experiment_join.py FOLDER... --out docs/results/language-models

A run is taken from the last folder that holds it. Losses are joined only if they are of the same sequences
in the same precision.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from statetrack.errors import UserError
from statetrack.files import write_json, write_text
from statetrack.lm.measured import Perplexities, read_perplexities, write_perplexities


def join(folders: list[Path], out: Path) -> None:
    """Write runs.jsonl, perplexity.json, spectrum.json and log.txt of all folders to `out`."""
    measured = [read_perplexities(folder / "perplexity.json") for folder in folders]
    for folder, one in zip(folders, measured, strict=True):
        _check_same(folders[0], measured[0], folder, one)
    models = {model.id: model for one in measured for model in one.models}
    runs: dict[str, str] = {}
    spectra: dict[tuple[str, int], dict] = {}
    logs: list[str] = []
    for folder in folders:
        runs |= {json.loads(line)["id"]: line for line in (folder / "runs.jsonl").read_text().splitlines()}
        spectra |= {(s["label"], s["seed"]): s for s in json.loads((folder / "spectrum.json").read_text())}
        text = (folder / "log.txt").read_text()
        if text not in logs:
            logs.append(text)
    write_perplexities(out / "perplexity.json", replace(measured[0], models=tuple(models.values())))
    write_text(out / "runs.jsonl", "".join(line + "\n" for line in runs.values()))
    write_json(out / "spectrum.json", list(spectra.values()))
    write_text(out / "log.txt", "".join(logs))


def _check_same(first: Path, expected: Perplexities, folder: Path, found: Perplexities) -> None:
    for what in ("data", "rows", "precision"):
        a, b = getattr(expected, what), getattr(found, what)
        if a != b:
            raise UserError(
                f"{what} differs: {a} in {first}, {b} in {folder}. Evaluate both on the same data."
            )
    if expected.to_dict()["splits"] != found.to_dict()["splits"]:
        raise UserError(f"{first} and {folder} hold losses of different sequences. Evaluate both alike.")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+", help="results of tools/lm_experiment.py")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    try:
        join(given.folders, given.out)
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Mutation testing: put small deliberate errors into the source, one at a time, and see whether tests notice.

    python tools/mutate.py src/statetrack/tasks --sample 100 --seed 0 --results mutants.jsonl
    python tools/mutate.py src/statetrack/report/results.py --tests tests/report
    python tools/mutate.py --report --results mutants.jsonl

Mutants are made by `mutations.py`, which says what is left out. They live in a temporary copy of the
repository; the working tree is only read. Once per call the chosen tests run unchanged, to record which
functions each of them calls and how long it takes. A mutant is then tried on the tests that call its
function, fastest first, and on the others only if none of those fails; the first failure kills it. A child
process per mutant is forked from one that has torch imported but not the package (`forked_tests.py`), so most
mutants take a second or two. Tests marked slow or gpu are left out.

Results are appended to a JSONL file: a call that is stopped goes on from there. `--retry` tries its survivors
again, after tests were added. Survivors judged equivalent (no test could tell them from the original) are
listed in `tools/equivalent_mutants.txt`, each with the reason, and do not count.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from forked_tests import Recording, Tree, record
from mutations import Mutant, mutants

# The tests of a folder of the package, where they are not those of the folder of the same name. Those that
# train every item at smoke scale are left out: they would take minutes for every survivor.
TESTS = {
    "experiments": (
        "tests/experiments/test_items.py",
        "tests/experiments/test_order.py",
        "tests/experiments/test_protocol_table.py",
        "tests/experiments/test_small_experiments.py",
    ),
    "training": ("tests/training", "tests/tasks"),
    "report": ("tests/report",),
}
IMPORTS = ("torch", "numpy", "pytest", "matplotlib.figure", "jinja2", "sympy", "rich.table")
EQUIVALENT = Path(__file__).parent / "equivalent_mutants.txt"


@dataclass
class Result:
    """What became of a mutant: killed (by which test), survived, or timeout, which counts as killed."""

    id: str
    file: str
    line: int
    kind: str
    diff: str
    outcome: str
    by: str
    seconds: float


def try_out(tree: Tree, recording: Recording, file: str, mutant: Mutant, seconds: float) -> Result:
    """The verdict on one mutant."""
    started, outcome, by = time.monotonic(), "survived", ""
    with tree.changed(file, mutant.source):
        for tests in recording.ordered(f"{file}:{mutant.scope}"):
            if not tests or outcome != "survived":
                continue
            allowed = seconds + 5 * sum(recording.seconds[test] for test in tests)
            found = tree.pytest({"order": tests}, tests, allowed)
            if found == "timeout":
                outcome, by = "timeout", ""
            elif found["code"] != 0:
                outcome, by = "killed", found["failed"]
    took = round(time.monotonic() - started, 2)
    return Result(mutant.id, file, mutant.line, mutant.kind, mutant.diff, outcome, by, took)


def chosen_mutants(root: Path, paths: list[str], sample: int, seed: int) -> list[tuple[str, Mutant]]:
    """The mutants of files and folders, or `sample` of them drawn with `seed`."""
    files: list[Path] = []
    for path in paths:
        if not (root / path).exists():
            raise SystemExit(f"{path} does not exist, expected a file or folder below {root}.")
        files += sorted((root / path).rglob("*.py")) if (root / path).is_dir() else [root / path]
    names = [file.relative_to(root).as_posix() for file in files]
    found = [(name, mutant) for name in names for mutant in mutants((root / name).read_text(), name)]
    if 0 < sample < len(found):
        found = random.Random(seed).sample(found, sample)
    return found


def tests_of(paths: list[str]) -> list[str]:
    """The test folders mapped to source paths."""
    folders = [Path(path).parts[2] if len(Path(path).parts) > 2 else "" for path in paths]
    return list(dict.fromkeys(test for folder in folders for test in TESTS.get(folder, (f"tests/{folder}",))))


def run(root: Path, options: argparse.Namespace) -> None:
    """Try the chosen mutants that the results file does not settle yet."""
    before, equivalent = read_results(options.results), read_equivalent()
    survivors = {r.id for r in before.values() if r.outcome == "survived"}
    todo = [
        (file, mutant)
        for file, mutant in chosen_mutants(
            root, options.paths, 0 if options.retry else options.sample, options.seed
        )
        if (mutant.id in survivors if options.retry else mutant.id not in before)
        and mutant.id not in equivalent
    ]
    print(f"{len(todo)} mutants to try", flush=True)
    tests = options.tests or tests_of(options.paths)
    jobs = max(1, min(options.jobs, len(todo)))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = [Tree(root, Path(folder) / str(i), options.imports) for i in range(jobs if todo else 0)]

        stopped = threading.Event()

        def stop(number: int, frame: object) -> None:
            stopped.set()
            for tree in trees:
                tree.stop()
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(130)

        def work(number: int) -> None:
            with trees[number] as tree:
                recording = record(tree, tests)
                for file, mutant in todo[number::jobs]:
                    result = try_out(tree, recording, file, mutant, options.seconds)
                    if stopped.is_set():  # its tests were cut off, which is no verdict
                        return
                    with open(options.results, "a") as out:
                        out.write(json.dumps(asdict(result)) + "\n")
                    print(f"{result.outcome:9} {file}:{result.line} {result.seconds:.1f} s", flush=True)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(work, range(len(trees))))


def read_results(path: Path) -> dict[str, Result]:
    """The last result of every mutant."""
    if not path.exists():
        return {}
    found = (Result(**json.loads(line)) for line in path.read_text().splitlines() if line.endswith("}"))
    return {result.id: result for result in found}


def read_equivalent() -> dict[str, str]:
    """Id and reason of every mutant judged equivalent: lines "id  file  reason", # for comments."""
    lines = EQUIVALENT.read_text().splitlines() if EQUIVALENT.exists() else []
    return {line.split()[0]: line.split(maxsplit=2)[2] for line in lines if line and not line.startswith("#")}


def report(results: dict[str, Result], equivalent: dict[str, str]) -> str:
    """Killed, survived and timeouts by file and folder, then every survivor as a diff."""
    counted = [result for result in results.values() if result.id not in equivalent]
    groups: dict[str, list[Result]] = {}
    for result in counted:
        for name in (str(Path(result.file).parent), result.file):
            groups.setdefault(name, []).append(result)
    text = [f"{'file':48} killed timeout survived  rate"]
    for name, group in sorted(groups.items()):
        n = {kind: sum(r.outcome == kind for r in group) for kind in ("killed", "timeout", "survived")}
        text.append(
            f"{name:48} {n['killed']:6} {n['timeout']:7} {n['survived']:8} {n['survived'] / len(group):5.1%}"
        )
    text.append(
        f"{len(results) - len(counted)} more are equivalent. Left out by rule: see tools/mutations.py."
    )
    for r in sorted(counted, key=lambda r: (r.file, r.line)):
        if r.outcome == "survived":
            text += ["", f"{r.id}  {r.file}:{r.line}", r.diff]
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="*", help="files and folders to mutate, relative to the repository")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the repository")
    parser.add_argument("--tests", nargs="+", help="test files and folders (default: those of the folder)")
    parser.add_argument("--results", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument("--sample", type=int, default=0, help="how many mutants; 0 for all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=1, help="processes that try mutants side by side")
    parser.add_argument(
        "--imports", nargs="+", default=IMPORTS, help="loaded once, before children are forked"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="more than 5 times what the tests take")
    parser.add_argument("--retry", action="store_true", help="try the survivors again, and no others")
    parser.add_argument("--report", action="store_true", help="only print the report")
    options = parser.parse_args()
    if options.paths and not options.report:
        run(options.root.resolve(), options)
    print(report(read_results(options.results), read_equivalent()))


if __name__ == "__main__":
    main()

"""The mutation tool on a toy package: what its tests pin is killed, what they do not pin survives."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"

TOY = """
def smaller(x, y):
    return min(x, y)


def unpinned(x):
    return -x


def emptied(items):
    while items:
        items.pop()
    return items
"""
TESTS = """
import pytest

from toy import emptied, smaller, unpinned


@pytest.mark.skip(reason="a tool that is not installed")
def test_skipped():
    pass


def test_smaller():
    assert smaller(1, 2) == 1


def test_calls_but_pins_nothing():
    unpinned(1)


def test_emptied():
    assert emptied([1, 2]) == []
"""


def load(name):
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def mutations():
    return load("mutations")


def diffs(mutations, source):
    return [mutant.diff for mutant in mutations.mutants(source, "toy.py")]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a = x < y", ["x <= y", "x >= y"]),
        ("a = x == y", ["x != y"]),
        ("a = x + y", ["x - y"]),
        ("a = x / y", ["x * y"]),
        ("a = 3", ["4", "2"]),
        ("a = 0", ["1"]),
        ("a = 0.5", ["0.75"]),
        ("a = True", ["False"]),
        ("a = 'live'", ["'liveX'"]),
        ("a = 'a whole sentence'", []),
        ("a = x and y", ["x or y"]),
        ("a = [x for x in y if x]", ["[x for x in y if not x]"]),
        ("a = max(x)", ["min(x)"]),
        ("a = x.sum()", ["x.mean()"]),
        ("a = f(x, b=y)", ["f(x)"]),
        ("a = f(x, device=y)", []),
        ("a: int = x", []),
        ("a = Literal['live', 'dead']", []),
        ("a = f'{x + 1}'", []),
    ],
)
def test_mutants_of_one_line(mutations, source, expected):
    new = [diff.splitlines()[1].removeprefix("+a = ") for diff in diffs(mutations, source)]
    assert new == expected


def test_statements_are_left_out_and_returns_give_nothing(mutations):
    source = "def f(x):\n    x.go()\n    x.y = z\n    if x:\n        raise E(1)\n    return x"
    assert sorted(diffs(mutations, source)) == [
        "-        raise E(1)\n+        pass",
        "-    if x:\n+    if not x:",
        "-    return x\n+    return None",
        "-    x.go()\n+    pass",
        "-    x.y = z\n+    pass",
    ]


def test_what_needs_a_gpu_is_left_out(mutations):
    source = "if x.is_cuda:\n    a = 1\ndef _capture():\n    a = 2\nb = 3 if x.device.type == 'cuda' else 5\n"
    changed = diffs(mutations, source)
    assert all("else 6" in diff or "else 4" in diff for diff in changed)
    assert len(changed) == 2


def test_a_step_that_a_cpu_takes_as_well_is_changed_but_not_what_its_cuda_graph_does(mutations):
    source = "class GraphStep:\n    a = 2\n    if uses_graphs:\n        b = 1\nclass _Graph:\n    c = 2\n"
    assert sorted(diffs(mutations, source)) == ["-    a = 2\n+    a = 1", "-    a = 2\n+    a = 3"]


def test_ids_do_not_depend_on_lines_but_on_the_change(mutations):
    first = mutations.mutants("a = 3\nb = 3", "toy.py")
    moved = mutations.mutants("\n\n\na = 3\nb = 3", "toy.py")
    assert [m.id for m in first] == [m.id for m in moved]
    assert len({m.id for m in first}) == len(first) == 4
    assert mutations.mutants("a = 3", "other.py")[0].id != first[0].id


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """The tool's results on the toy, and the toy's folder."""
    root = tmp_path_factory.mktemp("toy")
    for name, text in (("src/toy.py", TOY), ("tests/test_toy.py", TESTS)):
        (root / name).parent.mkdir()
        (root / name).write_text(text)
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["slow: x", "gpu: x"]\n')
    results = root / "results.jsonl"
    command = [sys.executable, str(TOOLS / "mutate.py"), "src/toy.py", "--root", str(root)]
    command += ["--tests", "tests", "--results", str(results), "--seconds", "3", "--imports", "pytest"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    again = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return root, [json.loads(line) for line in results.read_text().splitlines()], shown, again


def test_the_pinned_is_killed_and_the_unpinned_survives(outcome):
    _, results, shown, _ = outcome
    found = {r["diff"].splitlines()[1].strip("+ "): (r["outcome"], r["by"]) for r in results}
    assert found == {
        "return max(x, y)": ("killed", "tests/test_toy.py::test_smaller"),
        "return +x": ("survived", ""),
        "while not items:": ("killed", "tests/test_toy.py::test_emptied"),
        "pass": ("timeout", ""),  # a loop that never ends
        "return None": ("killed", "tests/test_toy.py::test_emptied"),  # the last of three
    }
    assert [r["outcome"] for r in results if "return None" in r["diff"]] == ["killed", "survived", "killed"]
    assert "-    return -x\n+    return +x" in shown


def test_the_source_is_left_alone_and_a_second_call_has_nothing_to_do(outcome):
    root, _, _, again = outcome
    assert (root / "src/toy.py").read_text() == TOY
    assert again.startswith("0 mutants to try")

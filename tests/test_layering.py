"""Imports point one way: ops <- layers <- training <- experiments <- commands. Read from the source."""

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent / "src/statetrack"

# A package or module may import those on the lines above its own.
LEVELS = (
    ("errors", "field_comments", "threads"),
    ("peer_names", "peer_options", "plugins", "provenance"),
    ("config", "files", "exit_codes"),
    ("ops",),
    ("automata", "compat", "layers"),
    ("tasks",),
    ("spec",),
    ("spectrum", "horizon", "snapping", "recipes"),
    ("training",),
    ("run_folder",),
    ("run",),
    ("trained",),
    ("sweep", "lm"),
    ("integrations", "experiments"),
    ("report", "bench"),
    ("reproduce",),
    ("commands",),
    ("cli",),
)
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}

# What a level would allow and the design does not.
FORBIDDEN = {
    "automata": {"layers", "training", "run"},
    "tasks": {"layers", "training", "run"},
    "experiments": {"training", "run", "sweep"},
}

# Modules whose classes derive from those of an extra, which they import at their top. Others import these
# modules in functions.
SUBCLASSES = {
    f"statetrack.integrations.huggingface{name}"
    for name in ("", ".cache", ".configuration", ".conversion", ".export", ".modeling")
}

# Optional dependencies, and the modules that may import them, each in the function that needs it.
EXTRAS = {
    "tyro": {"statetrack.commands.flags"},
    "rich": {"statetrack.commands.progress", "statetrack.sweep.display"},
    "matplotlib": {"statetrack.report.figures"},
    "jinja2": {"statetrack.report.page"},
    "markupsafe": {"statetrack.report.page"},
    "ray": {"statetrack.integrations.ray"},
    "tokenizers": {"statetrack.lm.tokenizers", "statetrack.integrations.huggingface.tokenizer"},
    "pyarrow": {"statetrack.lm.documents"},
    "datasets": {"statetrack.lm.inputs"},
    "mambapy": {"statetrack.bench.cases"},
    "xlstm": {"statetrack.bench.xlstm_case"},
    "transformers": {
        "statetrack.bench.cases",
        "statetrack.commands.convert",
        "statetrack.commands.lm.export",
        "statetrack.integrations.huggingface.tokenizer",
        *SUBCLASSES,
    },
    "lm_eval": {"statetrack.commands.lm.eval", "statetrack.integrations.lm_eval"},
    "safetensors": {
        "statetrack.integrations.huggingface.modeling",
        "statetrack.training.loop",
        "statetrack.training.sharded_files",
    },
    "tensorboard": {"statetrack.integrations.loggers"},
    "wandb": {"statetrack.integrations.loggers"},
    "sympy": {"statetrack.automata.groups"},  # comes with torch, but takes long to import
}

# Names that train; a report may read what runs wrote, and start none.
TRAINS = {"train", "run", "running", "sweep", "ray_sweep", "GraphStep", "ShardedStep"}


class Import(NamedTuple):
    importer: str  # dotted name of the importing module
    module: str  # dotted name of what is imported
    name: str | None  # the name taken from it
    at_the_top: bool  # runs when the importer is imported


def module_name(path: Path) -> str:
    parts = ("statetrack", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def imports_of(importer: str, tree: ast.AST, at_the_top: bool = True):
    """Every import of a module but those for type checkers; `require("x", ...)` is one too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (Import(importer, alias.name, None, at_the_top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{importer} has a relative import; write it out"
            yield from (Import(importer, node.module or "", alias.name, at_the_top) for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", None) == "require":
            names = [a.value for a in node.args[:1] if isinstance(a, ast.Constant)]
            yield from (Import(importer, name, None, at_the_top) for name in names)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from imports_of(importer, node, at_the_top and not inside)


IMPORTS = [found for name, path in MODULES.items() for found in imports_of(name, ast.parse(path.read_text()))]
OWN = [found for found in IMPORTS if found.module.split(".")[0] == "statetrack"]


def part(module: str) -> str:
    """The top-level package or module of a dotted name, "" for statetrack itself."""
    return [*module.split("."), ""][1]


def parts_imported(found: Import) -> set[str]:
    """`from statetrack import tasks` imports tasks; `from statetrack import __version__` nothing."""
    if found.module != "statetrack":
        return {part(found.module)}
    return {found.name} & LEVEL.keys() if found.name else set()


def test_every_module_has_a_level():
    named = {part(module) for module in MODULES} - {""}
    assert named == set(LEVEL), "add a new package to LEVELS, in the place its imports give it"


@pytest.mark.parametrize("package", LEVEL)
def test_imports_point_one_way(package):
    for found in OWN:
        if part(found.importer) == package:
            for imported in parts_imported(found) - {package}:
                assert imported in LEVEL, f"{imported}, imported by {found.importer}, is not in LEVELS"
                assert LEVEL[imported] < LEVEL[package], f"{found.importer} imports {imported}"
                assert imported not in FORBIDDEN.get(package, ()), f"{found.importer} imports {imported}"


def test_reports_start_no_training():
    for found in OWN:
        if part(found.importer) == "report":
            assert found.name not in TRAINS, f"{found.importer} imports {found.name} of {found.module}"


def test_no_import_cycles():
    """Of imports at the top of modules. A package's `__init__` counts only where a name is taken from it."""
    graph: dict[str, set[str]] = {name: set() for name in MODULES}
    for found in OWN:
        whole = f"{found.module}.{found.name}"
        # a package may export a function named like its module: what `from` gives then is the function
        exported = found.name in _names_bound_in(found.module)
        target = whole if whole in MODULES and not exported else found.module
        if found.at_the_top and target != found.importer:
            graph[found.importer].add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' <- '.join(error.args[1])}")


def _names_bound_in(module: str) -> set[str]:
    return {found.name for found in OWN if found.importer == module and found.name and found.at_the_top}


def test_extras_are_imported_in_functions_of_their_modules():
    for found in IMPORTS:
        package = found.module.split(".")[0]
        if package in sys.stdlib_module_names or package in ("statetrack", "torch", "numpy"):
            continue
        if package == "triton":
            assert part(found.importer) == "ops", f"{found.importer} imports triton"
            in_kernels = any("triton" in step for step in found.importer.split("."))
            assert in_kernels or not found.at_the_top, f"{found.importer} imports triton at its top"
            continue
        assert found.importer in EXTRAS.get(package, ()), f"{found.importer} imports {found.module}"
        at_the_top = found.at_the_top and found.importer not in SUBCLASSES
        assert not at_the_top, f"{found.importer} imports {found.module} at its top, not in a function"


def test_modules_that_import_extras_at_their_top_are_imported_in_functions():
    for found in OWN:
        if found.module in SUBCLASSES and found.importer not in SUBCLASSES:
            assert not found.at_the_top, f"{found.importer} imports {found.module} at its top"


def test_the_tables_hold_nothing_stale():
    imported = {(found.module.split(".")[0], found.importer) for found in IMPORTS}
    for extra, importers in EXTRAS.items():
        # the peer library of a benchmark is named by a variable
        stale = {name for name in importers if (extra, name) not in imported} - EXTRAS["transformers"]
        assert not stale, f"{stale} no longer import {extra}"

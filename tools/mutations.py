"""Mutants of a Python source file: the same program with one small deliberate error.

A mutation changes one node of the syntax tree: a comparison or its boundary, an arithmetic operator, a
constant, `and`/`or`/`not`, a condition, a statement that is left out, a `return` that gives nothing, `min`
and `max` or `sum` and `mean` swapped, a keyword argument that is dropped.

Left out by rule:

    texts         type hints, docstrings, strings with a space, f-strings, everything in `raise`, `__all__`
    guards        `assert`, the arguments `frozen`, `strict` and `maxsize`: they change no result
    GPU only      conditions that mention CUDA, or a CUDA graph or stream, with what they guard, `device=`,
                  and definitions whose name contains "cuda", "graph" or "capture"; not the class GraphStep,
                  which is also the step on a CPU
    scripts       the body of `if __name__ == "__main__"`
"""

import ast
import copy
import difflib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.MatMult: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "sum": "max"}
METHODS = {
    **{"min": "max", "max": "min", "any": "all", "all": "any", "sum": "mean", "mean": "sum"},
    **{"argmax": "argmin", "argmin": "argmax", "cummin": "cummax", "cummax": "cummin"},
    **{
        "exp": "log",
        "sqrt": "square",
        "square": "sqrt",
        "sigmoid": "tanh",
        "tanh": "sigmoid",
        "silu": "sigmoid",
    },
    **{"ones": "zeros", "zeros": "ones", "ones_like": "zeros_like", "zeros_like": "ones_like"},
}
CHOICE = re.compile(r"[\w\[][\w,.:+*()=\[\]-]*")  # a string without spaces is a name, not a text
NO_GPU = re.compile(r"cuda|graph(?!step)|capture", re.IGNORECASE)
GPU_CONDITION = re.compile(r"cuda|\b(uses_graphs|graphs|stream)\b")
GUARDS = ("frozen", "strict", "maxsize", "device")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Mutant:
    """One changed program. `scope` is the first line of the innermost function it is in, 0 for none."""

    id: str
    line: int
    scope: int
    kind: str
    diff: str
    source: str


def mutants(source: str, path: str) -> list[Mutant]:
    """Every mutant of a file. An id depends on the change and its surroundings, not on line numbers."""
    tree = ast.parse(source)
    before = ast.unparse(tree)
    found: list[Mutant] = []
    seen: dict[str, int] = {}
    for node, line, scope, kind, apply, undo in _sites(tree):
        apply()
        after = ast.unparse(ast.fix_missing_locations(tree))
        undo()
        if after == before:
            continue
        diff = _diff(before, after)
        text = f"{path} {scope and _name_at(tree, scope)} {diff}"
        seen[text] = seen.get(text, 0) + 1
        digest = sha256(f"{text} {seen[text]}".encode()).hexdigest()[:10]
        found.append(Mutant(digest, line or getattr(node, "lineno", 0), scope, kind, diff, after))
    return found


def _diff(before: str, after: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def _name_at(tree: ast.Module, line: int) -> str:
    return next(d.name for d in ast.walk(tree) if isinstance(d, DEFINITIONS) and _first_line(d) == line)


def _first_line(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    """Where a code object says it begins: at the first decorator."""
    return min([node.lineno, *(d.lineno for d in node.decorator_list)])


Site = tuple[ast.AST, int, int, str, Callable[[], None], Callable[[], None]]


def _sites(tree: ast.Module) -> Iterator[Site]:
    """Places to change: node, line, scope, what is done, and how to do and undo it."""
    yield from _visit(tree, 0, 0)


def _visit(node: ast.AST, line: int, scope: int) -> Iterator[Site]:
    line = getattr(node, "lineno", line)
    inner = scope
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        inner = _first_line(node)
    for kind, apply, undo in _changes(node):
        yield node, line, inner if kind == "statement" else scope, kind, apply, undo
    for name, child in _children(node):
        # defaults and decorators of a function run where it is defined
        yield from _visit(child, line, inner if name == "body" else scope)


def _children(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The parts of a node that are in scope, with the field each belongs to."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _left_out(node, name, child):
                yield name, child


def _left_out(parent: ast.AST, field: str, child: ast.AST) -> bool:
    if field in ("annotation", "returns", "type_comment", "op", "ops", "ctx"):
        return True
    if isinstance(child, DEFINITIONS) and NO_GPU.search(child.name):
        return True
    if isinstance(parent, ast.If | ast.IfExp) and field in ("test", "body") and _needs_gpu(parent.test):
        return True
    if isinstance(child, ast.Compare | ast.BoolOp) and _needs_gpu(child):
        return True
    if isinstance(child, ast.keyword) and child.arg in GUARDS:
        return True
    if isinstance(child, ast.Subscript) and ast.unparse(child.value) in ("Literal", "Callable"):
        return True  # a type hint with a name
    if isinstance(parent, ast.If) and field in ("test", "body") and "__name__" in ast.unparse(parent.test):
        return True
    if isinstance(parent, ast.Assign) and any(
        isinstance(t, ast.Name) and t.id == "__all__" for t in parent.targets
    ):
        return True
    if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
        return True  # a docstring
    return isinstance(child, ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert) or isinstance(
        parent, ast.Raise
    )


def _needs_gpu(test: ast.AST) -> bool:
    return GPU_CONDITION.search(ast.unparse(test)) is not None


Change = tuple[str, Callable[[], None], Callable[[], None]]


def _set(node: ast.AST, **values: object) -> Change:
    """The change of some fields of a node; its kind is filled in by the caller."""
    old = {name: copy.copy(getattr(node, name)) for name in values}

    def put(new: dict[str, object]) -> None:
        for name, value in new.items():
            setattr(node, name, value)

    return "", lambda: put(values), lambda: put(old)


def _changes(node: ast.AST) -> Iterator[Change]:
    """The mutations of this node itself."""
    for kind, find in (
        ("comparison", _comparisons),
        ("arithmetic", _arithmetic),
        ("constant", _constants),
        ("logic", _logic),
        ("statement", _statements),
        ("call", _calls),
    ):
        for _, apply, undo in find(node):
            yield kind, apply, undo


def _comparisons(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            for other in COMPARISONS[type(op)]:
                yield _set(node, ops=[*node.ops[:i], other(), *node.ops[i + 1 :]])


def _arithmetic(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.BinOp | ast.AugAssign):
        yield _set(node, op=OPERATORS[type(node.op)]())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield _set(node, op=ast.UAdd())


def _constants(node: ast.AST) -> Iterator[Change]:
    if not isinstance(node, ast.Constant):
        return
    value = node.value
    if isinstance(value, bool):
        yield _set(node, value=not value)
    elif isinstance(value, int):
        yield _set(node, value=value + 1)
        if value > 0:  # a negative number is a minus and a positive one
            yield _set(node, value=value - 1)
    elif isinstance(value, float):
        yield _set(node, value=value * 1.5 if value else 1.0)
    elif isinstance(value, str) and CHOICE.fullmatch(value):
        yield _set(node, value=value + "X")


def _logic(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.BoolOp):
        yield _set(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    if isinstance(node, ast.If | ast.IfExp | ast.While) and not _needs_gpu(node.test):
        yield _set(node, test=ast.UnaryOp(ast.Not(), node.test))
    if isinstance(node, ast.comprehension):
        for i, test in enumerate(node.ifs):
            yield _set(node, ifs=[*node.ifs[:i], ast.UnaryOp(ast.Not(), test), *node.ifs[i + 1 :]])


def _statements(node: ast.AST) -> Iterator[Change]:
    """Statements left out, and returns of nothing."""
    for field in ("body", "orelse", "finalbody"):
        block = getattr(node, field, None)
        if not isinstance(block, list):
            continue
        for i, statement in enumerate(block):
            if _left_out(node, field, statement):
                continue
            stores = isinstance(statement, ast.Assign) and not any(
                isinstance(target, ast.Name | ast.Tuple) for target in statement.targets
            )
            acts = isinstance(
                statement, ast.Expr | ast.AugAssign | ast.Raise | ast.Delete | ast.Continue | ast.Break
            )
            if stores or acts:
                yield _set(node, **{field: [*block[:i], ast.Pass(), *block[i + 1 :]]})
    if isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield _set(node, value=ast.Constant(None))


def _calls(node: ast.AST) -> Iterator[Change]:
    if not isinstance(node, ast.Call):
        return
    if isinstance(node.func, ast.Name) and node.func.id in NAMES:
        yield _set(node, func=ast.Name(NAMES[node.func.id], ast.Load()))
    if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
        yield _set(node.func, attr=METHODS[node.func.attr])
    for i, keyword in enumerate(node.keywords):
        if keyword.arg is not None and keyword.arg not in GUARDS:
            yield _set(node, keywords=[*node.keywords[:i], *node.keywords[i + 1 :]])

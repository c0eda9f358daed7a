"""The fields of a dataclass or a NamedTuple with the comments beside them in the source, for `help()`.

A comment stands at the end of a field's line or in the lines above it:

    heads: int = 4  # number of heads
    # a longer comment
    # of two lines
    width: int = 8
"""

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)
COMMENT = re.compile(r"^\s*# ?(.*)$")


@lru_cache(maxsize=256)
def field_comments(cls: type) -> dict[str, str]:
    """The comment of every field that has one, those of base classes included; empty without the source."""
    comments: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base) or hasattr(base, "_fields"):
            comments |= _own_comments(base)
    return {name: comments[name] for name in _names(cls) if name in comments}


def _names(cls: Any) -> Sequence[str]:
    if dataclasses.is_dataclass(cls):
        return [field.name for field in dataclasses.fields(cls)]
    return getattr(cls, "_fields", ())  # of a NamedTuple


def _own_comments(cls: type) -> dict[str, str]:
    try:
        lines = textwrap.dedent(inspect.getsource(cls)).splitlines()
    except (OSError, TypeError):  # a class made in a prompt, or a package without its source
        return {}
    (definition,) = ast.parse("\n".join(lines)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            comment = _behind(lines, node) or _above(lines, node)
            if comment:
                found[node.target.id] = comment
    return found


def _behind(lines: list[str], node: ast.AnnAssign) -> str:
    """The comment at the end of the field's last line."""
    end = (node.end_lineno or node.lineno) - 1
    rest = lines[end].encode()[node.end_col_offset or 0 :].decode()  # offsets count bytes
    match = COMMENT.match(rest)
    return match[1] if match else ""


def _above(lines: list[str], node: ast.AnnAssign) -> str:
    """The lines of comment directly above the field, as one."""
    parts: list[str] = []
    at = node.lineno - 2
    while at >= 0 and (match := COMMENT.match(lines[at])):
        parts.insert(0, match[1].strip())
        at -= 1
    return " ".join(parts)


def listed(comments: dict[str, str], without: tuple[str, ...] = ()) -> str:
    """The fields as the section of a docstring that tyro shows beside its flags."""
    return "\n".join(
        ["Attributes:", *(f"    {name}: {text}" for name, text in comments.items() if name not in without)]
    )


class _Help:
    """The docstring of a class with its fields, put together when somebody asks for it."""

    def __init__(self, cls: type):
        self.cls, self.text = cls, inspect.cleandoc(cls.__doc__ or "")

    def __get__(self, instance: Any, owner: type) -> str:
        comments = field_comments(self.cls)
        return f"{self.text}\n\n{listed(comments)}" if comments else self.text


def explain_fields(cls: Class) -> Class:
    """Let `help()` of a dataclass, and its `__doc__`, end with its fields and what their comments say."""
    if not isinstance(vars(cls).get("__doc__"), _Help):
        setattr(cls, "__doc__", _Help(cls))  # noqa: B010 - to a type checker a docstring is a str
    return cls


def text_alone(cls: type) -> str | None:
    """The docstring of a class of `explain_fields` without the list of its fields; None of any other."""
    own = vars(cls).get("__doc__")
    return own.text if isinstance(own, _Help) else None

"""Configurations are frozen dataclasses: here they become JSON and back, and get a name by their content."""

import dataclasses
import json
import types
import typing
from functools import lru_cache
from hashlib import sha256
from typing import Any, Literal, Union

from statetrack.errors import UserError, unknown_name


def to_dict(config: Any, *, hashed: bool = False) -> dict:
    """Nested dataclass -> plain dict. Each level names its class, so equal fields of two mixers differ.

    With `hashed` without fields that do not count in comparisons, such as the place of a file.
    """
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.compare or not hashed}
    for name in _floats(type(config)) & fields.keys():
        if type(fields[name]) is int:  # 0 and 0.0 are the same config, so they must have the same name
            fields[name] = float(fields[name])
    return {"kind": type(config).__name__} | {name: _plain(value, hashed) for name, value in fields.items()}


@lru_cache(maxsize=256)
def _floats(cls: type) -> frozenset[str]:
    """The fields of a dataclass that are declared as float."""
    return frozenset(name for name, hint in typing.get_type_hints(cls).items() if hint is float)


def _plain(value: Any, hashed: bool) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value, hashed=hashed)
    return list(value) if isinstance(value, tuple) else value


def run_id(config: Any) -> str:
    """Twelve hex digits that name a run; equal configs share a folder and are not run twice."""
    return sha256(json.dumps(to_dict(config, hashed=True), sort_keys=True).encode()).hexdigest()[:12]


def from_dict(data: Any, kinds: dict[str, type], where: str = "spec") -> Any:
    """Plain dict -> nested dataclass, checked field by field. Only the classes in `kinds` can be built."""
    if not isinstance(data, dict) or "kind" not in data:
        raise UserError(f"{where} is {_short(data)}, expected an object with a 'kind'.")
    if not isinstance(data["kind"], str) or data["kind"] not in kinds:
        raise unknown_name(f"{where}: kind", data["kind"], kinds)
    cls = kinds[data["kind"]]
    hints = typing.get_type_hints(cls)
    known = {f.name: hints[f.name] for f in dataclasses.fields(cls)}
    values = {}
    for name, value in data.items():
        if name == "kind":
            continue
        if name not in known:
            raise unknown_name(f"{where}: {cls.__name__} field", name, known)
        values[name] = _read(value, known[name], kinds, f"{where}.{name}")
    missing = [
        f.name
        for f in dataclasses.fields(cls)
        if f.name not in values and f.default is f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise UserError(f"{where}: {cls.__name__} needs {', '.join(missing)}.")
    return cls(**values)


def _read(value: Any, hint: Any, kinds: dict[str, type], where: str) -> Any:
    """`value` as the type hint wants it: dataclasses from objects, tuples from lists, the rest checked."""
    if isinstance(value, dict):
        built = from_dict(value, kinds, where)
        if not isinstance(hint, type) or not isinstance(built, hint):
            raise UserError(
                f"{where} is a {type(built).__name__}, expected {getattr(hint, '__name__', hint)}."
            )
        return built
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        choices = [a for a in arguments if a is not type(None)]
        return _read(value, choices[0], kinds, where)
    if origin is Literal:
        if value not in arguments:
            raise unknown_name(where, value, [str(a) for a in arguments])
        return value
    if origin is tuple and isinstance(value, list | tuple):
        items = arguments[:1] * len(value) if Ellipsis in arguments else arguments
        if len(items) != len(value):
            raise UserError(f"{where} is {_short(value)}, expected {len(items)} values.")
        return tuple(_read(v, item, kinds, f"{where}[{i}]") for i, (v, item) in enumerate(zip(value, items)))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(hint, type) or not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise UserError(f"{where} is {_short(value)}, expected {getattr(hint, '__name__', hint)}.")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."

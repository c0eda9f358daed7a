"""Configurations are frozen dataclasses: here they become JSON and back, and get a name by their content."""

import dataclasses
import json
import re
import types
import typing
from collections.abc import Iterator
from functools import lru_cache
from hashlib import sha256
from typing import Any, Literal, Union

from statetrack.errors import UserError, unknown_name
from statetrack.field_comments import explain_fields
from statetrack.peer_options import explain_unknown_options, unknown_option
from statetrack.plugins import find

_KINDS: dict[str, type] = {}  # the classes that a spec may name


def added(default: Any = dataclasses.MISSING, *, default_factory: Any = dataclasses.MISSING) -> Any:
    """A field that a config class gained after runs of it were published: `dropout: float = added(0.0)`.

    At its default it is left out of what `run_id` hashes, so the runs before it keep their ids; a whole
    nested config can be added in the same way. The default must be what the code did before there was the
    field, and must never change. The field is given by keyword only, so that no positional call moves.
    """
    options: dict[str, Any] = {"default": default, "default_factory": default_factory}
    given = {name: value for name, value in options.items() if value is not dataclasses.MISSING}
    if len(given) != 1:
        raise TypeError("added() takes either a default or a default_factory.")
    return dataclasses.field(**given, kw_only=True, metadata={"added": True})


def renamed(was: str, default: Any) -> Any:
    """A field that had another name when runs of its class were published: `eps: float = renamed("e", 1e-5)`.

    Ids are still made of the old name, and specs with the old name can be read.
    """
    return dataclasses.field(default=default, metadata={"was": was})


def to_dict(config: Any, *, hashed: bool = False) -> dict:
    """Nested dataclass -> plain dict. Each level names its class, so equal fields of two mixers differ.

    With `hashed` without what an id does not depend on (see `_left_out`), and with the first names of fields.
    """
    cls = type(config)
    fields = [f for f in dataclasses.fields(config) if not (hashed and _left_out(f, config))]
    values = {f.name: getattr(config, f.name) for f in fields}
    for name in _floats(cls) & values.keys():
        if type(values[name]) is int:  # 0 and 0.0 are the same config, so they must have the same name
            values[name] = float(values[name])
    names = {f.name: f.metadata.get("was", f.name) if hashed else f.name for f in fields}
    return {"kind": cls.__name__} | {names[name]: _plain(value, hashed) for name, value in values.items()}


def _left_out(field: dataclasses.Field, config: Any) -> bool:
    """Whether an id does not depend on the field: it does not count in comparisons either (the place of a
    file), or it was added later and `config` does not use it."""
    if not field.compare:
        return True
    if not field.metadata.get("added"):
        return False
    factory = field.default_factory
    default = field.default if factory is dataclasses.MISSING else factory()
    return getattr(config, field.name) == default


@lru_cache(maxsize=256)
def _floats(cls: type) -> frozenset[str]:
    """The fields of a dataclass that are declared as float."""
    return frozenset(name for name, hint in typing.get_type_hints(cls).items() if hint is float)


def _plain(value: Any, hashed: bool) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value, hashed=hashed)
    return [_plain(v, hashed) for v in value] if isinstance(value, tuple) else value


def run_id(config: Any) -> str:
    """Twelve hex digits that name a run; equal configs share a folder and are not run twice."""
    return sha256(json.dumps(to_dict(config, hashed=True), sort_keys=True).encode()).hexdigest()[:12]


def register_kind(cls: type) -> None:
    """Let specs name this class. A class defined again, as by a notebook cell, takes its own place.

    Its constructor then answers an unknown option with what the option is called here, and `help()` lists its
    fields with the comments beside them.
    """
    known = _KINDS.get(cls.__name__, cls)
    if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise UserError(
            f"{known.__module__} and {cls.__module__} both have a class {cls.__name__!r}, and a spec names "
            "classes by that name alone. Rename the one outside statetrack."
        )
    explain_unknown_options(cls)
    explain_fields(cls)
    _KINDS[cls.__name__] = cls


def register(where: str, name: str, config: Any, table: dict[str, Any]) -> None:
    """Put `config` into a table of names, and let specs name its class and those of the configs in it.

    The same config twice under one name is fine; another one is refused, and so is what JSON cannot hold.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise UserError(f"{where}: the name is {name!r}, expected letters, digits, '-', '_' and '.' only.")
    if name in table and to_dict(table[name]) != to_dict(config):
        raise UserError(f"{where}: the name {name!r} is taken by {_short(table[name])}. Choose another.")
    for part in _parts(config):
        if not type(part).__dataclass_params__.frozen:
            raise UserError(f"{where}: {type(part).__name__} is mutable. Use @dataclass(frozen=True).")
        register_kind(type(part))
    try:
        same = from_dict(json.loads(json.dumps(to_dict(config))), name) == config
    except TypeError as error:
        raise UserError(f"{where}: {_short(config)} cannot be written as JSON: {error}.") from error
    if not same:
        raise UserError(f"{where}: {_short(config)} is not the same once written as JSON and read again.")
    table[name] = config


def _parts(config: Any) -> Iterator[Any]:
    """A config and the configs nested in it."""
    yield config
    for value in (getattr(config, f.name) for f in dataclasses.fields(config)):
        for part in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(part):
                yield from _parts(part)


def from_dict(data: Any, where: str = "spec") -> Any:
    """Plain dict -> nested dataclass, checked field by field. Only registered classes can be built."""
    if not isinstance(data, dict) or "kind" not in data:
        raise UserError(f"{where} is {_short(data)}, expected an object with a 'kind'.")
    cls = find(f"{where}: kind", data["kind"], _KINDS)
    hints = typing.get_type_hints(cls)
    known = {f.name: hints[f.name] for f in dataclasses.fields(cls)}
    now: dict[str, str] = {f.metadata["was"]: f.name for f in dataclasses.fields(cls) if "was" in f.metadata}
    values = {}
    for key, value in data.items():
        name = str(now.get(key, key))
        if name == "kind":
            continue
        if name not in known:
            raise unknown_option(f"{where}: {cls.__name__}", name, known)
        values[name] = _read(value, known[name], f"{where}.{name}")
    missing = [
        f.name
        for f in dataclasses.fields(cls)
        if f.name not in values and f.default is f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise UserError(f"{where}: {cls.__name__} needs {', '.join(missing)}.")
    return cls(**values)


def check_types(config: Any, where: str) -> None:
    """Refuse values that `from_dict` would refuse: each field is to be what its type hint says."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        _read(getattr(config, field.name), hints[field.name], f"{where}.{field.name}")


def _read(value: Any, hint: Any, where: str) -> Any:
    """`value` as the type hint wants it: dataclasses from objects, tuples from lists, the rest checked."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    is_union = origin in (Union, types.UnionType)
    if isinstance(value, dict) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        built = from_dict(value, where) if isinstance(value, dict) else value
        if built is value:
            check_types(built, where)
        choices = tuple(a for a in (arguments if is_union else (hint,)) if isinstance(a, type))
        if not isinstance(built, choices):
            raise UserError(
                f"{where} is a {type(built).__name__}, expected {getattr(hint, '__name__', hint)}."
            )
        return built
    if is_union:
        if value is None and type(None) in arguments:
            return None
        choices = [a for a in arguments if a is not type(None)]
        return _read(value, choices[0], where)
    if origin is Literal:
        if value not in arguments:
            raise unknown_name(where, value, [str(a) for a in arguments])
        return value
    if origin is tuple and isinstance(value, list | tuple):
        items = arguments[:1] * len(value) if Ellipsis in arguments else arguments
        if len(items) != len(value):
            raise UserError(f"{where} is {_short(value)}, expected {len(items)} values.")
        return tuple(_read(v, item, f"{where}[{i}]") for i, (v, item) in enumerate(zip(value, items)))
    if isinstance(value, int) and hint in (int, float) and abs(value) >= 2**63:
        raise UserError(f"{where} is {_short(value)}, expected a number of at most 64 bits.")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(hint, type) or not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise UserError(f"{where} is {_short(value)}, expected {getattr(hint, '__name__', hint)}.")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."

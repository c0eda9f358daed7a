"""Flags from dataclasses, with tyro."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from statetrack.errors import UserError, require
from statetrack.peer_options import PEER_OPTIONS, unknown_option
from statetrack.plugins import use_plugins

T = TypeVar("T")


def parse(
    cls: type[T], arguments: Sequence[str], prog: str, default: T | None = None, *, positional: bool = False
) -> T:
    """Read every field of the dataclass `cls` as a flag; nested dataclasses add theirs without a prefix.

    With `positional`, fields without a default are positional arguments. Options of other libraries are
    answered with ours.
    """
    refuse_peer_flags(cls, arguments, prog)
    tyro = require("tyro", extra="cli", for_="the command line")
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.AvoidSubcommands)
    config += (tyro.conf.PositionalRequiredArgs,) if positional else ()
    options = {} if default is None else {"default": default}
    return tyro.cli(cls, args=list(arguments), prog=prog, config=config, **options)


def refuse_peer_flags(cls: type, arguments: Sequence[str], prog: str) -> None:
    """Answer a flag that another library has, and `cls` has not, with what it is called here."""
    known = {*_field_names(cls)}
    for argument in arguments:
        if not argument.startswith("--"):
            continue
        name = argument[2:].partition("=")[0].replace("-", "_")
        name = name if name in PEER_OPTIONS else name.removeprefix("no_")
        if name in PEER_OPTIONS and name not in known:
            raise unknown_option(prog, name, known, of="this task and mixer" if "train" in prog else "")


def _field_names(cls: Any) -> Iterator[str]:
    """The fields of a dataclass and of the dataclasses in it."""
    for field in fields(cls):
        if is_dataclass(field.type):
            yield from _field_names(field.type)
        else:
            yield field.name


def take_first(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The first argument if it is not a flag, else None; and the remaining arguments."""
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], list(arguments[1:])
    return None, list(arguments)


def take_model(arguments: Sequence[str], command: str) -> tuple[str, list[str]]:
    """The folder of a model, which comes before the flags, and the flags; "" where --help is asked for."""
    folder, flags = take_first(arguments)
    if folder is None and not {"-h", "--help"} & {*flags}:
        raise UserError(
            f"{command}: give the folder of a run or of an exported model first, before any option."
        )
    return folder or "", flags


def take_leading(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments before the first flag, and the rest."""
    flags = [i for i, argument in enumerate(arguments) if argument.startswith("-")]
    end = flags[0] if flags else len(arguments)
    return list(arguments[:end]), list(arguments[end:])


D = TypeVar("D", str, None)


def take(arguments: Sequence[str], flag: str, default: D) -> tuple[str | D, list[str]]:
    """The value of one flag, the last one given, and the arguments without it."""
    values, rest = take_all(arguments, flag)
    return (values[-1] if values else default), rest


def take_all(arguments: Sequence[str], flag: str) -> tuple[list[str], list[str]]:
    """Every value of a flag, `--flag value` or `--flag=value`, and the arguments without it."""
    rest, values, waiting = [], [], False
    for argument in arguments:
        if waiting:
            values.append(argument)
            waiting = False
        elif argument == flag:
            waiting = True
        elif argument.startswith(flag + "="):
            values.append(argument.removeprefix(flag + "="))
        else:
            rest.append(argument)
    if waiting:
        raise UserError(f"{flag} needs a value.")
    return values, rest


def names_given(arguments: Sequence[str]) -> set[str]:
    """The fields that flags name: `--eval-lengths 32` gives eval_lengths, `--no-gated` gives gated."""
    flags = (argument[2:].split("=")[0].replace("-", "_") for argument in arguments if argument[:2] == "--")
    return {name.removeprefix("no_") for name in flags}


def take_plugins(arguments: Sequence[str]) -> list[str]:
    """Load every `--plugin FILE.py` or `--plugin MODULE`; returns the arguments without them."""
    plugins, rest = take_all(arguments, "--plugin")
    use_plugins(plugins)
    return rest

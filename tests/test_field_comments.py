"""The comments beside the fields of a dataclass: in `help()`, and beside the flags of every command."""

import dataclasses
import importlib
import inspect
import pkgutil
from typing import NamedTuple

import pytest

import statetrack.commands
from statetrack.commands import spec_flags
from statetrack.commands.flags import parse
from statetrack.field_comments import explain_fields, field_comments, text_alone
from statetrack.layers import ModelConfig, model_config


@explain_fields
@dataclasses.dataclass(frozen=True)
class Base:
    """What it is."""

    plain: int = 0
    behind: str = "a # b"  # at the end: of its line
    # above,
    # in two lines
    above: int = 1

    # not of the next one

    apart: int = 2
    split: tuple[int, ...] = dataclasses.field(default_factory=tuple)  # behind the bracket – and a dash


@explain_fields
@dataclasses.dataclass(frozen=True)
class Derived(Base):
    """A second."""

    above: int = 3  # another


class Pair(NamedTuple):
    left: int  # the first
    right: int


def test_comments_behind_and_above_a_field_are_found():
    assert field_comments(Base) == {
        "behind": "at the end: of its line",
        "above": "above, in two lines",
        "split": "behind the bracket – and a dash",
    }
    assert field_comments(Derived)["above"] == "another"
    assert field_comments(Derived)["behind"] == "at the end: of its line"
    assert field_comments(Pair) == {"left": "the first"}


def test_help_ends_with_the_fields_and_the_text_is_kept():
    assert inspect.getdoc(Base).startswith(
        "What it is.\n\nAttributes:\n    behind: at the end: of its line\n"
    )
    assert Base().__doc__ == Base.__doc__
    assert text_alone(Base) == "What it is."
    assert text_alone(Pair) is None
    assert explain_fields(Base) is Base
    assert Base.__doc__.count("Attributes") == 1


def test_a_class_without_source_keeps_its_docstring():
    made = dataclasses.make_dataclass("Made", [("a", int)], namespace={"__doc__": "Text."})
    assert explain_fields(made).__doc__ == "Text."


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


# Sorted: workers that collect the tests in different orders stop each other.
OPTIONS = sorted(
    {
        value
        for module in pkgutil.walk_packages(statetrack.commands.__path__, "statetrack.commands.")
        for value in vars(importlib.import_module(module.name)).values()
        if inspect.isclass(value)
        and dataclasses.is_dataclass(value)
        and value.__name__.endswith(("Options", "Flags", "Fields", "Size", "Sequences"))
    },
    key=_full_name,
)


@pytest.mark.parametrize("options", OPTIONS, ids=_full_name)
def test_every_option_of_every_command_has_an_explanation(options):
    missing = {field.name for field in dataclasses.fields(options)} - field_comments(options).keys()
    assert not missing


def test_the_flags_of_the_backbone_and_the_seed_are_explained(capsys):
    parts = spec_flags.model_parts(model_config("deltanet"))
    with pytest.raises(SystemExit):
        spec_flags.parse_parts(parts, ["--help"], "statetrack train", "What it does.")
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--seed INT" in shown
    assert spec_flags.SEED in shown
    for name, comment in field_comments(ModelConfig).items():
        if name not in ("mixer", "mixers"):
            assert f"--{name.replace('_', '-')}" in shown
            assert comment in shown, name
    assert "Attributes" not in shown


def test_a_list_of_fields_does_not_become_text_of_the_command(capsys):
    with pytest.raises(SystemExit):
        parse(Derived, ["--help"], "program")
    shown = capsys.readouterr().out
    assert "at the end: of its line" in shown
    assert "Attributes" not in shown

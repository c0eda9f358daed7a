"""What an item of the paper is: labelled runs at three scales, the published numbers, the differences."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any, Literal

from statetrack.errors import unknown_name
from statetrack.layers import ModelConfig
from statetrack.spec import RunSpec

Scale = Literal["smoke", "quick", "paper"]
SCALES: tuple[Scale, ...] = ("smoke", "quick", "paper")
Comparison = Literal["agrees", "higher", "lower"]
PRECISION = "Layers in bfloat16, recurrences in float32 (the paper does not say)."


@dataclass(frozen=True)
class LabelledRun:
    """One run of an item. Runs that differ in learning rate and seed alone share panel and label."""

    panel: str  # the task, as a title
    label: str  # the model, as in a legend: "DeltaNet [-1,1] (1L)"
    family: str  # gives the colour
    spec: RunSpec
    ours: bool = False  # beyond the paper
    stored_id: str | None = field(default=None, compare=False)  # in the file that the run was read from

    @cached_property
    def id(self) -> str:
        """The name of its results: the one they were stored under, whatever the spec's id is today."""
        return self.stored_id or self.spec.id

    @property
    def eigenvalues(self) -> str:
        """The range, or "" for a model without one."""
        return getattr(self.spec.model.mixer, "eigenvalues", "")

    def to_dict(self) -> dict[str, Any]:
        named = {name: getattr(self, name) for name in ("panel", "label", "family", "ours", "id")}
        return named | {"spec": self.spec.to_dict()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "LabelledRun":
        spec = RunSpec.from_dict(data["spec"])
        return cls(data["panel"], data["label"], data["family"], spec, data["ours"], data["id"])


@dataclass(frozen=True)
class NamedModel:
    """A model of an item, before the task is known."""

    label: str
    family: str
    config: ModelConfig
    ours: bool = False


@dataclass(frozen=True)
class Published:
    """What the paper prints for one panel and label; a number where it gives one, else its words."""

    text: str
    best: float | None = None
    median: float | None = None
    at_most: float | None = None  # where the paper gives only an upper bound
    tolerance: float = 0.05  # differences up to this count as agreement

    def compare(self, scores: Sequence[float]) -> Comparison | None:
        """How the scores of our seeds compare with the paper's numbers; None where it gives words only.

        "lower" if our best or our median is below the paper's by more than the tolerance; else "higher" if
        one of them is above it by more; else "agrees".
        """
        if not scores:
            return None
        pairs = ((max(scores), self.best), (median(scores), self.median))
        off = [ours - theirs for ours, theirs in pairs if theirs is not None]
        off += [] if self.at_most is None else [max(0.0, max(scores) - self.at_most)]
        if not off:
            return None
        if min(off) < -self.tolerance:
            return "lower"
        return "higher" if max(off) > self.tolerance else "agrees"


NOT_IN_PAPER = "not in the paper"  # the label of an item of ours


@dataclass(frozen=True)
class Claim:
    """An ordering that the paper reports, or that we expect of our own items: `better` above `worse`."""

    panel: str
    better: str
    worse: str


@dataclass(frozen=True)
class Item:
    """A table or figure. `measure` is what its table shows of each run:

    scaled accuracy   over all evaluation lengths, 0 is guessing and 1 is perfect
    reach             the longest length up to which 90 % of the sequences are right at every position
    """

    name: str
    what: str
    paper_label: str  # in paper.tex
    runs: Callable[..., list[LabelledRun]]  # (scale, seeds=None)
    measure: Literal["scaled accuracy", "reach"]
    figure: Literal["curves", "dots", "grid"]
    paper: Mapping[tuple[str, str], Published]
    claims: tuple[Claim, ...]
    differences: Mapping[str, tuple[str, ...]]  # by scale
    headline: tuple[tuple[str, str], ...] = ()  # panel and label of the cells to run first (see order.py)
    first_rate: float | None = None  # of a cell with several learning rates; the first one listed when None
    # (label, name of the setting) by the label of a row that repeats another one with a changed setting
    settings: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    default_setting: str = ""  # the name of the setting of all other rows, where some have another

    @property
    def is_ours(self) -> bool:
        """Whether the paper has no such table or figure."""
        return self.paper_label == NOT_IN_PAPER


def check_scale(scale: str) -> None:
    if scale not in SCALES:
        raise unknown_name("scale", scale, SCALES)


def range_label(name: str, eigenvalues: str, layers: int | None = None) -> str:
    """ "DeltaNet [-1,1] (5L)", as in the legends of the paper."""
    return f"{name} {eigenvalues}" + ("" if layers is None else f" ({layers}L)")

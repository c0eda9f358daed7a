"""Which model classes can track a language, and by which theorem."""

import textwrap
from dataclasses import asdict, dataclass, field
from typing import Literal

from statetrack.automata import verdicts
from statetrack.automata.analysis import Analysis, analyse, image_sets
from statetrack.automata.cascade import ExcludedState
from statetrack.automata.dfa import DFA
from statetrack.automata.holonomy import Holonomy, TooManyImages

HOLONOMY_IMAGES = 5_000
COLUMNS = 100  # of a terminal
LARGE_CASCADE = 16  # layers; a cascade of more is a proof, not a model
# What no row of the table covers. The rates are those of an alternating pair, which a test runs.
NOT_JUDGED = (
    "RWKV-7 and Gated DeltaNet-2: they subtract a product of two different vectors, so products of their "
    "transitions can grow (an alternating pair by 1.12 times a token, 1.27 with the range doubled), and the "
    "theorems need norms of at most 1 [docs/gates.md]"
)


@dataclass(frozen=True)
class ModelClass:
    """A family of linear RNNs; `householders` are the factors per token, None for diagonal layers."""

    name: str
    kind: Literal["diagonal", "householder"]
    eigenvalues: Literal["[0,1]", "[-1,1]", "unit-circle"]
    householders: int | None
    layers: int | None


@dataclass(frozen=True)
class Verdict:
    """One row of the table: can this class track the language at every length, and by which theorem.

    `answer` is "yes", "no" or "unknown"; every "no" has a `witness` that can be checked on the automaton.
    """

    model: ModelClass
    answer: str
    reason: str
    source: str
    derived: bool = False  # from the theorem's argument, not from its statement
    witness: verdicts.AnyWitness | None = None


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`: properties of the automaton, and a verdict for every model class.

    `cheapest` is the first class of the table that is proven to suffice; `conclusion()` says in words what
    that is worth. `text()` formats everything for a terminal.
    """

    dfa: DFA
    analysis: Analysis
    verdicts: list[Verdict]
    cheapest: ModelClass
    cascades: dict[str, list[int] | None] = field(default_factory=dict)

    def to_dict(self) -> dict:
        """Plain data, for JSON."""
        return {
            "alphabet": list(self.dfa.alphabet),
            "analysis": self.analysis.to_dict(),
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
            "cheapest": self.cheapest.name,
            "conclusion": ": ".join(self.conclusion()),
            "cascades": self.cascades,
            "not_judged": NOT_JUDGED,
        }

    def conclusion(self) -> tuple[str, str]:
        """What was proven about the cheapest class, as a label and the class's name."""
        names = [v.model.name for v in self.verdicts]
        above = self.verdicts[: names.index(self.cheapest.name)]
        if (self.cheapest.layers or 1) > LARGE_CASCADE:
            return "no small class is proven to suffice; one that does", self.cheapest.name
        if any(v.answer == "unknown" for v in above):
            return "cheapest class proven here to suffice", self.cheapest.name
        return "cheapest class that suffices", self.cheapest.name

    def summary(self) -> list[tuple[str, str]]:
        """The properties of the automaton as pairs of name and value."""
        a = self.analysis
        given = f" ({a.states} given)" if a.states != a.states_min else ""
        needed = [f"{letter}: {n}" for letter, n in a.householders.items()]
        lines = [
            ("states", f"{a.states_min} minimal{given}"),
            ("transition monoid", _monoid(a)),
            ("groups inside", _groups(a)),
            ("Householders", ", ".join(needed) or "none"),
            ("cascades", _cascades(self.cascades)),
        ]
        if a.is_group:
            bound = "" if a.min_faithful_degree_exact else " or fewer"
            lines.append(("faithful degree", f"{_big(a.min_faithful_degree)}{bound}"))
        return lines + [("left out", part) for part in a.left_out]

    def text(self) -> str:
        """The verdicts and properties as text for a terminal."""
        lines = [f"{name:<19}{value}" for name, value in self.summary()]
        lines = [line for text in lines for line in _wrapped(text, 19)]
        width = max(len(v.model.name) for v in self.verdicts)
        lines.append("")
        for v in self.verdicts:
            source = v.source + (", derived" if v.derived else "")
            text = f"{v.model.name:<{width}}  {v.answer:<7}  {v.reason} [{source}]"
            lines += _wrapped(text, width + 11)
            if v.witness is not None:
                lines += _wrapped(f"{'':<{width + 11}}witness: {v.witness}", width + 11)
        lines += ["", *_wrapped(f"not judged: {NOT_JUDGED}", 12)]
        return "\n".join([*lines, "", ": ".join(self.conclusion())])


def _wrapped(text: str, indent: int) -> list[str]:
    """The text wrapped to a terminal's width, lines after the first indented."""
    return textwrap.wrap(text, COLUMNS, subsequent_indent=" " * indent, drop_whitespace=True) or [text]


def explain(dfa: DFA) -> Explanation:
    """Which classes of linear RNNs can track the language of `dfa` at every length, by theorem.

        print(explain(DFA.from_regex("(b*ab*a)*b*", "ab")).text())

    The verdicts are about the minimal automaton. They state whether weights exist, not whether training
    finds them. RWKV-7 and Gated DeltaNet-2 get no verdict: products of their transitions can grow.
    """
    minimal = dfa.minimal()
    analysis = analyse(dfa)
    facts = verdicts.Facts(minimal, analysis, image_sets(minimal))
    rows = [
        Verdict(model, *answer[:3], derived=answer[3], witness=answer[4])
        for model, answer in (
            (
                ModelClass("diagonal [0,1]", "diagonal", "[0,1]", None, None),
                verdicts.diagonal_positive(facts),
            ),
            (
                ModelClass("DeltaNet [0,1]", "householder", "[0,1]", 1, None),
                verdicts.positive_factors(facts, 1),
            ),
            (
                ModelClass("DeltaProduct_2 [0,1]", "householder", "[0,1]", 2, None),
                verdicts.positive_factors(facts, 2),
            ),
            (
                ModelClass("DeltaProduct_k [0,1], k > 2", "householder", "[0,1]", 3, None),
                verdicts.positive_many(facts),
            ),
            (
                ModelClass("diagonal [-1,1], 1 layer", "diagonal", "[-1,1]", None, 1),
                facts.signed_one,
            ),
            (
                ModelClass("diagonal [-1,1]", "diagonal", "[-1,1]", None, None),
                verdicts.diagonal_negative(facts),
            ),
            (
                ModelClass("diagonal unit circle, 1 layer", "diagonal", "unit-circle", None, 1),
                verdicts.unit_circle_one(facts),
            ),
            (
                ModelClass("DeltaNet [-1,1], 1 layer", "householder", "[-1,1]", 1, 1),
                verdicts.deltanet_one(facts),
            ),
            (
                ModelClass("DeltaNet with rotations, 1 layer", "householder", "unit-circle", 1, 1),
                verdicts.rotating_one(facts),
            ),
            (
                ModelClass("DeltaNet [-1,1], 2 layers", "householder", "[-1,1]", 1, 2),
                verdicts.deltanet_two(facts),
            ),
            (
                ModelClass("diagonal unit circle", "diagonal", "unit-circle", None, None),
                verdicts.unit_circle(facts),
            ),
            _product_row(facts),
            (_cascade_class(minimal.n_states), verdicts.deltaproduct_many(facts)),
        )
    ]
    cheapest = next(v.model for v in rows if v.answer == "yes")
    return Explanation(dfa, analysis, rows, cheapest, cascade_sizes(minimal))


def _product_row(facts: verdicts.Facts):
    factors, answer = verdicts.deltaproduct_one(facts)
    return ModelClass(
        f"DeltaProduct_{factors or 'k'} [-1,1], 1 layer", "householder", "[-1,1]", factors, 1
    ), answer


def _cascade_class(n: int) -> ModelClass:
    layers = max(1, n - 1)
    name = f"DeltaProduct_{n} [-1,1], {layers} layer{'s' if layers > 1 else ''} (cascade)"
    return ModelClass(name, "householder", "[-1,1]", n, layers)


def cascade_sizes(minimal: DFA) -> dict[str, list[int] | None]:
    """Level sizes of both cascades; None for holonomy if there are too many image sets."""
    if minimal.n_states == 1 or not minimal.alphabet:
        return {"excluded": [], "holonomy": []}
    try:
        holonomy = Holonomy(minimal, HOLONOMY_IMAGES).sizes
    except TooManyImages:
        holonomy = None
    return {"excluded": ExcludedState(minimal).sizes, "holonomy": holonomy}


def _monoid(a: Analysis) -> str:
    size = "more elements than counted"
    if a.monoid_size is not None:
        size = f"{_big(a.monoid_size)} element{'s' if a.monoid_size != 1 else ''}"
    return f"{size}, a group" if a.is_group else size


def _groups(a: Analysis) -> str:
    if a.is_aperiodic:
        return "none: the language is star-free (aperiodic)"
    if a.is_aperiodic is None:
        return "none found within the limits"
    kinds = {True: "solvable", False: "not all solvable", None: "solvability not settled"}[a.is_solvable]
    orders = ", ".join(map(_big, a.group_orders)) or "not computed"
    return f"orders {orders} ({kinds}{', 2-groups' if a.is_2group else ''})"


def _cascades(sizes: dict[str, list[int] | None]) -> str:
    return "; ".join(
        f"{name} {'too many image sets' if found is None else _levels(found)}"
        for name, found in sizes.items()
    )


def _levels(sizes: list[int]) -> str:
    if not sizes:
        return "no levels"
    shown = ", ".join(map(str, sizes[:8])) + (", ..." if len(sizes) > 8 else "")
    return f"{len(sizes)} level{'s' if len(sizes) > 1 else ''} of size{'s' if len(sizes) > 1 else ''} {shown}"


def _big(n: int | None) -> str:
    if n is None:
        return "not computed"
    return str(n) if n < 10**15 else f"about 10^{len(str(n)) - 1}"

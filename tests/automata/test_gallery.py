"""The gallery of docs/theory.md is what `explain` says today."""

from pathlib import Path

import machines
import pytest

from statetrack.automata import DFA, explain

PAGE = Path(__file__).parents[2] / "docs" / "theory.md"

SWAPS = {letter: machines.cycle(5, [i, i + 1]) for i, letter in enumerate("xyzw", start=1)}
HEXAGON = {"x": (0, 5, 4, 3, 2, 1), "y": (1, 0, 5, 4, 3, 2)}
GALLERY = [
    ("second-to-last letter is b", "`[ab]*b[ab]`", machines.SECOND_TO_LAST_B),
    ("alternating", "`(ab)*`", DFA.from_regex("(ab)*", "ab")),
    ("contains abba", "`[ab]*abba[ab]*`", DFA.from_regex("[ab]*abba[ab]*", "ab")),
    ("parity of a", "`(b*ab*a)*b*`", DFA.from_regex("(b*ab*a)*b*", "ab")),
    ("a only in pairs", r"`(aa\|b)*`", DFA.from_regex("(aa|b)*", "ab")),
    ("a multiple of three a's", "`(b*ab*ab*a)*b*`", DFA.from_regex("(b*ab*ab*a)*b*", "ab")),
    ("length 1 modulo 3, ends in a", "`([ab]{3})*a`", DFA.from_regex("([ab]{3})*a", "ab")),
    ("mirrors of a hexagon", "two reflections", DFA.from_permutations(HEXAGON)),
    ("S5 by swaps of neighbours", "four swaps", DFA.from_permutations(SWAPS)),
    ("S5", "a swap and a 5-cycle", DFA.from_permutations(machines.symmetric(5))),
]


COLUMNS = (
    "diagonal [0,1]",
    "DeltaNet [0,1]",
    "diagonal [-1,1], 1 layer",
    "diagonal [-1,1]",
    "diagonal unit circle, 1 layer",
    "DeltaNet [-1,1], 1 layer",
    "DeltaNet with rotations, 1 layer",
    "DeltaNet [-1,1], 2 layers",
    "diagonal unit circle",
)


def row(name: str, given_as: str, dfa: DFA) -> str:
    found = explain(dfa)
    a, v = found.analysis, {verdict.model.name: verdict.answer for verdict in found.verdicts}
    product = found.verdicts[-2]  # its name holds the number of factors
    one_layer = f"yes, k = {product.model.householders}" if product.answer == "yes" else product.answer
    groups = ", ".join(map(str, a.group_orders)) or "none"
    cells = [name, given_as, a.states_min, a.monoid_size, groups, *(v[c] for c in COLUMNS), one_layer]
    return "| " + " | ".join(map(str, [*cells, found.cheapest.name])) + " |"


@pytest.mark.parametrize(("name", "given_as", "dfa"), GALLERY)
def test_the_page_shows_the_real_verdicts(name, given_as, dfa):
    assert row(name, given_as, dfa) in PAGE.read_text(encoding="utf-8").splitlines()

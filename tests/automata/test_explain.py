"""The verdict table: every no has a word that shows it, and the classes are the theorems'."""

import json
import random
import subprocess
import sys

import machines
import pytest

from statetrack.automata import DFA, explain


def answers(dfa: DFA) -> dict[str, str]:
    return {v.model.name.split(" (")[0]: v.answer for v in explain(dfa).verdicts}


def test_every_no_is_shown_by_a_word_with_the_period_it_claims():
    rng = random.Random(9)
    for _ in range(80):
        dfa = machines.random_dfa(rng)
        for verdict in explain(dfa).verdicts:
            assert (verdict.witness is not None) == (verdict.answer == "no")
            if verdict.witness is not None:
                assert verdict.witness.holds(dfa)


STAR_FREE = ["[ab]*b[ab]", "(ab)*", "a*b*", "[ab]*aa[ab]*"]
PERIODIC = ["(aa)*", "(b*ab*a)*b*", "([ab]{3})*", "(abab)*"]


@pytest.mark.parametrize("pattern", STAR_FREE + PERIODIC)
def test_diagonal_0_1_is_star_free(pattern):
    found = answers(DFA.from_regex(pattern, "ab"))
    assert found["diagonal [0,1]"] == ("yes" if pattern in STAR_FREE else "no")


@pytest.mark.parametrize(
    ("dfa", "cheapest"),
    [
        (DFA.from_regex("[ab]*b[ab]", "ab"), "diagonal [0,1]"),
        (DFA.from_regex("(b*ab*a)*b*", "ab"), "diagonal [-1,1], 1 layer"),
        (machines.adder(4, 1), "diagonal [-1,1]"),
        (machines.adder(3, 1), "diagonal unit circle, 1 layer"),
        (DFA.from_permutations(machines.dihedral(5)), "DeltaNet with rotations, 1 layer"),
        (DFA.from_permutations({"x": (1, 0, 2), "y": (0, 2, 1)}), "DeltaNet [-1,1], 1 layer"),
        (
            DFA.from_permutations({"x": (0, 5, 4, 3, 2, 1), "y": (1, 0, 5, 4, 3, 2)}),
            "DeltaNet [-1,1], 1 layer",
        ),
        (DFA.from_permutations(machines.symmetric(5)), "DeltaNet with rotations, 1 layer"),
        (DFA.from_permutations(machines.Q8), "diagonal [-1,1]"),
        (DFA.from_permutations(machines.A5), "DeltaProduct_2 [-1,1], 1 layer"),
        (DFA.from_regex("([ab]{3})*a", "ab"), "diagonal unit circle, 1 layer"),
        (DFA.from_regex("((ab|ba)(a|b)|aa|bb)*", "ab"), "diagonal unit circle"),
    ],
)
def test_cheapest_class(dfa, cheapest):
    assert explain(dfa).cheapest.name == cheapest


def test_one_or_two_positive_factors_fail_only_where_the_word_is_short_enough():
    parity, pairs, triples = (answers(DFA.from_regex(p, "abc")) for p in ("(aa)*", "(abab)*", "(abcabc)*"))
    assert [f["DeltaNet [0,1]"] for f in (parity, pairs, triples)] == ["no", "no", "unknown"]
    assert [f["DeltaProduct_2 [0,1]"] for f in (parity, pairs, triples)] == ["no", "unknown", "unknown"]


def test_a_letter_of_period_four_defeats_one_layer_of_single_factors():
    found = explain(machines.adder(4, 1))
    verdict = next(v for v in found.verdicts if v.model.name == "DeltaNet [-1,1], 1 layer")
    assert (verdict.answer, verdict.witness.period) == ("no", 4)


def test_every_regular_language_has_a_cascade():
    rng = random.Random(0)
    for _ in range(20):
        assert explain(machines.random_dfa(rng)).verdicts[-1].answer == "yes"


def test_report_is_readable_and_plain_data():
    found = explain(DFA.from_permutations(machines.symmetric(5)))
    assert "witness: c^k, period 5 in k" in found.text()
    assert "cheapest class proven here to suffice: DeltaNet with rotations" in found.text()
    record = json.loads(json.dumps(found.to_dict()))
    assert record["cheapest"] == found.cheapest.name
    warning = "RWKV-7 and Gated DeltaNet-2: they subtract a product of two different vectors"
    assert record["not_judged"].startswith(warning)
    assert f"not judged: {record['not_judged']}" in " ".join(found.text().split())
    assert record["analysis"]["group_orders"] == [120]


def test_a_large_star_free_language_is_settled_by_its_elements():
    """1,024 states and too many image sets, but only 2,047 elements, none with a period."""
    found = explain(DFA.from_regex("(a|b)*a(a|b){9}", "ab"))
    assert found.analysis.is_aperiodic
    assert found.analysis.is_2group
    assert found.analysis.is_solvable
    assert found.analysis.left_out == []
    assert found.text().endswith("cheapest class that suffices: diagonal [0,1]")


def test_what_was_not_settled_is_not_a_reason():
    """A random automaton of 200 states: neither its elements nor its image sets can be listed."""
    rng = random.Random(3)
    maps = {a: [rng.randrange(200) for _ in range(200)] for a in "ab"}
    found = explain(DFA("ab", maps, 0, [q for q in range(200) if rng.random() < 0.5]))
    for verdict in found.verdicts:
        if found.analysis.is_aperiodic is None and verdict.answer == "unknown":
            assert "every period needs" not in verdict.reason
    assert found.cheapest.layers > 16
    assert "\nno small class is proven to suffice; one that does: DeltaProduct_" in found.text()


def test_a_period_of_four_of_a_single_letter_defeats_two_positive_factors():
    assert answers(machines.adder(4, 1))["DeltaProduct_2 [0,1]"] == "no"


def test_a_period_among_many_letters_is_found():
    """Only the word yz has a period, behind some 600 others."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    dfa = DFA.from_regex("(yzyz)*", letters)
    assert answers(dfa)["DeltaNet [0,1]"] == "no"


def test_the_package_imports_without_sympy():
    code = "import sys, statetrack.automata; print({'sympy', 'matplotlib', 'automata'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_large_symmetric_groups_are_no_for_diagonal_layers_with_words_that_show_it():
    """More points than sympy is asked for: S_n and A_n of any degree are known by Jordan's theorem."""
    dfa = DFA.from_group("S61")
    (verdict,) = [v for v in explain(dfa).verdicts if v.model.name == "diagonal unit circle"]
    assert verdict.answer == "no"
    assert verdict.witness.holds(dfa)

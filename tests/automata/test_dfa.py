"""Automata: construction, running, minimising, JSON, drawing, and the errors on the way in."""

import random
import re
import time
import xml.etree.ElementTree as ET

import machines
import numpy as np
import pytest
from automata.fa.dfa import DFA as OracleDFA

from statetrack.automata import DFA
from statetrack.errors import UserError

EVEN = DFA("ab", {"a": [1, 0], "b": [0, 1]}, start=0, accepting=[0])


def oracle(dfa: DFA) -> OracleDFA:
    moves = {q: {a: table[q] for a, table in dfa.transitions.items()} for q in range(dfa.n_states)}
    return OracleDFA(
        states=set(moves),
        input_symbols=set(dfa.alphabet),
        transitions=moves,
        initial_state=dfa.start,
        final_states=set(dfa.accepting),
    )


def test_run_gives_the_start_and_one_state_per_letter():
    assert EVEN.run("aba") == [0, 1, 1, 0]
    assert EVEN.accepts("aba")
    assert not EVEN.accepts("ab")
    assert EVEN.run([]) == [0]


def test_a_missing_move_leads_to_a_sink():
    only_ab = DFA("ab", {"a": [1, None, None], "b": [None, 2, None]}, 0, [2])
    assert only_ab.n_states == 4
    assert [only_ab.accepts(w) for w in ("ab", "a", "abb", "ba", "")] == [True, False, False, False, False]


def test_minimal_agrees_with_automata_lib_on_size_and_language():
    rng = random.Random(0)
    for _ in range(150):
        dfa = machines.random_dfa(rng)
        minimal, expected = dfa.minimal(), oracle(dfa).minify()
        assert minimal.n_states == len(expected.states)
        assert oracle(minimal) == expected


def test_equal_languages_have_equal_minimal_automata():
    other = DFA.from_regex("b*(ab*ab*)*", "ab")
    assert other == EVEN.minimal()
    assert hash(other) == hash(EVEN.minimal())


def test_from_permutations_moves_a_state_to_its_image():
    assert DFA.from_permutations({"c": [1, 2, 0]}, start=2).run("cc") == [2, 0, 1]


def test_json_and_files_give_the_automaton_back(tmp_path):
    dfa = DFA(["on", "off"], {"on": [1, 1], "off": [0, 0]}, 0, [1])
    dfa.save(tmp_path / "switch.json")
    assert DFA.load(tmp_path / "switch.json") == dfa == DFA.from_json(dfa.to_json())
    partial = '{"alphabet": ["a"], "transitions": {"a": [null]}, "start": 0, "accepting": [0]}'
    assert DFA.from_json(partial).n_states == 2


def test_an_empty_alphabet_and_a_single_state_are_automata():
    assert DFA([], {}, 0, [0]).accepts("")
    assert not DFA([], {}).accepts("")
    assert DFA("a", {"a": [0]}).minimal().n_states == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DFA("ab", {"a": [0]}), "'b' has no row"),
        (lambda: DFA("a", {"a": [0], "z": [0]}), "row for 'z', which is not in the alphabet"),
        (lambda: DFA("ab", {"a": [0, 1], "b": [0]}), "differ in length"),
        (lambda: DFA("a", {"a": [0, 2]}), "state 1 on letter 'a' is 2, expected a state from 0 to 1"),
        (lambda: DFA("a", {"a": [0, -1]}), "is -1"),
        (lambda: DFA("a", {"a": [0, 0.5]}), "is 0.5"),
        (lambda: DFA("a", {"a": []}), "at least one state"),
        (lambda: DFA("a", {"a": 5}), "row of letter 'a' is 5"),
        (lambda: DFA.from_permutations({"a": [0, None]}), "no permutation"),
        (
            lambda: DFA.from_json(
                '{"alphabet": "a", "transitions": {"a": [0]}, "start": "0", "accepting": []}'
            ),
            "is '0'",
        ),
        (lambda: DFA("a", {"a": [0]}, start=3), "start state is 3"),
        (lambda: DFA("a", {"a": [0]}, accepting=[1]), "accepting state is 1"),
        (lambda: DFA("aa", {"a": [0]}), "2 times"),
        (lambda: DFA(["a", 1], {"a": [0]}), "letter 1 is not"),
        (lambda: DFA(3, {}), "alphabet is 3"),
        (lambda: DFA("a", [0]), "transitions is a list"),
        (lambda: DFA.from_permutations({"a": [0, 0]}), "no permutation of 0 to 1"),
        (lambda: DFA("a", {"a": [0]}, 0, 0), "accepting is 0, expected a list"),
        (lambda: DFA("a", {"a": {0: 0}}), "row of letter 'a' is {0: 0}"),
        (lambda: DFA("a", {"a": np.array([[0]])}), "is array([0])"),
        (lambda: DFA.from_permutations([[0, 1]]), "permutations is a list"),
        (lambda: DFA.from_permutations({"a": [[0]]}), "no permutation of 0 to 0"),
        (lambda: DFA.from_permutations({"a": 5}), "no permutation"),
        (lambda: EVEN.run("axb"), "'x' at position 1"),
        (lambda: DFA.from_json("{"), "not JSON"),
        (lambda: DFA.from_json("[1]"), "found list"),
        (lambda: DFA.from_json('{"alphabet": ["a"]}'), "found alphabet"),
        (lambda: DFA.load("/nowhere/x.json"), "cannot be read"),
    ],
)
def test_mistakes_are_named(make, words):
    with pytest.raises(UserError, match=re.escape(words)):
        make()


def test_a_large_alphabet_takes_no_time():
    letters = [f"letter {i}" for i in range(20_000)]
    started = time.process_time()
    dfa = DFA(letters, {letter: [1, 0] for letter in letters}, 0, [0])
    assert DFA.from_permutations(dfa.transitions) == dfa
    assert time.process_time() - started < 1
    with pytest.raises(UserError, match="2 times"):
        DFA([*letters, letters[-1]], dfa.transitions)


def test_numpy_numbers_are_states():
    given = DFA("a", {"a": np.array([1, 0])}, np.int64(1), np.array([1]))
    assert given == DFA("a", {"a": [1, 0]}, 1, [1])
    assert DFA([], {}, np.int64(2)).n_states == 3


@pytest.mark.parametrize("name", ["s5", "S_5", "s_5", " S5 ", "S05"])
def test_groups_are_named_as_in_the_word_problem(name):
    assert DFA.from_group(name) == DFA.from_group("S5")
    assert DFA.from_group("q_8") == DFA.from_group("Q8")
    assert DFA.from_group("m11") == DFA.from_group("M11")


def test_svg_stands_alone_and_shows_every_state():
    for n in (1, 2, 7):
        dfa = DFA('<"', {"<": [(q + 1) % n for q in range(n)], '"': [0] * n}, 0, [0])
        root = ET.fromstring(dfa.to_svg())
        groups = [g.get("id") for g in root.iter("{http://www.w3.org/2000/svg}g")]
        assert groups == [f"state-{q}" for q in range(n)]


def test_dot_names_every_arrow():
    text = EVEN.to_dot()
    assert '0 -> 1 [label="a"];' in text
    assert '1 -> 1 [label="b"];' in text
    assert "0 [shape=doublecircle];" in text


def test_run_tokens_is_run_on_batches():
    rng = random.Random(0)
    for _ in range(20):
        dfa = machines.random_dfa(rng)
        tokens = np.random.default_rng(0).integers(len(dfa.alphabet), size=(3, 17))
        expected = [dfa.run([dfa.alphabet[i] for i in row])[1:] for row in tokens]
        assert dfa.run_tokens(tokens).tolist() == expected
    with pytest.raises(UserError, match="outside 0 to"):
        dfa.run_tokens(tokens + 9)

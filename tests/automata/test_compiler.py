"""Compiled networks track every state of every automaton tried, in every format."""

import random
import re

import machines
import numpy as np
import pytest
import torch

from statetrack.automata import DFA, compile_dfa
from statetrack.automata.actions import EPS, Permutation, Reset
from statetrack.automata.cascade import ExcludedState, run_cascade
from statetrack.automata.holonomy import Holonomy, TooManyImages
from statetrack.errors import UserError

DTYPES = ("float16", "float32", "float64")


@pytest.mark.slow
def test_both_cascades_track_500_random_automata_in_every_format():
    rng = random.Random(7)
    for trial in range(500):
        dfa = machines.random_dfa(rng)
        word = machines.random_word(rng, dfa, (3, 40, 400)[trial % 3])
        for strategy in ("excluded", "holonomy"):
            for dtype in DTYPES:
                network = compile_dfa(dfa, strategy, dtype)
                assert network.states(word) == dfa.run(word), (trial, strategy, dtype)
            assert network.accepts(word) == dfa.accepts(word)
            if strategy == "excluded":
                assert len(network.layers) <= max(0, dfa.n_states - 1)


def test_all_short_words_of_all_automata_with_two_states():
    words = [w for n in range(5) for w in np.ndindex(*[2] * n)]
    maps = [[0, 0], [0, 1], [1, 0], [1, 1]]
    for a in maps:
        for b in maps:
            dfa = DFA("ab", {"a": a, "b": b}, 0, [1])
            for strategy in ("auto", "excluded", "holonomy"):
                network = compile_dfa(dfa, strategy)
                for w in words:
                    word = ["ab"[i] for i in w]
                    assert network.states(word) == dfa.run(word)


@pytest.mark.parametrize(
    "dfa",
    [
        DFA([], {}, 0, [0]),
        DFA("a", {"a": [0]}),
        DFA("ab", {"a": [1, 1, 2], "b": [1, 1, 0]}, 1),
        DFA.from_regex("[^a]", "a"),
    ],
)
def test_one_reachable_state_needs_no_layer(dfa):
    word = list(dfa.alphabet) * 3
    for strategy in ("auto", "group", "cyclic", "reflections", "excluded", "holonomy"):
        network = compile_dfa(dfa, strategy)
        assert network.layers == []
        assert network.states(word) == dfa.run(word)


def literal_construction(cascade, word: list[int]) -> list[int]:
    """Theorem 4 as printed: a level takes the states above it after the letter for those before it."""
    config, states = list(cascade.start), []
    for letter in word:
        before = after = cascade.top
        for level, c in enumerate(config):
            config[level] = cascade.action(level, letter, before, after)(c)
            seen = config[level]
            after = cascade.refine(level, after, cascade.action(level, letter, before, after)(seen))
            before = cascade.refine(level, before, seen)
        here = cascade.top
        for level, c in enumerate(config):
            here = cascade.refine(level, here, c)
        states.append(cascade.state_of(here))
    return states


def test_second_to_last_letter_defeats_the_printed_construction_and_not_ours():
    dfa = machines.SECOND_TO_LAST_B
    cascade = Holonomy(dfa.trimmed())
    assert len(cascade.sizes) == 2
    for word in ("ba", "baa"):
        letters = ["ab".index(a) for a in word]
        assert run_cascade(cascade, letters) == dfa.run(word)
        assert compile_dfa(dfa, "holonomy").states(word) == dfa.run(word)
    # Every printed level is idempotent under a letter, so a second a changes nothing.
    ba, baa = (literal_construction(cascade, ["ab".index(a) for a in w])[-1] for w in ("ba", "baa"))
    assert ba == baa
    assert dfa.accepts("ba") != dfa.accepts("baa")


def test_the_printed_construction_goes_wrong_on_nearly_every_cascade_of_several_levels():
    rng, wrong, tried = random.Random(0), 0, 0
    while tried < 100:
        dfa = machines.random_dfa(rng).trimmed()
        cascade = ExcludedState(dfa)
        if len(cascade.sizes) < 2 or all(dfa.is_permutation(a) for a in dfa.alphabet):
            continue
        tried += 1
        word = [rng.randrange(len(dfa.alphabet)) for _ in range(60)]
        expected = dfa.run([dfa.alphabet[i] for i in word])
        assert run_cascade(cascade, word) == expected
        wrong += literal_construction(cascade, word) != expected[1:]
    assert wrong >= 90


def test_star_free_languages_compile_to_eigenvalues_between_0_and_1():
    for pattern in ("[ab]*b[ab]", "(ab)*", "a*b*", "(ab|ba)*", "[ab]*abba[ab]*", "(a(ab)*b)*"):
        dfa = DFA.from_regex(pattern, "ab")
        network = compile_dfa(dfa)
        assert network.strategy == "holonomy"
        rng = random.Random(0)
        word = machines.random_word(rng, dfa, 300)
        assert network.states(word) == dfa.run(word)
        for layer in network.layers:
            for action in layer.actions:
                A = action.A()
                assert np.array_equal(A, np.eye(layer.size)) or np.array_equal(A, EPS * np.eye(layer.size))


def test_auto_takes_one_layer_for_a_group_and_keeps_unreachable_states_out():
    s5 = compile_dfa(DFA.from_permutations(machines.symmetric(5)))
    assert (s5.strategy, len(s5.layers), s5.layers[0].size) == ("group", 1, 5)
    with_spare = DFA("a", {"a": [1, 0, 0]}, 0, [0])  # a permutes what can be reached
    assert compile_dfa(with_spare).strategy == "group"
    assert compile_dfa(with_spare).states("aaa") == [0, 1, 0, 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "letters", [*(machines.symmetric(n) for n in range(2, 7)), machines.A5, machines.M11]
)
def test_groups_by_theorem_3(letters, dtype):
    rng = random.Random(1)
    points = DFA.from_permutations(letters)
    word = rng.choices(points.alphabet, k=400)
    network = compile_dfa(points, "group", dtype)
    assert network.states(word) == points.run(word)
    for x, letter in enumerate(points.alphabet):
        assert len(network.layers[0].factors(x)) == round(
            np.linalg.matrix_rank(network.layers[0].A(x) - np.eye(len(letters[letter])))
        )


@pytest.mark.parametrize("letters", [machines.symmetric(4), machines.symmetric(6), machines.A5])
def test_group_elements_are_tracked_on_the_smallest_faithful_degree(letters):
    dfa = machines.word_problem(letters)
    network = compile_dfa(dfa, "group", representation="smallest")
    n = len(next(iter(letters.values())))
    assert network.layers[0].size == n
    word = random.Random(3).choices(dfa.alphabet, k=300)
    assert network.states(word) == dfa.run(word)


def test_m11_elements_are_tracked_on_its_11_points():
    dfa = machines.word_problem(machines.M11)
    network = compile_dfa(dfa, "group", "float16", representation=machines.M11)
    assert (dfa.n_states, network.layers[0].size) == (7920, 11)
    word = random.Random(4).choices(dfa.alphabet, k=200)
    assert network.states(word) == dfa.run(word)


@pytest.mark.parametrize("strategy", ["group", "cyclic", "reflections"])
def test_addition_modulo_m_up_to_64(strategy):
    rng = random.Random(2)
    for m in range(1, 65):
        dfa = machines.adder(m, 0, 1, m // 2, m - 1) if m > 3 else machines.adder(m, 0, 1)
        word = rng.choices(dfa.alphabet, k=150)
        for dtype in ("float32", "float64"):
            network = compile_dfa(dfa, strategy, dtype)
            assert network.states(word) == dfa.run(word), (m, dtype)
        sizes = {"group": [m], "cyclic": [2 if m > 2 else 1], "reflections": [1, 2]}[strategy]
        assert [layer.size for layer in network.layers] == (sizes if m > 1 else [])
        most = {"group": m - 1, "cyclic": 2, "reflections": 1}[strategy]
        assert network.householders <= most


def test_appendix_d_uses_reflections_only():
    network = compile_dfa(machines.adder(7, 0, 1, 3), "reflections")
    network.states("0130131")
    for layer in network.layers:
        for action in layer.actions:
            assert np.allclose(action.A() @ action.A(), np.eye(layer.size))
            assert np.isclose(np.linalg.det(action.A()), -1)


def test_rotations_have_a_horizon_and_permutations_none():
    shift = machines.adder(60, 7)
    assert compile_dfa(shift, "group", "float16").horizon(3000) is None
    coarse = compile_dfa(machines.adder(2047, 2), "cyclic", "float16").horizon(3000)
    assert coarse is not None


@pytest.mark.slow
def test_200_states_compile_and_run_in_the_excluded_state_form():
    rng, n = random.Random(0), 200
    dfa = DFA("ab", {"a": [rng.randrange(n) for _ in range(n)], "b": [(q + 1) % n for q in range(n)]}, 0, [0])
    network = compile_dfa(dfa, "excluded")
    word = machines.random_word(rng, dfa, 100)
    assert len(network.layers) == n - 1
    assert network.states(word) == dfa.run(word)


def test_actions_apply_as_their_matrices_and_their_factors():
    rng = random.Random(0)
    for _ in range(50):
        n = rng.randint(2, 9)
        for action in (Permutation(tuple(rng.sample(range(n), n))), Reset(n, rng.randrange(n))):
            for dtype in DTYPES:
                h = np.random.default_rng(n).random(n).astype(dtype)
                A, B = action.A().astype(dtype), action.B().astype(dtype)
                assert np.array_equal(action.apply(h), A @ h + B)
            product, offset = np.eye(n), np.zeros(n)
            for beta, k, value in reversed(action.factors()):
                step = np.eye(n) - beta * np.outer(k, k)
                product, offset = step @ product, step @ offset + beta * k * value
            assert np.allclose(product, action.A(), atol=1e-15)
            assert np.allclose(offset, action.B(), atol=1e-15)
            assert all(-1 <= f.eigenvalue() <= 1 for f in action.factors())
            assert np.linalg.norm(action.A(), 2) <= 1 + 1e-12


def test_dec_of_a_single_token_is_the_trace_step():
    network = compile_dfa(machines.SECOND_TO_LAST_B, "holonomy")
    for trace in network.trace("abbab"):
        for h, x, y in zip(trace.states, trace.inputs, trace.outputs, strict=True):
            assert trace.layer.dec(h, int(x)) == y


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: compile_dfa(d, "holonomi"), "Did you mean 'holonomy'?"),
        (lambda d: compile_dfa(d, dtype="float8"), "dtype 'float8' is not known"),
        (lambda d: compile_dfa(d, "group"), "takes 2 states to the same one"),
        (lambda d: compile_dfa(d).states("axb"), "'x' at position 1"),
        (
            lambda d: compile_dfa(DFA.from_permutations(machines.symmetric(3)), "cyclic"),
            "needs a cyclic group",
        ),
        (
            lambda d: compile_dfa(machines.adder(3, 1), "group", representation={"1": [0, 1]}),
            "not faithful",
        ),
        (
            lambda d: compile_dfa(machines.adder(3, 1), "group", representation={"1": [0, 0]}),
            "expected for every",
        ),
        (
            lambda d: compile_dfa(machines.adder(3, 1), "group", representation="least"),
            "representation 'least'",
        ),
        (
            lambda d: compile_dfa(machines.adder(3, 1), "group", representation=3),
            "the representation is a int",
        ),
        (
            lambda d: compile_dfa(machines.adder(3, 1), "group", representation={"1": 3}),
            "expected for every",
        ),
        (lambda d: compile_dfa(d, dtype=np.int8), "dtype 'int8' is not known"),
    ],
)
def test_mistakes_are_named(make, words):
    with pytest.raises(UserError, match=re.escape(words)):
        make(machines.SECOND_TO_LAST_B)


@pytest.mark.parametrize("dtype", ["float16", np.float16, np.dtype("float16"), torch.float16])
def test_a_dtype_goes_by_any_of_its_names(dtype):
    assert compile_dfa(machines.SECOND_TO_LAST_B, dtype=dtype).dtype == "float16"


def test_too_many_image_sets_fall_back_to_the_excluded_state():
    n = 40
    cerny = DFA("ab", {"a": [(q + 1) % n for q in range(n)], "b": [1, *range(1, n)]}, 0, [0])
    assert compile_dfa(cerny).strategy == "excluded"
    with pytest.raises(TooManyImages, match="Use the strategy 'excluded'"):
        Holonomy(cerny, cap=5000)


def test_excluded_state_levels_shrink_by_one():
    dfa = DFA.from_regex("[ab]*a[ab][ab]", "ab")
    assert ExcludedState(dfa).sizes == [8, 7, 6, 5, 4, 3, 2]


def test_tables_alone_run_the_network():
    """What a web page does with `tables()`: no lazy look-ups, only arrays and the actions' A and B."""
    dfa = DFA.from_regex("(aa|b)*", "ab")
    network = compile_dfa(dfa, "excluded", "float64")
    levels = network.tables()
    word = machines.random_word(random.Random(0), dfa, 60)
    hs, decoded = [level.layer.H0 for level in levels], [dfa.start]
    for letter in word:
        x = dfa.alphabet.index(letter)
        for i, level in enumerate(levels):
            action = level.layer.actions[level.action_of[x]]
            hs[i] = action.A() @ hs[i] + action.B()
            if level.last:
                decoded.append(int(level.table[x, hs[i].argmax()]))
            else:
                x = int(level.table[x, level.layer.read(hs[i][None], np.array([x]))[0]])
    assert decoded == dfa.run(word)
    assert network.layers[1].describe(0).startswith("letter 0, {")

"""Signed diagonal layers, the unit circle, rotations with reflections: every yes runs on the real ops."""

import random

import machines
import pytest
import torch

from statetrack.automata import DFA, analyse, explain
from statetrack.automata.cascade import run_cascade
from statetrack.automata.cyclic_cascade import CyclicCascade, prime_chain
from statetrack.automata.gate_network import compile_gates
from statetrack.automata.groups import closure
from statetrack.automata.one_layer import holding, merge_witness
from statetrack.automata.one_layer_network import compile_one_layer
from statetrack.automata.rotation_network import compile_rotations
from statetrack.errors import UserError
from statetrack.ops.delta_rule import delta_rule
from statetrack.ops.gated_linear_attention import gated_linear_attention

BACKENDS = ("reference", "chunked")
ORDERS = {"[0,1]": 1, "[-1,1]": 2, "unit-circle": None}
SWAPS = {letter: machines.cycle(5, [i, i + 1]) for i, letter in enumerate("xyzw", start=1)}
MIXED = {"r": (1, 2, 3, 4, 5, 0), "h": (3, 4, 5, 0, 1, 2), "s": (1, 0, 2, 3, 4, 5)}


def answers(dfa):
    return {v.model.name: v.answer for v in explain(dfa).verdicts}


def test_a_cascade_of_numbers_modulo_primes_is_the_automaton():
    rng = random.Random(2)
    tried = 0
    for _ in range(60):
        dfa = machines.random_dfa(rng, most_states=6).trimmed()
        if dfa.n_states == 1 or not analyse(dfa).is_solvable:
            continue
        word = [rng.randrange(len(dfa.alphabet)) for _ in range(80)]
        assert run_cascade(CyclicCascade(dfa), word) == dfa.run([dfa.alphabet[i] for i in word])
        tried += 1
    assert tried > 20


@pytest.mark.parametrize(
    ("group", "primes"),
    [(machines.symmetric(4), [2, 2, 2, 3]), (machines.Q8, [2, 2, 2]), (machines.dihedral(6), [2, 2, 3])],
)
def test_a_solvable_group_splits_into_the_primes_of_its_order(group, primes):
    assert sorted(step.prime for step in prime_chain(closure(list(group.values()), 100))) == primes


def test_the_alternating_group_does_not_split():
    assert prime_chain(closure(list(machines.A5.values()), 100)) is None


def test_stacks_of_diagonal_layers_have_the_gates_that_explain_says():
    """Both ways: weights exist in the ranges with a yes, and are refused in those with a no."""
    rng = random.Random(5)
    seen = set()
    for i in range(40):
        dfa = machines.random_dfa(rng, most_states=6)
        found = answers(dfa)
        for name, eigenvalues in (
            ("diagonal [0,1]", "[0,1]"),
            ("diagonal [-1,1]", "[-1,1]"),
            ("diagonal unit circle", "unit-circle"),
        ):
            seen.add((name, found[name]))
            if found[name] == "yes":
                network = compile_gates(dfa.minimal(), eigenvalues, backend=BACKENDS[i % 2])
                word = machines.random_word(rng, dfa, 200)
                assert network.states(word) == dfa.minimal().run(word)
            elif found[name] == "no":
                with pytest.raises(UserError, match="compile_gates"):
                    compile_gates(dfa.minimal(), eigenvalues)
    assert len(seen) == 6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("group", ["D4", "S4", "Q8", "Z12"])
def test_solvable_groups_are_tracked_by_signs_and_turns_on_long_words(group, backend):
    dfa = DFA.from_group(group)
    word = machines.random_word(random.Random(0), dfa, 1000 if backend == "reference" else 5000)
    network = compile_gates(dfa, backend=backend)
    assert network.gates == ("[-1,1]" if group in ("D4", "Q8") else "unit-circle")
    assert network.states(word) == dfa.run(word)


def test_gates_outside_the_range_are_refused():
    with pytest.raises(UserError, match=r"gates in \[-1,1\] are not enough"):
        compile_gates(machines.adder(3, 1), "[-1,1]")
    with pytest.raises(UserError, match="not solvable"):
        compile_gates(DFA.from_permutations(machines.A5))


def test_an_automaton_that_is_not_minimal_is_named_where_its_minimal_one_needs_no_group():
    """Three states in a ring, all accepting: the language is all words, and the ring is a group of three."""
    ring = DFA("a", {"a": [1, 2, 0]}, 0, [0, 1, 2])
    with pytest.raises(UserError, match=r"not minimal: dfa.minimal\(\) may need less"):
        compile_gates(ring, "[0,1]")
    assert compile_gates(ring.minimal(), "[0,1]").states("aaaa") == ring.minimal().run("aaaa")


ONE_LAYER = {  # [0,1], [-1,1], unit circle
    "[ab]*b[ab]": ("yes", "yes", "yes"),
    "[ab]*a": ("yes", "yes", "yes"),
    "(b*ab*a)*b*": ("no", "yes", "yes"),
    "([ab][ab])*": ("no", "yes", "yes"),
    "(b*ab*ab*a)*b*": ("no", "no", "yes"),
    "([ab]{3})*a": ("no", "no", "yes"),
    "(ab)*": ("no", "no", "no"),
    "a*b*": ("no", "no", "no"),
    "a[ab]*": ("no", "no", "no"),
    "(aa|b)*": ("no", "no", "no"),
}


@pytest.mark.parametrize("pattern", ONE_LAYER)
def test_one_diagonal_layer(pattern):
    dfa = DFA.from_regex(pattern, "ab")
    word = machines.random_word(random.Random(1), dfa, 500)
    for (eigenvalues, order), expected in zip(ORDERS.items(), ONE_LAYER[pattern], strict=True):
        witness = merge_witness(dfa.minimal(), order)
        assert (witness is None) == (expected == "yes")
        if witness is not None:
            assert witness.holds(dfa)
            with pytest.raises(UserError, match="no single diagonal layer"):
                compile_one_layer(dfa, eigenvalues)
            continue
        for backend in BACKENDS:
            assert compile_one_layer(dfa, eigenvalues, backend=backend).states(word) == dfa.minimal().run(
                word
            )
    assert answers(dfa)["diagonal [-1,1], 1 layer"] == ONE_LAYER[pattern][1]
    assert answers(dfa)["diagonal unit circle, 1 layer"] == ONE_LAYER[pattern][2]


# Pairs of signs: each of three letters flips two of them or one, and the third is the product of the others.
DEPENDENT_SIGNS = DFA.from_permutations({"a": (1, 0, 3, 2), "b": (2, 3, 0, 1), "c": (3, 2, 1, 0)})
SIGNED = {pattern: DFA.from_regex(pattern, "ab") for pattern, found in ONE_LAYER.items() if found[1] == "yes"}


@pytest.mark.parametrize("name", [*SIGNED, "dependent signs"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_signed_diagonal_layer_is_one_of_deltanet_with_heads_of_width_one(name, backend):
    """1 - beta is the gate and beta v what is written: why `explain` says yes to DeltaNet in such a row."""
    dfa = SIGNED.get(name, DEPENDENT_SIGNS).minimal()
    network = compile_one_layer(dfa, "[-1,1]")
    letters = machines.random_word(random.Random(2), dfa, 500)
    tokens = torch.tensor([[dfa.alphabet.index(letter) for letter in letters]])
    beta, write = 1 - network.gate[tokens], network.write[tokens]
    assert beta.min() >= 0
    assert beta.max() <= 2
    one, v = torch.ones(*beta.shape, 1), torch.where(write == 0, 0.0, write / beta)[..., None]
    start = network.start[None, :, None, None]
    o, _ = delta_rule(one, one, v, beta, scale=1.0, initial_state=start, backend=backend)
    torch.testing.assert_close(o, network(tokens))
    digits = network._digits(o[0]).tolist()
    states = [network.by_features[network._features(row)] for row in digits]
    assert [dfa.start, *states] == dfa.run(letters)
    assert answers(dfa)["DeltaNet [-1,1], 1 layer"] == "yes"
    assert answers(dfa)["DeltaNet with rotations, 1 layer"] == "yes"


# (a class, one that contains it): what the first tracks, the second does
CONTAINED = [
    ("diagonal [0,1]", "DeltaNet [0,1]"),
    ("DeltaNet [0,1]", "DeltaProduct_2 [0,1]"),
    ("DeltaProduct_2 [0,1]", "DeltaProduct_k [0,1], k > 2"),
    ("diagonal [0,1]", "diagonal [-1,1]"),
    ("diagonal [-1,1], 1 layer", "diagonal [-1,1]"),
    ("diagonal [-1,1], 1 layer", "diagonal unit circle, 1 layer"),
    ("diagonal [-1,1], 1 layer", "DeltaNet [-1,1], 1 layer"),
    ("diagonal [-1,1]", "diagonal unit circle"),
    ("diagonal unit circle, 1 layer", "diagonal unit circle"),
    ("DeltaNet [-1,1], 1 layer", "DeltaNet with rotations, 1 layer"),
    ("DeltaNet [-1,1], 1 layer", "DeltaNet [-1,1], 2 layers"),
]


def test_no_class_is_said_to_track_less_than_one_that_it_contains():
    rng = random.Random(7)
    three_signs = {
        letter: tuple(q ^ bits for q in range(8)) for letter, bits in zip("abcd", (1, 2, 4, 7), strict=True)
    }
    groups = [machines.symmetric(4), machines.Q8, machines.A5, machines.dihedral(4), three_signs]
    automata = [DEPENDENT_SIGNS, *map(DFA.from_permutations, groups)]
    automata += [machines.random_dfa(rng, most_states=5) for _ in range(40)]
    for dfa in automata:
        found = answers(dfa)
        for smaller, larger in CONTAINED:
            pair = (found[smaller], found[larger])
            assert pair[0] != "yes" or pair[1] == "yes", (dfa, smaller, larger, pair)
            assert pair[1] != "no" or pair[0] == "no", (dfa, smaller, larger, pair)


def test_words_that_a_layer_merges_and_weights_of_a_layer_exclude_each_other():
    """Two searches that share no code: what cannot be, and what is."""
    rng = random.Random(3)
    found = [0, 0]
    for _ in range(50):
        dfa = machines.random_dfa(rng, most_states=7).minimal()
        for order in ORDERS.values():
            impossible, possible = merge_witness(dfa, order) is not None, holding(dfa, order) is not None
            assert not (impossible and possible)
            found[0] += impossible
            found[1] += possible
    assert min(found) > 40


@pytest.mark.parametrize(("eigenvalues", "order"), ORDERS.items())
@pytest.mark.parametrize("pattern", ["(ab)*", "a*b*", "(aa|b)*", "([ab]{4})*a[ab]*"])
def test_layers_with_random_gates_merge_the_words_of_a_witness(pattern, eigenvalues, order):
    """The states after both words of a witness, in 64 random channels: apart for k = 0, equal for large k.

    A channel either keeps a letter, with a gate of modulus 1 and no write, or contracts and writes on it.
    """
    dfa = DFA.from_regex(pattern, "ab")
    witness = merge_witness(dfa.minimal(), order)
    if witness is None:
        pytest.skip("one layer is enough")
    generator = torch.Generator().manual_seed(0)
    channels = 64
    keeps = torch.rand(2, channels, generator=generator) < 0.5
    turn = {"[0,1]": [0.0], "[-1,1]": [0.0, torch.pi]}.get(eigenvalues)
    if turn is None:  # turns whose order divides that of the inserted power, as in the limit
        turn = [2 * torch.pi * i / max(1, len(witness.left)) for i in range(max(1, len(witness.left)))]
    angle = (
        torch.tensor(turn, dtype=torch.float64)[torch.randint(len(turn), (2, channels), generator=generator)]
        * keeps
    )
    gate = torch.where(keeps, 1.0, 0.8 * torch.rand(2, channels, generator=generator)).double()
    write = torch.where(keeps, 0.0, torch.randn(2, channels, generator=generator)).double()

    def state(part, k):
        word = [*witness.x, *part, *witness.z, *witness.e * k, *witness.y]
        tokens = torch.tensor([["ab".index(letter) for letter in word]])
        keys = torch.stack([write[tokens], torch.zeros_like(write[tokens])], -1)
        ones = torch.ones(*tokens.shape, channels, 1, dtype=torch.float64)
        start = torch.randn(1, channels, 2, 1, generator=torch.Generator().manual_seed(1)).double()
        _, S = gated_linear_attention(
            keys,
            keys,
            ones,
            a=gate[tokens],
            angle=angle[tokens][..., None],
            initial_state=start,
            output_final_state=True,
            backend="reference",
        )
        return S

    distances = [(state(witness.left, k) - state(witness.right, k)).abs().max().item() for k in (0, 200)]
    assert distances[1] < 1e-9
    assert distances[0] > 1e-3


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
@pytest.mark.parametrize(
    "group", [machines.symmetric(5), SWAPS, MIXED, machines.dihedral(7), machines.dihedral(6)]
)
def test_rotations_with_reflections_track_groups_in_one_layer(group, backend):
    dfa = DFA.from_permutations(group)
    assert answers(dfa)["DeltaNet with rotations, 1 layer"] == "yes"
    word = machines.random_word(random.Random(0), dfa, 1000 if backend == "reference" else 3000)
    assert compile_rotations(dfa, backend=backend).states(word) == dfa.run(word)


def test_rotations_take_one_reflection_per_token():
    network = compile_rotations(DFA.from_permutations(machines.symmetric(5)))
    assert network.keys.shape[0] == 2
    assert torch.allclose(network.keys.norm(dim=1), torch.tensor([1.0, 0.0]))


def test_rotations_refuse_what_they_are_not_known_to_track():
    dfa = DFA.from_permutations(machines.A5)
    assert answers(dfa)["DeltaNet with rotations, 1 layer"] == "unknown"
    with pytest.raises(UserError, match="do not commute"):
        compile_rotations(dfa)


def test_a_group_that_is_not_solvable_is_named_by_words():
    verdicts = {v.model.name: v for v in explain(DFA.from_permutations(machines.A5)).verdicts}
    stack, one = verdicts["diagonal unit circle"], verdicts["diagonal unit circle, 1 layer"]
    assert (stack.answer, stack.witness.claim) == ("no", "not solvable")
    assert (one.answer, one.witness.claim) == ("no", "not commutative")
    # The witness of another group does not hold here.
    assert not stack.witness.holds(DFA.from_permutations({"a": (1, 2, 0, 3, 4), "b": (0, 1, 2, 4, 3)}))


def test_a_turn_of_six_degrees_counts_modulo_sixty():
    dfa = machines.adder(60, 1)
    word = ["1"] * 1000
    for backend in BACKENDS:
        assert compile_one_layer(dfa, backend=backend).states(word) == dfa.minimal().run(word)

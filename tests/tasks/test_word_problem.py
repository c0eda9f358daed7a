"""Group word problems, token by token."""

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from statetrack.errors import UserError
from statetrack.tasks import WordProblem, group, task
from statetrack.tasks.word_problem import _allowed

S5 = list(permutations(range(5)))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_ids_of_S5_are_lexicographic_and_products_apply_the_first_element_first():
    batch = task("s5").label(torch.tensor([[1, 2], [2, 1]]), 2)
    assert batch.targets[:, 1:].tolist() == [[1, 3], [2, 4]]


def test_worked_example_of_the_docstring():
    batch = WordProblem("S3").label(torch.tensor([[1, 2, 2, 4]]), 4)
    assert batch.inputs.tolist() == [[6, 1, 2, 2, 4]]
    assert batch.targets.tolist() == [[6, 1, 3, 1, 5]]


@given(seed=st.integers(0, 1000), length=st.integers(1, 70))
def test_labels_are_products_of_permutations(seed, length):
    batch = task("s5").sample(2, (length, length), generator(seed))
    for tokens, targets in zip(batch.inputs[:, 1:].tolist(), batch.targets[:, 1:].tolist(), strict=True):
        product = tuple(range(5))
        for x, y in zip(tokens, targets, strict=True):
            product = tuple(S5[x][i] for i in product)  # x after all before it
            assert S5[y] == product


def test_swaps_are_the_eleven_permutations_moving_at_most_two_points():
    assert _allowed(group("S5"), "swaps").tolist() == [0, 1, 2, 5, 6, 14, 21, 24, 54, 80, 105]


def test_up_to_three_points_are_31_permutations():
    assert len(_allowed(group("S5"), "up-to-3")) == 31


def test_inputs_are_uniform_over_the_allowed_set_and_labels_span_the_group():
    batch = task("s5-swaps").sample(400, (60, 60), generator())
    counts = torch.bincount(batch.inputs[:, 1:].flatten(), minlength=120)
    allowed = torch.tensor([0, 1, 2, 5, 6, 14, 21, 24, 54, 80, 105])
    assert counts.sum() == counts[allowed].sum()
    assert (counts[allowed] / counts.sum() - 1 / 11).abs().max() < 0.01
    assert len(batch.targets[:, -1].unique()) > 100


def test_four_tokens_per_element_hold_each_label_for_four_positions():
    problem = task("s5-4-tokens")
    batch = problem.label(torch.tensor([[1, 2, 5]]), 10)
    after = [group("S5").then[1, 2]]
    assert batch.inputs[0].tolist() == [121, 1, 120, 120, 120, 2, 120, 120, 120, 5, 120]
    assert batch.targets[0].tolist() == [121, 0, 0, 0, 1, 1, 1, 1, *after * 3]


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64])
def test_lengths_that_cut_an_element_short_are_filled(length):
    batch = task("z60-2-tokens").sample(3, (length, length), generator())
    assert batch.inputs.shape == batch.targets.shape == (3, length + 1)


def test_cyclic_groups_add_residues():
    batch = task("z60").sample(4, (50, 50), generator())
    assert torch.equal(batch.targets[:, 1:], batch.inputs[:, 1:].cumsum(1) % 60)


def test_dense_parity_is_the_word_problem_of_S2():
    batch = task("parity-dense").sample(4, (50, 50), generator())
    assert torch.equal(batch.targets[:, 1:], batch.inputs[:, 1:].cumsum(1) % 2)


@pytest.mark.parametrize(
    ("name", "order"), [("S1", 1), ("S4", 24), ("A5", 60), ("A2", 1), ("Z1", 1), ("Z64", 64)]
)
def test_named_groups_satisfy_the_axioms(name, order):
    g = group(name)
    assert g.order == order
    elements = torch.arange(order)
    table = g.table(torch.device("cpu")).view(order, order)
    assert torch.equal(table[0], elements)  # identity
    assert torch.equal(table[:, 0], elements)
    assert torch.equal(table.sort(1).values, elements.expand(order, order))  # inverses
    a, b, c = torch.randint(order, (3, 500), generator=generator())
    assert torch.equal(table[table[a, b], c], table[a, table[b, c]])  # associativity


def test_a_group_is_generated_from_permutations():
    dihedral = WordProblem("1 2 3 0; 0 3 2 1", inputs="generators")
    assert dihedral.vocab_size == 8 + 1
    drawn = dihedral.sample(20, (30, 30), generator()).inputs[:, 1:]
    assert len(drawn.unique()) == 2


def test_names_of_one_group_are_one_task():
    assert WordProblem("s_5") == WordProblem("S5")
    assert WordProblem("1,0,2 ;1 2 0") == WordProblem("1 0 2; 1 2 0")


def test_rotations_of_more_points_than_a_byte_counts_are_residues():
    """The rotation by r takes point 0 to r, so lexicographic order is that of the residues."""
    rotations = group(" ".join(str((i + 1) % 300) for i in range(300)))
    assert np.array_equal(rotations.then, group("Z300").then)


def test_sympy_agrees_on_the_order_of_a_generated_group():
    from sympy.combinatorics import Permutation, PermutationGroup

    images = [[1, 2, 3, 4, 0], [1, 0, 2, 3, 4], [0, 2, 3, 1, 4]]
    text = "; ".join(" ".join(map(str, image)) for image in images)
    assert group(text).order == PermutationGroup([Permutation(image) for image in images]).order()


def test_the_same_generator_seed_gives_the_same_batch():
    first, second = (task("s5").sample(5, (20, 20), generator(3)) for _ in range(2))
    assert torch.equal(first.inputs, second.inputs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"group": "Q8"}, "group 'Q8' is not known"),
        ({"group": "S9"}, "more than 5040 elements"),
        ({"group": "S100000"}, "more than 5040 elements"),
        ({"group": "S0"}, "at least 1"),
        ({"group": "0 0 1"}, "not a permutation of the points 0 to 2"),
        ({"group": "1 0; 1 2 0"}, "not a permutation"),
        ({"group": "S5", "inputs": "swap"}, "Did you mean 'swaps'"),
        ({"group": "Z5", "inputs": "swaps"}, "move no points"),
        ({"group": "S5", "inputs": "generators"}, "not given by generators"),
        ({"tokens_per_element": 0}, "expected at least 1"),
    ],
)
def test_wrong_problems_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        WordProblem(**arguments)


def test_an_unknown_task_suggests_the_nearest():
    with pytest.raises(UserError, match="Did you mean 's5-swaps'"):
        task("s5-swap")


def test_negative_lengths_are_refused():
    with pytest.raises(UserError, match="lengths are -3 to 5"):
        task("s5").sample(2, (-3, 5), generator())

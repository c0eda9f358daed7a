"""The run of an automaton: one launch equals the loop of table look-ups."""

import pytest
import torch

from statetrack.errors import UserError
from statetrack.ops.automaton_run import run_automaton
from statetrack.tasks.groups import group


@pytest.mark.parametrize(("B", "T"), [(1, 1), (3, 7), (33, 5), (70, 2)])
def test_triton_matches_the_reference(B, T):
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(6, (4, 6), generator=generator)
    letters = torch.randint(4, (B, T), generator=generator)
    expected = run_automaton(table, letters, 2, backend="reference")
    assert torch.equal(run_automaton(table, letters, 2, backend="triton"), expected)


def test_the_multiplication_table_of_a_group_gives_its_prefix_products():
    s4 = group("S4")
    elements = torch.randint(24, (5, 9), generator=torch.Generator().manual_seed(0))
    states = run_automaton(s4.moves(torch.device("cpu")), elements, 0)
    assert torch.equal(states, s4.prefix_products(elements))


def test_no_letters_give_no_states():
    assert run_automaton(
        torch.zeros(2, 3, dtype=torch.long), torch.zeros(4, 0, dtype=torch.long), 1
    ).shape == (4, 0)


def test_wrong_shapes_are_explained():
    with pytest.raises(UserError, match="expected \\(letters, states\\) and \\(words, time\\)"):
        run_automaton(torch.zeros(6, dtype=torch.long), torch.zeros(4, 2, dtype=torch.long), 0)

"""The run of an automaton as a loop of table look-ups: the definition."""

import torch
from torch import Tensor


def run_automaton_reference(table: Tensor, letters: Tensor, start: int) -> Tensor:
    """s_t = table[x_t, s_{t-1}], s_0 = start.

    Shapes: table (letters, states), x and s (B, T), all integers; every x_t is a row of the table.
    """
    if letters.shape[1] == 0:
        return letters.clone()
    state, states = torch.full_like(letters[:, 0], start), []
    for column in letters.unbind(1):
        state = table[column, state]
        states.append(state)
    return torch.stack(states, 1)

"""The recurrence of one block, forwards and backwards in time, in place.

One call updates one step of every sequence. Where that is little work for a call, time is cut in lanes that
run side by side, each from zero; what enters a lane is added afterwards, times the decays since:

    h_t = (h_t from zero) + a_t ... a_{s+1} a_s h_{s-1}        in the lane that starts at s

Products of the a_t, not exponentials of sums of logs: they may be negative or zero, and never exceed one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def run(a: Tensor, h: Tensor, state: Tensor, lane: int | None = None) -> None:
    """h_t += a_t h_{t-1} along time, from `state` on. Shapes: a, h (B, T, ...); state (B, ...).

    `lane` is the number of steps in a lane; None runs one step after the other.
    """
    whole = _in_lanes(a.shape[1], lane)
    if lane and whole:
        a_lanes, h_lanes = (x[:, :whole].unflatten(1, (-1, lane)) for x in (a, h))
        since = torch.stack(_sweep_all(a_lanes.unbind(2)[1:], h_lanes.unbind(2)), dim=2)
        for first, decay, values in zip(a_lanes[:, :, 0].unbind(1), since.unbind(1), h_lanes.unbind(1)):
            values.addcmul_(decay, (first * state).unsqueeze(1))
            state = values[:, -1]
    _sweep(a[:, whole:].unbind(1), (state, *h[:, whole:].unbind(1)))


def run_back(a: Tensor, g: Tensor, dstate: Tensor, lane: int | None = None) -> None:
    """g_t += a_{t+1} g_{t+1} against time, from the gradient `dstate` of the state that leaves.

    `dstate` is overwritten by the gradient of the state that entered, a_1 g_1.
    """
    whole = _in_lanes(a.shape[1], lane)
    if whole < a.shape[1]:
        g[:, -1].add_(dstate)
        _sweep(a[:, whole + 1 :].unbind(1)[::-1], g[:, whole:].unbind(1)[::-1])
        torch.mul(a[:, whole], g[:, whole], out=dstate)
    if lane and whole:
        a_lanes, g_lanes = (x[:, :whole].unflatten(1, (-1, lane)) for x in (a, g))
        since = torch.stack(_sweep_all(a_lanes.unbind(2)[:0:-1], g_lanes.unbind(2)[::-1])[::-1], dim=2)
        lanes = zip(a_lanes[:, :, 0].unbind(1), since.unbind(1), g_lanes.unbind(1))
        for first, decay, values in reversed(list(lanes)):
            values.addcmul_(decay, dstate.unsqueeze(1))
            torch.mul(first, values[:, 0], out=dstate)


def _in_lanes(T: int, lane: int | None) -> int:
    """How many of the first T steps run in lanes: whole ones, and none if there is only one."""
    return T // lane * lane if lane and 2 * lane <= T else 0


def _sweep(decays: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """values[i + 1] += decays[i] values[i], in order."""
    for decay, before, now in zip(decays, values, values[1:]):
        now.addcmul_(decay, before)


def _sweep_all(decays: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
    """The same, and the product of the decays up to each value."""
    _sweep(decays, values)
    products = [torch.ones_like(values[0])]
    for decay in decays:
        products.append(products[-1] * decay)
    return products

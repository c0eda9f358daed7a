"""The recurrence of one block, forward and backward in time, in place.

One PyTorch call updates one step of every sequence. Where that is little work per call, time is cut into
lanes that run in parallel, each from zero; the state that enters a lane is added afterwards, with its decay:

    h_t = (h_t from zero) + a_t ... a_{s+1} a_s h_{s-1}        in the lane that starts at s

The decays are products of a_t, not exponentials of sums of logs: a_t may be negative or zero.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def scan_forward(a: Tensor, h: Tensor, state: Tensor, lane: int | None = None) -> None:
    """h_t += a_t h_{t-1} along time, from `state` on. Shapes: a, h (B, T, ...); state (B, ...).

    `lane` is the number of steps in a lane; None runs one step after the other.
    """
    whole = _steps_in_lanes(a.shape[1], lane)
    if lane and whole:
        a_lanes, h_lanes = (x[:, :whole].unflatten(1, (-1, lane)) for x in (a, h))
        decays = torch.stack(_update_with_decays(a_lanes.unbind(2)[1:], h_lanes.unbind(2)), dim=2)
        for first, decay, values in zip(a_lanes[:, :, 0].unbind(1), decays.unbind(1), h_lanes.unbind(1)):
            values.addcmul_(decay, (first * state).unsqueeze(1))
            state = values[:, -1]
    _update(a[:, whole:].unbind(1), (state, *h[:, whole:].unbind(1)))


def scan_backward(a: Tensor, g: Tensor, dstate: Tensor, lane: int | None = None) -> None:
    """g_t += a_{t+1} g_{t+1} against time, from the gradient `dstate` of the state that leaves.

    `dstate` is overwritten by the gradient of the state that entered, a_1 g_1.
    """
    whole = _steps_in_lanes(a.shape[1], lane)
    if whole < a.shape[1]:
        g[:, -1].add_(dstate)
        _update(a[:, whole + 1 :].unbind(1)[::-1], g[:, whole:].unbind(1)[::-1])
        torch.mul(a[:, whole], g[:, whole], out=dstate)
    if lane and whole:
        a_lanes, g_lanes = (x[:, :whole].unflatten(1, (-1, lane)) for x in (a, g))
        decays = _update_with_decays(a_lanes.unbind(2)[:0:-1], g_lanes.unbind(2)[::-1])
        decays = torch.stack(decays[::-1], dim=2)
        lanes = zip(a_lanes[:, :, 0].unbind(1), decays.unbind(1), g_lanes.unbind(1))
        for first, decay, values in reversed(list(lanes)):
            values.addcmul_(decay, dstate.unsqueeze(1))
            torch.mul(first, values[:, 0], out=dstate)


def _steps_in_lanes(T: int, lane: int | None) -> int:
    """How many of the first T steps run in lanes: whole ones, and none if there is only one."""
    return T // lane * lane if lane and 2 * lane <= T else 0


def _update(decays: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """values[i + 1] += decays[i] values[i], in order."""
    for decay, before, now in zip(decays, values, values[1:]):
        now.addcmul_(decay, before)


def _update_with_decays(decays: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
    """The same, and the product of the decays up to each value."""
    _update(decays, values)
    products = [torch.ones_like(values[0])]
    for decay in decays:
        products.append(products[-1] * decay)
    return products

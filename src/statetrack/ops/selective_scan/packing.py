"""Packed sequences for backends that take rectangles: sequences of like length side by side, padded.

A padded step has size zero, so a = 1 and x = 0: it leaves the state as it is, and nobody reads its output.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from statetrack.ops.selective_scan.reference import step_sizes


def scan_packed(
    scan: Callable[..., tuple[Tensor, Tensor]],
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    state: Tensor | None,
    *,
    delta_softplus: bool,
    eigenvalues: str,
    cu_seqlens: Tensor,
    max_seqlen: int | None,
) -> tuple[Tensor, Tensor]:
    """Arguments and results of `selective_scan_reference`, by calls of `scan` without `cu_seqlens`."""
    padding = _pad(cu_seqlens, max_seqlen, u.shape[2])
    dtype = torch.promote_types(u.dtype, torch.float32)
    steps = padding.spread(step_sizes(delta, delta_bias, delta_softplus, dtype))
    steps = [torch.where(inside, x, 0.0) for x, inside in zip(steps, padding.inside, strict=True)]
    gates = [None] * len(steps) if z is None else padding.spread(z)
    each_B, each_C = ([x] * len(steps) if x.ndim == 2 else padding.spread(x) for x in (B, C))
    if state is None:
        state = u.new_zeros(padding.order.numel(), u.shape[1], A.shape[1], dtype=dtype)
    states = _Reorder.apply(state, padding.order, padding.back).split([len(x) for x in padding.inside])
    outputs, last = [], []
    for x, step, B, C, gate, h in zip(padding.spread(u), steps, each_B, each_C, gates, states, strict=True):
        if x.shape[2]:
            y, h = scan(x, step, A, B, C, D, gate, None, h, delta_softplus=False, eigenvalues=eigenvalues)
            outputs.append(y)
        last.append(h.to(dtype))
    out = padding.gather(outputs) if outputs else torch.zeros_like(u)
    return out, _Reorder.apply(torch.cat(last), padding.back, padding.order)


class _Reorder(torch.autograd.Function):
    """x[there] along the first axis; gradients return by `back`, not by adding up, which is slow on a CPU."""

    @staticmethod
    def forward(ctx, x, there, back):
        ctx.save_for_backward(back)
        return x.index_select(0, there)

    @staticmethod
    def backward(ctx, gradient):
        (back,) = ctx.saved_tensors
        return gradient.index_select(0, back), None, None


@dataclass(frozen=True)
class _Padding:
    """Groups of n sequences, padded to T steps each."""

    order: Tensor  # (S,): the sequences, group by group
    back: Tensor  # (S,): where in that order every sequence is
    inside: list[Tensor]  # (n, 1, T) per group: whether a step is one of the sequence, not one added
    step: Tensor  # of every padded place, group by group: its step of the row, or any step if added
    place: Tensor  # of every step of the row: its place among the padded ones

    def spread(self, x: Tensor) -> list[Tensor]:
        """(1, ..., time) as (n, ..., T) for every group."""
        rows = _Reorder.apply(x[0].movedim(-1, 0), self.step, self.place)
        shapes = [(len(inside), inside.shape[2]) for inside in self.inside]
        parts = rows.split([n * T for n, T in shapes])
        return [part.unflatten(0, shape).movedim(1, -1) for part, shape in zip(parts, shapes, strict=True)]

    def gather(self, groups: Sequence[Tensor]) -> Tensor:
        """The way back, for channels: (n, D, T) for every group as (1, D, time)."""
        kept = [inside for inside in self.inside if inside.shape[2]]
        # nothing flows back into steps that were added
        rows = [torch.where(inside, x, 0.0).mT.flatten(0, 1) for x, inside in zip(groups, kept, strict=True)]
        return _Reorder.apply(torch.cat(rows), self.place, self.step).mT[None]


def _pad(cu_seqlens: Tensor, max_seqlen: int | None, time: int) -> _Padding:
    start, lengths = cu_seqlens[:-1].long(), cu_seqlens.long().diff()
    device = cu_seqlens.device
    groups = [
        (torch.as_tensor(members, device=device), torch.arange(longest, device=device))
        for members, longest in _groups(lengths, max_seqlen)
    ]
    order = torch.cat([members for members, _ in groups])
    inside = [t < lengths[members][:, None, None] for members, t in groups]
    step = torch.cat([(start[members][:, None] + t).flatten() for members, t in groups])
    # where the first step of every sequence goes, in the order of the groups
    widths = torch.cat([torch.full_like(members, len(t)) for members, t in groups])
    back = order.argsort()
    first = (widths.cumsum(0) - widths)[back]
    sequence = torch.repeat_interleave(lengths, output_size=time)
    place = first[sequence] + torch.arange(time, device=device) - start[sequence]
    return _Padding(order, back, inside, step.clamp(max=max(time - 1, 0)), place)


def _groups(lengths: Tensor, max_seqlen: int | None) -> list[tuple[Tensor | list[int], int]]:
    """Sequences to pad together, and to which length: by powers of two, so that half is padding at worst.

    On a GPU a bound spares reading the lengths, and all are padded to it.
    """
    if max_seqlen is not None and lengths.is_cuda:
        return [(torch.arange(len(lengths), device=lengths.device), max_seqlen)]
    of_length = lengths.tolist()
    groups: dict[int, list[int]] = {}
    for s, T in enumerate(of_length):
        groups.setdefault(T.bit_length(), []).append(s)
    return [(members, max(of_length[s] for s in members)) for members in groups.values()]

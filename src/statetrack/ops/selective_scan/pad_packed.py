"""Packed sequences for backends without `cu_seqlens`: sequences of similar length are padded to rectangles.

A padded step has delta = 0, so a = 1 and x = 0: it leaves the state as it is, and its output is not read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from statetrack.errors import UserError
from statetrack.ops.selective_scan.arguments import ScanInputs, ScanOptions
from statetrack.ops.selective_scan.reference import step_sizes


def scan_packed_by_padding(
    scan: Callable[[ScanInputs, ScanOptions], tuple[Tensor, Tensor]],
    inputs: ScanInputs,
    options: ScanOptions,
) -> tuple[Tensor, Tensor]:
    """Arguments and results of `selective_scan_reference`, by calls of `scan` without `cu_seqlens`."""
    u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens = inputs
    assert cu_seqlens is not None
    padding = _pad(cu_seqlens, options.max_seqlen, u.shape[2])
    dtype = torch.promote_types(u.dtype, torch.float32)
    deltas = padding.pad(step_sizes(delta, delta_bias, options.delta_softplus, dtype))
    deltas = [torch.where(inside, x, 0.0) for x, inside in zip(deltas, padding.inside, strict=True)]
    gates = [None] * len(deltas) if z is None else padding.pad(z)
    Bs, Cs = ([x] * len(deltas) if x.ndim == 2 else padding.pad(x) for x in (B, C))
    if initial_state is None:
        initial_state = u.new_zeros(padding.permutation.numel(), u.shape[1], A.shape[1], dtype=dtype)
    states = _Permute.apply(initial_state, padding.permutation, padding.inverse)
    states = states.split([len(x) for x in padding.inside])
    # softplus and bias are in the step sizes already
    options = options._replace(delta_softplus=False, max_seqlen=None)
    outputs, last_states = [], []
    for x, delta, B, C, gate, h in zip(padding.pad(u), deltas, Bs, Cs, gates, states, strict=True):
        if x.shape[2]:
            y, h = scan(ScanInputs(x, delta, A, B, C, D, gate, None, h), options)
            outputs.append(y)
        last_states.append(h.to(dtype))
    out = padding.unpad(outputs) if outputs else torch.zeros_like(u)
    return out, _Permute.apply(torch.cat(last_states), padding.inverse, padding.permutation)


class _Permute(torch.autograd.Function):
    """x[index] along the first axis. The gradient gathers by `inverse`: a scatter-add is slow on a CPU."""

    @staticmethod
    def forward(ctx, x, index, inverse):
        ctx.save_for_backward(inverse)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, gradient):
        (inverse,) = ctx.saved_tensors
        return gradient.index_select(0, inverse), None, None


@dataclass(frozen=True)
class _Padding:
    """Groups of n sequences, padded to T steps each."""

    permutation: Tensor  # (S,): the sequences, group by group
    inverse: Tensor  # (S,): where in that permutation every sequence is
    inside: list[Tensor]  # (n, 1, T) per group: whether a step belongs to the sequence, not to the padding
    row_step: Tensor  # of every padded step, group by group: its step in the row, or any step if padding
    padded_step: Tensor  # of every step in the row: its index among the padded steps

    def pad(self, x: Tensor) -> list[Tensor]:
        """(1, ..., time) as (n, ..., T) for every group."""
        rows = _Permute.apply(x[0].movedim(-1, 0), self.row_step, self.padded_step)
        shapes = [(len(inside), inside.shape[2]) for inside in self.inside]
        parts = rows.split([n * T for n, T in shapes])
        return [part.unflatten(0, shape).movedim(1, -1) for part, shape in zip(parts, shapes, strict=True)]

    def unpad(self, groups: Sequence[Tensor]) -> Tensor:
        """The inverse of `pad`, for channels: (n, D, T) for every group as (1, D, time)."""
        masks = [inside for inside in self.inside if inside.shape[2]]
        # no gradient flows into padded steps
        rows = [torch.where(inside, x, 0.0).mT.flatten(0, 1) for x, inside in zip(groups, masks, strict=True)]
        return _Permute.apply(torch.cat(rows), self.padded_step, self.row_step).mT[None]


def _pad(cu_seqlens: Tensor, max_seqlen: int | None, time: int) -> _Padding:
    """How to pad the sequences of a row of `time` steps."""
    start, lengths = cu_seqlens[:-1].long(), cu_seqlens.long().diff()
    device = cu_seqlens.device
    groups = [
        (torch.as_tensor(members, device=device), torch.arange(T, device=device))
        for members, T in _groups(lengths, max_seqlen)
    ]
    permutation = torch.cat([members for members, _ in groups])
    inside = [t < lengths[members][:, None, None] for members, t in groups]
    row_step = torch.cat([(start[members][:, None] + t).flatten() for members, t in groups])
    # index of the first step of every sequence among the padded steps
    widths = torch.cat([torch.full_like(members, len(t)) for members, t in groups])
    inverse = permutation.argsort()
    first = (widths.cumsum(0) - widths)[inverse]
    sequence = torch.repeat_interleave(lengths, output_size=time)
    padded_step = first[sequence] + torch.arange(time, device=device) - start[sequence]
    return _Padding(permutation, inverse, inside, row_step.clamp(max=max(time - 1, 0)), padded_step)


def _groups(lengths: Tensor, max_seqlen: int | None) -> list[tuple[Tensor | list[int], int]]:
    """Sequences to pad together, and to which length: by powers of two, so that at most half is padding.

    On a GPU `max_seqlen` avoids reading the lengths, and all sequences are padded to it; likewise under
    torch.compile, for which shapes must not depend on them.
    """
    compiling = torch.compiler.is_compiling()
    if compiling and max_seqlen is None:
        raise UserError(
            "selective_scan: torch.compile cannot read cu_seqlens: pass max_seqlen, the length of the "
            "longest packed sequence or more."
        )
    if max_seqlen is not None and (lengths.is_cuda or compiling):
        return [(torch.arange(len(lengths), device=lengths.device), max_seqlen)]
    of_length = lengths.tolist()
    groups: dict[int, list[int]] = {}
    for s, T in enumerate(of_length):
        groups.setdefault(T.bit_length(), []).append(s)
    return [(members, max(of_length[s] for s in members)) for members in groups.values()]

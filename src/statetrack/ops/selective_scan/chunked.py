"""The selective scan in chunks, in plain PyTorch, with a hand-written backward. Runs on any device.

The scan itself, linear in x = delta u, is in `blocked_scan`. Here are the parts that cost B T D only: step
sizes, skip connection, gate, layouts, and which gradients are asked for. Arithmetic is float32 (float64 for
float64 inputs), and only the inputs and one state per chunk are saved for the backward.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from statetrack.ops.autograd import first_derivative_only, needs_gradient, without_autocast
from statetrack.ops.custom_ops import register_op, without_dispatcher
from statetrack.ops.selective_scan.arguments import ScanInputs, ScanOptions
from statetrack.ops.selective_scan.blocked_scan import BlockedScan, block_size
from statetrack.ops.selective_scan.pad_packed import scan_packed_by_padding


def selective_scan_chunked(inputs: ScanInputs, options: ScanOptions) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `selective_scan_reference`."""
    if inputs.cu_seqlens is not None:
        return scan_packed_by_padding(selective_scan_chunked, inputs, options)
    B, C = _same_groups(inputs.B, inputs.C)
    tensors = inputs._replace(B=B, C=C)[:9]
    save = needs_gradient(tensors)
    return _Chunked.apply(*tensors, options.delta_softplus, options.signed(), save)


class _Chunked(torch.autograd.Function):
    """Memory grows with B T D, not with B T D N: only the state that enters each chunk is saved."""

    @staticmethod
    def forward(ctx, u, delta, A, B, C, D, z, delta_bias, initial_state, delta_softplus, signed, save):
        forward = without_dispatcher(u, _forward, torch.ops.statetrack.chunked_scan_forward)
        out, last_state, checkpoints = forward(
            u, delta, A, B, C, D, z, delta_bias, initial_state, delta_softplus, signed, save
        )
        if save:
            ctx.save_for_backward(u, delta, A, B, C, D, z, delta_bias, checkpoints)
        ctx.options = delta_softplus, signed
        # Detached, or autograd would forbid writing into what it takes for views of something hidden.
        return out.detach(), last_state.detach()

    @staticmethod
    @first_derivative_only
    def backward(ctx, dout, dlast_state):
        saved = ctx.saved_tensors  # read once: a checkpointed block computes them again to give them
        needed = list(ctx.needs_input_grad[: len(NAMES)])
        backward = without_dispatcher(saved[0], _backward, torch.ops.statetrack.chunked_scan_backward)
        gradients = backward(*saved, dout, dlast_state, *ctx.options, needed)
        return *(g if n else None for g, n in zip(gradients, needed, strict=True)), None, None, None


NAMES = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state")


def _forward(
    u, delta, A, B, C, D, z, delta_bias, initial_state, delta_softplus: bool, signed: bool, save: bool
) -> list[Tensor]:
    """Outputs, last states, and the states that enter every chunk (none unless `save`)."""
    p = _TimeFirst(u, delta, A, B, C, delta_bias, delta_softplus, signed)
    h = p.state_in(initial_state)
    checkpoints = h.new_empty(len(p.scan.times), *h.shape) if save else None
    y = p.scan.forward(h, checkpoints).flatten(2)
    if D is not None:
        y.addcmul_(p.u, D.to(y.dtype))
    if z is not None:
        y.mul_(F.silu(_time_first(z, y.dtype)))
    return [
        _like_input(u, y.to(u.dtype)),
        p.state_out(h),
        h.new_empty(0) if checkpoints is None else checkpoints,
    ]


def _forward_fake(
    u, delta, A, B, C, D, z, delta_bias, initial_state, delta_softplus: bool, signed: bool, save: bool
) -> list[Tensor]:
    (batch, channels, T), N = u.shape, A.shape[1]
    groups, dtype = _groups(B, C), torch.promote_types(u.dtype, torch.float32)
    state = u.new_empty(batch, groups, N, channels // groups, dtype=dtype)
    chunks = -(-T // block_size(batch, channels, N, u.device.type).steps)
    checkpoints = state.new_empty(chunks, *state.shape) if save else state.new_empty(0)
    return [_like_input(u, u.new_empty(batch, T, channels)), _TimeFirst.state_out(state), checkpoints]


def _like_input(u: Tensor, y: Tensor) -> Tensor:
    """(B, T, D) as (B, D, T), in memory as u is: contiguous if that is, else without a copy."""
    return y.mT.contiguous() if u.is_contiguous() else y.mT


def _backward(
    u, delta, A, B, C, D, z, delta_bias, checkpoints, dout, dlast_state, delta_softplus, signed, needed
) -> list[Tensor]:
    """The gradients of `NAMES`; an empty tensor for what is not needed."""
    names = {name for name, is_needed in zip(NAMES, needed, strict=True) if is_needed}
    saved = u, delta, A, B, C, D, z, delta_bias, checkpoints
    with without_autocast(dout.device):
        gradients = _gradients(names, dout, dlast_state, *saved, delta_softplus, signed)
    return [gradients[name] if name in names else dout.new_empty(0) for name in NAMES]


def _backward_fake(
    u, delta, A, B, C, D, z, delta_bias, checkpoints, dout, dlast_state, delta_softplus, signed, needed
) -> list[Tensor]:
    batch, channels, T = u.shape
    row = checkpoints.new_empty(batch, T, channels)
    _, _, groups, N, width = checkpoints.shape
    constant, by_time = checkpoints.new_empty(groups, N, width), row.new_empty(batch, T, groups, N)
    likes: dict[str, Any] = dict.fromkeys(("u", "delta", "z"), row.mT) | {"A": _weights_out(constant)}
    likes |= {name: row.new_empty(channels) for name in ("D", "delta_bias")}
    likes |= {name: _weights_out(constant if x.ndim == 2 else by_time) for name, x in (("B", B), ("C", C))}
    likes["initial_state"] = _TimeFirst.state_out(checkpoints[0])
    return [
        torch.empty_like(likes[name]) if is_needed else dout.new_empty(0)
        for name, is_needed in zip(NAMES, needed, strict=True)
    ]


def _gradients(
    needed, dout, dlast_state, u, delta, A, B, C, D, z, delta_bias, checkpoints, delta_softplus, signed
):
    """Gradients by name, of all inputs in `needed` and maybe of others. Equations: `BlockedScan.backward`."""
    p = _TimeFirst(u, delta, A, B, C, delta_bias, delta_softplus, signed)
    dy = dout = _time_first(dout, p.u.dtype)
    if z is not None:
        z = _time_first(z, p.u.dtype)
        dy = dout * F.silu(z)
    wanted = needed & {"A", "B", "C"}
    wanted |= {"x", "delta"} if needed & {"delta", "delta_bias"} else {"x"} if "u" in needed else set()
    wanted |= {"y"} if "z" in needed else set()
    dstate = p.state_in(dlast_state)
    g = p.scan.backward(checkpoints, dy.unflatten(2, (p.groups, -1)), dstate, wanted)
    out = {name: _weights_out(g[name]) for name in wanted & {"A", "B", "C"}}
    out["initial_state"] = p.state_out(dstate)
    skip = None if D is None else D.to(p.u.dtype)
    if "D" in needed:
        out["D"] = (dy * p.u).sum((0, 1))
    if "z" in needed:
        y = g["y"].flatten(2) if skip is None else g["y"].flatten(2).addcmul_(p.u, skip)
        out["z"] = torch.ops.aten.silu_backward(dout * y, z).mT
    if "delta" in wanted:
        # delta acts through x = delta u, and through a.
        ddelta = g["delta"].flatten(2).addcmul_(g["x"].flatten(2), p.u)
        if delta_softplus:
            ddelta = torch.ops.aten.softplus_backward(ddelta, p.delta_raw, 1.0, 20.0)
        out |= {"delta": ddelta.mT, "delta_bias": ddelta.sum((0, 1))}
    if "u" in needed:
        du = g["x"].flatten(2).mul_(p.delta)
        out["u"] = (du if skip is None else du.addcmul_(dy, skip)).mT
    return out


class _TimeFirst:
    """A call's inputs as the scan reads them: time before channels, channels in groups, one dtype."""

    def __init__(self, u, delta, A, B, C, delta_bias, delta_softplus: bool, signed: bool):
        dtype = torch.promote_types(u.dtype, torch.float32)
        self.u, self.delta_raw = _time_first(u, dtype), _time_first(delta, dtype)
        if delta_bias is not None:
            self.delta_raw = self.delta_raw + delta_bias.to(dtype)
        self.delta = F.softplus(self.delta_raw) if delta_softplus else self.delta_raw
        self.groups = _groups(B, C)
        A, B, C = (_weights_in(x.to(dtype), self.groups) for x in (A, B, C))
        x, delta = (x.unflatten(2, (self.groups, -1)) for x in (self.delta * self.u, self.delta))
        self.scan = BlockedScan(delta, x, A, B, C, signed)

    def state_in(self, state: Tensor | None) -> Tensor:
        """(B, D, N) as (B, G, N, P), always in memory of its own: the scan writes into it."""
        shape = (self.u.shape[0], *self.scan.A.shape)
        if state is None:
            return self.u.new_zeros(shape)
        return self.u.new_empty(shape).copy_(state.unflatten(1, (self.groups, -1)).mT)

    @staticmethod
    def state_out(state: Tensor) -> Tensor:
        """(B, G, N, P) as (B, D, N)."""
        return state.mT.flatten(1, 2)


def _groups(B: Tensor, C: Tensor) -> int:
    """Into how many groups the channels fall, B and C given by `_same_groups`."""
    return max(x.shape[1] if x.ndim == 4 else 1 for x in (B, C))


def _time_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, D, T) as (B, T, D)."""
    return x.mT.to(dtype).contiguous()


def _weights_in(x: Tensor, groups: int) -> Tensor:
    """A, B or C as the scan takes them: (D, N) as (G, N, P), (B, G, N, T) as (B, T, G, N)."""
    return (x.unflatten(0, (groups, -1)).mT if x.ndim == 2 else x.permute(0, 3, 1, 2)).contiguous()


def _weights_out(x: Tensor) -> Tensor:
    """The inverse of `_weights_in`."""
    return x.mT.flatten(0, 1) if x.ndim == 3 else x.permute(0, 2, 3, 1)


def _same_groups(B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """B and C with a group axis of one size, (B, G, N, T), unless they are constant."""
    B, C = (x[:, None] if x.ndim == 3 else x for x in (B, C))
    groups = math.lcm(*(x.shape[1] for x in (B, C) if x.ndim == 4))

    def grouped(x: Tensor) -> Tensor:
        return x if x.ndim == 2 or x.shape[1] == groups else x.repeat_interleave(groups // x.shape[1], dim=1)

    return grouped(B), grouped(C)


_INPUTS = "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias"
# one op each for torch.compile, which would unroll the loops over steps
register_op(
    f"chunked_scan_forward({_INPUTS}, Tensor? initial_state, bool delta_softplus, bool signed, bool save) "
    "-> Tensor[]",
    _forward,
    _forward_fake,
)
register_op(
    f"chunked_scan_backward({_INPUTS}, Tensor checkpoints, Tensor dout, Tensor? dlast_state, "
    "bool delta_softplus, bool signed, bool[] needed) -> Tensor[]",
    _backward,
    _backward_fake,
)

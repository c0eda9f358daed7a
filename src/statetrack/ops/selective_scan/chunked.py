"""The selective scan in chunks, in plain PyTorch, with a hand-written backward. Runs on any device.

The scan proper, linear in x = delta u, is in `blocks`; here are the parts that cost B T D only: step sizes,
skip, gate, layouts, and which gradients are asked for. Arithmetic is float32 (float64 for float64 inputs) at
every length, and only inputs and one state per chunk are kept for the backward.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from statetrack.ops.autograd import first_derivative_only
from statetrack.ops.selective_scan.blocks import Scan
from statetrack.ops.selective_scan.packing import scan_packed


def selective_scan_chunked(
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
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `selective_scan_reference`."""
    if cu_seqlens is not None:
        return scan_packed(
            selective_scan_chunked,
            *(u, delta, A, B, C, D, z, delta_bias, state),
            delta_softplus=delta_softplus,
            eigenvalues=eigenvalues,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
        )
    B, C = _same_groups(B, C)
    inputs = (u, delta, A, B, C, D, z, delta_bias, state)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    return _Chunked.apply(*inputs, delta_softplus, eigenvalues == "[-1,1]", keep)


class _Chunked(torch.autograd.Function):
    """Memory grows with B T D, not with B T D N: no state is saved but the one that enters each chunk."""

    @staticmethod
    def forward(ctx, u, delta, A, B, C, D, z, delta_bias, state, softplus, extended, keep):
        ctx.options = softplus, extended
        p = _Prepared(u, delta, A, B, C, delta_bias, softplus, extended)
        h = p.state_in(state)
        checkpoints = h.new_empty(len(p.scan.times), *h.shape) if keep else None
        y = p.scan.forward(h, checkpoints).flatten(2)
        if D is not None:
            y.addcmul_(p.u, D.to(y.dtype))
        if z is not None:
            y.mul_(F.silu(_time_first(z, y.dtype)))
        if keep:
            ctx.save_for_backward(u, delta, A, B, C, D, z, delta_bias, checkpoints)
        out = y.to(u.dtype).mT
        # The memory layout follows that of u: contiguous for contiguous, no copy for a transposed (B, T, D).
        # Detached, or autograd would forbid writing into what it takes for views of something hidden.
        return (out.contiguous() if u.is_contiguous() else out).detach(), p.state_out(h).detach()

    @staticmethod
    @first_derivative_only
    def backward(ctx, dout, dlast):
        names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "state")
        need = {name for name, needed in zip(names, ctx.needs_input_grad) if needed}
        with torch.autocast(dout.device.type, enabled=False):
            gradients = _gradients(need, dout, dlast, *ctx.saved_tensors, *ctx.options)
        return *(gradients[name] if name in need else None for name in names), None, None, None


def _gradients(need, dout, dlast, u, delta, A, B, C, D, z, delta_bias, checkpoints, softplus, extended):
    """Gradients by name, of all inputs in `need` and perhaps of others. Equations: `Scan.backward`."""
    p = _Prepared(u, delta, A, B, C, delta_bias, softplus, extended)
    dy = dout = _time_first(dout, p.u.dtype)
    if z is not None:
        z = _time_first(z, p.u.dtype)
        dy = dout * F.silu(z)
    wanted = need & {"A", "B", "C"}
    wanted |= {"x", "delta"} if need & {"delta", "delta_bias"} else {"x"} if "u" in need else set()
    wanted |= {"y"} if "z" in need else set()
    dstate = p.state_in(dlast)
    g = p.scan.backward(checkpoints, dy.unflatten(2, (p.groups, -1)), dstate, wanted)
    out = {name: _weights_out(g[name]) for name in wanted & {"A", "B", "C"}}
    out["state"] = p.state_out(dstate)
    skip = None if D is None else D.to(p.u.dtype)
    if "D" in need:
        out["D"] = (dy * p.u).sum((0, 1))
    if "z" in need:
        y = g["y"].flatten(2) if skip is None else g["y"].flatten(2).addcmul_(p.u, skip)
        out["z"] = torch.ops.aten.silu_backward(dout * y, z).mT
    if "delta" in wanted:
        # delta acts through x = delta u, and through a.
        ddelta = g["delta"].flatten(2).addcmul_(g["x"].flatten(2), p.u)
        if softplus:
            ddelta = torch.ops.aten.softplus_backward(ddelta, p.raw, 1.0, 20.0)
        out |= {"delta": ddelta.mT, "delta_bias": ddelta.sum((0, 1))}
    if "u" in need:
        du = g["x"].flatten(2).mul_(p.delta)
        out["u"] = (du if skip is None else du.addcmul_(dy, skip)).mT
    return out


class _Prepared:
    """A call's inputs as the scan reads them: time before channels, channels in groups, one dtype."""

    def __init__(self, u, delta, A, B, C, delta_bias, softplus: bool, extended: bool):
        dtype = torch.promote_types(u.dtype, torch.float32)
        self.u, self.raw = _time_first(u, dtype), _time_first(delta, dtype)
        if delta_bias is not None:
            self.raw = self.raw + delta_bias.to(dtype)
        self.delta = F.softplus(self.raw) if softplus else self.raw
        self.groups = max(x.shape[1] if x.ndim == 4 else 1 for x in (B, C))
        A, B, C = (_weights_in(x.to(dtype), self.groups) for x in (A, B, C))
        x, delta = (x.unflatten(2, (self.groups, -1)) for x in (self.delta * self.u, self.delta))
        self.scan = Scan(delta, x, A, B, C, extended)

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


def _time_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, D, T) as (B, T, D)."""
    return x.mT.to(dtype).contiguous()


def _weights_in(x: Tensor, groups: int) -> Tensor:
    """A, B or C as the scan takes them: (D, N) as (G, N, P), (B, G, N, T) as (B, T, G, N)."""
    return (x.unflatten(0, (groups, -1)).mT if x.ndim == 2 else x.permute(0, 3, 1, 2)).contiguous()


def _weights_out(x: Tensor) -> Tensor:
    """The way back from `_weights_in`."""
    return x.mT.flatten(0, 1) if x.ndim == 3 else x.permute(0, 2, 3, 1)


def _same_groups(B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """B and C with a group axis of one size, (B, G, N, T), unless they are constant."""
    B, C = (x[:, None] if x.ndim == 3 else x for x in (B, C))
    groups = math.lcm(*(x.shape[1] for x in (B, C) if x.ndim == 4))

    def grouped(x: Tensor) -> Tensor:
        return x if x.ndim == 2 or x.shape[1] == groups else x.repeat_interleave(groups // x.shape[1], dim=1)

    return grouped(B), grouped(C)

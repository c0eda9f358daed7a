"""The selective scan in chunks, in plain PyTorch, with a hand-written backward. Runs on any device."""

from math import lcm

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from statetrack.ops.selective_scan.blocks import Scan, Wanted
from statetrack.ops.selective_scan.reference import step_sizes


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
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `selective_scan_reference`."""
    B, C = _same_groups(B, C)
    return _SelectiveScan.apply(
        u, delta, A, B, C, D, z, delta_bias, state, delta_softplus, eigenvalues == "[-1,1]", torch.is_grad_enabled()
    )


def _same_groups(B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """Give B and C, where they vary, a group axis of one size: (B, G, N, T)."""
    B, C = (x[:, None] if x.ndim == 3 else x for x in (B, C))
    groups = lcm(*(x.shape[1] for x in (B, C) if x.ndim == 4))
    return tuple(
        x.repeat_interleave(groups // x.shape[1], dim=1) if x.ndim == 4 and x.shape[1] < groups else x for x in (B, C)
    )


class _SelectiveScan(torch.autograd.Function):
    """Saves its inputs and one state per chunk, so memory grows with B T D and not with B T D N."""

    @staticmethod
    def forward(ctx, u, delta, A, B, C, D, z, delta_bias, state, softplus, extended, keep):
        ctx.options = softplus, extended
        u_t, raw, steps, scan = _time_first(u, delta, A, B, C, delta_bias, softplus, extended)
        h = _enter(state, scan)
        keep = keep and any(ctx.needs_input_grad)
        checkpoints = h.new_empty(scan.chunks, *h.shape) if keep else None
        y, last = scan.forward(h, checkpoints)
        y = y.flatten(2)
        if D is not None:
            y.addcmul_(u_t, D.to(y.dtype))
        if z is not None:
            y.mul_(F.silu(z.permute(2,0,1).to(y.dtype)))
        if keep:
            ctx.save_for_backward(u, delta, A, B, C, D, z, delta_bias, state, checkpoints)
        out = y.permute(1, 2, 0).to(u.dtype)
        return (out.contiguous() if u.is_contiguous() else out), last.mT.flatten(1, 2).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlast):
        u, delta, A, B, C, D, z, delta_bias, state, checkpoints = ctx.saved_tensors
        softplus, extended = ctx.options
        u_t, raw, steps, scan = _time_first(u, delta, A, B, C, delta_bias, softplus, extended)
        dtype=u_t.dtype
        need = ctx.needs_input_grad
        dy = _flat(dout, dtype)
        wanted = Wanted(need[0] or need[1] or need[7], need[1] or need[2] or need[7], need[3], need[4], need[6])
        dstate = _enter(dlast, scan).clone()
        g = scan.backward(checkpoints, dy.view_as(scan.x), dstate, wanted)
        dx = g["x"].flatten(2); 
        du = dx * steps
        dd = g["delta"].flatten(2).addcmul_(dx, u_t)
        dD=None
        if D is not None:
            du.addcmul_(dy, D.to(dtype)); dD=(dy*u_t).sum((0,1))
        G=scan.A.shape[0]
        ptb=lambda x: x.permute(1,2,3,0)
        return du.permute(1,2,0), dd.permute(1,2,0), g["A"].mT.flatten(0,1), ptb(g["B"]), ptb(g["C"]), dD, None,None,None,None,None,None


def _flat(x, dtype):
    return x.transpose(1, 2).to(dtype).contiguous().transpose(0, 1)

def _enter(state, scan):
    _, batch, G, P = scan.x.shape
    N = scan.A.shape[1]
    if state is None: return scan.x.new_zeros(batch, G, N, P)
    return state.to(scan.x.dtype).view(batch, G, P, N).mT.contiguous()

def _time_first(u, delta, A, B, C, delta_bias, softplus, extended):
    dtype = torch.promote_types(u.dtype, torch.float32)
    u_t = _flat(u, dtype)
    raw = _flat(delta, dtype)
    if delta_bias is not None: raw = raw + delta_bias.to(dtype)
    steps = F.softplus(raw) if softplus else raw
    G = max(x.shape[1] if x.ndim == 4 else 1 for x in (B, C))
    def per_state(x): return x.to(dtype).unflatten(0, (G, -1)).mT.contiguous()
    def w(x): return per_state(x) if x.ndim == 2 else x.to(dtype).permute(3, 0, 1, 2).contiguous()
    s = steps.unflatten(-1, (G, -1))
    return u_t, raw, steps, Scan(s, (steps*u_t).unflatten(-1,(G,-1)), per_state(A), w(B), w(C), extended)

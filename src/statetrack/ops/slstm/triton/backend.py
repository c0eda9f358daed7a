"""The Triton backend of the sLSTM: two kernels, and the gradient of R as one matrix product."""

from typing import Any

import torch
from torch import Tensor

from statetrack.ops.autograd import first_derivative_only, needs_gradient
from statetrack.ops.custom_ops import register_op, without_dispatcher
from statetrack.ops.slstm.reference import SLSTMCell, fresh_cell
from statetrack.ops.slstm.triton.kernels import backward_kernel, forward_kernel
from statetrack.ops.triton_runtime.compile_ahead import launch
from statetrack.ops.triton_runtime.sizes import block

SEQUENCES = 16  # of a program: the fewest rows a product on tensor cores takes
WIDEST = 64  # of a head: four matrices of 64 x 64 fill the registers of eight warps


def refuses(x: Tensor) -> str | None:
    """Why the kernels cannot take these inputs, or None."""
    if x.shape[-1] > WIDEST:
        return f"heads are {x.shape[-1]} wide, more than {WIDEST}"
    if x.dtype == torch.float64:
        return "float64 is not offered there"
    return "there are no steps" if x.numel() == 0 else None


def slstm_triton(x: Tensor, R: Tensor, state: SLSTMCell | None = None) -> tuple[Tensor, SLSTMCell]:
    """Same arguments and results as `slstm_reference`."""
    x, R = x.float().contiguous(), R.float().contiguous()
    cell = fresh_cell(x[:, :1]) if state is None else state
    h0, c0, n0, m0 = (s.float().contiguous() for s in cell)
    if needs_gradient((x, R, h0, c0, n0, m0)):
        h, c, n, m = _SLSTM.apply(x, R, h0, c0, n0, m0)
    else:
        forward = without_dispatcher(x, _forward, torch.ops.statetrack.slstm_forward)
        h, _, c, n, m = forward(x, R, h0, c0, n0, m0, False)
    return h, SLSTMCell(h[:, -1], c, n, m)


class _SLSTM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, R, h0, c0, n0, m0):
        forward = without_dispatcher(x, _forward, torch.ops.statetrack.slstm_forward)
        h, gates, c, n, m = forward(x, R, h0, c0, n0, m0, True)
        ctx.save_for_backward(R, h0, c0, n0, m0, h, gates, c, n, m)
        ctx.set_materialize_grads(False)
        return h, c[:, -1].clone(), n[:, -1].clone(), m[:, -1].clone()

    @staticmethod
    @first_derivative_only
    def backward(ctx, dh, dc, dn, dm):
        R, h0, c0, n0, m0, h, gates, c, n, m = ctx.saved_tensors
        backward = without_dispatcher(R, _backward, torch.ops.statetrack.slstm_backward)
        dgates, dh0, dc0, dn0, dm0 = backward(R, gates, c0, n0, m0, c, n, m, dh, dc, dn, dm)
        # (H, D, B T) by (H, B T, 4 D)
        before = torch.cat([h0[:, None], h[:, :-1]], dim=1).flatten(0, 1)
        dR = before.permute(1, 2, 0) @ dgates.flatten(-2).flatten(0, 1).transpose(0, 1)
        return dgates, dR, dh0, dc0, dn0, dm0 if ctx.needs_input_grad[5] else None


def _launch_options(x: Tensor) -> tuple[tuple[int, int], dict[str, Any]]:
    B, _, H, _, D = x.shape
    options = {"D": D, "BD": block(D), "BB": SEQUENCES, "num_warps": 4 if D <= 32 else 8}
    return (-(-B // SEQUENCES), H), options


def _forward(x, R, h0, c0, n0, m0, save: bool) -> list[Tensor]:
    """h; gates, c, n and m of all steps with `save`, else no gates and the last c, n and m."""
    results = _forward_fake(x, R, h0, c0, n0, m0, save)
    h, gates, c, n, m = results
    B, T, H = x.shape[:3]
    grid, options = _launch_options(x)
    launch(forward_kernel, grid)(x, R, h0, c0, n0, m0, gates, h, c, n, m, B, T, H, SAVE=save, **options)
    return results


def _forward_fake(x, R, h0, c0, n0, m0, save: bool) -> list[Tensor]:
    B, T, H, _, D = x.shape
    h, gates = x.new_empty(B, T, H, D), x.new_empty(x.shape if save else (0,))
    return [h, gates, *(x.new_empty((B, T, H, D) if save else (B, H, D)) for _ in range(3))]


def _backward(R, gates, c0, n0, m0, c, n, m, dh, dc, dn, dm) -> list[Tensor]:
    """The gradients of the gates, of h0, c0, n0 and m0."""
    results = _backward_fake(R, gates, c0, n0, m0, c, n, m, dh, dc, dn, dm)
    B, T, H = gates.shape[:3]
    grid, options = _launch_options(gates)
    through_m = not (dc is dn is dm is None)
    dh = torch.zeros_like(c) if dh is None else dh.contiguous()
    # without any of them they are not read, and c0 stands for their addresses
    of_last = [c0] * 3
    if through_m:
        of_last = [torch.zeros_like(c0) if x is None else x.contiguous() for x in (dc, dn, dm)]
    given = R, gates, c0, n0, m0, c, n, m, dh, *of_last
    launch(backward_kernel, grid)(*given, *results, B, T, H, THROUGH_M=through_m, **options)
    return results


def _backward_fake(R, gates, c0, n0, m0, c, n, m, dh, dc, dn, dm) -> list[Tensor]:
    return [torch.empty_like(x) for x in (gates, c0, c0, n0, m0)]


_CELL, _CELLS = "Tensor c0, Tensor n0, Tensor m0", "Tensor c, Tensor n, Tensor m"
_GRADIENTS = "Tensor? dh, Tensor? dc, Tensor? dn, Tensor? dm"
register_op(
    f"slstm_forward(Tensor x, Tensor R, Tensor h0, {_CELL}, bool save) -> Tensor[]", _forward, _forward_fake
)
register_op(
    f"slstm_backward(Tensor R, Tensor gates, {_CELL}, {_CELLS}, {_GRADIENTS}) -> Tensor[]",
    _backward,
    _backward_fake,
)

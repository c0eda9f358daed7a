"""The Triton backend of the sLSTM: one kernel each way, and one for the gradients of R and of the bias."""

from typing import Any

import torch
from torch import Tensor

from statetrack.ops.autograd import first_derivative_only, needs_gradient
from statetrack.ops.custom_ops import register_op, without_dispatcher
from statetrack.ops.delta_rule.triton.plan import INTERPRETED
from statetrack.ops.partial_gradients import sum_over_programs
from statetrack.ops.slstm.reference import SLSTMCell, fresh_cell
from statetrack.ops.slstm.triton.kernels import backward_kernel, forward_kernel
from statetrack.ops.slstm.triton.weight_gradients import weight_gradients_kernel
from statetrack.ops.triton_runtime.compile_ahead import launch
from statetrack.ops.triton_runtime.sizes import block, processors

SEQUENCES = 16  # of a program: the fewest rows a product on tensor cores takes
WIDEST = 64  # of a head: four matrices of 64 x 64 fill the registers of eight warps
LARGEST = 2**31 - 1  # steps are counted in 32 bits, and places within the sequences of a program


def refuses(x: Tensor) -> str | None:
    """Why the kernels cannot take these inputs, or None."""
    if x.shape[-1] > WIDEST:
        return f"heads are {x.shape[-1]} wide, more than {WIDEST}"
    if x.dtype == torch.float64:
        return "float64 is not offered there"
    if x.shape[0] * x.shape[1] > LARGEST or SEQUENCES * x[0].numel() > LARGEST:
        return f"there are {x.shape[0]} sequences of {x.shape[1]} steps, too many for 32 bits"
    return "there are no steps" if x.numel() == 0 else None


def slstm_triton(
    x: Tensor, R: Tensor, state: SLSTMCell | None = None, bias: Tensor | None = None
) -> tuple[Tensor, SLSTMCell]:
    """Same arguments and results as `slstm_reference`."""
    R = R.float().contiguous()
    if not _is_in_rows(x):
        x = x.contiguous()
    if bias is not None:
        bias = bias.float().contiguous()
    cell = fresh_cell(x[:, :1].float()) if state is None else state
    h0, c0, n0, m0 = (s.float().contiguous() for s in cell)
    if needs_gradient((x, R, bias, h0, c0, n0, m0)):
        h, c, n, m = _SLSTM.apply(x, R, bias, h0, c0, n0, m0)
    else:
        forward = without_dispatcher(x, _forward, torch.ops.statetrack.slstm_forward)
        h, _, c, n, m = forward(x, R, bias, h0, c0, n0, m0, False)
    return h, SLSTMCell(h[:, -1], c, n, m)


def _is_in_rows(x: Tensor) -> bool:
    """Whether x (B, T, H, 4, D) lies in memory as that or as (B, T, 4, H, D), without gaps."""
    return x.is_contiguous() or x.transpose(2, 3).is_contiguous()


def _distances(x: Tensor) -> dict[str, int]:
    """Of heads and of gates; strides alone do not tell where there is one head."""
    H, D = x.shape[2], x.shape[4]
    return {"SH": 4 * D, "SG": D} if x.is_contiguous() else {"SH": D, "SG": H * D}


class _SLSTM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, R, bias, h0, c0, n0, m0):
        forward = without_dispatcher(x, _forward, torch.ops.statetrack.slstm_forward)
        h, gates, c, n, m = forward(x, R, bias, h0, c0, n0, m0, True)
        ctx.save_for_backward(R, h0, c0, n0, m0, h, gates, c, n, m)
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.has_bias = x.dtype, bias is not None
        return h, c[:, -1].clone(), n[:, -1].clone(), m[:, -1].clone()

    @staticmethod
    @first_derivative_only
    def backward(ctx, dh, dc, dn, dm):
        R, h0, c0, n0, m0, h, gates, c, n, m = ctx.saved_tensors
        backward = without_dispatcher(R, _backward, torch.ops.statetrack.slstm_backward)
        given = R, gates, c0, n0, m0, c, n, m, dh, dc, dn, dm
        dgates, dh0, dc0, dn0, dm0 = backward(*given, ctx.dtype)
        sums = without_dispatcher(h0, _weight_gradients, torch.ops.statetrack.slstm_weight_gradients)
        dR, dbias = sums(h0, h, dgates)
        dbias = dbias if ctx.has_bias else None
        return dgates, dR, dbias, dh0, dc0, dn0, dm0 if ctx.needs_input_grad[6] else None


def _launch_options(x: Tensor) -> tuple[tuple[int, int], dict[str, Any]]:
    B, _, H, _, D = x.shape
    options = {"D": D, "BD": block(D), "BB": SEQUENCES, "num_warps": 4 if D <= 32 else 8}
    return (-(-B // SEQUENCES), H), options | _distances(x)


def _forward(x, R, bias, h0, c0, n0, m0, save: bool) -> list[Tensor]:
    """h; gates, c, n and m of all steps with `save`, else no gates and the last c, n and m."""
    results = _forward_fake(x, R, bias, h0, c0, n0, m0, save)
    h, gates, c, n, m = results
    B, T, H = x.shape[:3]
    grid, options = _launch_options(x)
    options |= {"HAS_BIAS": bias is not None, "SAVE": save}
    tensors = x, R, R if bias is None else bias, h0, c0, n0, m0, gates, h, c, n, m
    launch(forward_kernel, grid)(*tensors, B, T, H, **options)
    return results


def _forward_fake(x, R, bias, h0, c0, n0, m0, save: bool) -> list[Tensor]:
    B, T, H, _, D = x.shape
    gates = torch.empty_like(x, dtype=torch.float32) if save else R.new_empty(0)
    return [
        R.new_empty(B, T, H, D),
        gates,
        *(R.new_empty((B, T, H, D) if save else (B, H, D)) for _ in range(3)),
    ]


def _backward(R, gates, c0, n0, m0, c, n, m, dh, dc, dn, dm, dtype: torch.dtype) -> list[Tensor]:
    """The gradients of the gates, in this dtype, of h0, c0, n0 and m0."""
    results = _backward_fake(R, gates, c0, n0, m0, c, n, m, dh, dc, dn, dm, dtype)
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


def _backward_fake(R, gates, c0, n0, m0, c, n, m, dh, dc, dn, dm, dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty_like(gates, dtype=dtype), *(torch.empty_like(x) for x in (c0, c0, n0, m0))]


def weight_gradients_constants(D: int) -> dict[str, Any]:
    """Constants of the kernel that sums the weights' gradients: ROWS steps are a tile."""
    BD = block(D)
    return {"D": D, "BD": BD, "ROWS": BD, "num_warps": 4 if BD <= 32 else 8}


def weight_gradients_grid(steps: int, H: int, D: int, processors: int) -> tuple[int, int]:
    """Programs of a head, and heads: one or two per multiprocessor, as each leaves a whole partial dR."""
    programs = (2 if D <= 32 else 1) * processors // H
    return min(max(1, programs), -(-steps // weight_gradients_constants(D)["ROWS"])), H


def _weight_gradients(h0: Tensor, h: Tensor, dgates: Tensor) -> list[Tensor]:
    """The gradients of R (H, D, 4 D) and of the bias (H, 4, D)."""
    (B, T, H, D), half = h.shape, dgates.dtype == torch.bfloat16 and not INTERPRETED
    grid = weight_gradients_grid(B * T, H, D, processors(h.device))
    partial = h.new_empty(grid[0], H, D + 1, 4 * D)
    options = weight_gradients_constants(D) | {"BF16": half} | _distances(dgates)
    launch(weight_gradients_kernel, grid)(h0, h, dgates, partial, B, T, H, **options)
    total = sum_over_programs(partial, torch.float32)
    return [total[:, :D], total[:, D].unflatten(-1, (4, D))]


def _weight_gradients_fake(h0: Tensor, h: Tensor, dgates: Tensor) -> list[Tensor]:
    H, D = h.shape[2:]
    total = h.new_empty(H, D + 1, 4 * D)
    return [total[:, :D], total[:, D].unflatten(-1, (4, D))]


_CELL, _CELLS = "Tensor c0, Tensor n0, Tensor m0", "Tensor c, Tensor n, Tensor m"
_GRADIENTS = "Tensor? dh, Tensor? dc, Tensor? dn, Tensor? dm, ScalarType dtype"
register_op(
    f"slstm_forward(Tensor x, Tensor R, Tensor? bias, Tensor h0, {_CELL}, bool save) -> Tensor[]",
    _forward,
    _forward_fake,
)
register_op(
    f"slstm_backward(Tensor R, Tensor gates, {_CELL}, {_CELLS}, {_GRADIENTS}) -> Tensor[]",
    _backward,
    _backward_fake,
)
register_op(
    "slstm_weight_gradients(Tensor h0, Tensor h, Tensor dgates) -> Tensor[]",
    _weight_gradients,
    _weight_gradients_fake,
)

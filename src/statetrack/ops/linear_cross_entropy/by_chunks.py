"""The loss and its gradients for chunks of rows, one after the other, so that few logits exist at a time.

    z = W x,  loss = sum_i log(sum_c exp(z_ic)) - z_i,target
    dz = softmax(z) - one_hot(target),  dx = dz W,  dW = dz^T x

The loss is a scalar, so both gradients can be computed in the forward pass while the logits of a chunk are
there, and the backward pass multiplies them by the gradient of the loss. What differs between backends is the
function that replaces the logits of a chunk by their gradient.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from statetrack.ops.autograd import autocast_is_on, first_derivative_only, needs_gradient, without_autocast
from statetrack.ops.custom_ops import register_op

# losses(z, targets, ignore_index, gradient) -> (rows,): writes dz over z if `gradient`
Losses = Callable[[Tensor, Tensor, int, bool], Tensor]
TILE = 128  # rows that a matrix product takes at a time


def chunk_rows(rows: int, classes: int, max_logits: int) -> int:
    """Rows of a chunk: at most `max_logits` logits, but at least one tile, and chunks as equal as may be."""
    most = max(TILE, max_logits // classes // TILE * TILE)
    chunks = max(1, -(-rows // most))
    return max(1, -(-rows // (chunks * TILE))) * TILE


def loss_by_chunks(
    losses: Losses,
    max_logits: int,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    dtype: torch.dtype,
    gradients: tuple[bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, dx in the dtype of the product and dW in float32 or better; what is not asked for is empty.

    Shapes: x (N, D); weight (classes, D); targets (N,). `dtype` is that of the product.
    """
    weight, accumulator = weight.to(dtype), torch.promote_types(dtype, torch.float32)
    _, dx, dweight = _empty(x, weight, dtype, gradients)
    parts = torch.zeros(len(x), dtype=accumulator, device=x.device)
    rows = chunk_rows(len(x), len(weight), max_logits)
    for start in range(0, len(x), rows):
        part = slice(start, start + rows)
        given = x[part].to(dtype)
        z = given @ weight.T
        parts[part] = losses(z, targets[part], ignore_index, any(gradients))
        if gradients[0]:
            torch.mm(z, weight, out=dx[part])
        if gradients[1]:
            _add_product(dweight, z.T, given, start > 0)
    if gradients[1] and not len(x):
        dweight.zero_()
    return parts.sum(), dx, dweight


def _empty(x: Tensor, weight: Tensor, dtype: torch.dtype, gradients: tuple[bool, bool]):
    """Uninitialised loss, dx and dW."""
    accumulator = torch.promote_types(dtype, torch.float32)
    dx = x.new_empty(x.shape if gradients[0] else (0,), dtype=dtype)
    dweight = x.new_empty(weight.shape if gradients[1] else (0,), dtype=accumulator)
    return x.new_empty((), dtype=accumulator), dx, dweight


def _add_product(total: Tensor, a: Tensor, b: Tensor, add: bool) -> None:
    """total = a b, or total + a b if `add`; on a GPU without rounding the product to half precision."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=int(add), out=total)
    elif total.is_cuda:
        torch.addmm(total, a, b, beta=int(add), out_dtype=total.dtype, out=total)
    elif add:
        total += a @ b
    else:
        total.copy_(a @ b)


def register(name: str, losses: Losses, max_logits: Callable[[], int]) -> None:
    """Make the op statetrack::linear_cross_entropy_<name>."""

    def run(x, weight, targets, ignore_index, dtype, grad_x, grad_weight):
        given = x, weight, targets, ignore_index, dtype, (grad_x, grad_weight)
        with without_autocast(x.device):
            return loss_by_chunks(losses, max_logits(), *given)

    def fake(x, weight, targets, ignore_index, dtype, grad_x, grad_weight):
        return _empty(x, weight, dtype, (grad_x, grad_weight))

    register_op(
        f"linear_cross_entropy_{name}(Tensor x, Tensor weight, Tensor targets, int ignore_index, "
        "ScalarType dtype, bool grad_x, bool grad_weight) -> (Tensor, Tensor, Tensor)",
        run,
        fake,
    )


def run_op(name: str, x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """The loss by the op of that name, with gradients; arguments as for the reference."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if autocast_is_on(x.device) else x.dtype
    x, targets = x.flatten(0, -2), targets.flatten().long()
    if needs_gradient((x, weight)):
        return _Loss.apply(x, weight, targets, ignore_index, dtype, name)
    op = getattr(torch.ops.statetrack, f"linear_cross_entropy_{name}")
    return op(x, weight, targets, ignore_index, dtype, False, False)[0]


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, ignore_index, dtype, name):
        wanted = ctx.needs_input_grad[:2]
        op = getattr(torch.ops.statetrack, f"linear_cross_entropy_{name}")
        loss, dx, dweight = op(x, weight, targets, ignore_index, dtype, *wanted)
        ctx.save_for_backward(dx, dweight)
        ctx.dtypes = x.dtype, weight.dtype
        return loss

    @staticmethod
    @first_derivative_only
    def backward(ctx, dloss):
        each = zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad, strict=False)
        dx, dweight = (_scaled(g, dloss, dtype) if wanted else None for g, dtype, wanted in each)
        return dx, dweight, None, None, None, None


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient * factor, rounded to `dtype` once and with no tensor in between."""
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))

"""The Triton backend of the mLSTM, for short sequences from an empty state: what training on words needs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from statetrack.ops.autograd import first_derivative_only, needs_gradient
from statetrack.ops.custom_ops import register_op, without_dispatcher
from statetrack.ops.delta_rule.triton.plan import INTERPRETED
from statetrack.ops.mlstm.chunked import mlstm_chunked
from statetrack.ops.mlstm.reference import EPS, MLSTMCell
from statetrack.ops.mlstm.triton.kernels import backward_kernel, forward_kernel
from statetrack.ops.triton_runtime.compile_ahead import launch
from statetrack.ops.triton_runtime.sizes import block

LONGEST = 64  # steps: a program holds all pairs of them
WIDEST = 128  # of keys and values


def refuses(q: Tensor, v: Tensor, state: MLSTMCell | None, signed: bool) -> str | None:
    """Why the kernels cannot take these inputs, or None."""
    if signed:
        return "the gates have signs"
    if q.shape[1] > LONGEST:
        return f"there are {q.shape[1]} steps, more than {LONGEST}"
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        return f"keys or values are {max(q.shape[-1], v.shape[-1])} wide, more than {WIDEST}"
    if state is not None:
        return "a state enters"
    if torch.promote_types(q.dtype, v.dtype) == torch.float64:
        return "float64 is not offered there"
    return "there are no steps" if q.numel() == 0 or v.numel() == 0 else None


def mlstm_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    state: MLSTMCell | None = None,
    signed: bool = False,
) -> tuple[Tensor, MLSTMCell]:
    """Same arguments and results as `mlstm_reference`, without a state that enters and without signs."""
    assert state is None  # see `refuses`
    assert not signed
    if not _exact_in_bfloat16(q, k, v):
        q, k, v = q.float(), k.float(), v.float()
    return _run([x.contiguous() for x in (q, k, v, i, f)])


def mlstm_joined_triton(
    qkv: Tensor, i: Tensor, f: Tensor, state: MLSTMCell | None = None, signed: bool = False
) -> tuple[Tensor, MLSTMCell]:
    """`mlstm_triton` of the parts of qkv (B, T, 3, H, K), where they are; so is their gradient written."""
    assert state is None  # see `refuses`
    assert not signed
    if not _exact_in_bfloat16(qkv):
        qkv = qkv.float()
    return _run([x.contiguous() for x in (qkv, i, f)])


def _run(inputs: list[Tensor]) -> tuple[Tensor, MLSTMCell]:
    """From q, k, v, i, f or from qkv, i, f."""
    if needs_gradient(inputs):
        h, C, n, m = _MLSTM.apply(*inputs)
    else:
        forward = without_dispatcher(inputs[0], _forward, torch.ops.statetrack.mlstm_forward)
        h, C, n, m = forward(*_parts(inputs))
    return h, MLSTMCell(C, n, m)


def _parts(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """q, k, v, i, f, where they may be joined as qkv, i, f."""
    return tuple(inputs) if len(inputs) == 5 else (*inputs[0].unbind(2), *inputs[1:])


class _MLSTM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        forward = without_dispatcher(inputs[0], _forward, torch.ops.statetrack.mlstm_forward)
        return tuple(forward(*_parts(inputs)))

    @staticmethod
    @first_derivative_only
    def backward(ctx, dh, dC, dn, dm):
        inputs = ctx.saved_tensors
        if dC is not None or dn is not None or dm is not None:  # rare: a loss of the last state
            return _gradients_by_chunks(inputs, (dh, dC, dn, dm))
        if dh is None:
            return (None,) * len(inputs)
        if len(inputs) == 5:
            backward = without_dispatcher(dh, _backward, torch.ops.statetrack.mlstm_backward)
        else:
            backward = without_dispatcher(dh, _joined_backward, torch.ops.statetrack.mlstm_joined_backward)
        return tuple(backward(*inputs, dh.contiguous()))


def _gradients_by_chunks(inputs: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...]):
    """The gradients with those of the last state, from the chunked form."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        q, k, v, i, f = _parts(leaves)
        h, cell = mlstm_chunked(q, k, v, i, f)
        outputs = [(y, g) for y, g in zip((h, *cell), gradients, strict=True) if g is not None]
        of_outputs = [g.to(y.dtype) for y, g in outputs]
        return torch.autograd.grad([y for y, _ in outputs], leaves, of_outputs, materialize_grads=True)


def _exact_in_bfloat16(*tensors: Tensor) -> bool:
    # Triton's interpreter has no bfloat16 arithmetic
    return not INTERPRETED and all(x.dtype == torch.bfloat16 for x in tensors)


def _launch_options(
    q: Tensor, k: Tensor, v: Tensor
) -> tuple[tuple[int], tuple[int, int, float], dict[str, Any]]:
    B, T, H, K = q.shape
    V = v.shape[-1]
    sizes = {"K": K, "V": V, "BT": block(T), "BK": block(K), "BV": block(V), "EPS": EPS}
    options = sizes | {"BF16": _exact_in_bfloat16(q, k, v), "num_warps": 8}
    options["PARTS"] = 1 if q.is_contiguous() else 3  # of one tensor: see `_parts`
    return (B * H,), (T, H, K**-0.5), options


def _forward(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> list[Tensor]:
    """h in bfloat16 if v is, else in float32, and the last C, n and m."""
    results = _forward_fake(q, k, v, i, f)
    grid, numbers, options = _launch_options(q, k, v)
    launch(forward_kernel, grid)(q, k, v, i, f, *results, *numbers, **options)
    return results


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> list[Tensor]:
    (B, _, H, K), V = q.shape, v.shape[-1]
    shapes = ((B, H, K, V), (B, H, K), (B, H))
    dtype = torch.bfloat16 if v.dtype == torch.bfloat16 else torch.float32
    return [v.new_empty(v.shape, dtype=dtype), *(v.new_empty(shape, dtype=torch.float32) for shape in shapes)]


def _backward(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, dh: Tensor) -> list[Tensor]:
    """The gradients of the inputs, in their dtypes."""
    results = _backward_fake(q, k, v, i, f, dh)
    _launch_backward((q, k, v, i, f), dh, results)
    return results


def _joined_backward(qkv: Tensor, i: Tensor, f: Tensor, dh: Tensor) -> list[Tensor]:
    results = _joined_backward_fake(qkv, i, f, dh)
    _launch_backward(_parts((qkv, i, f)), dh, _parts(results))
    return results


def _launch_backward(inputs: Sequence[Tensor], dh: Tensor, results: Sequence[Tensor]) -> None:
    grid, numbers, options = _launch_options(*inputs[:3])
    launch(backward_kernel, grid)(*inputs, dh, *results, *numbers, **options)


def _backward_fake(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, dh: Tensor) -> list[Tensor]:
    return [torch.empty_like(x) for x in (q, k, v, i, f)]


def _joined_backward_fake(qkv: Tensor, i: Tensor, f: Tensor, dh: Tensor) -> list[Tensor]:
    return [torch.empty_like(x) for x in (qkv, i, f)]


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor i, Tensor f"
register_op(f"mlstm_forward({_INPUTS}) -> Tensor[]", _forward, _forward_fake)
register_op(f"mlstm_backward({_INPUTS}, Tensor dh) -> Tensor[]", _backward, _backward_fake)
register_op(
    "mlstm_joined_backward(Tensor qkv, Tensor i, Tensor f, Tensor dh) -> Tensor[]",
    _joined_backward,
    _joined_backward_fake,
)

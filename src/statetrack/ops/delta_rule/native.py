"""The native CPU backend of the delta rule: `torch.library` ops around the C++ kernels of ops/native."""

import torch
from torch import Tensor

from statetrack.ops.autograd import first_derivative_only, needs_gradient
from statetrack.ops.custom_ops import register_op, without_dispatcher
from statetrack.ops.delta_rule.reference import strengths
from statetrack.ops.native import library


def delta_rule_native(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    state: Tensor | None,
    *,
    scale: float,
    householders: int,
    l2norm: bool,
    cu_seqlens: Tensor | None,
    beta_from_logits: float | None = None,
    final: bool = True,
    max_seqlen: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `delta_rule_reference`, in float32 whatever the inputs."""
    beta = strengths(beta, beta_from_logits)
    inputs = [x if x is None or x.dtype == torch.float32 else x.float() for x in (q, k, v, beta, g, state)]
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.long().contiguous()
    keep = needs_gradient(inputs)
    return _Native.apply(*inputs, cu_seqlens, scale, householders, l2norm, keep)


def refuses(q: Tensor, v: Tensor) -> str | None:
    """Why the kernels cannot take these inputs, or None."""
    if q.device.type != "cpu":
        return f"the inputs are on {q.device}, not on a CPU"
    if q.dtype == torch.float64:
        return "float64 is not offered there"
    if q.numel() == 0 or v.numel() == 0:
        return "the input is empty"
    return library.ABSENT


def chunk_length(K: int, n: int) -> int:
    """Tokens per chunk, of n steps each; a sequence is cut evenly, in chunks of two thirds to 3/2 of this."""
    return max(1, (32 if K <= 64 else 64) // n)


def _saved(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, n: int, keep: bool) -> tuple[Tensor, Tensor]:
    """Room for the state entering every chunk, widths rounded up to 16, and for the error of every step."""
    (B, T, H, K), V = q.shape, v.shape[-1]
    if not keep:
        return q.new_empty(0), q.new_empty(0)
    chunk = chunk_length(K, n)
    if cu_seqlens is None:
        stored = B * max(1, (T + chunk // 2) // chunk)
    else:  # an upper bound that needs no look at the offsets
        stored = T // chunk + cu_seqlens.shape[0]
    return q.new_empty(stored, H, -(-K // 16) * 16, -(-V // 16) * 16), q.new_empty(v.shape)


def _rows(x: Tensor) -> Tensor:
    """x with its width contiguous, as the kernels read it."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _sizes(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, scale: float, n: int, l2norm: bool):
    (B, T, H, K), V = q.shape, v.shape[-1]
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shares = library.threads(8 * B * T * n * H * (K + 16) * (V + 16))
    return sequences, T, H, K, V, n, chunk_length(K, n), l2norm, shares, scale


def _forward(q, k, v, beta, g, state, cu_seqlens, scale: float, n: int, l2norm: bool, keep: bool):
    """Outputs, last states, and what the backward needs: states entering chunks and errors."""
    q, k, v = _rows(q), _rows(k), _rows(v)
    sizes = _sizes(q, v, cu_seqlens, scale, n, l2norm)
    out = q.new_empty(*q.shape[:3], v.shape[3])
    final = q.new_empty(sizes[0], *sizes[2:5])
    states, errors = _saved(q, v, cu_seqlens, n, keep)
    state = None if state is None else state.contiguous()
    library.expect_writes(out, states, errors)
    at, strided = library.address, library.strided
    library.CALL["delta_forward"](
        library.DELTA.pack(
            *sizes,
            *strided(q), *strided(k), *strided(v), *strided(beta), *strided(g), 0, 0, 0, 0,
            *map(at, (cu_seqlens, state, out, final)), *((at(states), at(errors)) if keep else (0, 0)),
            *(0,) * 7,
        )
    )  # fmt: skip
    return out, final, states, errors


def _backward(q, k, v, beta, g, state, cu_seqlens, states, errors, dout, dfinal, scale, n, l2norm):
    """Gradients of q, k, v, beta, g (empty without a gate) and of the first state (empty without one)."""
    q, k, v, dout = _rows(q), _rows(k), _rows(v), _rows(dout)
    gradients = _gradients(q, k, v, g, state)
    dq, dk, dv, dbeta, dg, dstate = gradients
    dfinal = None if dfinal is None else dfinal.contiguous()
    library.expect_writes(dq, dk, dv)
    at, strided = library.address, library.strided
    library.CALL["delta_backward"](
        library.DELTA.pack(
            *_sizes(q, v, cu_seqlens, scale, n, l2norm),
            *strided(q), *strided(k), *strided(v), *strided(beta), *strided(g), *strided(dout),
            *map(at, (cu_seqlens, state, None, None, states, errors, dfinal, dq, dk, dv, dbeta, dg, dstate)),
        )
    )  # fmt: skip
    return gradients


def _gradients(q, k, v, g, state) -> list[Tensor]:
    """Room for them, contiguous."""
    dg = q.new_empty(0 if g is None else g.shape)
    dstate = q.new_empty(0 if state is None else state.shape)
    return [*(q.new_empty(x.shape) for x in (q, k, v)), q.new_empty(k.shape[:3]), dg, dstate]


class _Native(torch.autograd.Function):
    """Autograd around the two ops. `torch.library.register_autograd` takes three times as long per call."""

    @staticmethod
    def forward(ctx, q, k, v, beta, g, state, cu_seqlens, scale, n, l2norm, keep):
        forward = without_dispatcher(q, _forward, delta_forward)
        out, final, states, errors = forward(q, k, v, beta, g, state, cu_seqlens, scale, n, l2norm, keep)
        ctx.save_for_backward(q, k, v, beta, g, state, cu_seqlens, states, errors)
        ctx.options = scale, n, l2norm
        ctx.set_materialize_grads(False)
        return out, final

    @staticmethod
    @first_derivative_only
    def backward(ctx, dout, dfinal):
        q, k, v, beta, g, state, *saved = ctx.saved_tensors
        if dout is None:
            dout = q.new_zeros(*q.shape[:3], v.shape[3])
        backward = without_dispatcher(q, _backward, delta_backward)
        dq, dk, dv, dbeta, dg, dstate = backward(q, k, v, beta, g, state, *saved, dout, dfinal, *ctx.options)
        gate, first = None if g is None else dg, None if state is None else dstate
        return dq, dk, dv, dbeta, gate, first, None, None, None, None, None


def _forward_fake(q, k, v, beta, g, state, cu_seqlens, scale, n, l2norm, keep):
    (B, _, H, K), V = q.shape, v.shape[-1]
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    final = q.new_empty(sequences, H, K, V)
    return q.new_empty(*q.shape[:3], V), final, *_saved(q, v, cu_seqlens, n, keep)


def _backward_fake(q, k, v, beta, g, state, cu_seqlens, states, errors, dout, dfinal, scale, n, l2norm):
    return _gradients(q, k, v, g, state)


INPUTS = "Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? g, Tensor? state, Tensor? cu_seqlens"
OPTIONS = "float scale, int n, bool l2norm"
register_op(
    f"native_delta_forward({INPUTS}, {OPTIONS}, bool keep) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    devices=("CPU",),
)
register_op(
    f"native_delta_backward({INPUTS}, Tensor states, Tensor errors, Tensor dout, Tensor? dfinal, {OPTIONS}) "
    "-> Tensor[]",
    _backward,
    _backward_fake,
    devices=("CPU",),
)
delta_forward = torch.ops.statetrack.native_delta_forward.default
delta_backward = torch.ops.statetrack.native_delta_backward.default

"""The native CPU backend of the delta rule: `torch.library` ops around the C++ kernels of ops/native."""

import torch
from torch import Tensor

from statetrack.ops.autograd import first_derivative_only, needs_gradient
from statetrack.ops.custom_ops import register_op, without_dispatcher
from statetrack.ops.delta_rule.options import DeltaRuleOptions
from statetrack.ops.delta_rule.reference import beta_values
from statetrack.ops.native import library


def delta_rule_native(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    options: DeltaRuleOptions,
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `delta_rule_reference`, in float32 whatever the inputs."""
    beta = beta_values(beta, options.beta_from_logits, options.hard_beta)
    inputs = [
        x if x is None or x.dtype == torch.float32 else x.float() for x in (q, k, v, beta, g, initial_state)
    ]
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.long().contiguous()
    save = needs_gradient(inputs)
    return _Native.apply(*inputs, cu_seqlens, options.scale, options.householders, options.l2norm, save)


def refuses(q: Tensor, v: Tensor) -> str | None:
    """Why the kernels cannot take these inputs, or None."""
    if q.device.type != "cpu":
        return f"the inputs are on {q.device}, not on a CPU"
    if q.dtype == torch.float64:
        return "float64 is not offered there"
    if q.numel() == 0 or v.numel() == 0:
        return "the input is empty"
    return library.ABSENT


def chunk_length(K: int, householders: int) -> int:
    """Tokens per chunk; sequences are cut evenly, into chunks of two thirds to 3/2 of this."""
    return max(1, (32 if K <= 64 else 64) // householders)


def _new_saved(q, v, cu_seqlens: Tensor | None, householders: int, save: bool) -> tuple[Tensor, Tensor]:
    """Buffers for what the backward reads: the state entering every chunk, widths rounded up to 16, and E."""
    (B, T, H, K), V = q.shape, v.shape[-1]
    if not save:
        return q.new_empty(0), q.new_empty(0)
    chunk = chunk_length(K, householders)
    if cu_seqlens is None:
        chunks = B * max(1, (T + chunk // 2) // chunk)
    else:  # an upper bound that does not read the offsets
        chunks = T // chunk + cu_seqlens.shape[0]
    return q.new_empty(chunks, H, -(-K // 16) * 16, -(-V // 16) * 16), q.new_empty(v.shape)


def _new_gradients(q, k, v, g, initial_state) -> list[Tensor]:
    """Contiguous buffers for the gradients; empty ones for absent inputs."""
    dg = q.new_empty(0 if g is None else g.shape)
    dinitial_state = q.new_empty(0 if initial_state is None else initial_state.shape)
    return [*(q.new_empty(x.shape) for x in (q, k, v)), q.new_empty(k.shape[:3]), dg, dinitial_state]


def _contiguous_rows(x: Tensor) -> Tensor:
    """x with its width contiguous, as the kernels read it."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _sizes(q, v, cu_seqlens: Tensor | None, scale: float, householders: int, l2norm: bool) -> tuple:
    """The first fields of `Delta` in arguments.h."""
    (B, T, H, K), V = q.shape, v.shape[-1]
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    threads = library.threads(8 * B * T * householders * H * (K + 16) * (V + 16))
    return sequences, T, H, K, V, householders, chunk_length(K, householders), l2norm, threads, scale


def _forward(q, k, v, beta, g, initial_state, cu_seqlens, scale, householders, l2norm, save):
    """Outputs, last states, and what the backward needs: states entering chunks, and E."""
    q, k, v = _contiguous_rows(q), _contiguous_rows(k), _contiguous_rows(v)
    sizes = _sizes(q, v, cu_seqlens, scale, householders, l2norm)
    out = q.new_empty(*q.shape[:3], v.shape[3])
    final_state = q.new_empty(sizes[0], *sizes[2:5])
    states, E = _new_saved(q, v, cu_seqlens, householders, save)
    initial_state = None if initial_state is None else initial_state.contiguous()
    library.expect_writes(out, states, E)
    at, strided = library.address, library.strided
    library.CALL["delta_forward"](
        library.DELTA.pack(
            *sizes,
            *strided(q), *strided(k), *strided(v), *strided(beta), *strided(g), 0, 0, 0, 0,
            *map(at, (cu_seqlens, initial_state, out, final_state)), *((at(states), at(E)) if save else (0,
            0)), *(0,) * 7,
        )
    )  # fmt: skip
    return out, final_state, states, E


def _backward(
    q, k, v, beta, g, initial_state, cu_seqlens, states, E, dout, dfinal_state, scale, householders, l2norm
):
    """Gradients of q, k, v, beta, g and the initial state, the last two empty for absent inputs."""
    q, k, v, dout = _contiguous_rows(q), _contiguous_rows(k), _contiguous_rows(v), _contiguous_rows(dout)
    gradients = _new_gradients(q, k, v, g, initial_state)
    dq, dk, dv, *_ = gradients
    dfinal_state = None if dfinal_state is None else dfinal_state.contiguous()
    library.expect_writes(dq, dk, dv)
    at, strided = library.address, library.strided
    library.CALL["delta_backward"](
        library.DELTA.pack(
            *_sizes(q, v, cu_seqlens, scale, householders, l2norm),
            *strided(q), *strided(k), *strided(v), *strided(beta), *strided(g), *strided(dout),
            *map(at, (cu_seqlens, initial_state, None, None, states, E, dfinal_state, *gradients)),
        )
    )  # fmt: skip
    return gradients


class _Native(torch.autograd.Function):
    """Autograd around the two ops. `torch.library.register_autograd` takes three times as long per call."""

    @staticmethod
    def forward(ctx, q, k, v, beta, g, initial_state, cu_seqlens, scale, householders, l2norm, save):
        forward = without_dispatcher(q, _forward, delta_forward)
        out, final_state, states, E = forward(
            q, k, v, beta, g, initial_state, cu_seqlens, scale, householders, l2norm, save
        )
        ctx.save_for_backward(q, k, v, beta, g, initial_state, cu_seqlens, states, E)
        ctx.scalars = scale, householders, l2norm
        ctx.set_materialize_grads(False)
        return out, final_state

    @staticmethod
    @first_derivative_only
    def backward(ctx, dout, dfinal_state):
        saved = ctx.saved_tensors  # read once: a checkpointed block computes them again to give them
        q, _, v, _, g, initial_state, *_ = saved
        if dout is None:
            dout = q.new_zeros(*q.shape[:3], v.shape[3])
        backward = without_dispatcher(q, _backward, delta_backward)
        dq, dk, dv, dbeta, dg, dinitial_state = backward(*saved, dout, dfinal_state, *ctx.scalars)
        dg = None if g is None else dg
        dinitial_state = None if initial_state is None else dinitial_state
        return dq, dk, dv, dbeta, dg, dinitial_state, None, None, None, None, None


def _forward_fake(q, k, v, beta, g, initial_state, cu_seqlens, scale, householders, l2norm, save):
    (B, _, H, K), V = q.shape, v.shape[-1]
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    final_state = q.new_empty(sequences, H, K, V)
    return q.new_empty(*q.shape[:3], V), final_state, *_new_saved(q, v, cu_seqlens, householders, save)


def _backward_fake(q, k, v, beta, g, initial_state, *_) -> list[Tensor]:
    return _new_gradients(q, k, v, g, initial_state)


INPUTS = "Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? g, Tensor? initial_state, Tensor? cu_seqlens"
SCALARS = "float scale, int householders, bool l2norm"
register_op(
    f"native_delta_forward({INPUTS}, {SCALARS}, bool save) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    devices=("CPU",),
)
register_op(
    f"native_delta_backward({INPUTS}, Tensor states, Tensor E, Tensor dout, Tensor? dfinal_state, {SCALARS}) "
    "-> Tensor[]",
    _backward,
    _backward_fake,
    devices=("CPU",),
)
delta_forward = torch.ops.statetrack.native_delta_forward.default
delta_backward = torch.ops.statetrack.native_delta_backward.default

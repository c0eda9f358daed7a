"""The native CPU backend of the delta rule: `torch.library` ops around the C++ kernels of ops/native.

There are two sets of kernels: for one gate per head, which comes as its logarithm, or none (delta_*.h), and
for one gate per key channel, which comes as a number (channel_*.h). The shape of `gate` tells which.
"""

import torch
from torch import Tensor

from statetrack.ops.autograd import first_derivative_only, needs_gradient
from statetrack.ops.custom_ops import register_op, without_dispatcher
from statetrack.ops.delta_rule.options import DeltaRuleOptions
from statetrack.ops.delta_rule.reference import beta_values
from statetrack.ops.native import library

# With a gate per channel: steps per chunk, MAX_PAIRED in pairs.h, and chunks per saved state, GROUP in
# channel_chunk.h.
MAX_PAIRED, GROUP = 16, 4


def delta_rule_native(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gate: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    options: DeltaRuleOptions,
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `delta_rule_reference`, in float32 whatever the inputs.

    `gate` is g (B, T, H), or the gates themselves, (B, T, H, K).
    """
    beta = beta_values(beta, options.beta_from_logits, options.hard_beta)
    inputs = [
        x if x is None or x.dtype == torch.float32 else x.float()
        for x in (q, k, v, beta, gate, initial_state)
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


def refuses_channels(q: Tensor, v: Tensor, householders: int) -> str | None:
    """Why the kernels for a gate per key channel cannot take these inputs, or None."""
    if householders > MAX_PAIRED:
        return f"gates per key channel with more than {MAX_PAIRED} Householder factors are not offered there"
    reason = refuses(q, v)
    if reason is None and "channel_forward" not in library.CALL:
        return "the library is from before it had gates per key channel: reinstall the package"
    return reason


def _per_channel(gate: Tensor | None) -> bool:
    return gate is not None and gate.ndim == 4


def chunk_length(K: int, householders: int, per_channel: bool = False) -> int:
    """Tokens per chunk. With a gate per head, sequences are cut evenly, into 2/3 to 3/2 of this."""
    if per_channel:
        return max(1, MAX_PAIRED // householders)
    return max(1, (32 if K <= 64 else 64) // householders)


def _new_saved(q, v, gate, cu_seqlens: Tensor | None, householders: int, save: bool) -> tuple[Tensor, Tensor]:
    """Buffers for what the backward reads: states entering chunks, widths rounded up to 16, and E.

    With a gate per channel they enter every GROUP-th chunk.
    """
    (B, T, H, K), V = q.shape, v.shape[-1]
    if not save:
        return q.new_empty(0), q.new_empty(0)
    chunk = chunk_length(K, householders, _per_channel(gate))
    between = chunk * GROUP if _per_channel(gate) else chunk
    if cu_seqlens is not None:  # an upper bound that does not read the offsets
        states = T // between + cu_seqlens.shape[0]
    elif _per_channel(gate):
        states = B * -(-T // between)
    else:
        states = B * max(1, (T + chunk // 2) // chunk)
    return q.new_empty(states, H, -(-K // 16) * 16, -(-V // 16) * 16), q.new_empty(v.shape)


def _new_gradients(q, k, v, gate, initial_state) -> list[Tensor]:
    """Contiguous buffers for the gradients; empty ones for absent inputs."""
    dgate = q.new_empty(0 if gate is None else gate.shape)
    dinitial_state = q.new_empty(0 if initial_state is None else initial_state.shape)
    return [*(q.new_empty(x.shape) for x in (q, k, v)), q.new_empty(k.shape[:3]), dgate, dinitial_state]


def _contiguous_rows(x: Tensor) -> Tensor:
    """x with its width contiguous, as the kernels read it."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _rows(q, k, v, gate) -> tuple:
    """What the kernels read by rows; a gate per head has none."""
    q, k, v = _contiguous_rows(q), _contiguous_rows(k), _contiguous_rows(v)
    return q, k, v, _contiguous_rows(gate) if _per_channel(gate) else gate


def _sizes(q, v, gate, cu_seqlens: Tensor | None, scale: float, householders: int, l2norm: bool) -> tuple:
    """The first fields of `Delta` in arguments.h."""
    (B, T, H, K), V = q.shape, v.shape[-1]
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    threads = library.threads(8 * B * T * householders * H * (K + 16) * (V + 16))
    chunk = chunk_length(K, householders, _per_channel(gate))
    return sequences, T, H, K, V, householders, chunk, l2norm, threads, scale


def _forward(q, k, v, beta, gate, initial_state, cu_seqlens, scale, householders, l2norm, save):
    """Outputs, last states, and what the backward needs: states entering chunks, and E."""
    q, k, v, gate = _rows(q, k, v, gate)
    sizes = _sizes(q, v, gate, cu_seqlens, scale, householders, l2norm)
    out = q.new_empty(*q.shape[:3], v.shape[3])
    final_state = q.new_empty(sizes[0], *sizes[2:5])
    states, E = _new_saved(q, v, gate, cu_seqlens, householders, save)
    initial_state = None if initial_state is None else initial_state.contiguous()
    library.expect_writes(out, states, E)
    at, strided = library.address, library.strided
    library.CALL["channel_forward" if _per_channel(gate) else "delta_forward"](
        library.DELTA.pack(
            *sizes,
            *strided(q), *strided(k), *strided(v), *strided(beta), *strided(gate), 0, 0, 0, 0,
            *map(at, (cu_seqlens, initial_state, out, final_state)), *((at(states), at(E)) if save else (0,
            0)), *(0,) * 7,
        )
    )  # fmt: skip
    return out, final_state, states, E


def _backward(
    q, k, v, beta, gate, initial_state, cu_seqlens, states, E, dout, dfinal_state, scale, householders, l2norm
):
    """Gradients of q, k, v, beta, gate and the initial state, the last two empty for absent inputs."""
    (q, k, v, gate), dout = _rows(q, k, v, gate), _contiguous_rows(dout)
    gradients = _new_gradients(q, k, v, gate, initial_state)
    dq, dk, dv, *_ = gradients
    dfinal_state = None if dfinal_state is None else dfinal_state.contiguous()
    library.expect_writes(dq, dk, dv)
    at, strided = library.address, library.strided
    library.CALL["channel_backward" if _per_channel(gate) else "delta_backward"](
        library.DELTA.pack(
            *_sizes(q, v, gate, cu_seqlens, scale, householders, l2norm),
            *strided(q), *strided(k), *strided(v), *strided(beta), *strided(gate), *strided(dout),
            *map(at, (cu_seqlens, initial_state, None, None, states, E, dfinal_state, *gradients)),
        )
    )  # fmt: skip
    return gradients


class _Native(torch.autograd.Function):
    """Autograd around the two ops. `torch.library.register_autograd` takes three times as long per call."""

    @staticmethod
    def forward(ctx, q, k, v, beta, gate, initial_state, cu_seqlens, scale, householders, l2norm, save):
        forward = without_dispatcher(q, _forward, delta_forward)
        out, final_state, states, E = forward(
            q, k, v, beta, gate, initial_state, cu_seqlens, scale, householders, l2norm, save
        )
        ctx.save_for_backward(q, k, v, beta, gate, initial_state, cu_seqlens, states, E)
        ctx.scalars = scale, householders, l2norm
        ctx.set_materialize_grads(False)
        return out, final_state

    @staticmethod
    @first_derivative_only
    def backward(ctx, dout, dfinal_state):
        saved = ctx.saved_tensors  # read once: a checkpointed block computes them again to give them
        q, _, v, _, gate, initial_state, *_ = saved
        if dout is None:
            dout = q.new_zeros(*q.shape[:3], v.shape[3])
        backward = without_dispatcher(q, _backward, delta_backward)
        dq, dk, dv, dbeta, dgate, dinitial_state = backward(*saved, dout, dfinal_state, *ctx.scalars)
        dgate = None if gate is None else dgate
        dinitial_state = None if initial_state is None else dinitial_state
        return dq, dk, dv, dbeta, dgate, dinitial_state, None, None, None, None, None


def _forward_fake(q, k, v, beta, gate, initial_state, cu_seqlens, scale, householders, l2norm, save):
    (B, _, H, K), V = q.shape, v.shape[-1]
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    final_state = q.new_empty(sequences, H, K, V)
    return q.new_empty(*q.shape[:3], V), final_state, *_new_saved(q, v, gate, cu_seqlens, householders, save)


def _backward_fake(q, k, v, beta, gate, initial_state, *_) -> list[Tensor]:
    return _new_gradients(q, k, v, gate, initial_state)


INPUTS = "Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? gate, Tensor? initial_state, Tensor? cu_seqlens"
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

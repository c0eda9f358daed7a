"""The native CPU backend of gated linear attention: `torch.library` ops around the kernels of ops/native."""

import torch
from torch import Tensor

from statetrack.ops.autograd import first_derivative_only, needs_gradient
from statetrack.ops.custom_ops import register_op, without_dispatcher
from statetrack.ops.gated_linear_attention.rotation import both_of_pair, fold_angles
from statetrack.ops.native import library

# Tokens per chunk. With a gate per channel every pair of them costs a product: at most MAX_PAIRED in
# gated_chunk.h. The times of 16 to 64 differ by less than a tenth otherwise.
PER_CHANNEL, PER_HEAD = 16, 32
SAVED = 64  # tokens between saved states; the backward computes those between again


def gated_linear_attention_native(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    angle: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `gated_linear_attention_reference`, in float32 whatever the inputs."""
    q, k, v, a = (x if x.dtype == torch.float32 else x.float() for x in (q, k, v, a))
    state = None if initial_state is None else initial_state.float()
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.long().contiguous()
    unfold = None
    if angle is not None:
        q, k, unfold = fold_angles(q, k, angle, cu_seqlens)
        a = a if a.ndim == 3 else both_of_pair(a)
    save = needs_gradient((q, k, v, a, state))
    o, state = _Native.apply(q, k, v, a, state, cu_seqlens, scale, save)
    return o, state if unfold is None else unfold(state)


def refuses(q: Tensor, v: Tensor) -> str | None:
    """Why the kernels cannot take these inputs, or None."""
    if q.device.type != "cpu":
        return f"the inputs are on {q.device}, not on a CPU"
    if q.dtype == torch.float64:
        return "float64 is not offered there"
    if q.numel() == 0 or v.numel() == 0:
        return "the input is empty"
    return library.ABSENT


def _new_states(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, save: bool) -> Tensor:
    """A buffer for what the backward reads: the state entering every group of chunks, widths padded to 16."""
    (B, T, H, K), V = q.shape, v.shape[-1]
    if not save:
        return q.new_empty(0)
    # for packed sequences an upper bound that does not read the offsets
    groups = B * -(-T // SAVED) if cu_seqlens is None else T // SAVED + cu_seqlens.shape[0]
    return q.new_empty(groups, H, -(-K // 16) * 16, -(-V // 16) * 16)


def _new_gradients(q, k, v, a, initial_state) -> list[Tensor]:
    """Contiguous buffers for the gradients; an empty one for an absent state."""
    dinitial_state = q.new_empty(0 if initial_state is None else initial_state.shape)
    return [*(q.new_empty(x.shape) for x in (q, k, v, a)), dinitial_state]


def _contiguous_rows(x: Tensor) -> Tensor:
    """x with its width contiguous, as the kernels read it."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _sizes(q, v, a, cu_seqlens: Tensor | None, scale: float) -> tuple:
    """The first fields of `Gated` in arguments.h."""
    (B, T, H, K), V = q.shape, v.shape[-1]
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    threads = library.threads(8 * B * T * H * (K + 16) * (V + 16))
    chunk = PER_CHANNEL if a.ndim == 4 else PER_HEAD
    return sequences, T, H, K, V, a.ndim == 4, chunk, SAVED // chunk, threads, scale


def _rows(q, k, v, a) -> list[Tensor]:
    """What the kernels read by rows; a gate per head has none."""
    return [*map(_contiguous_rows, (q, k, v)), _contiguous_rows(a) if a.ndim == 4 else a]


def _forward(q, k, v, a, initial_state, cu_seqlens, scale, save):
    """Outputs, last states, and the saved states that the backward needs."""
    q, k, v, a = _rows(q, k, v, a)
    sizes = _sizes(q, v, a, cu_seqlens, scale)
    out, final_state = q.new_empty(v.shape), q.new_empty(sizes[0], *sizes[2:5])
    states = _new_states(q, v, cu_seqlens, save)
    initial_state = None if initial_state is None else initial_state.contiguous()
    library.expect_writes(out, states)
    at, strided = library.address, library.strided
    library.CALL["gated_forward"](
        library.GATED.pack(
            *sizes,
            *strided(q), *strided(k), *strided(v), *strided(a), 0, 0, 0, 0,
            *map(at, (cu_seqlens, initial_state, out, final_state)), at(states) if save else 0, *(0,) * 6,
        )
    )  # fmt: skip
    return out, final_state, states


def _backward(q, k, v, a, initial_state, cu_seqlens, states, dout, dfinal_state, scale):
    """Gradients of q, k, v, a and the initial state, the last one empty if there was none."""
    (q, k, v, a), dout = _rows(q, k, v, a), _contiguous_rows(dout)
    gradients = _new_gradients(q, k, v, a, initial_state)
    dfinal_state = None if dfinal_state is None else dfinal_state.contiguous()
    library.expect_writes(*gradients[:4])
    at, strided = library.address, library.strided
    library.CALL["gated_backward"](
        library.GATED.pack(
            *_sizes(q, v, a, cu_seqlens, scale),
            *strided(q), *strided(k), *strided(v), *strided(a), *strided(dout),
            *map(at, (cu_seqlens, initial_state, None, None, states, dfinal_state, *gradients)),
        )
    )  # fmt: skip
    return gradients


class _Native(torch.autograd.Function):
    """Autograd around the two ops. `torch.library.register_autograd` takes three times as long per call."""

    @staticmethod
    def forward(ctx, q, k, v, a, initial_state, cu_seqlens, scale, save):
        forward = without_dispatcher(q, _forward, gated_forward)
        out, final_state, states = forward(q, k, v, a, initial_state, cu_seqlens, scale, save)
        ctx.save_for_backward(q, k, v, a, initial_state, cu_seqlens, states)
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        return out, final_state

    @staticmethod
    @first_derivative_only
    def backward(ctx, dout, dfinal_state):
        saved = ctx.saved_tensors  # read once: a checkpointed block computes them again to give them
        q, _, v, _, initial_state, *_ = saved
        dout = torch.zeros_like(v) if dout is None else dout
        backward = without_dispatcher(q, _backward, gated_backward)
        dq, dk, dv, da, dinitial_state = backward(*saved, dout, dfinal_state, ctx.scale)
        return dq, dk, dv, da, None if initial_state is None else dinitial_state, None, None, None


def _forward_fake(q, k, v, a, initial_state, cu_seqlens, scale, save):
    (B, _, H, K), V = q.shape, v.shape[-1]
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    states = _new_states(q, v, cu_seqlens, save)
    return q.new_empty(v.shape), q.new_empty(sequences, H, K, V), states


def _backward_fake(q, k, v, a, initial_state, *_) -> list[Tensor]:
    return _new_gradients(q, k, v, a, initial_state)


INPUTS = "Tensor q, Tensor k, Tensor v, Tensor a, Tensor? initial_state, Tensor? cu_seqlens"
register_op(
    f"native_gated_forward({INPUTS}, float scale, bool save) -> (Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    devices=("CPU",),
)
register_op(
    f"native_gated_backward({INPUTS}, Tensor states, Tensor dout, Tensor? dfinal_state, float scale) "
    "-> Tensor[]",
    _backward,
    _backward_fake,
    devices=("CPU",),
)
gated_forward = torch.ops.statetrack.native_gated_forward.default
gated_backward = torch.ops.statetrack.native_gated_backward.default

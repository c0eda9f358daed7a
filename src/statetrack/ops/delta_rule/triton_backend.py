"""The Triton backend of the delta rule: `torch.library` ops around two kernels, for heads up to 64 wide."""

from typing import Any

import torch
from torch import Tensor

from statetrack.ops.delta_rule.reference import floor_decay
from statetrack.ops.delta_rule.triton_kernels import backward_kernel, forward_kernel

WIDEST = 64  # the widest head whose state and gradients fit the registers of one program
PRECISION = "tf32x3"  # three tf32 products: float32 accuracy on tensor cores
C = 16  # rows of a chunk: with 32 the backward no longer fits the registers (measured 2.3 times slower)


def delta_rule_triton(
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
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `delta_rule_reference`; outputs come in the dtype of v."""
    if q.numel() == 0 or v.numel() == 0:
        from statetrack.ops.delta_rule.chunked import delta_rule_chunked

        return delta_rule_chunked(
            q,
            k,
            v,
            beta,
            g,
            state,
            scale=scale,
            householders=householders,
            l2norm=l2norm,
            cu_seqlens=cu_seqlens,
        )
    g = None if g is None else floor_decay(g.float())
    o, final, _ = delta_rule_forward(q, k, v, beta, g, state, cu_seqlens, scale, householders, l2norm)
    return o, final


def _geometry(q: Tensor, cu_seqlens: Tensor | None, n: int):
    """Sequences, stored states, and the index of every packed sequence's first one."""
    B, T = q.shape[:2]
    if cu_seqlens is None:
        return B, B * -(-T * n // C), q.new_empty(0, dtype=torch.int32)
    sequences = cu_seqlens.numel() - 1
    chunks = (cu_seqlens.diff() * n + C - 1) // C
    # an upper bound that needs no look at the device: each sequence wastes less than one chunk
    return sequences, -(-T * n // C) + sequences, (chunks.cumsum(0) - chunks).int()


def _block(width: int) -> int:
    """The power of two that holds a width; tensor cores take no less than 16."""
    return max(16, 1 << (width - 1).bit_length())


def _constants(
    q: Tensor, v: Tensor, g: Tensor | None, cu_seqlens: Tensor | None, n: int, l2norm: bool
) -> dict[str, Any]:
    K, V = q.shape[-1], v.shape[-1]
    return {
        "C": C,
        "K": K,
        "V": V,
        "BK": _block(K),
        "BV": _block(V),
        "n": n,
        "GATED": g is not None,
        "PACKED": cu_seqlens is not None,
        "L2NORM": l2norm,
        "PRECISION": PRECISION,
    }


def _launch(programs: int, constants: dict) -> dict[str, Any]:
    """One warp per program where programs fill the GPU and the state is small, four elsewhere (measured)."""
    small = max(constants["BK"], constants["BV"]) <= 32
    return {"num_warps": 1 if programs >= 1024 and small else 4}


@torch.library.custom_op("statetrack::delta_rule_forward", mutates_args=())
def delta_rule_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    n: int,
    l2norm: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, last states, and the state entering every chunk."""
    (B, T, H, K), V = q.shape, v.shape[-1]
    sequences, stored, chunk_of = _geometry(q, cu_seqlens, n)
    q, k, v, beta = (x.contiguous() for x in (q, k, v, beta))
    g = g.contiguous() if g is not None else beta
    out = v.new_empty(B, T, H, V)
    final = q.new_empty(sequences, H, K, V, dtype=torch.float32)
    states = q.new_empty(stored, H, K, V, dtype=torch.float32)
    constants = _constants(q, v, None if g is beta else g, cu_seqlens, n, l2norm)
    constants |= {"STATE": state is not None, "SAVE": True}
    forward_kernel[(sequences * H,)](
        q, k, v, beta, g, final if state is None else state.contiguous(), out, final, states,
        beta if cu_seqlens is None else cu_seqlens, chunk_of, T, H, scale,
        **constants, **_launch(sequences * H, constants),
    )  # fmt: skip
    return out, final, states


@delta_rule_forward.register_fake
def _(q, k, v, beta, g, state, cu_seqlens, scale, n, l2norm):
    (B, T, H, K), V = q.shape, v.shape[-1]
    sequences, stored, _ = _geometry(q, cu_seqlens, n)
    states = q.new_empty(stored, H, K, V, dtype=torch.float32)
    return v.new_empty(B, T, H, V), q.new_empty(sequences, H, K, V, dtype=torch.float32), states


@torch.library.custom_op("statetrack::delta_rule_backward", mutates_args=())
def delta_rule_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    states: Tensor,
    cu_seqlens: Tensor | None,
    dout: Tensor,
    dfinal: Tensor | None,
    scale: float,
    n: int,
    l2norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, beta, g (empty without a gate) and of the first state."""
    (_, T, H, K), V = q.shape, v.shape[-1]
    sequences, _, chunk_of = _geometry(q, cu_seqlens, n)
    q, k, v, beta, dout = (x.contiguous() for x in (q, k, v, beta, dout))
    dq, dk, dv, dbeta = (torch.empty_like(x) for x in (q, k, v, beta))
    gate = beta if g is None else g.contiguous()
    dg = q.new_empty(0) if g is None else torch.empty_like(gate)
    dstate = q.new_empty(sequences, H, K, V, dtype=torch.float32)
    constants = _constants(q, v, g, cu_seqlens, n, l2norm)
    constants["FINAL"] = dfinal is not None
    backward_kernel[(sequences * H,)](
        q, k, v, beta, gate, states, dout, dstate if dfinal is None else dfinal.contiguous(),
        dq, dk, dv, dbeta, dbeta if g is None else dg, dstate,
        beta if cu_seqlens is None else cu_seqlens, chunk_of, T, H, scale,
        **constants, **_launch(sequences * H, constants),
    )  # fmt: skip
    return dq, dk, dv, dbeta, dg, dstate


@delta_rule_backward.register_fake
def _(q, k, v, beta, g, states, cu_seqlens, dout, dfinal, scale, n, l2norm):
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    dstate = q.new_empty(sequences, *states.shape[1:], dtype=torch.float32)
    dg = q.new_empty(0) if g is None else torch.empty_like(g)
    return *(torch.empty_like(x) for x in (q, k, v, beta)), dg, dstate


def _setup_context(ctx, inputs, output):
    q, k, v, beta, g, state, cu_seqlens, *options = inputs
    ctx.save_for_backward(q, k, v, beta, g, cu_seqlens, output[2])
    ctx.options, ctx.has_state = options, state is not None
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dfinal, dstates):
    q, k, v, beta, g, cu_seqlens, states = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(v[:, : q.shape[1]])
    dq, dk, dv, dbeta, dg, dstate = delta_rule_backward(
        q, k, v, beta, g, states, cu_seqlens, dout, dfinal, *ctx.options
    )
    return (
        dq,
        dk,
        dv,
        dbeta,
        None if g is None else dg,
        dstate if ctx.has_state else None,
        None,
        None,
        None,
        None,
    )


delta_rule_forward.register_autograd(_backward, setup_context=_setup_context)

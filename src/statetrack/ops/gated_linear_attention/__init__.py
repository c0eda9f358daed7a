"""Gated linear attention: diagonal transitions with a sign and a rotation, eigenvalues on the whole disc."""

import torch
from torch import Tensor

from statetrack.errors import UserError
from statetrack.ops import checks
from statetrack.ops.autograd import run_backend
from statetrack.ops.backends import load, pick_backend

# A backend is a function with the arguments of `gated_linear_attention_reference`.
BACKENDS = {
    "reference": "statetrack.ops.gated_linear_attention.reference:gated_linear_attention_reference",
    "chunked": "statetrack.ops.gated_linear_attention.chunked:gated_linear_attention_chunked",
    "native": "statetrack.ops.gated_linear_attention.native:gated_linear_attention_native",
    "triton": "statetrack.ops.gated_linear_attention.triton.backend:gated_linear_attention_triton",
}
# Functions of q and v that give the reason why a backend cannot take them, or None.
REFUSALS = {
    "native": "statetrack.ops.gated_linear_attention.native:refuses",
    "triton": "statetrack.ops.gated_linear_attention.triton.plan:refuses",
}
OP = "gated_linear_attention"
ORDER = "Time comes before heads in this library."


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    a: Tensor | None = None,
    sign: Tensor | None = None,
    angle: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Apply a gated linear recurrence along time, with gates of either sign and rotations of the keys.

        S_t = diag(a_t) R(angle_t) S_{t-1} + k_t v_t^T        o_t = scale S_t^T q_t

    Shapes, with time before heads: q, k (B, T, H, K); v (B, T, H, V); initial_state (N, H, K, V). The gates
    are (B, T, H, K), one per key channel (GLA, HGRN2), or (B, T, H), one per head (Mamba-2), which is never
    spread over the channels. N is B, or the number of packed sequences. Returns the outputs (B, T, H, V) in
    the dtype of v, and the last states (N, H, K, V) in float32 (float64 if q is), or None unless
    `output_final_state`.

    - The gates are given in one of two ways. `a`: the number itself, in [-1, 1]; its gradient is exact
      everywhere, at a = 0 and across it, so pass this for gates like 2 s - 1. `g`: the logarithm of the size,
      at most 0, -inf allowed, with `sign` of the same shape holding -1, 0 or 1 (None: all 1); then
      a = sign exp(g), and the gradient of g vanishes where a does. Gates beyond 1 in size, with which the
      state grows, are computed as the equation says.
    - `angle` (B, T, H, K/2): channel i turns with channel i + K/2, by this many radians. Gates per channel
      are then (B, T, H, K/2), one for both channels of a pair.
    - `scale` multiplies the outputs: any finite number, K^-1/2 by default.
    - `cu_seqlens` (N + 1 offsets, B = 1) packs N sequences into one row. `max_seqlen`, at least the longest,
      is checked only: no backend needs it.
    - `backend`: "auto", "reference", "chunked", "native" (CPU) or "triton" (GPU).

    The state carries no cumulated sign or angle: it is S itself, and a later call takes it as it is.
    Arithmetic is float32 or better. Values are checked inside `statetrack.checked()` only: it refuses gates
    beyond 1 in size, and NaN or infinity. Outside it, NaN or infinity at step t leaves earlier outputs alone
    on a CPU; on a GPU, other outputs of the same chunk may become NaN with it, and behind a bad angle those
    of later packed sequences. Derivation: docs/internals/gates.md.

    >>> q, k, v = torch.randn(3, 2, 16, 4, 32).unbind()              # B, T, H, K = 2, 16, 4, 32
    >>> a = 2 * torch.rand(2, 16, 4, 32) - 1                         # eigenvalues in [-1, 1]
    >>> o, S = gated_linear_attention(q, k, v, a=a, output_final_state=True)
    >>> o.shape, S.shape
    (torch.Size([2, 16, 4, 32]), torch.Size([2, 4, 32, 32]))
    """
    _check(q, k, v, g, a, sign, angle, initial_state, cu_seqlens)
    checks.check_scale(OP, scale)
    checks.check_offsets(OP, cu_seqlens, max_seqlen, q.shape[1])
    if checks.is_checked():
        _check_values(q, k, v, g, a, sign, angle, initial_state)
    refusals = {name: lambda target=target: load(target)(q, v) for name, target in REFUSALS.items()}
    run = pick_backend(OP, backend, q.device, BACKENDS, refusals)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    gates = (g, a, sign) if getattr(run, "separate_gates", False) else (_gate(g, a, sign),)
    o, state = run_backend(OP, run, q.device, q, k, v, *gates, angle, initial_state, cu_seqlens, scale)
    return o.to(v.dtype), state if output_final_state else None


def _gate(g: Tensor | None, a: Tensor | None, sign: Tensor | None) -> Tensor:
    """The gate as one number, in float32 at least."""
    given = g if a is None else a
    assert given is not None
    given = given.to(torch.promote_types(given.dtype, torch.float32))
    if a is not None:
        return given
    return given.exp() if sign is None else sign * given.exp()


def _check(q, k, v, g, a, sign, angle, initial_state, cu_seqlens) -> None:
    given = {"q": q, "k": k, "v": v, "g": g, "a": a, "sign": sign, "angle": angle}
    given["initial_state"] = initial_state
    checks.require_tensors(OP, q=q, k=k, v=v)
    checks.check_tensors(OP, **given)
    if (g is None) == (a is None):
        raise UserError(f"{OP}: expected either g, the logarithm of the gate, or a, the gate itself.")
    if sign is not None and g is None:
        raise UserError(f"{OP}: sign goes with g only; a has its own sign.")
    checks.check_heads(OP, q, v, ORDER)
    checks.check_floating(OP, q.device, **given)
    (B, T, H, K), V = q.shape, v.shape[-1]
    checks.check_shape(OP, "k", k, (B, T, H, K), "the shape of q", ORDER)
    checks.check_shape(OP, "v", v, (B, T, H, V), "(batch, time, heads, V)", ORDER)
    width = K
    if angle is not None:
        if K % 2:
            raise UserError(f"{OP}: angle turns pairs of channels, and K = {K} is odd.")
        width = K // 2
        checks.check_shape(OP, "angle", angle, (B, T, H, width), "(batch, time, heads, K / 2)", ORDER)
    for name, gate in (("g", g), ("a", a), ("sign", sign)):
        if gate is None or (name != "sign" and gate.ndim == 3):
            expected, meaning = (B, T, H), "(batch, time, heads)"
        elif name == "sign":
            expected, meaning = tuple(g.shape), "the shape of g"
        else:
            expected, meaning = (
                (B, T, H, width),
                f"(batch, time, heads, {'K / 2' if angle is not None else 'K'})",
            )
        if gate is not None:
            checks.check_shape(OP, name, gate, expected, meaning, ORDER)
    sequences = B if cu_seqlens is None else checks.check_packing(OP, cu_seqlens, B, q.device)
    if initial_state is not None:
        meaning = "(sequences, heads, K, V)"
        checks.check_shape(OP, "initial_state", initial_state, (sequences, H, K, V), meaning)


def _check_values(q, k, v, g, a, sign, angle, initial_state) -> None:
    checks.check_finite(OP, q=q, k=k, v=v, angle=angle, initial_state=initial_state)
    if a is not None:
        checks.check_range(OP, "a", a, -1.0, 1.0, "Use sigmoid for [0,1], 2 * sigmoid - 1 for [-1,1].")
    if g is not None:
        checks.check_range(OP, "g", g, -float("inf"), 0.0, "g is the logarithm of a size in [0, 1].")
    if sign is not None:
        checks.check_range(OP, "sign", sign, -1.0, 1.0, "Use -1, 0 or 1.")


__all__ = ["gated_linear_attention"]

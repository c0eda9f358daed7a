"""The delta rule with two different vectors (RWKV-7, Gated DeltaNet-2): products of transitions can grow."""

from torch import Tensor

from statetrack.ops import checks
from statetrack.ops.autograd import run_backend
from statetrack.ops.backends import pick_backend

BACKENDS = {
    "reference": "statetrack.ops.generalised_delta_rule.reference:generalised_delta_rule_reference",
}
OP = "generalised_delta_rule"
ORDER = "Time comes before heads in this library."


def generalised_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Apply a recurrence along time whose transition is diag(w) less a product of two vectors.

        S_t = (diag(w_t) - a_t b_t^T) S_{t-1} + k_t v_t^T        o_t = scale S_t^T q_t

    Warning: the state can grow without bound. With a = beta b and |b| = 1, the delta rule, the transition is
    symmetric and no step makes a state longer while beta is in [0, 2]. With unequal vectors the eigenvalues
    of every single transition can be in [0, 1], and products of transitions grow all the same: with RWKV-7's
    vectors a = r * x, b = x, |x| = 1, rates r in [0, 1] per channel and w = 1, two alternating steps grow
    sqrt(5) / 2 = 1.118 times a token, and 1.272 with rates in [0, 2]. Decays w below 1 can make up for it;
    nothing in the op does. Theorems of this library about norms and ranges do not hold for it.

    - RWKV-7 (Peng et al. 2025): w its decay, a = rate * kappa, b = kappa, |kappa| = 1.
    - Gated DeltaNet-2 (Hatamizadeh et al. 2026): w = exp(g), a = k, b = w * erase * k, and v * write for v.
    - `delta_rule`: w = 1, a = beta * k, b = k, and beta * k for k. It has fast backends; this op has none.

    Shapes, with time before heads: q, k, w, a, b (B, T, H, K); v (B, T, H, V); initial_state (N, H, K, V), N
    being B or, with `cu_seqlens` (N + 1 offsets, B = 1), the number of packed sequences. `scale` is K^-1/2 by
    default. Returns the outputs (B, T, H, V) in the dtype of v, and the last states (N, H, K, V) in float32
    (float64 if q is), or None unless `output_final_state`. `backend` is "auto" or "reference", a plain loop.

    >>> q, k, v, x = torch.randn(4, 2, 16, 4, 32).unbind()           # B, T, H, K = 2, 16, 4, 32
    >>> x, rate, w = torch.nn.functional.normalize(x, dim=-1), torch.rand_like(x), torch.ones_like(x)
    >>> o, S = generalised_delta_rule(q, k, v, w, rate * x, x, output_final_state=True)
    >>> o.shape, S.shape
    (torch.Size([2, 16, 4, 32]), torch.Size([2, 4, 32, 32]))
    """
    named = {"q": q, "k": k, "v": v, "w": w, "a": a, "b": b}
    _check(named, initial_state, cu_seqlens)
    checks.check_scale(OP, scale)
    checks.check_offsets(OP, cu_seqlens, max_seqlen, q.shape[1])
    if checks.is_checked():
        checks.check_finite(OP, q=q, k=k, v=v, w=w, a=a, b=b, initial_state=initial_state)
    run = pick_backend(OP, backend, q.device, BACKENDS)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    o, state = run_backend(OP, run, q.device, *named.values(), initial_state, cu_seqlens, scale)
    return o.to(v.dtype), state if output_final_state else None


def _check(named: dict[str, Tensor], initial_state: Tensor | None, cu_seqlens: Tensor | None) -> None:
    checks.require_tensors(OP, **named)
    checks.check_tensors(OP, initial_state=initial_state)
    q, v = named["q"], named["v"]
    checks.check_heads(OP, q, v, ORDER)
    checks.check_floating(OP, q.device, **named, initial_state=initial_state)
    (B, T, H, K), V = q.shape, v.shape[-1]
    for name in ("k", "w", "a", "b"):
        checks.check_shape(OP, name, named[name], (B, T, H, K), "the shape of q", ORDER)
    checks.check_shape(OP, "v", v, (B, T, H, V), "(batch, time, heads, V)", ORDER)
    sequences = B if cu_seqlens is None else checks.check_packing(OP, cu_seqlens, B, q.device)
    if initial_state is not None:
        meaning = "(sequences, heads, K, V)"
        checks.check_shape(OP, "initial_state", initial_state, (sequences, H, K, V), meaning)


__all__ = ["generalised_delta_rule"]

"""The delta rule: products of generalised Householder matrices, with eigenvalues in [-1, 1]."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from statetrack.errors import UserError
from statetrack.ops import checks
from statetrack.ops.autograd import run_backend
from statetrack.ops.backends import choose_once, load, pick_backend
from statetrack.ops.call_cache import CallCache
from statetrack.ops.delta_rule import gates
from statetrack.ops.delta_rule.options import DeltaRuleOptions

# A backend is a function with the arguments of `delta_rule_reference`.
BACKENDS = {
    "reference": "statetrack.ops.delta_rule.reference:delta_rule_reference",
    "chunked": "statetrack.ops.delta_rule.chunked:delta_rule_chunked",
    "native": "statetrack.ops.delta_rule.native:delta_rule_native",
    "triton": "statetrack.ops.delta_rule.triton.backend:delta_rule_triton",
}
# Functions of q and v that give the reason why a backend cannot take them, or None.
REFUSALS = {
    "native": "statetrack.ops.delta_rule.native:refuses",
    "triton": "statetrack.ops.delta_rule.triton.plan:refuses",
}
_choices = CallCache()


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    g: Tensor | None = None,
    a: Tensor | None = None,
    sign: Tensor | None = None,
    angle: Tensor | None = None,
    householders: int = 1,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    beta_from_logits: float | None = None,
    hard_beta: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Apply the delta rule along time: a product of generalised Householder matrices with gates.

        S_t = (I - beta_t k_t k_t^T) diag(a_t) R(angle_t) S_{t-1} + beta_t k_t v_t^T     o_t = scale S_t^T q_t

    Shapes, with time before heads: q (B, T, H, K); k (B, T n, H, K); v (B, T n, H, V); beta (B, T n, H);
    initial_state (N, H, K, V). The gates are (B, T, H), one per head (Gated DeltaNet), or (B, T, H, K), one
    per key channel (KDA). n = `householders` steps are made per token (DeltaProduct): the gate stands before
    the first of them, and the state is read after the last. N is B, or the number of packed sequences.
    Returns the outputs (B, T, H, V) in the dtype of v, and the last states (N, H, K, V) in float32 (float64
    if q is), or None unless `output_final_state`. The contract is flash-linear-attention's.

    - `beta` in [0, 1] keeps the eigenvalues of a step, 1 - beta |k|^2 and 1, in [0, 1]; `beta` in [0, 2]
      opens them to [-1, 1]. Both hold for keys of norm 1: pass normalised keys, or set
      `use_qk_l2norm_in_kernel`, which divides q and k by their norms in float32.
      Other real numbers are computed as the equation says: the state may then grow without bound.
    - `g`: a = exp(g), the logarithm of a decay in [0, 1], so at most 0; None means no decay (DeltaNet).
      Positive g, a state that grows, is computed as the equation says. In float32, values below -40 per head
      count as -40 and get no gradient, on all backends but "reference".
    - `a`: in place of g, the gate itself, in [-1, 1]. Its gradient is that of the number, at a = 0 and across
      it too: pass this for gates like 2 s - 1.
    - `sign`: -1 or 1, with g or alone; a = sign exp(g). One per head or per channel; it gets no gradient.
    - `angle` (B, T, H, K/2): channel i turns with channel i + K/2, by this many radians, before the gate.
      Gates and signs per channel are then (B, T, H, K/2), one for both channels of a pair.
    - `scale` multiplies the outputs: any finite number, K^-1/2 by default.
    - `beta_from_logits` = s: `beta` holds logits x, and the rule runs with s sigmoid(x), computed in float32.
      With `hard_beta`, with s clamp(1.02 sigmoid(x) - 0.01, 0, 1) instead, which reaches 0 and s.
    - `cu_seqlens` (N + 1 offsets in tokens, B = 1) packs N sequences into one row; `max_seqlen`, at least the
      longest of them in tokens, lets a GPU use the kernels for short sequences without reading the offsets.
    - `backend`: "auto", or "reference", "chunked", "native" (CPU), "triton" (GPU).

    The recurrence runs in float32 or better whatever the dtype of the inputs, since near beta = 2 rounding
    errors do not decay. Values are checked inside `statetrack.checked()` only: it refuses beta outside [0,
    2], gates above 1, and NaN or infinity, naming the first bad step. Outside it, NaN or infinity at step t
    leaves earlier outputs alone on a CPU; on a GPU, other outputs of the same chunk may become NaN with it,
    and behind a bad angle those of later packed sequences. There, keys and queries longer than 1.8e19, whose
    squares overflow, give NaN too; on a CPU they are normalised. Signs and angles leave no trace in the
    state: it is S itself, and a later call takes it as it is. Derivation: docs/internals/delta_rule.md,
    docs/internals/gates.md.

    >>> q, k, v = torch.randn(3, 2, 16, 4, 32).unbind()              # B, T, H, K = 2, 16, 4, 32
    >>> beta = 2 * torch.rand(2, 16, 4)                              # eigenvalues in [-1, 1]
    >>> o, S = delta_rule(q, k, v, beta, use_qk_l2norm_in_kernel=True, output_final_state=True)
    >>> o.shape, S.shape
    (torch.Size([2, 16, 4, 32]), torch.Size([2, 4, 32, 32]))
    """
    if not isinstance(householders, int) or householders < 1:
        raise UserError(
            f"delta_rule: householders is {householders!r}, expected a whole number of at least 1."
        )
    checks.check_flags("delta_rule", use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, hard_beta=hard_beta)
    if beta_from_logits is not None and not (
        isinstance(beta_from_logits, (int, float)) and 0 < beta_from_logits < math.inf
    ):
        raise UserError(
            f"delta_rule: beta_from_logits is {beta_from_logits!r}, expected the largest beta: 1 for "
            "eigenvalues in [0,1], 2 for [-1,1]."
        )
    if hard_beta and beta_from_logits is None:
        raise UserError(
            "delta_rule: hard_beta is set without beta_from_logits, expected both: beta is logits."
        )
    checks.check_scale("delta_rule", scale)
    gate: Tensor | gates.Gate | None = g
    given: tuple[Tensor | None, ...] = (g,)
    if a is not None or sign is not None or angle is not None or (isinstance(g, Tensor) and g.ndim == 4):
        gate = gates.Gate(g, a, sign.detach() if isinstance(sign, Tensor) else sign, angle)
        given = tuple(gate)
    run = choose_once(
        _choices,
        (backend, householders),
        (q, k, v, beta, *given, initial_state, cu_seqlens),
        lambda: _choose(backend, householders, q, k, v, beta, gate, initial_state, cu_seqlens),
    )
    checks.check_offsets("delta_rule", cu_seqlens, max_seqlen, q.shape[1])
    if checks.is_checked():
        _check_values(q, k, v, beta, gate, initial_state, use_qk_l2norm_in_kernel, beta_from_logits)
    options = DeltaRuleOptions(
        q.shape[-1] ** -0.5 if scale is None else float(scale),
        householders,
        use_qk_l2norm_in_kernel,
        beta_from_logits,
        max_seqlen,
        output_final_state,
        hard_beta,
    )
    inputs = q, k, v, beta, gate, initial_state, cu_seqlens
    o, final_state = run_backend("delta_rule", run, q.device, *inputs, options)
    if checks.is_checked() and not bool(o.isfinite().all()):
        _refuse_outputs(inputs, options)
    o = o if o.dtype == v.dtype else o.to(v.dtype)
    return o, final_state if output_final_state else None


def _refuse_outputs(inputs: tuple, options: DeltaRuleOptions) -> None:
    """The error for NaN or infinity in the outputs.

    A chunk kernel spreads it to earlier steps of the chunk: the loop over time names the first one.
    """
    o, _ = _choose("reference", options.householders, *inputs)(*inputs, options)
    checks.check_finite("delta_rule", time=1, out=o)
    raise UserError(
        "delta_rule: out holds NaN or infinity, which the recurrence itself does not: products inside a "
        "chunk have overflowed, such as |k|^2 of a key longer than 1.8e19. Scale q and k down, or use "
        'backend="reference".'
    )


def _choose(backend: str, householders: int, q, k, v, beta, gate, initial_state, cu_seqlens) -> Callable:
    """The backend for these inputs, their shapes, dtypes and devices checked."""
    _check(q, k, v, beta, gate, householders, initial_state, cu_seqlens)
    if isinstance(gate, gates.Gate):
        refusals = {
            name: lambda why=why: why(gate, q, v, householders) for name, why in gates.REFUSALS.items()
        }
        return pick_backend("delta_rule", backend, q.device, gates.BACKENDS, refusals)
    refusals = {name: lambda target=target: load(target)(q, v) for name, target in REFUSALS.items()}
    return pick_backend("delta_rule", backend, q.device, BACKENDS, refusals)


def _check(q, k, v, beta, gate, householders, initial_state, cu_seqlens) -> None:
    op, order = "delta_rule", "Time comes before heads in this library."
    gate = gate if isinstance(gate, gates.Gate) else gates.Gate(gate, None, None, None)
    given = {"q": q, "k": k, "v": v, "beta": beta, "initial_state": initial_state} | gate._asdict()
    checks.require_tensors(op, q=q, k=k, v=v, beta=beta)
    checks.check_tensors(op, **given)
    checks.check_heads(op, q, v, order)
    checks.check_floating(op, q.device, **given)
    (B, T, H, K), V = q.shape, v.shape[-1]
    steps = T * householders
    time = "time" if householders == 1 else f"time * {householders} householders"
    checks.check_shape(op, "k", k, (B, steps, H, K), f"(batch, {time}, heads, K)", order)
    checks.check_shape(op, "v", v, (B, steps, H, V), f"(batch, {time}, heads, V)", order)
    checks.check_shape(op, "beta", beta, (B, steps, H), f"(batch, {time}, heads)", order)
    gates.check_gate(op, gate, q, order)
    sequences = B if cu_seqlens is None else checks.check_packing(op, cu_seqlens, B, q.device)
    if initial_state is not None:
        checks.check_shape(
            op, "initial_state", initial_state, (sequences, H, K, V), "(sequences, heads, K, V)"
        )


def _check_values(q, k, v, beta, gate, initial_state, l2norm, beta_from_logits) -> None:
    op = "delta_rule"
    checks.check_finite(op, time=1, q=q, k=k, v=v)
    checks.check_finite(op, initial_state=initial_state)
    if beta_from_logits is None:
        checks.check_range(op, "beta", beta, 0.0, 2.0, "Use sigmoid for [0,1], 2 * sigmoid for [-1,1].")
    else:
        checks.check_finite(op, time=1, beta=beta)
    gate = gate if isinstance(gate, gates.Gate) else gates.Gate(gate, None, None, None)
    gates.check_gate_values(op, gate)
    if not l2norm:
        slack = 1e-5 if k.dtype in (torch.float32, torch.float64) else 2e-2
        hint = "Normalise the keys, or set use_qk_l2norm_in_kernel=True."
        checks.check_range(op, "|k|", k.float().norm(dim=-1), 0.0, 1.0 + slack, hint)


__all__ = ["delta_rule"]

"""Gates of the delta rule beyond one decay per head: per key channel, with a sign, and with rotations.

    S_t = (I - beta_t k_t k_t^T) diag(a_t) R(angle_t) S_{t-1} + beta_t k_t v_t^T

Signs and rotations need no kernel of their own. With C_t = R(angle_t) ... R(angle_1), c_t = sign_1 ... sign_t
and S_t = c_t C_t S'_t,

    S'_t = (I - beta_t k'_t k'_t^T) |a_t| S'_{t-1} + beta_t k'_t v_t^T        k'_t = c_t C_t^T k_t

read with q'_t = c_t C_t^T q_t: the unsigned rule on q' and k', whose norms are those of q and k. Derivation:
docs/gates.md.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from statetrack.errors import UserError
from statetrack.ops import checks
from statetrack.ops.autograd import first_derivative_only
from statetrack.ops.backends import load
from statetrack.ops.delta_rule.options import DeltaRuleOptions
from statetrack.ops.delta_rule.reference import delta_rule_reference
from statetrack.ops.gated_linear_attention.rotation import (
    along_time,
    at_ends,
    before_sequence,
    both_of_pair,
    cumulated_angles,
    rotate,
)

# A backend is a function of q, k, v, beta, gate, initial_state, cu_seqlens and options.
BACKENDS = {
    "reference": "statetrack.ops.delta_rule.gates:gated_reference",
    "chunked": "statetrack.ops.delta_rule.chunked_gates:gated_chunked",
    "native": "statetrack.ops.delta_rule.gates:folded_native",
    "triton": "statetrack.ops.delta_rule.gates:folded_triton",
}
# log |a| of a gate of 0 where a kernel takes logarithms: e^-39 is 0 for all purposes of float32, and lies
# above the floor of `floor_decay`, so that its gradient arrives.
LOG_OF_ZERO = -39.0


class Gate(NamedTuple):
    """How a call gave its gates: a = sign exp(g), or `a` itself; and the angles."""

    g: Tensor | None
    a: Tensor | None
    sign: Tensor | None
    angle: Tensor | None

    @property
    def per_channel(self) -> bool:
        """Whether the sizes of the gates differ between the channels of a head."""
        given = self.g if self.a is None else self.a
        return given is not None and given.ndim == 4

    def values(self) -> Tensor | None:
        """The gates as numbers, (B, T, H) or (B, T, H, K), in float32 at least; None without any."""
        if self.a is not None:
            return _at_least_float32(self.a)
        size = None if self.g is None else _at_least_float32(self.g).exp()
        if self.sign is None or size is None:
            return size if self.sign is None else _at_least_float32(self.sign)
        size = size[..., None] if size.ndim < self.sign.ndim else size
        sign = self.sign[..., None] if self.sign.ndim < size.ndim else self.sign
        return sign * size

    def signs_and_logs(self) -> tuple[Tensor | None, Tensor | None]:
        """The signs, and the logarithms of the sizes; None for what there is none of."""
        if self.a is None:
            return self.sign, self.g
        a = _at_least_float32(self.a)
        return torch.where(a.detach() < 0, -1.0, 1.0).to(a.dtype), _LogSize.apply(a)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _LogSize(torch.autograd.Function):
    """log |a|, with e^LOG_OF_ZERO in the place of smaller sizes, whose gradient arrives nevertheless.

    A kernel gives dL/dg = a dL/da, to its own relative accuracy however small a is, so that the quotient is
    the gradient of the number a: finite, and in general not 0, where a is 0.
    """

    @staticmethod
    def forward(ctx, a: Tensor) -> Tensor:
        log = a.abs().log().clamp(min=LOG_OF_ZERO)
        ctx.save_for_backward(a, log)
        return log

    @staticmethod
    @first_derivative_only
    def backward(ctx, dlog):
        a, log = ctx.saved_tensors
        size = log.exp()
        return dlog / torch.where(a < 0, -size, size)


def gated_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gate: Gate,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    options: DeltaRuleOptions,
) -> tuple[Tensor, Tensor]:
    """The loop over time, on the gates as numbers."""
    a = gate.values()
    return delta_rule_reference(q, k, v, beta, None, initial_state, cu_seqlens, options, a, gate.angle)


def folded_native(
    q, k, v, beta, gate: Gate, initial_state, cu_seqlens, options
) -> tuple[Tensor, Tensor | None]:
    """The native kernels: per channel on the gates as numbers, else with the signs folded into q and k.

    Angles are folded in always.
    """
    run = load("statetrack.ops.delta_rule.native:delta_rule_native")
    a = gate.values() if gate.per_channel else None
    if a is not None:
        return _turned(run, q, k, v, beta, a, gate.angle, initial_state, cu_seqlens, options)
    return _folded(run, q, k, v, beta, gate, initial_state, cu_seqlens, options)


def folded_triton(
    q, k, v, beta, gate: Gate, initial_state, cu_seqlens, options
) -> tuple[Tensor, Tensor | None]:
    """The Triton kernels: they take signs per head, and with gates per channel all signs; others and angles
    are folded in.
    """
    if not gate.per_channel:
        run = load("statetrack.ops.delta_rule.triton.backend:delta_rule_triton")
        given = gate.g if gate.a is None else gate.a
        signed = gate.sign if gate.a is None else gate.a
        if given is None or signed is None or signed.ndim == 4 or gate.angle is not None:
            return _folded(run, q, k, v, beta, gate, initial_state, cu_seqlens, options)
        if gate.a is not None:
            g, c = load("statetrack.ops.delta_rule.triton.head_signs:SignsAndLogs").apply(given, cu_seqlens)
        else:
            g = given
            c = load("statetrack.ops.delta_rule.triton.head_signs:cumulated_head_signs")(signed, cu_seqlens)
        o, S = run(q, k, v, beta, g, initial_state, cu_seqlens, options, c)
        return o, S if S is None else S * at_ends(c, cu_seqlens, 1.0)[..., None, None]
    run = load("statetrack.ops.delta_rule.triton.channel_backend:delta_rule_channel_triton")
    (g, a, sign, angle), unfold = gate, None
    if angle is not None:
        q, k, _, unfold = fold(q, k, Gate(None, None, None, angle), cu_seqlens)
        g, a, sign = (x if x is None or x.ndim == 3 else both_of_pair(x) for x in (g, a, sign))
    sizes = g if a is None else a
    o, S = run(q, k, v, beta, sizes, sign, a is None, initial_state, cu_seqlens, options)
    return o, S if unfold is None else unfold(S)


def _turned(
    run: Callable,
    q,
    k,
    v,
    beta,
    a: Tensor,
    angle: Tensor | None,
    initial_state,
    cu_seqlens,
    options: DeltaRuleOptions,
) -> tuple[Tensor, Tensor]:
    """A backend that takes gates per channel as numbers `a`, with the angles folded into q and k."""
    if angle is None:
        return run(q, k, v, beta, a, initial_state, cu_seqlens, options)
    angles = Gate(None, None, None, angle)
    q, k, _, unfold = fold(q, k, angles, cu_seqlens, options.householders)
    o, S = run(q, k, v, beta, both_of_pair(a), initial_state, cu_seqlens, options)
    return o, unfold(S)


def _folded(
    run: Callable, q, k, v, beta, gate: Gate, initial_state, cu_seqlens, options: DeltaRuleOptions
) -> tuple[Tensor, Tensor | None]:
    q, k, g, unfold = fold(q, k, gate, cu_seqlens, options.householders)
    o, S = run(q, k, v, beta, g, initial_state, cu_seqlens, options)
    return o, S if S is None else unfold(S)


def fold(
    q: Tensor, k: Tensor, gate: Gate, cu_seqlens: Tensor | None, householders: int = 1
) -> tuple[Tensor, Tensor, Tensor | None, Callable[[Tensor], Tensor]]:
    """q' and k', the logarithms of the sizes of the gates, and the function that gives S from the last S'.

    Signs and angles are cumulated from the start of each sequence. Signs leave q and k in their dtype; with
    angles q' and k' are in float32 at least: turned keys rounded to fewer digits are no unit vectors, and
    with beta near 2 such errors do not decay.
    """
    sign, g = gate.signs_and_logs()
    if g is not None and g.ndim == 4 and gate.angle is not None:
        g = both_of_pair(g)
    c = None if sign is None else cumulated_signs(sign.detach(), cu_seqlens)
    if c is not None:
        c = c if c.ndim == 4 else c[..., None]
    if gate.angle is None:
        if c is None:
            return q, k, g, lambda S: S
        factor = c.to(q.dtype)
        folded = (q * factor, k * _per_step(factor, householders))
        return *folded, g, lambda S: S * at_ends(c, cu_seqlens, 1.0)[..., None]
    total = cumulated_angles(gate.angle, cu_seqlens)
    cos, sin = total.cos(), total.sin()
    if c is not None:
        cos, sin = c * cos, c * sin
    q_turned = rotate(_at_least_float32(q), cos, -sin)
    cos_of_step, sin_of_step = _per_step(cos, householders), _per_step(sin, householders)
    k_turned = rotate(_at_least_float32(k), cos_of_step, -sin_of_step)

    def unfold(S: Tensor) -> Tensor:
        cos_last, sin_last = at_ends(cos, cu_seqlens, 1.0), at_ends(sin, cu_seqlens, 0.0)
        return rotate(S, cos_last[..., None], sin_last[..., None], dim=-2).to(S.dtype)

    return q_turned, k_turned, g, unfold


def cumulated_signs(sign: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The product of `sign` (B, T, ...) up to each step, from the start of its sequence."""
    c = along_time(torch.cumprod, sign)
    if cu_seqlens is None:
        return c
    return c * before_sequence(c, cu_seqlens, 1.0)  # a sign is its own inverse


def _per_step(x: Tensor, householders: int) -> Tensor:
    """A number of every token (B, T, ...) for each of its steps, (B, T n, ...)."""
    return x if householders == 1 else x.repeat_interleave(householders, dim=1)


def native_refuses(gate: Gate, q: Tensor, v: Tensor, householders: int) -> str | None:
    """Why the native kernels cannot take these gates, or None."""
    if gate.per_channel:
        return load("statetrack.ops.delta_rule.native:refuses_channels")(q, v, householders)
    return load("statetrack.ops.delta_rule.native:refuses")(q, v)


def triton_refuses(gate: Gate, q: Tensor, v: Tensor, householders: int) -> str | None:
    """Why the Triton kernels cannot take these gates, or None."""
    if gate.per_channel and householders > 1:
        return "gates per key channel with several Householder factors per token are not offered there"
    if q.numel() == 0 or v.numel() == 0:
        return "the input is empty"
    return load("statetrack.ops.delta_rule.triton.plan:refuses")(q, v)


REFUSALS = {"native": native_refuses, "triton": triton_refuses}


def check_gate(op: str, gate: Gate, q: Tensor, order: str) -> None:
    """Refuse gates that do not fit together, or q (B, T, H, K)."""
    B, T, H, K = q.shape
    if gate.g is not None and gate.a is not None:
        raise UserError(f"{op}: expected either g, the logarithm of the gate, or a, the gate itself.")
    if gate.sign is not None and gate.a is not None:
        raise UserError(f"{op}: sign goes with g only; a has its own sign.")
    width, meaning = K, "K"
    if gate.angle is not None:
        if K % 2:
            raise UserError(f"{op}: angle turns pairs of channels, and K = {K} is odd.")
        width, meaning = K // 2, "K / 2"
        checks.check_shape(op, "angle", gate.angle, (B, T, H, width), "(batch, time, heads, K / 2)", order)
    for name, x in (("g", gate.g), ("a", gate.a), ("sign", gate.sign)):
        if x is not None and x.ndim == 4:
            checks.check_shape(op, name, x, (B, T, H, width), f"(batch, time, heads, {meaning})", order)
        elif x is not None:
            checks.check_shape(op, name, x, (B, T, H), "(batch, time, heads)", order)


def check_gate_values(op: str, gate: Gate) -> None:
    """In checked mode, refuse gates beyond 1 in size, signs that are none, and NaN."""
    if gate.a is not None:
        checks.check_range(op, "a", gate.a, -1.0, 1.0, "Use sigmoid for [0,1], 2 * sigmoid - 1 for [-1,1].")
    if gate.g is not None:
        checks.check_range(op, "g", gate.g, -float("inf"), 0.0, "g is the logarithm of a decay in [0, 1].")
    if gate.sign is not None:
        hint = "Use -1 or 1; a gate of 0 is g = -inf."
        checks.check_range(op, "|sign|", gate.sign.abs(), 1.0, 1.0, hint)
    checks.check_finite(op, time=1, angle=gate.angle)

"""Arguments of fla's functions in the form that the ops of this library take, or the reason why not."""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from statetrack.errors import UserError, unknown_name
from statetrack.ops import checks
from statetrack.ops.delta_rule import delta_rule

CHUNK_SIZES = (16, 32, 64)


def grouped_delta_rule(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    *,
    state_v_first: bool,
    initial_state: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule with grouped value heads and states in either layout."""
    check_per_head(op, beta)
    q, k = grouped_heads(op, q, k, v)
    if state_v_first and initial_state is not None:
        initial_state = initial_state.transpose(-1, -2)
    o, state = delta_rule(q, k, v, beta, g=g, initial_state=initial_state, **options)
    if state_v_first and state is not None:
        state = state.transpose(-1, -2).contiguous()
    return o, state


def grouped_heads(op: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q and k with a head for each value head: value head i has key head i H // G."""
    if not all(isinstance(x, Tensor) and x.ndim == 4 for x in (q, k, v)) or q.shape != k.shape:
        return q, k  # for the op to refuse
    heads, values = q.shape[2], v.shape[2]
    if heads == values:
        return q, k
    if heads == 0 or values % heads:
        raise UserError(
            f"{op}: v has {values} heads and q and k have {heads}, expected a multiple of the heads of k."
        )
    if heads == 1:  # a view; other numbers of heads cannot be repeated without a copy
        return q.expand(-1, -1, values, -1), k.expand(-1, -1, values, -1)
    repeats = values // heads
    return q.repeat_interleave(repeats, dim=2), k.repeat_interleave(repeats, dim=2)


def decay_of_gate(op: str, g: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    """-exp(A_log) softplus(g + dt_bias), in float32 or better."""
    if g is None or A_log is None:
        missing = "g, the input of the gate," if g is None else "A_log"
        raise UserError(f"{op}: use_gate_in_kernel=True needs {missing} as well.")
    dtype = torch.promote_types(g.dtype, torch.float32)
    x = g.to(dtype)
    if dt_bias is not None:
        checks.check_shape(op, "dt_bias", dt_bias, (g.shape[-1],), "(value heads,)")
        x = x + dt_bias.to(dtype)
    checks.check_shape(op, "A_log", A_log, (g.shape[-1],), "(value heads,)")
    return -A_log.to(dtype).exp() * F.softplus(x)


def decay_of_channel_gate(
    op: str, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> Tensor:
    """-exp(A_log) softplus(g + dt_bias), or with a lower bound b the bounded b sigmoid(exp(A_log) (g +
    dt_bias)), in float32 or better; g (B, T, G, K), A_log (G,), dt_bias (G K,)."""
    if A_log is None and lower_bound is None:
        raise UserError(f"{op}: use_gate_in_kernel=True needs A_log, or lower_bound, as well.")
    G, K = g.shape[-2:]
    dtype = torch.promote_types(g.dtype, torch.float32)
    x, rate = g.to(dtype), None
    if dt_bias is not None:
        checks.check_shape(op, "dt_bias", dt_bias.flatten(), (G * K,), "(value heads * K,)")
        x = x + dt_bias.to(dtype).reshape(G, K)
    if A_log is not None:
        checks.check_shape(op, "A_log", A_log.flatten(), (G,), "(value heads,)")
        rate = A_log.to(dtype).reshape(G, 1).exp()
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(x if rate is None else rate * x)
    assert rate is not None
    return -rate * F.softplus(x)


def check_per_channel(op: str, name: str, gate: Tensor, q: Tensor, v: Tensor) -> Tensor:
    """The gate, refused unless it has a value for every key channel of every value head: a gate per head
    would be another rule."""
    if not isinstance(gate, Tensor):
        raise UserError(f"{op}: {name} is a {type(gate).__name__}, expected a tensor.")
    if all(isinstance(x, Tensor) and x.ndim == 4 for x in (q, v)):  # else for the op to refuse
        expected = (*v.shape[:3], q.shape[-1])
        checks.check_shape(op, name, gate, expected, "(batch, time, value heads, K)")
    return gate


def decay_of_both(op: str, g: Tensor | None, gk: Tensor | None, q: Tensor, v: Tensor) -> Tensor | None:
    """The decay per head, the decay per key channel, or both as one decay per channel: their sum."""
    if gk is None:
        return g
    check_per_channel(op, "gk", gk, q, v)
    if g is None:
        return gk
    checks.check_shape(op, "g", g, tuple(gk.shape[:3]), "(batch, time, value heads)")
    dtype = torch.promote_types(torch.promote_types(g.dtype, gk.dtype), torch.float32)
    return g.to(dtype)[..., None] + gk.to(dtype)


def refuse_value_gates(op: str, gv: Any, ours: str) -> None:
    """Refuse a decay per value channel, and say how one head per value channel computes the same."""
    if gv is not None:
        raise UserError(
            f"{op}: gv, a decay of every value channel, is not offered. Heads of one value channel each "
            f"compute the same, with V times the work on the keys: statetrack.{ours} with q, k and the other "
            "gates after repeat_interleave(V, dim=2), v as (B, T, H V, 1), and gv as (B, T, H V) added to "
            "the other gates."
        )


def largest_beta(op: str, from_logits: bool, allow_neg_eigval: bool) -> float | None:
    """`beta_from_logits` of the op: 1 or 2, None where beta is given as it is."""
    if allow_neg_eigval and not from_logits:
        raise UserError(
            f"{op}: allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True and logits as beta. With a "
            "beta of your own, pass values up to 2, such as 2 * sigmoid(x)."
        )
    return (2.0 if allow_neg_eigval else 1.0) if from_logits else None


def read_extras(
    op: str,
    extras: dict[str, Any],
    known: tuple[str, ...],
    state_v_first: bool = False,
    chunk_sizes: tuple[int, ...] = CHUNK_SIZES,
) -> dict[str, Any]:
    """The keywords that fla reads from **kwargs. It ignores others; here they are errors."""
    for name in extras:
        if name not in (*known, "chunk_size", "head_first"):
            raise unknown_name(f"{op}: option", name, (*known, "chunk_size"))
    if extras.get("head_first"):
        raise UserError(
            f"{op}: head_first=True was removed from fla. Inputs are (batch, time, heads, width): transpose "
            "axes 1 and 2 of q, k, v, beta and g."
        )
    if "head_first" in extras:
        warnings.warn("head_first=False is what there is: leave it out.", DeprecationWarning, stacklevel=3)
    size = extras.get("chunk_size")
    if size is not None and size not in chunk_sizes:
        expected = f"{', '.join(map(str, chunk_sizes[:-1]))} or {chunk_sizes[-1]}"
        raise UserError(f"{op}: chunk_size is {size!r}, expected {expected}, or none.")
    if "transpose_state_layout" in extras:
        if state_v_first:
            raise UserError(f"{op}: give state_v_first or its old name transpose_state_layout, not both.")
        warnings.warn("transpose_state_layout is called state_v_first now.", DeprecationWarning, stacklevel=3)
    return extras


def refuse_context(op: str, cp_context: Any) -> None:
    """Refuse context parallelism, and say how else a long sequence can be run."""
    if cp_context is not None:
        raise UserError(
            f"{op}: cp_context, one sequence over several devices, is not offered. Share the batch instead "
            "(torchrun, docs/first-steps.md), or pass the last state of one piece on as the "
            "initial_state of the next."
        )


def check_per_head(op: str, beta: Tensor) -> Tensor:
    """beta, refused if it has a value for every value channel."""
    if isinstance(beta, Tensor) and beta.ndim == 4:
        raise UserError(
            f"{op}: beta has shape {tuple(beta.shape)}, expected (batch, time, heads). A beta of every value "
            "channel is not offered; the eigenvalues of a step come from one beta per head."
        )
    return beta


def beta_of_one(v: Tensor) -> Tensor:
    """A beta of 1 for every value head and step."""
    return torch.ones_like(v[..., 0])


def longest_sequence(cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> int | None:
    """The longest packed sequence, where the offsets are known on the host."""
    if cu_seqlens is None or cu_seqlens_cpu is None or cu_seqlens_cpu.numel() < 2:
        return None
    return max(int(cu_seqlens_cpu.diff().max()), 1)

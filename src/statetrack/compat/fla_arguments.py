"""Arguments of fla's functions in the form that `statetrack.delta_rule` takes, or the reason why not."""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from statetrack.errors import UserError, unknown_name
from statetrack.ops import checks

CHUNK_SIZES = (16, 32, 64)


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


def largest_beta(op: str, from_logits: bool, allow_neg_eigval: bool) -> float | None:
    """`beta_from_logits` of the op: 1 or 2, None where beta is given as it is."""
    if allow_neg_eigval and not from_logits:
        raise UserError(
            f"{op}: allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True and logits as beta. With a "
            "beta of your own, pass values up to 2, such as 2 * sigmoid(x)."
        )
    return (2.0 if allow_neg_eigval else 1.0) if from_logits else None


def read_extras(
    op: str, extras: dict[str, Any], known: tuple[str, ...], state_v_first: bool = False
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
    if extras.get("chunk_size", 64) not in CHUNK_SIZES:
        raise UserError(f"{op}: chunk_size is {extras['chunk_size']!r}, expected 16, 32 or 64, or none.")
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

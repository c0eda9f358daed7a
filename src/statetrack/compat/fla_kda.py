"""Kimi Delta Attention of fla 0.6.0 on `statetrack.delta_rule`; exported by `statetrack.compat.fla`."""

from typing import Any

from torch import Tensor

from statetrack.compat.fla_arguments import (
    check_per_channel,
    decay_of_channel_gate,
    grouped_delta_rule,
    largest_beta,
    longest_sequence,
    read_extras,
    refuse_context,
)
from statetrack.errors import UserError

CHUNK_SIZES = (32, 64)
SAFE_LOWER_BOUND = -5.0  # the least that fla's safe_gate allows


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention, the delta rule with a decay per key channel, as `fla.ops.kda.chunk_kda`.

        S_t = (I - beta_t k_t k_t^T) diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T        o_t = scale S_t^T q_t

    Shapes: q, k (B, T, H, K); v (B, T, G, V); g (B, T, G, K); beta (B, T, G); initial_state (N, G, K, V), or
    (N, G, V, K) with `state_v_first`. G is a multiple of H (grouped values): value head i uses key head
    i H // G. Returns o (B, T, G, V) and the last states, in float32, or None unless `output_final_state`.

    - `g`: the logarithm of the decay, at most 0. With `use_gate_in_kernel=True`, `A_log=` (G,) and perhaps
      `dt_bias=` (G K,), the decay is -exp(A_log) softplus(g + dt_bias); with `lower_bound` b as well,
      b sigmoid(exp(A_log) (g + dt_bias)), where A_log may be left out and counts as 0.
    - `use_beta_sigmoid_in_kernel`: `beta` holds logits x, and the rule runs with sigmoid(x); with
      `allow_neg_eigval` as well, with 2 sigmoid(x).
    - `cu_seqlens_cpu` saves reading `cu_seqlens` from a GPU. `safe_gate` checks `lower_bound` as fla does
      and changes no number; `disable_recompute`, `chunk_size` and `max_num_seqs` change nothing here.
    - `return_intermediate_states`, `use_graph` and `cp_context` are refused.

    >>> q, k = torch.randn(2, 2, 16, 2, 32).unbind()                 # two key heads
    >>> v, g = torch.randn(2, 16, 6, 8), -torch.rand(2, 16, 6, 32)   # six value heads
    >>> o, S = chunk_kda(
    ...     q, k, v, g, torch.rand(2, 16, 6), output_final_state=True, use_qk_l2norm_in_kernel=True)
    >>> o.shape, S.shape
    (torch.Size([2, 16, 6, 8]), torch.Size([2, 6, 32, 8]))
    """
    op = "chunk_kda"
    refuse_context(op, cp_context)
    refuse_serving_options(op, return_intermediate_states, use_graph)
    check_safe_gate(op, safe_gate and use_gate_in_kernel, lower_bound)
    known = ("A_log", "dt_bias", "transpose_state_layout")
    extras = read_extras(op, kwargs, known, state_v_first, CHUNK_SIZES)
    gate = extras.get("A_log"), extras.get("dt_bias"), lower_bound
    check_per_channel(op, "g", g, q, v)
    return grouped_delta_rule(
        op,
        q,
        k,
        v,
        decay_of_channel_gate(op, g, *gate) if use_gate_in_kernel else g,
        beta,
        beta_from_logits=largest_beta(op, use_beta_sigmoid_in_kernel, allow_neg_eigval),
        state_v_first=bool(extras.get("transpose_state_layout", state_v_first)),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        max_seqlen=longest_sequence(cu_seqlens, cu_seqlens_cpu),
    )


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention, as `fla.ops.kda.fused_recurrent_kda`.

    Equation, shapes and results: see `chunk_kda`. `A_log`, `dt_bias` and `lower_bound` count with
    `use_gate_in_kernel=True` only. Unlike fla's, it has gradients.
    """
    op = "fused_recurrent_kda"
    extras = read_extras(op, kwargs, ("transpose_state_layout",), state_v_first)
    check_per_channel(op, "g", g, q, v)
    return grouped_delta_rule(
        op,
        q,
        k,
        v,
        decay_of_channel_gate(op, g, A_log, dt_bias, lower_bound) if use_gate_in_kernel else g,
        beta,
        beta_from_logits=largest_beta(op, use_beta_sigmoid_in_kernel, allow_neg_eigval),
        state_v_first=bool(extras.get("transpose_state_layout", state_v_first)),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )


def check_safe_gate(op: str, safe: bool, lower_bound: float | None) -> None:
    """Refuse the bounds that fla's safe_gate refuses."""
    if safe and not (lower_bound and SAFE_LOWER_BOUND <= lower_bound < 0):
        raise UserError(
            f"{op}: lower_bound is {lower_bound!r}, expected a number in [-5, 0) with safe_gate=True and "
            "use_gate_in_kernel=True. Without safe_gate, other bounds and None are taken."
        )


def refuse_serving_options(op: str, return_intermediate_states: bool, use_graph: bool) -> None:
    """Refuse what serving engines ask of fla, and name the way round."""
    if return_intermediate_states:
        raise UserError(
            f"{op}: return_intermediate_states=True, the states of all chunks, is not offered. Call {op} on "
            "pieces of the sequence, and pass the last state of each on as the initial_state of the next."
        )
    if use_graph:
        raise UserError(
            f"{op}: use_graph=True, offsets that change inside a captured CUDA graph, is not offered. Leave "
            "it out: cu_seqlens may hold empty sequences, and has to end at the length of the row."
        )

"""Delta rules and linear attention of flash-linear-attention (fla 0.6.0) on the ops of this library.

    from fla.ops.delta_rule import chunk_delta_rule                 # before
    from statetrack.compat.fla import chunk_delta_rule              # after

Signatures, defaults, layouts (time before heads) and results are fla's. Three things go further: the `chunk_`
functions also take float32 and float64, every function runs on a CPU, and every function has gradients. A
`chunk_` and a `fused_recurrent_` function run the same code here: the device decides which kernel it is.
"""

from typing import Any

from torch import Tensor

from statetrack.compat.fla_arguments import (
    beta_of_one,
    check_per_head,
    decay_of_both,
    decay_of_gate,
    grouped_delta_rule,
    largest_beta,
    longest_sequence,
    read_extras,
    refuse_context,
    refuse_value_gates,
)
from statetrack.compat.fla_fixed_decay import (
    chunk_hgrn,
    chunk_lightning_attn,
    chunk_linear_attn,
    chunk_retention,
    fused_chunk_linear_attn,
    fused_chunk_retention,
    fused_recurrent_hgrn,
    fused_recurrent_lightning_attn,
    fused_recurrent_linear_attn,
    fused_recurrent_retention,
    parallel_retention,
)
from statetrack.compat.fla_generalised import (
    chunk_dplr_delta_rule,
    chunk_gdn2,
    chunk_iplr_delta_rule,
    chunk_rwkv7,
    fused_mul_recurrent_rwkv7,
    fused_recurrent_dplr_delta_rule,
    fused_recurrent_gdn2,
    fused_recurrent_iplr_delta_rule,
    fused_recurrent_rwkv7,
)
from statetrack.compat.fla_kda import chunk_kda, fused_recurrent_kda
from statetrack.compat.fla_linear_attention import (
    chunk_gla,
    chunk_simple_gla,
    fused_chunk_simple_gla,
    fused_recurrent_gla,
    fused_recurrent_simple_gla,
    parallel_simple_gla,
)
from statetrack.errors import UserError
from statetrack.ops.delta_rule import delta_rule

__all__ = [
    "chunk_delta_rule",
    "chunk_dplr_delta_rule",
    "chunk_gated_delta_product",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_gdn2",
    "chunk_gla",
    "chunk_hgrn",
    "chunk_iplr_delta_rule",
    "chunk_kda",
    "chunk_lightning_attn",
    "chunk_linear_attn",
    "chunk_retention",
    "chunk_rwkv7",
    "chunk_simple_gla",
    "fused_chunk_delta_rule",
    "fused_chunk_gla",
    "fused_chunk_linear_attn",
    "fused_chunk_retention",
    "fused_chunk_simple_gla",
    "fused_mul_recurrent_rwkv7",
    "fused_recurrent_delta_rule",
    "fused_recurrent_dplr_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_gdn2",
    "fused_recurrent_gla",
    "fused_recurrent_hgrn",
    "fused_recurrent_iplr_delta_rule",
    "fused_recurrent_kda",
    "fused_recurrent_lightning_attn",
    "fused_recurrent_linear_attn",
    "fused_recurrent_retention",
    "fused_recurrent_rwkv7",
    "fused_recurrent_simple_gla",
    "parallel_retention",
    "parallel_simple_gla",
]


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule (DeltaNet), as `fla.ops.delta_rule.chunk_delta_rule`.

        S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T        o_t = scale S_t^T q_t

    Shapes: q, k (B, T, H, K); v (B, T, H, V); beta (B, T, H), in [0, 1], or in [0, 2] for eigenvalues in
    [-1, 1]; initial_state (N, H, K, V), N = B, or the number of sequences that `cu_seqlens` packs into B = 1.
    `scale` is K^-1/2 by default. Returns o (B, T, H, V) and the last states (N, H, K, V) in float32, or None
    unless `output_final_state`. `cu_seqlens_cpu` saves reading `cu_seqlens` from a GPU. `chunk_size` changes
    nothing here.

    >>> q, k, v = torch.randn(3, 2, 16, 4, 32).unbind()
    >>> o, S = chunk_delta_rule(q, k, v, torch.rand(2, 16, 4), use_qk_l2norm_in_kernel=True)
    >>> o.shape, S
    (torch.Size([2, 16, 4, 32]), None)
    """
    op = "chunk_delta_rule"
    read_extras(op, kwargs, ())
    return delta_rule(
        q,
        k,
        v,
        check_per_head(op, beta),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        max_seqlen=longest_sequence(cu_seqlens, cu_seqlens_cpu),
    )


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule (DeltaNet), as `fla.ops.delta_rule.fused_recurrent_delta_rule`.

    Equation, shapes and results: see `chunk_delta_rule`. `beta` is 1 when None. `scale` must be positive.
    """
    op = "fused_recurrent_delta_rule"
    if scale is not None and not scale > 0:
        raise UserError(f"{op}: scale is {scale!r}, expected a positive number, or None for K^-1/2.")
    return delta_rule(
        q,
        k,
        v,
        beta_of_one(v) if beta is None else check_per_head(op, beta),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule (Gated DeltaNet), as `fla.ops.gated_delta_rule.chunk_gated_delta_rule`.

        S_t = (I - beta_t k_t k_t^T) exp(g_t) S_{t-1} + beta_t k_t v_t^T        o_t = scale S_t^T q_t

    Shapes: q, k (B, T, H, K); v (B, T, G, V); g, beta (B, T, G); initial_state (N, G, K, V), or (N, G, V, K)
    with `state_v_first`. G is a multiple of H (grouped values): value head i uses key head i H // G.
    Returns o (B, T, G, V) and the last states, in float32, or None unless `output_final_state`.

    - `g`: the logarithm of the decay, at most 0. With `use_gate_in_kernel=True`, `A_log=` (G,) and perhaps
      `dt_bias=` (G,), the decay is -exp(A_log) softplus(g + dt_bias).
    - `use_beta_sigmoid_in_kernel`: `beta` holds logits x, and the rule runs with sigmoid(x); with
      `allow_neg_eigval` as well, with 2 sigmoid(x): eigenvalues in [-1, 1].
    - `cu_seqlens_cpu` saves reading `cu_seqlens` from a GPU. `chunk_indices` and `chunk_size` change nothing
      here. `cp_context` (one sequence over several devices) is refused.

    >>> q, k = torch.randn(2, 2, 16, 2, 32).unbind()                 # two key heads
    >>> v, x = torch.randn(2, 16, 6, 32), torch.randn(2, 16, 6)      # six value heads
    >>> o, S = chunk_gated_delta_rule(
    ...     q, k, v, -torch.rand(2, 16, 6), x, output_final_state=True, use_qk_l2norm_in_kernel=True,
    ...     use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)
    >>> o.shape, S.shape
    (torch.Size([2, 16, 6, 32]), torch.Size([2, 6, 32, 32]))
    """
    op = "chunk_gated_delta_rule"
    refuse_context(op, cp_context)
    extras = read_extras(
        op, kwargs, ("use_gate_in_kernel", "A_log", "dt_bias", "transpose_state_layout"), state_v_first
    )
    gate = extras.get("A_log"), extras.get("dt_bias")
    return grouped_delta_rule(
        op,
        q,
        k,
        v,
        decay_of_gate(op, g, *gate) if extras.get("use_gate_in_kernel") else g,
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


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule, as `fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule`.

    Equation, shapes and results: see `chunk_gated_delta_rule`. `g` None means no decay, `beta` None means 1.
    `gk` (B, T, G, K) is the logarithm of a decay of every key channel, as in `chunk_kda`; given together with
    g, it is added to it. `gv`, a decay of every value channel, is refused. Unlike fla's, it has gradients.
    """
    op = "fused_recurrent_gated_delta_rule"
    refuse_value_gates(op, gv, "delta_rule")
    extras = read_extras(op, kwargs, ("transpose_state_layout",), state_v_first)
    return grouped_delta_rule(
        op,
        q,
        k,
        v,
        decay_of_both(op, decay_of_gate(op, g, A_log, dt_bias) if use_gate_in_kernel else g, gk, q, v),
        beta_of_one(v) if beta is None else beta,
        beta_from_logits=largest_beta(op, use_beta_sigmoid_in_kernel, allow_neg_eigval),
        state_v_first=bool(extras.get("transpose_state_layout", state_v_first)),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )


def chunk_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    num_householder: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """(Gated) DeltaProduct, as `fla.ops.gated_delta_product.chunk_gated_delta_product`.

    The equation is that of `chunk_gated_delta_rule` with n = `num_householder` steps of k, v and beta per
    token: the state decays before the first and is read after the last. Shapes: q (B, T, H, K); k (B, T n, H,
    K); v (B, T n, H, V); beta (B, T n, H); g (B, T, H) or None; `cu_seqlens` counts tokens, not steps.
    """
    op = "chunk_gated_delta_product"
    refuse_context(op, cp_context)
    return delta_rule(
        q,
        k,
        v,
        check_per_head(op, beta),
        g=g,
        householders=num_householder,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        max_seqlen=longest_sequence(cu_seqlens, cu_seqlens_cpu),
    )


def fused_chunk_delta_rule(**kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """fla keeps this name, and its function refuses every call; here it is `chunk_delta_rule` by keywords."""
    return chunk_delta_rule(**kwargs)


def fused_chunk_gla(**kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """fla keeps this name, and its function refuses every call; here it is `chunk_gla` by keywords."""
    return chunk_gla(**kwargs)


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule

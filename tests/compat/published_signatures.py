"""The signatures of other libraries as their sources publish them, and how to compare ours with them."""

import ast
import inspect

# fla 0.6.0, fla/ops/delta_rule, gated_delta_rule, gated_delta_product, gla, simple_gla, kda, linear_attn,
# retention, lightning_attn, hgrn, generalized_delta_rule, rwkv7 and gdn2; annotations left out
FLA = {
    "chunk_delta_rule": "q, k, v, beta, scale=None, initial_state=None, output_final_state=False, "
    "use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None, **kwargs",
    "fused_recurrent_delta_rule": "q, k, v, beta=None, scale=None, initial_state=None, "
    "output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None",
    "chunk_gated_delta_rule": "q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, "
    "use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, "
    "state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, "
    "**kwargs",
    "fused_recurrent_gated_delta_rule": "q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, "
    "initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, "
    "use_gate_in_kernel=False, A_log=None, dt_bias=None, use_beta_sigmoid_in_kernel=False, "
    "allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, **kwargs",
    "chunk_gated_delta_product": "q, k, v, g, beta, num_householder, scale=None, initial_state=None, "
    "output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None, "
    "cp_context=None",
    "chunk_gla": "q, k, v, g, scale=None, initial_state=None, output_final_state=False, "
    "state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None",
    "fused_recurrent_gla": "q, k, v, gk=None, gv=None, scale=None, initial_state=None, "
    "output_final_state=False, reverse=False, state_v_first=False, cu_seqlens=None, **kwargs",
    "chunk_simple_gla": "q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, "
    "output_final_state=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, **kwargs",
    "fused_recurrent_simple_gla": "q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, "
    "output_final_state=False, reverse=False, state_v_first=False, cu_seqlens=None, **kwargs",
    "chunk_kda": "q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, "
    "use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, "
    "allow_neg_eigval=False, safe_gate=False, lower_bound=None, disable_recompute=False, "
    "return_intermediate_states=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, "
    "cp_context=None, use_graph=False, max_num_seqs=None, **kwargs",
    "fused_recurrent_kda": "q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None, "
    "output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, "
    "use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, lower_bound=None, state_v_first=False, "
    "cu_seqlens=None, **kwargs",
    "fused_chunk_gla": "**kwargs",
    "fused_chunk_simple_gla": "q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, "
    "output_final_state=False, cu_seqlens=None",
    "parallel_simple_gla": "q, k, v, g=None, scale=None, output_attentions=False, cu_seqlens=None, "
    "cu_seqlens_cpu=None",
    "fused_chunk_delta_rule": "**kwargs",
    "chunk_linear_attn": "q, k, v, scale=None, initial_state=None, output_final_state=False, "
    "normalize=True, cu_seqlens=None",
    "fused_chunk_linear_attn": "q, k, v, scale=None, initial_state=None, output_final_state=False, "
    "normalize=True, cu_seqlens=None",
    "fused_recurrent_linear_attn": "q, k, v, scale=None, initial_state=None, output_final_state=False, "
    "reverse=False, normalize=False, cu_seqlens=None",
    "chunk_retention": "q, k, v, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, "
    "**kwargs",
    "fused_chunk_retention": "q, k, v, scale=None, initial_state=None, output_final_state=False, "
    "cu_seqlens=None",
    "fused_recurrent_retention": "q, k, v, scale=None, initial_state=None, output_final_state=False, "
    "reverse=False, state_v_first=False, cu_seqlens=None, **kwargs",
    "parallel_retention": "q, k, v, scale=None, output_attentions=False, cu_seqlens=None",
    "chunk_lightning_attn": "q, k, v, layer_idx, num_layers, scale=None, initial_state=None, "
    "output_final_state=False, cu_seqlens=None, **kwargs",
    "fused_recurrent_lightning_attn": "q, k, v, layer_idx, num_layers, scale=None, initial_state=None, "
    "output_final_state=False, reverse=False, cu_seqlens=None",
    "fused_recurrent_hgrn": "x, g, initial_state=None, output_final_state=False, cu_seqlens=None",
    "chunk_hgrn": "x, g, initial_state=None, output_final_state=False",
    "chunk_gdn2": "q, k, v, g, b, w, scale=None, initial_state=None, output_final_state=False, "
    "use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None, "
    "safe_gate=False, lower_bound=None, disable_recompute=False, return_intermediate_states=False, "
    "state_v_first=False, cp_context=None, **kwargs",
    "fused_recurrent_gdn2": "q, k, v, g, b, w, A_log=None, dt_bias=None, scale=None, initial_state=None, "
    "output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, lower_bound=None, "
    "state_v_first=False, cu_seqlens=None, **kwargs",
    "chunk_rwkv7": "r, w, k, v, a, b, scale=1.0, initial_state=None, output_final_state=False, "
    "cu_seqlens=None, cu_seqlens_cpu=None, safe_gate=False, chunk_size=None, disable_recompute=False, "
    "cp_context=None, lower_bound=None",
    "fused_recurrent_rwkv7": "r, w, k, v, a, b, scale=None, initial_state=None, output_final_state=True, "
    "cu_seqlens=None",
    "fused_mul_recurrent_rwkv7": "r, w, k, v, kk, a, scale=1.0, initial_state=None, "
    "output_final_state=False, reverse=False, cu_seqlens=None",
    "chunk_dplr_delta_rule": "q, k, v, a, b, gk, scale=None, initial_state=None, output_final_state=False, "
    "cu_seqlens=None, cu_seqlens_cpu=None, safe_gate=False, chunk_size=None, disable_recompute=False, "
    "cp_context=None, lower_bound=None, **kwargs",
    "fused_recurrent_dplr_delta_rule": "q, k, v, a, b, gk, scale=None, initial_state=None, "
    "output_final_state=False, reverse=False, cu_seqlens=None",
    "chunk_iplr_delta_rule": "q, k, v, a, b, scale=None, initial_state=None, output_final_state=False, "
    "cu_seqlens=None, cu_seqlens_cpu=None, **kwargs",
    "fused_recurrent_iplr_delta_rule": "q, k, v, a, b, scale=None, initial_state=None, "
    "output_final_state=False, cu_seqlens=None",
}
# mamba-ssm, mamba_ssm/ops/selective_scan_interface.py, ops/triton/selective_state_update.py, ssd_combined.py
MAMBA = {
    "selective_scan_fn": "u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, "
    "return_last_state=False",
    "selective_state_update": "state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, "
    "state_batch_indices=None",
    "mamba_inner_fn": "xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, "
    "out_proj_bias, A, B=None, C=None, D=None, delta_bias=None, B_proj_bias=None, C_proj_bias=None, "
    "delta_softplus=True, checkpoint_lvl=1, b_rms_weight=None, c_rms_weight=None, dt_rms_weight=None, "
    "b_c_dt_rms_eps=1e-6",
    "mamba_chunk_scan_combined": "x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, "
    "initial_states=None, seq_idx=None, cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, 1e999), "
    "return_final_states=False, return_varlen_states=False",
}


def published(text: str) -> list[tuple]:
    """Name, kind and default of every parameter in the text of a signature."""
    arguments = ast.parse(f"def f({text}): ...").body[0].args
    defaults = [inspect.Parameter.empty] * (len(arguments.args) - len(arguments.defaults))
    defaults += [ast.literal_eval(default) for default in arguments.defaults]
    plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
    found = [(a.arg, plain, value) for a, value in zip(arguments.args, defaults, strict=True)]
    rest = arguments.kwarg
    return found + ([(rest.arg, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.empty)] if rest else [])


def parameters(function, without=()) -> list[tuple]:
    """Name, kind and default of every parameter of a function."""
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in found if p.name not in without]

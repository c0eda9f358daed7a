"""OLMo Hybrid (`OlmoHybridForCausalLM` of transformers): Gated DeltaNet, and attention with norms behind it.

Its config wants an attention layer. A model without one is written with an attention layer at its end that
adds zero: its two last matrices are zero, and so are the norms of what they give.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from statetrack.errors import UserError
from statetrack.integrations.huggingface.families.family import (
    Equal,
    Family,
    Weights,
    expect,
    expect_backbone,
    layers_of,
    of_pattern,
    one,
    renamed,
    single,
)
from statetrack.layers import AttentionConfig, DeltaNetConfig, Model, ModelConfig
from statetrack.ops.checks import EIGENVALUES

NAME = "olmo_hybrid"
HEAD_NORM_EPS = 1e-5  # not an option of the family
LINEAR, ATTENTION = "linear_attention", "full_attention"
MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
OTHER_NAMES = {
    "attention_layer_norm": "input_layernorm",
    "feedforward_layer_norm": "post_attention_layernorm",
}
LINEARS = {
    "to_q": "q_proj",
    "to_k": "k_proj",
    "to_v": "v_proj",
    "to_decay": "a_proj",
    "to_beta": "b_proj",
    "output_gate": "g_proj",
    "to_out": "o_proj",
    "norm": "o_norm",
}


def read(settings: Mapping[str, Any]) -> ModelConfig:
    where, heads = f"{NAME} checkpoint", settings["linear_num_key_heads"]
    expect(where, settings, hidden_act=("silu", "swish"), attention_bias=False)
    values = settings["linear_num_value_heads"]
    if values % heads:
        raise UserError(
            f"{where}: linear_num_value_heads is {values}, expected a multiple of linear_num_key_heads = "
            f"{heads}."
        )
    expect(where, settings, attention_dropout=(0.0, None))
    expect(where, settings, head_dim=(None, settings["hidden_size"] // settings["num_attention_heads"]))
    linear = DeltaNetConfig(
        heads,
        "[-1,1]" if settings["linear_allow_neg_eigval"] else "[0,1]",
        head_dim=settings["linear_key_head_dim"],
        value_dim=settings["linear_value_head_dim"],
        convolution=settings["linear_conv_kernel_dim"],
        output_gate=True,
        gated=True,
        head_norm_eps=HEAD_NORM_EPS,
        value_heads=None if values == heads else values,
    )
    heads, kv_heads = settings["num_attention_heads"], settings["num_key_value_heads"]
    attention = AttentionConfig(
        heads,
        **_positions(where, settings.get("rope_parameters") or {}),
        kv_heads=None if kv_heads == heads else kv_heads,
        qk_norm=True,
        qk_norm_eps=settings["rms_norm_eps"],
    )
    kinds = {LINEAR: linear, ATTENTION: attention}
    for kind in settings["layer_types"]:
        if kind not in kinds:
            raise UserError(f"{where}: a layer is of type {kind!r}, expected {' or '.join(kinds)}.")
    return ModelConfig(
        **of_pattern([kinds[kind] for kind in settings["layer_types"]]),
        d_model=settings["hidden_size"],
        layers=settings["num_hidden_layers"],
        mlp_ratio=settings["intermediate_size"] / settings["hidden_size"],
        tied=settings["tie_word_embeddings"],
        norm_eps=settings["rms_norm_eps"],
        attention_norm="post",
    )


def _positions(where: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `AttentionConfig` for rotary positions; without a base there are none."""
    if rope.get("rope_theta") is None:
        return {"positions": False}
    expect(where, rope, rope_type=("default", None), partial_rotary_factor=(1.0, None))
    return {"rotary_base": float(rope["rope_theta"])}


def write(config: ModelConfig) -> dict[str, Any]:
    where, mixers = f"to {NAME}", layers_of(config)
    expect_backbone(where, config, mlp=True)
    expect(where, config, attention_norm="post")
    attention = single(
        where, [m for m in mixers if isinstance(m, AttentionConfig)], AttentionConfig, "attention layers"
    )
    linear = single(where, [m for m in mixers if m != attention], DeltaNetConfig, "other layers")
    expect(where, linear, gated=True, output_gate=True, householders=1, qk_activation="silu")
    expect(where, linear, head_norm_eps=HEAD_NORM_EPS, eigenvalues=EIGENVALUES, signed_gate=False)
    expect(where, linear, conv_bias=False, gate_activation="silu", beta="sigmoid", gate="smooth")
    expect(where, attention, qk_norm=True, qk_norm_eps=config.norm_eps, qkv_bias=False, window=None)
    if not linear.convolution:
        raise UserError(f"{where}: convolution is 0, expected at least 1: its layers have a convolution.")
    keys, values = _widths(linear, config.d_model)
    value_heads = linear.value_heads or linear.heads
    return {
        "hidden_size": config.d_model,
        "intermediate_size": round(config.mlp_ratio * config.d_model),
        "num_hidden_layers": config.layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads or attention.heads,
        "layer_types": [ATTENTION if m == attention else LINEAR for m in mixers],
        "rms_norm_eps": config.norm_eps,
        # without a base there are no positions; without the whole setting transformers takes a default base
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": attention.rotary_base if attention.positions else None,
        },
        "linear_num_key_heads": linear.heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": keys // linear.heads,
        "linear_value_head_dim": values // value_heads,
        "linear_conv_kernel_dim": linear.convolution,
        "linear_allow_neg_eigval": linear.eigenvalues == "[-1,1]",
    }


def _widths(linear: DeltaNetConfig, d_model: int) -> tuple[int, int]:
    """Rows of keys and of values, all heads together."""
    K = linear.head_dim or d_model // linear.heads
    return linear.heads * K, (linear.value_heads or linear.heads) * (linear.value_dim or K)


def names(config: ModelConfig) -> list[Equal]:
    equal = [one("embedding.weight", "model.embed_tokens.weight"), one("norm.weight", "model.norm.weight")]
    for i, mixer in enumerate(layers_of(config)):
        ours, theirs = f"blocks.{i}.", f"model.layers.{i}."
        equal += renamed(MLP, f"{ours}mlp.", f"{theirs}mlp.")
        if isinstance(mixer, AttentionConfig):
            norms = {"mixer_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"}
            equal += _attention(mixer, config.d_model, f"{ours}mixer.", f"{theirs}self_attn.")
        else:
            norms = {"mixer_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
            equal += _linear(f"{ours}mixer.", f"{theirs}linear_attn.")
        equal += renamed(norms, ours, theirs)
    return equal if config.tied else [*equal, one("head.weight", "lm_head.weight")]


def _linear(ours: str, theirs: str) -> list[Equal]:
    filters = {f"convolutions.{i}": f"{part}_conv1d" for i, part in enumerate("qkv")}
    scalars = {"A_log": "A_log", "decay_bias": "dt_bias"}
    return renamed(LINEARS | filters, ours, theirs) + renamed(scalars, ours, theirs, "")


def _attention(mixer: AttentionConfig, d_model: int, ours: str, theirs: str) -> list[Equal]:
    return [
        *attention_rows(mixer, d_model, ours, theirs),
        *renamed({"to_out": "o_proj", "q_norm": "q_norm", "k_norm": "k_norm"}, ours, theirs),
    ]


def attention_rows(mixer: AttentionConfig, d_model: int, ours: str, theirs: str) -> list[Equal]:
    """Our one matrix of q, k and v, and their three; and so for their biases, where there are any."""
    shared = d_model // mixer.heads * (mixer.kv_heads or mixer.heads)
    return [
        Equal((f"{ours}to_qkv.{kind}",), tuple(f"{theirs}{part}_proj.{kind}" for part in "qkv"), rows)
        for kind, rows in (("weight", (d_model, shared, shared)), ("bias", (d_model, shared, shared)))
        if kind == "weight" or mixer.qkv_bias
    ]


def with_one_name(config: ModelConfig, weights: Weights) -> Weights:
    """Weights under names that transformers and vLLM read, from all that transformers reads or writes.

    Its `save_pretrained` gives the norms other names, and cuts the convolution into three equal parts,
    whatever the widths of q, k and v; only the concatenation counts.
    """
    for old, new in OTHER_NAMES.items():
        weights = {name.replace(f".{old}.", f".{new}."): x for name, x in weights.items()}
    for i, mixer in enumerate(layers_of(config)):
        if isinstance(mixer, DeltaNetConfig):
            _cut_convolution(mixer, config.d_model, f"model.layers.{i}.linear_attn.", weights)
    return weights


def _cut_convolution(mixer: DeltaNetConfig, d_model: int, layer: str, weights: Weights) -> None:
    """Cut the filters of q, k and v at the widths of q, k and v."""
    parts, whole = [f"{layer}{part}_conv1d.weight" for part in "qkv"], f"{layer}conv1d.weight"
    found = [weights.pop(name) for name in (whole, *parts) if name in weights]
    keys, values = _widths(mixer, d_model)
    if found and sum(map(len, found)) == 2 * keys + values:
        weights |= zip(parts, torch.cat(found).split((keys, keys, values)), strict=True)


def with_attention(config: ModelConfig, weights: Weights) -> tuple[ModelConfig, Weights]:
    """The model, with an attention layer behind its last that adds zero if it has no attention layer."""
    mixers = layers_of(config)
    if any(isinstance(mixer, AttentionConfig) for mixer in mixers):
        return config, weights
    heads = next(
        (m.heads for m in mixers if isinstance(m, DeltaNetConfig) and config.d_model % m.heads == 0), 1
    )
    attention = AttentionConfig(heads, positions=False, qk_norm=True, qk_norm_eps=config.norm_eps)
    longer = replace(config, mixers=(*mixers, attention), layers=config.layers + 1, attention_norm="post")
    table, last = weights["embedding.weight"], f"blocks.{config.layers}."
    with torch.random.fork_rng(devices=[]):
        fresh = Model(replace(longer, mixers=(attention,), layers=1), 1, 1).blocks[0].state_dict()
    added = {f"{last}{name}": x.to(table.dtype) for name, x in fresh.items()}
    for name in ("mixer.to_out.weight", "mlp.down.weight"):
        added[last + name].zero_()
    return longer, weights | added


def without_idle_attention(config: ModelConfig, weights: Weights) -> tuple[ModelConfig, Weights]:
    """The model without a last attention layer that adds zero, if it is its only one."""
    mixers = layers_of(config)
    places = [i for i, mixer in enumerate(mixers) if isinstance(mixer, AttentionConfig)]
    last = f"blocks.{config.layers - 1}."
    outputs = [weights[last + name] for name in ("mixer.to_out.weight", "mlp.down.weight")]
    if places != [config.layers - 1] or any(bool(x.any()) for x in outputs):
        return config, weights
    shorter = replace(config, **of_pattern(mixers[:-1]), layers=config.layers - 1, attention_norm="pre")
    return shorter, {name: x for name, x in weights.items() if not name.startswith(last)}


FAMILY = Family(
    NAME,
    "olmo_hybrid",
    "OlmoHybridForCausalLM",
    None,
    read,
    write,
    names,
    with_one_name,
    with_attention,
    without_idle_attention,
)

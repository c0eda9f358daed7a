"""DeltaNet and Gated DeltaNet as flash-linear-attention has them, with or without its attention layers."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from statetrack.errors import UserError
from statetrack.integrations.huggingface.families.family import (
    Equal,
    Family,
    expect,
    expect_backbone,
    layers_of,
    of_pattern,
    one,
    renamed,
    single,
)
from statetrack.integrations.huggingface.families.olmo_hybrid import LINEARS, MLP, attention_rows
from statetrack.layers import AttentionConfig, DeltaNetConfig, ModelConfig
from statetrack.ops.checks import EIGENVALUES

GATES = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}  # theirs and ours, of the output
DELTANET, GATED = "fla-deltanet", "fla-gated-deltanet"

# of the config classes of flash-linear-attention 0.6.0: a config.json leaves out what an older version lacked
SHARED = {
    "attn": None,
    "attnres_block_size": None,
    "allow_neg_eigval": False,
    "conv_size": 4,
    "conv_bias": False,
    "hidden_act": "swish",
    "hidden_ratio": 4,
    "intermediate_size": None,
    "max_position_embeddings": 2048,
    "norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_short_conv": True,
    "vocab_size": 32000,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
DEFAULTS = {
    DELTANET: {
        **SHARED,
        "hidden_size": 2048,
        "expand_k": 1.0,
        "expand_v": 1.0,
        "num_heads": 16,
        "num_hidden_layers": 24,
        "qk_activation": "silu",
        "qk_norm": "l2",
        "use_beta": True,
        "use_gate": False,
    },
    GATED: {
        **SHARED,
        "hidden_size": 2048,
        "expand_v": 2.0,
        "head_dim": 256,
        "num_heads": 6,
        "num_v_heads": None,
        "num_hidden_layers": 21,
        "output_gate_activation": "swish",
        "use_gate": True,
    },
}


def read(name: str, settings: Mapping[str, Any]) -> ModelConfig:
    where, heads, d_model = f"{name} checkpoint", settings["num_heads"], settings["hidden_size"]
    expect(where, settings, attnres_block_size=None, hidden_act=("swish", "silu"), conv_bias=False)
    own: dict[str, Any]
    if name == GATED:
        expect(where, settings, output_gate_activation=tuple(GATES))
        keys, values = settings["head_dim"], settings["num_v_heads"] or heads
        if values % heads:
            raise UserError(f"{where}: num_v_heads is {values}, expected a multiple of num_heads = {heads}.")
        own = {
            "head_dim": keys,
            "value_dim": _whole(where, "expand_v", keys * settings["expand_v"]),
            "value_heads": None if values == heads else values,
            "gate_activation": GATES[settings["output_gate_activation"]],
        }
    else:
        activations = ("silu", "relu", "identity")
        expect(where, settings, qk_norm="l2", use_beta=True, qk_activation=activations)
        own = {"qk_activation": settings["qk_activation"]}
        for width, option in (("head_dim", "expand_k"), ("value_dim", "expand_v")):
            own[width] = _whole(where, option, d_model * settings[option] / heads)
    linear = DeltaNetConfig(
        heads,
        "[-1,1]" if settings["allow_neg_eigval"] else "[0,1]",
        convolution=settings["conv_size"] if settings["use_short_conv"] else 0,
        output_gate=settings["use_gate"],
        gated=name == GATED,
        head_norm_eps=settings["norm_eps"],
        **own,
    )
    mixers: list[Any] = [linear] * settings["num_hidden_layers"]
    for layer, attention in _attention_of(where, settings["attn"]).items():
        mixers[layer] = attention
    return ModelConfig(
        **of_pattern(mixers),
        d_model=d_model,
        layers=len(mixers),
        mlp_ratio=_mlp_width(settings) / d_model,
        tied=settings["tie_word_embeddings"],
        norm_eps=settings["norm_eps"],
    )


def _whole(where: str, option: str, width: float) -> int:
    """A width per head that must be a whole number."""
    if abs(width - round(width)) > 1e-4 or round(width) < 1:
        raise UserError(f"{where}: {option} makes heads {width} wide, expected a whole number.")
    return round(width)


def _mlp_width(settings: Mapping[str, Any]) -> int:
    """As fla chooses it: 2/3 of `hidden_ratio` times the width, rounded up to a multiple of 256."""
    if settings["intermediate_size"] is not None:
        return settings["intermediate_size"]
    ratio = settings["hidden_ratio"] or 4
    return 256 * -(-int(settings["hidden_size"] * ratio * 2 / 3) // 256)


def _attention_of(where: str, attn: Any) -> dict[int, AttentionConfig]:
    """The attention layers of a hybrid; `attn` is None, one specification, or a list of them."""
    layers: dict[int, AttentionConfig] = {}
    for spec in attn if isinstance(attn, list) else [attn] if attn else []:
        heads = spec["num_heads"]
        shared = spec.get("num_kv_heads") or heads
        mixer = AttentionConfig(
            heads,
            float(spec.get("rope_theta") or 10_000.0),
            kv_heads=None if shared == heads else shared,
            qkv_bias=bool(spec.get("qkv_bias")),
            window=spec.get("window_size"),
        )
        layers |= dict.fromkeys(spec["layers"], mixer)
    return layers


def write(name: str, config: ModelConfig) -> dict[str, Any]:
    where, mixers = f"to {name}", layers_of(config)
    expect_backbone(where, config, mlp=True)
    attended = [i for i, mixer in enumerate(mixers) if isinstance(mixer, AttentionConfig)]
    linear = single(
        where, [m for m in mixers if not isinstance(m, AttentionConfig)], DeltaNetConfig, "linear layers"
    )
    expect(where, linear, householders=1, gated=name == GATED, head_norm_eps=config.norm_eps)
    expect(where, linear, eigenvalues=EIGENVALUES, signed_gate=False)
    expect(where, linear, conv_bias=False, beta="sigmoid", gate="smooth")
    K = linear.head_dim or config.d_model // linear.heads
    V = linear.value_dim or K
    settings = {
        "hidden_size": config.d_model,
        "intermediate_size": round(config.mlp_ratio * config.d_model),
        "num_hidden_layers": config.layers,
        "num_heads": linear.heads,
        "conv_size": linear.convolution or 4,
        "use_short_conv": linear.convolution > 0,
        "allow_neg_eigval": linear.eigenvalues == "[-1,1]",
        "use_gate": linear.output_gate,
        "norm_eps": config.norm_eps,
        "attn": _attention_spec(where, config, attended) if attended else None,
    }
    if name == GATED:
        expect(where, linear, qk_activation="silu")
        values = {"head_dim": K, "expand_v": V / K, "num_v_heads": linear.value_heads}
        gate = "swish" if linear.gate_activation == "silu" else linear.gate_activation
        return DEFAULTS[name] | settings | values | {"output_gate_activation": gate}
    expect(where, linear, value_heads=(None, linear.heads))
    if linear.output_gate:
        expect(where, linear, gate_activation="silu")
    ratios = {"expand_k": linear.heads * K / config.d_model, "expand_v": linear.heads * V / config.d_model}
    return DEFAULTS[name] | settings | ratios | {"qk_activation": linear.qk_activation}


def _attention_spec(where: str, config: ModelConfig, layers: list[int]) -> dict[str, Any]:
    attention = single(where, [config.mixer_of(i) for i in layers], AttentionConfig, "attention layers")
    expect(where, config, attention_norm="pre")
    expect(where, attention, qk_norm=False, positions=True)
    return {
        "layers": layers,
        "num_heads": attention.heads,
        "num_kv_heads": attention.kv_heads or attention.heads,
        "qkv_bias": attention.qkv_bias,
        "window_size": attention.window,
        "rope_theta": attention.rotary_base,
    }


def names(config: ModelConfig) -> list[Equal]:
    equal = [one("embedding.weight", "model.embeddings.weight"), one("norm.weight", "model.norm.weight")]
    for i, mixer in enumerate(layers_of(config)):
        ours, theirs = f"blocks.{i}.", f"model.layers.{i}."
        equal += renamed({"mixer_norm": "attn_norm", "mlp_norm": "mlp_norm"}, ours, theirs)
        equal += renamed(MLP, f"{ours}mlp.", f"{theirs}mlp.")
        ours, theirs = f"{ours}mixer.", f"{theirs}attn."
        if isinstance(mixer, AttentionConfig):
            equal += attention_rows(mixer, config.d_model, ours, theirs)
            equal += renamed({"to_out": "o_proj"}, ours, theirs)
        else:
            assert isinstance(mixer, DeltaNetConfig)
            equal += _linear(mixer, ours, theirs)
    return equal if config.tied else [*equal, one("head.weight", "lm_head.weight")]


def _linear(mixer: DeltaNetConfig, ours: str, theirs: str) -> list[Equal]:
    absent = {"to_decay": not mixer.gated, "output_gate": not mixer.output_gate}
    linears = {a: b for a, b in LINEARS.items() if not absent.get(a)}
    filters = {f"convolutions.{i}": f"{part}_conv1d" for i, part in enumerate("qkv")}
    equal = renamed(linears | (filters if mixer.convolution else {}), ours, theirs)
    if mixer.gated:
        equal += renamed({"A_log": "A_log", "decay_bias": "dt_bias"}, ours, theirs, "")
    return equal


FAMILIES = tuple(
    Family(name, model_type, architecture, DEFAULTS[name], partial(read, name), partial(write, name), names)
    for name, model_type, architecture in (
        (DELTANET, "delta_net", "DeltaNetForCausalLM"),
        (GATED, "gated_deltanet", "GatedDeltaNetForCausalLM"),
    )
)

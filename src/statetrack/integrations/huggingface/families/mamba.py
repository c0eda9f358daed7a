"""Mamba as transformers has it (`MambaForCausalLM`), with eigenvalues in [0,1]."""

from collections.abc import Mapping
from typing import Any

from statetrack.integrations.huggingface.families.family import (
    Equal,
    Family,
    expect,
    expect_backbone,
    layers_of,
    one,
    renamed,
    single,
)
from statetrack.layers import MambaConfig, ModelConfig

NAME = "mamba"
LINEARS = {name: name for name in ("in_proj", "conv1d", "x_proj", "dt_proj", "out_proj")}


def read(settings: Mapping[str, Any]) -> ModelConfig:
    expect(f"{NAME} checkpoint", settings, hidden_act=("silu", "swish"))
    mixer = MambaConfig(
        "[0,1]",
        d_state=settings["state_size"],
        expand=settings["expand"],
        convolution=settings["conv_kernel"],
        dt_rank=int(settings["time_step_rank"]),
        bias=settings["use_bias"],
        conv_bias=settings["use_conv_bias"],
    )
    return ModelConfig(
        mixer,
        d_model=settings["hidden_size"],
        layers=settings["num_hidden_layers"],
        mlp_ratio=0,
        tied=settings["tie_word_embeddings"],
        norm_eps=settings["layer_norm_epsilon"],
    )


def write(config: ModelConfig) -> dict[str, Any]:
    expect_backbone(f"to {NAME}", config, mlp=False)
    mixer = single(f"to {NAME}", layers_of(config), MambaConfig, "layers")
    expect(f"to {NAME}", mixer, eigenvalues="[0,1]")
    return {
        "hidden_size": config.d_model,
        "num_hidden_layers": config.layers,
        "state_size": mixer.d_state,
        "expand": mixer.expand,
        "conv_kernel": mixer.convolution,
        "time_step_rank": mixer.dt_rank or "auto",
        "layer_norm_epsilon": config.norm_eps,
        "use_bias": mixer.bias,
        "use_conv_bias": mixer.conv_bias,
    }


def names(config: ModelConfig) -> list[Equal]:
    equal = [
        one("embedding.weight", "backbone.embeddings.weight"),
        one("norm.weight", "backbone.norm_f.weight"),
    ]
    for i, mixer in enumerate(layers_of(config)):
        assert isinstance(mixer, MambaConfig)
        biases = {
            "dt_proj": True,
            "conv1d": mixer.conv_bias,
            "in_proj": mixer.bias,
            "out_proj": mixer.bias,
        }
        ours, theirs = f"blocks.{i}.", f"backbone.layers.{i}."
        equal += renamed({"mixer_norm": "norm"}, ours, theirs)
        ours, theirs = f"{ours}mixer.", f"{theirs}mixer."
        equal += renamed(LINEARS, ours, theirs) + renamed(
            {name: name for name, has in biases.items() if has}, ours, theirs, ".bias"
        )
        equal += renamed({"A_log": "A_log", "D": "D"}, ours, theirs, "")
    return equal if config.tied else [*equal, one("head.weight", "lm_head.weight")]


FAMILY = Family(NAME, "mamba", "MambaForCausalLM", None, read, write, names)

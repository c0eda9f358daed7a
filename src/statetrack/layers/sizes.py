"""Language models by size: every mixer that can be one, from 10M to 1.3B parameters.

A size is a width and a depth. Mixers with an MLP beside them have `layers` blocks; those without one (Mamba,
Mamba-2, mLSTM), and sLSTM with its narrow MLP, have twice as many blocks of half the size, as published.
`mlp_ratio` makes up for what a mixer has beyond DeltaNet's four matrices of d_model^2, so that the models of
one size have about the same number of parameters: those of the name, with a vocabulary of 32,000 and tied.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from statetrack.layers.attention import AttentionConfig
from statetrack.layers.block import ModelConfig
from statetrack.layers.deltanet import DeltaNetConfig
from statetrack.layers.gla import GLAConfig
from statetrack.layers.hgrn2 import HGRN2Config
from statetrack.layers.kda import KDAConfig
from statetrack.layers.mamba import MambaConfig
from statetrack.layers.mamba2 import Mamba2Config
from statetrack.layers.mamba3 import Mamba3Config
from statetrack.layers.mixer import MixerConfig
from statetrack.layers.model import Model

VOCABULARY = 32_000  # of the published DeltaNets, and of the parameter counts in the docs
HEAD_DIM = 64  # of attention, Mamba-2 and Mamba-3


@dataclass(frozen=True)
class Size:
    """The widths that the mixers of one size share."""

    d_model: int
    layers: int  # of a mixer with an MLP beside it
    heads: int  # of DeltaNet
    tied: bool  # whether the head is the embedding's table


# 340m and 1.3b are the DeltaNets of flame and of the paper, with a head of their own (Sec. 5.3)
SIZES = {
    "10m": Size(192, 8, 3, True),
    "60m": Size(512, 12, 4, True),
    "170m": Size(768, 20, 6, True),
    "340m": Size(1024, 24, 8, False),
    "1.3b": Size(2048, 24, 16, False),
}
# by preset: width of the MLP over d_model (None: as in the preset, twice the layers), norm eps of its papers
MIXERS: dict[str, tuple[float | None, float]] = {
    "deltanet": (2.75, 1e-6),
    "gated-deltanet": (2.5, 1e-6),
    "gated-deltanet-signed": (2.5, 1e-6),
    "deltanet-rotating": (2.625, 1e-6),
    "deltaproduct": (2.0, 1e-6),
    "kda": (2.625, 1e-6),
    "transformer": (2.75, 1e-6),
    "mamba": (None, 1e-5),
    "mamba2": (None, 1e-5),
    "mamba3": (2.0, 1e-5),
    "gla": (2.75, 1e-5),
    "hgrn2": (2.75, 1e-5),
    "mlstm": (None, 1e-5),
    "slstm": (None, 1e-5),
}
# other names of the same model: the published Mamba counts its vocabulary of 50,280
ALIASES = {"mamba-370m": "mamba-340m"}


def sized_presets(presets: Mapping[str, ModelConfig]) -> dict[str, ModelConfig]:
    """The presets "deltanet-10m", ..., "slstm-1.3b", from those of the same mixers at width 128."""
    sized = {
        f"{mixer}-{name}": _at_size(presets[mixer], size, *MIXERS[mixer])
        for mixer in MIXERS
        for name, size in SIZES.items()
    }
    return sized | {alias: sized[name] for alias, name in ALIASES.items()}


def _at_size(preset: ModelConfig, size: Size, mlp_ratio: float | None, norm_eps: float) -> ModelConfig:
    return replace(
        preset,
        mixer=_mixer_at_size(preset.mixer, size, norm_eps),
        d_model=size.d_model,
        layers=size.layers if mlp_ratio is not None else 2 * size.layers,
        mlp_ratio=preset.mlp_ratio if mlp_ratio is None else mlp_ratio,
        tied=size.tied or isinstance(preset.mixer, MambaConfig),  # the published Mambas are, at every size
        norm_eps=norm_eps,
    )


def _mixer_at_size(mixer: MixerConfig, size: Size, norm_eps: float) -> MixerConfig:
    if isinstance(mixer, DeltaNetConfig | KDAConfig):
        return replace(mixer, heads=size.heads, head_norm_eps=norm_eps)
    if isinstance(mixer, GLAConfig | HGRN2Config):
        return replace(mixer, heads=size.heads)
    if isinstance(mixer, Mamba2Config | Mamba3Config):
        return replace(mixer, heads=mixer.expand * size.d_model // HEAD_DIM, d_state=128)
    return attention_for(size.d_model) if isinstance(mixer, AttentionConfig) else mixer


def attention_for(d_model: int) -> AttentionConfig:
    """Attention of this width with heads of 64 channels, or with its default heads where 64 does not fit."""
    return AttentionConfig(heads=d_model // HEAD_DIM) if d_model % HEAD_DIM == 0 else AttentionConfig()


def count_parameters(config: ModelConfig, vocab_size: int = VOCABULARY, *, tied: bool | None = None) -> int:
    """The number of parameters of a model with this vocabulary, tied or not (as in `config` when None).

        count_parameters(model_config("deltanet-340m"))                   374,362,112
        count_parameters(model_config("deltanet-340m"), tied=True)        341,594,112

    No memory is taken for the weights.
    """
    config = config if tied is None else replace(config, tied=tied)
    with torch.device("meta"):
        model = Model(config, vocab_size, vocab_size)
    return sum(p.numel() for p in model.parameters())

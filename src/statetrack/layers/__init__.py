"""Layers: mixers, which carry state along time, and the backbone around them."""

from statetrack.layers.attention import Attention, AttentionConfig
from statetrack.layers.baselines import (
    DenseTransition,
    DenseTransitionConfig,
    DiagonalToy,
    DiagonalToyConfig,
)
from statetrack.layers.block import ModelConfig
from statetrack.layers.deltanet import DeltaNet, DeltaNetConfig
from statetrack.layers.gla import GLA, GLAConfig
from statetrack.layers.hgrn2 import HGRN2, HGRN2Config
from statetrack.layers.kda import KDA, KDAConfig
from statetrack.layers.mamba import Mamba, MambaConfig
from statetrack.layers.mamba2 import Mamba2, Mamba2Config
from statetrack.layers.mamba3 import Mamba3, Mamba3Config
from statetrack.layers.mixer import Mixer, MixerConfig, Packing
from statetrack.layers.mlstm import MLSTM, MLSTMConfig
from statetrack.layers.model import Model
from statetrack.layers.presets import PRESETS, SIZED_PRESETS, build, model_config, register_mixer
from statetrack.layers.ranges import extended_range
from statetrack.layers.sizes import count_parameters
from statetrack.layers.slstm import SLSTM, SLSTMConfig

__all__ = [
    "GLA",
    "HGRN2",
    "KDA",
    "MLSTM",
    "PRESETS",
    "SIZED_PRESETS",
    "SLSTM",
    "Attention",
    "AttentionConfig",
    "DeltaNet",
    "DeltaNetConfig",
    "DenseTransition",
    "DenseTransitionConfig",
    "DiagonalToy",
    "DiagonalToyConfig",
    "GLAConfig",
    "HGRN2Config",
    "KDAConfig",
    "MLSTMConfig",
    "Mamba",
    "Mamba2",
    "Mamba2Config",
    "Mamba3",
    "Mamba3Config",
    "MambaConfig",
    "Mixer",
    "MixerConfig",
    "Model",
    "ModelConfig",
    "Packing",
    "SLSTMConfig",
    "build",
    "count_parameters",
    "extended_range",
    "model_config",
    "register_mixer",
]

"""Layers: mixers that carry state along time, and the backbone that holds them."""

from statetrack.layers.baselines import (
    DenseTransition,
    DenseTransitionConfig,
    DiagonalToy,
    DiagonalToyConfig,
)
from statetrack.layers.deltanet import DeltaNet, DeltaNetConfig
from statetrack.layers.mamba import Mamba, MambaConfig
from statetrack.layers.mixer import Mixer, MixerConfig
from statetrack.layers.model import Model, ModelConfig
from statetrack.layers.presets import PRESETS, build, model_config

__all__ = [
    "PRESETS",
    "DeltaNet",
    "DeltaNetConfig",
    "DenseTransition",
    "DenseTransitionConfig",
    "DiagonalToy",
    "DiagonalToyConfig",
    "Mamba",
    "MambaConfig",
    "Mixer",
    "MixerConfig",
    "Model",
    "ModelConfig",
    "build",
    "model_config",
]

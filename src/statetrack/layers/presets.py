"""Models by name: each is the configuration a paper used, at width 128."""

from dataclasses import replace
from typing import Any

from statetrack.errors import UserError, unknown_name
from statetrack.layers.attention import AttentionConfig
from statetrack.layers.baselines import DenseTransitionConfig, DiagonalToyConfig
from statetrack.layers.deltanet import DeltaNetConfig
from statetrack.layers.mamba import MambaConfig
from statetrack.layers.mlstm import MLSTMConfig
from statetrack.layers.model import Model, ModelConfig
from statetrack.layers.slstm import SLSTMConfig

PRESETS: dict[str, ModelConfig] = {
    "deltanet": ModelConfig(DeltaNetConfig()),
    # Sec. 5.2 trains DeltaNet on group word problems without the short convolution, and in the authors' code
    # the SiLU of q and k went with it.
    "deltanet-no-conv": ModelConfig(DeltaNetConfig(convolution=0, qk_activation="identity")),
    "gated-deltanet": ModelConfig(DeltaNetConfig(gated=True, output_gate=True)),
    "deltaproduct": ModelConfig(DeltaNetConfig(householders=2)),
    "mamba": ModelConfig(MambaConfig(), mlp_ratio=0),
    "transformer": ModelConfig(AttentionConfig()),
    "mlstm": ModelConfig(MLSTMConfig(), mlp_ratio=0, norm="layer"),
    "slstm": ModelConfig(SLSTMConfig(), mlp_ratio=1.3, mlp="geglu", norm="layer"),
    "dense-transition": ModelConfig(DenseTransitionConfig(), mlp_ratio=0, norm="none", residual=False),
    "diagonal-toy": ModelConfig(DiagonalToyConfig(), d_model=10, mlp_ratio=0, norm="layer", residual=False),
}


def model_config(name: str, **changes: Any) -> ModelConfig:
    """The preset `name`, with fields of the backbone or of its mixer replaced.

    model_config("deltanet", layers=5, eigenvalues="[0,1]", convolution=0)
    """
    if name not in PRESETS:
        raise unknown_name("model", name, PRESETS)
    config = PRESETS[name]
    of_backbone = {key: value for key, value in changes.items() if key in vars(config)}
    of_mixer = {key: value for key, value in changes.items() if key not in of_backbone}
    for key in of_mixer:
        if key not in vars(config.mixer):
            raise unknown_name(f"{name}: option", key, [*vars(config), *vars(config.mixer)])
    if "mixer" in of_backbone and of_mixer:
        raise UserError(
            f"{name}: give either a whole mixer or single options of it ({', '.join(of_mixer)}), not both."
        )
    mixer = of_backbone.pop("mixer", None) or replace(config.mixer, **of_mixer)  # type: ignore[type-var]
    return replace(config, mixer=mixer, **of_backbone)


def build(name: str, vocab_size: int, n_classes: int | None = None, **changes: Any) -> Model:
    """A fresh model by preset name: build("deltanet", vocab_size=120, eigenvalues="[-1,1]")."""
    return Model(model_config(name, **changes), vocab_size, vocab_size if n_classes is None else n_classes)

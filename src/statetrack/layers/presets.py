"""Models by name: each is the configuration a paper used, at width 128."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

from statetrack.config import register, register_kind
from statetrack.errors import UserError, unknown_name
from statetrack.layers.attention import AttentionConfig
from statetrack.layers.baselines import DenseTransitionConfig, DiagonalToyConfig
from statetrack.layers.deltanet import DeltaNetConfig
from statetrack.layers.mamba import MambaConfig
from statetrack.layers.mixer import MixerConfig
from statetrack.layers.mlstm import MLSTMConfig
from statetrack.layers.model import Model, ModelConfig
from statetrack.layers.slstm import SLSTMConfig
from statetrack.plugins import find

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
    config = find("model", name, PRESETS)
    backbone, mixer = _names(config), _names(config.mixer)
    of_backbone = {key: value for key, value in changes.items() if key in backbone}
    of_mixer = {key: value for key, value in changes.items() if key not in of_backbone}
    for key in of_mixer:
        if key not in mixer:
            raise unknown_name(f"{name}: option", key, [*backbone, *mixer])
    if "mixer" in of_backbone and of_mixer:
        raise UserError(
            f"{name}: give either a whole mixer or single options of it ({', '.join(of_mixer)}), not both."
        )
    chosen = of_backbone.pop("mixer", None) or replace(config.mixer, **of_mixer)  # type: ignore[type-var]
    return replace(config, mixer=chosen, **of_backbone)


def _names(config: Any) -> list[str]:
    return [f.name for f in fields(config)]


def build(name: str, vocab_size: int, n_classes: int | None = None, **changes: Any) -> Model:
    """A fresh model by preset name: build("deltanet", vocab_size=120, eigenvalues="[-1,1]")."""
    return Model(model_config(name, **changes), vocab_size, vocab_size if n_classes is None else n_classes)


def register_mixer(name: str, config: ModelConfig | MixerConfig) -> None:
    """Add a mixer from outside: `--mixer NAME`, `build(NAME, ...)`, its class a kind that specs may name.

    `config` is a frozen dataclass with `build(d_model, layers)` that returns a `Mixer`, or a `ModelConfig`
    around one for another backbone than the default.
    """
    mixer = config.mixer if isinstance(config, ModelConfig) else config
    if not is_dataclass(mixer) or isinstance(mixer, type) or not isinstance(mixer, MixerConfig):
        raise UserError(f"register_mixer: {mixer!r} is not an instance of a dataclass with a `build`.")
    config = config if isinstance(config, ModelConfig) else ModelConfig(mixer)
    shared = sorted({*_names(config)} & {*_names(mixer)})
    if shared:
        raise UserError(
            f"register_mixer: {type(mixer).__name__} has a field {shared[0]!r}, and so has the backbone. "
            "Choose another name for the field."
        )
    register("register_mixer", name, config, PRESETS)


for _cls in (ModelConfig, *(type(preset.mixer) for preset in PRESETS.values())):
    register_kind(_cls)

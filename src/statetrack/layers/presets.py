"""Models by name: the configurations that papers used, at width 128, and language models by size."""

from collections import ChainMap
from dataclasses import fields, is_dataclass, replace
from typing import Any

from statetrack.config import register, register_kind
from statetrack.errors import UserError
from statetrack.layers.attention import AttentionConfig
from statetrack.layers.baselines import DenseTransitionConfig, DiagonalToyConfig
from statetrack.layers.block import ModelConfig
from statetrack.layers.deltanet import DeltaNetConfig
from statetrack.layers.gla import GLAConfig
from statetrack.layers.hgrn2 import HGRN2Config
from statetrack.layers.kda import KDAConfig
from statetrack.layers.mamba import MambaConfig
from statetrack.layers.mamba2 import Mamba2Config
from statetrack.layers.mamba3 import Mamba3Config
from statetrack.layers.mixer import MixerConfig
from statetrack.layers.mlstm import MLSTMConfig
from statetrack.layers.model import Model
from statetrack.layers.sizes import ALIASES, MIXERS, SIZES, attention_for, sized_presets
from statetrack.layers.slstm import SLSTMConfig
from statetrack.peer_options import unknown_option
from statetrack.plugins import find

PRESETS: dict[str, ModelConfig] = {
    "deltanet": ModelConfig(DeltaNetConfig()),
    # Sec. 5.2 trains DeltaNet on group word problems without the short convolution, and in the authors' code
    # the SiLU of q and k went with it.
    "deltanet-no-conv": ModelConfig(DeltaNetConfig(convolution=0, qk_activation="identity")),
    "gated-deltanet": ModelConfig(DeltaNetConfig(gated=True, output_gate=True)),
    "gated-deltanet-signed": ModelConfig(DeltaNetConfig(gated=True, output_gate=True, signed_gate=True)),
    "deltanet-rotating": ModelConfig(DeltaNetConfig(eigenvalues="unit-circle")),
    "deltaproduct": ModelConfig(DeltaNetConfig(householders=2)),
    "kda": ModelConfig(KDAConfig()),
    "mamba": ModelConfig(MambaConfig(), mlp_ratio=0),
    "mamba2": ModelConfig(Mamba2Config(), mlp_ratio=0),
    "mamba3": ModelConfig(Mamba3Config()),
    "gla": ModelConfig(GLAConfig()),
    "hgrn2": ModelConfig(HGRN2Config()),
    "transformer": ModelConfig(AttentionConfig()),
    "mlstm": ModelConfig(MLSTMConfig(), mlp_ratio=0, norm="layer"),
    "slstm": ModelConfig(SLSTMConfig(), mlp_ratio=1.3, mlp="geglu", norm="layer"),
    "dense-transition": ModelConfig(DenseTransitionConfig(), mlp_ratio=0, norm="none", residual=False),
    "diagonal-toy": ModelConfig(DiagonalToyConfig(), d_model=10, mlp_ratio=0, norm="layer", residual=False),
}
SIZED_PRESETS = sized_presets(PRESETS)  # "deltanet-340m", "mamba-60m", ...: see `sizes`


def preset_names() -> str:
    """The names of all presets in one line, those with a size by their pattern."""
    mixers, sizes = ",".join(MIXERS), ",".join(SIZES)
    return f"{', '.join(PRESETS)}; language models: {{{mixers}}}-{{{sizes}}}, {', '.join(ALIASES)}"


def model_config(name: str, *, attention_every: int = 0, **changes: Any) -> ModelConfig:
    """The preset `name`, with fields of the backbone or of its mixers replaced.

        model_config("deltanet", layers=5, eigenvalues="[0,1]", convolution=0)
        model_config("deltanet-340m", eigenvalues="[-1,1]", tied=True)
        model_config("deltanet-60m", attention_every=4)

    `attention_every` = n makes a hybrid: every n-th layer, the last of each n, is attention. In a hybrid an
    option goes to every mixer that has it; a pattern of your own is given as `mixers`.
    """
    config = find("model", name, ChainMap(PRESETS, SIZED_PRESETS))
    backbone = _names(config)
    of_backbone = {key: value for key, value in changes.items() if key in backbone}
    of_mixer = {key: value for key, value in changes.items() if key not in backbone}
    whole = [key for key in ("mixer", "mixers") if key in of_backbone]
    if whole and (of_mixer or attention_every):
        options = [*of_mixer, *(["attention_every"] if attention_every else [])]
        raise UserError(
            f"{name}: give either a whole mixer or single options of it ({', '.join(options)}), not both."
        )
    if "mixer" in of_backbone:
        of_backbone = {"mixers": ()} | of_backbone
    config = replace(config, **of_backbone)
    if attention_every:
        config = with_attention(name, config, attention_every)
    return with_mixer_options(name, config, of_mixer)


def with_attention(name: str, config: ModelConfig, every: int) -> ModelConfig:
    """The config as a hybrid whose layers every, 2 every, ... are attention."""
    if isinstance(every, bool) or not isinstance(every, int) or not 2 <= every <= config.layers:
        raise UserError(
            f"{name}: attention_every is {every!r}, expected 0 (none) or from 2 to layers = {config.layers}."
        )
    return replace(config, mixers=(config.mixer,) * (every - 1) + (attention_for(config.d_model),))


def with_mixer_options(name: str, config: ModelConfig, options: dict[str, Any]) -> ModelConfig:
    """The config with options of its mixers replaced, in every mixer of a hybrid that has them."""
    mixers = config.mixers or (config.mixer,)
    known = {key for mixer in mixers for key in _names(mixer)}
    for key in options:
        if key not in known:
            raise unknown_option(name, key, [*_names(config), *known])
    changed = tuple(
        replace(mixer, **{key: value for key, value in options.items() if key in _names(mixer)})  # type: ignore[type-var]
        for mixer in mixers
    )
    return replace(config, mixer=changed[0], mixers=changed if config.mixers else ())


def _names(config: Any) -> list[str]:
    return [f.name for f in fields(config)]


def build(name: str, vocab_size: int, n_classes: int | None = None, **changes: Any) -> Model:
    """A fresh model by preset name, with options of the backbone and of the mixer; see `model_config`.

    `vocab_size` tokens go in and `n_classes` logits per position come out, as many when None.

    >>> model = build("deltanet", vocab_size=121, eigenvalues="[-1,1]", layers=2, heads=2)
    >>> logits, state = model(torch.zeros(4, 32, dtype=torch.int64))     # tokens (B, T)
    >>> logits.shape
    torch.Size([4, 32, 121])
    """
    return Model(model_config(name, **changes), vocab_size, vocab_size if n_classes is None else n_classes)


def register_mixer(name: str, config: ModelConfig | MixerConfig) -> None:
    """Add a mixer from outside: `--mixer NAME`, `build(NAME, ...)`, its class a kind that specs may name.

    `config` is a frozen dataclass with `build(d_model, layers)` that returns a `Mixer`, or a `ModelConfig`
    around one for another backbone than the default.

        register_mixer("sums", SumsConfig())                  in my_mixers.py
        statetrack train --mixer sums --plugin my_mixers.py   on the command line
    """
    mixer = config.mixer if isinstance(config, ModelConfig) else config
    if not is_dataclass(mixer) or isinstance(mixer, type) or not isinstance(mixer, MixerConfig):
        raise UserError(f"register_mixer: {mixer!r} is not an instance of a dataclass with a `build`.")
    config = config if isinstance(config, ModelConfig) else ModelConfig(mixer)
    shared = sorted({*_names(config), "attention_every"} & {*_names(mixer)})
    if shared:
        raise UserError(
            f"register_mixer: {type(mixer).__name__} has a field {shared[0]!r}, and so has the backbone. "
            "Choose another name for the field."
        )
    if name in SIZED_PRESETS:
        raise UserError(f"register_mixer: the name {name!r} is that of a preset. Choose another.")
    register("register_mixer", name, config, PRESETS)


for _cls in (ModelConfig, *(type(preset.mixer) for preset in PRESETS.values())):
    register_kind(_cls)

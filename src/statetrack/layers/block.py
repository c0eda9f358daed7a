"""One block of the backbone, a mixer and an MLP behind norms, and the configuration of the backbone."""

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from statetrack.config import added
from statetrack.errors import UserError, unknown_name
from statetrack.layers.checks import check_eps
from statetrack.layers.deltanet import DeltaNetConfig
from statetrack.layers.mixer import Mixer, MixerConfig, Packing
from statetrack.layers.mlp import MLPS
from statetrack.layers.norm import RMSNorm, normalise_sum

WIDEST_MLP, MOST_LAYERS = 1_000_000, 100_000  # beyond any use: what is larger is a slip
NORMS = {"rms": RMSNorm, "layer": nn.LayerNorm}


@dataclass(frozen=True)
class ModelConfig:
    """The backbone around a mixer. Vocabulary and classes come from the task.

    `mixers` makes a hybrid: layer i has the mixer i modulo their number, and `mixer` is the first of them.
    """

    # the layer that carries state along time, such as DeltaNetConfig()
    mixer: MixerConfig = field(default_factory=DeltaNetConfig)
    d_model: int = 128  # width of the stream between the layers
    layers: int = 1  # number of blocks: a norm and the mixer, then a norm and the MLP
    mlp_ratio: float = 4.0  # width of the MLP over d_model; 0 for no MLP
    mlp: Literal["swiglu", "geglu"] = "swiglu"  # the gate of the MLP: silu or gelu
    norm: Literal["rms", "layer", "none"] = "rms"  # in front of mixers and MLPs: RMSNorm, LayerNorm, or none
    residual: bool = True  # x + f(x) around mixers and MLPs; False: f(x)
    mixers: tuple[MixerConfig, ...] = added(())  # a pattern of mixers, repeated over the layers
    tied: bool = added(False)  # whether the head is the embedding's table
    norm_eps: float = added(1e-5)  # of the backbone's norms
    # where the norms of attention blocks stand: x + f(norm(x)), or "post", x + norm(f(x)), as in OLMo
    attention_norm: Literal["pre", "post"] = added("pre")
    half_stream: bool = added(False)  # under autocast, whether the sums x + ... are rounded to its dtype too

    def __post_init__(self) -> None:
        if self.mixers:  # equal models have equal configs, and an id, whatever `mixer` was given beside them
            object.__setattr__(self, "mixer", self.mixers[0])

    def mixer_of(self, layer: int) -> MixerConfig:
        """The mixer of layer 0, 1, ..."""
        return self.mixers[layer % len(self.mixers)] if self.mixers else self.mixer


def check_model(config: ModelConfig, vocab_size: int, n_classes: int) -> None:
    for name, value in (("d_model", config.d_model), ("layers", config.layers)):
        if value < 1:
            raise UserError(f"Model: {name} is {value}, expected at least 1.")
    if config.layers > MOST_LAYERS:
        raise UserError(f"Model: layers is {config.layers}, expected at most {MOST_LAYERS:,}.")
    if vocab_size < 1 or n_classes < 1:
        raise UserError(
            f"Model: vocab_size is {vocab_size} and n_classes {n_classes}, expected at least 1 each."
        )
    if not 0 <= config.mlp_ratio <= WIDEST_MLP:
        raise UserError(
            f"Model: mlp_ratio is {config.mlp_ratio}, expected a number from 0 (no MLP) to {WIDEST_MLP:,}."
        )
    if config.tied and vocab_size != n_classes:
        raise UserError(
            f"Model: tied is set with {vocab_size} tokens and {n_classes} classes, expected as many of each: "
            "the head is the embedding's table."
        )
    if len(config.mixers) > config.layers:
        raise UserError(
            f"Model: mixers has {len(config.mixers)} mixers for {config.layers} layers, expected at most one "
            "for each layer."
        )
    check_eps("Model", norm_eps=config.norm_eps)
    if config.mlp not in MLPS:
        raise unknown_name("Model: mlp", config.mlp, MLPS)
    if config.norm not in (*NORMS, "none"):
        raise unknown_name("Model: norm", config.norm, [*NORMS, "none"])
    if config.attention_norm not in ("pre", "post"):
        raise unknown_name("Model: attention_norm", config.attention_norm, ["pre", "post"])


def make_norm(config: ModelConfig) -> nn.Module:
    return nn.Identity() if config.norm == "none" else NORMS[config.norm](config.d_model, eps=config.norm_eps)


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)) if there is an MLP; `residual=False` drops the x +.

    Attention blocks of a model with `attention_norm="post"`: x + norm(mixer(x)), then x + norm(mlp(x)).

    The stream enters and leaves as a pair x, y still to be added (y None: nothing to add), so that the next
    norm can add them in its own kernel.
    """

    def __init__(self, config: ModelConfig, layer: int = 0):
        super().__init__()
        self.residual = config.residual
        self.mixer_norm = make_norm(config)
        self.mixer: Mixer = config.mixer_of(layer).build(config.d_model, config.layers)
        if isinstance(self.mixer, Mixer):
            self.mixer.place(layer, config.layers)
        self.mlp_norm, self.mlp = None, None
        if config.mlp_ratio > 0:
            self.mlp_norm = make_norm(config)
            self.mlp = MLPS[config.mlp](config.d_model, config.mlp_ratio, config.layers)
        self.post_norm = config.attention_norm == "post" and not getattr(self.mixer, "is_recurrent", True)

    def forward(
        self,
        x: Tensor,
        y: Tensor | None = None,
        state: Any = None,
        at: Tensor | None = None,
        packing: Packing | None = None,
    ) -> tuple[Tensor, Tensor | None, Any]:
        """`at` (B, n): the only positions needed afterwards. After the mixer the others are dropped."""
        x, normal = self._read(self.mixer_norm, x, y)
        # mixers that do not pack have no such argument
        mixed, state = self.mixer(normal, state, **({} if packing is None else {"packing": packing}))
        if at is not None:
            x, mixed = select(x, at), select(mixed, at)
        x, y = self._written(self.mixer_norm, x, mixed)
        if self.mlp is not None and self.mlp_norm is not None:
            x, normal = self._read(self.mlp_norm, x, y)
            x, y = self._written(self.mlp_norm, x, self.mlp(normal))
        return x, y, state

    def _read(self, norm: nn.Module, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """x + y, and what the mixer or the MLP reads of it."""
        if self.post_norm:
            x = x if y is None else x + y
            return x, x
        return normalise_sum(norm, x, y)

    def _written(self, norm: nn.Module, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor | None]:
        """The stream after the mixer or the MLP, as a pair still to be added."""
        mixed = norm(mixed) if self.post_norm else mixed
        return (x, mixed) if self.residual else (mixed, None)


def select(x: Tensor, at: Tensor) -> Tensor:
    """The positions `at` (B, n) of each sequence in x (B, T, D), (B, n, D)."""
    return x.gather(1, at[..., None].expand(-1, -1, x.shape[-1]))

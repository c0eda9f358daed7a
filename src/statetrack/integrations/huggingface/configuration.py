"""The configuration of a statetrack model as transformers wants it: plain data in config.json."""

from dataclasses import fields
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from statetrack.config import from_dict, to_dict
from statetrack.errors import UserError
from statetrack.layers import ModelConfig

SHIM = "modeling_statetrack"  # the module of two lines beside saved weights, which `trust_remote_code` loads


class StateTrackConfig(PreTrainedConfig):
    """A `ModelConfig` with a vocabulary: StateTrackConfig(backbone=model_config("deltanet"), vocab_size=256).

    `backbone` is kept as plain data; `model_config` reads it. `eigenvalues` repeats the range of the layers,
    so that config.json shows it at its top: "[0,1]", "[-1,1]", "mixed" for layers that differ, None for
    layers without a choice. `context` is the length of the training sequences; it is not a limit. With
    `training_logits` a call with labels returns logits in training too, for trainers that compute metrics
    from them, at the price of the memory that they take.
    """

    model_type: ClassVar[str] = "statetrack"
    attribute_map: ClassVar[dict[str, str]] = {"max_position_embeddings": "context"}
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    vocab_size: int = 256
    eigenvalues: str | None = None
    backbone: dict[str, Any] | ModelConfig | None = None
    context: int = 2048
    use_cache: bool = True
    training_logits: bool = False
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        inside = {"hidden_size", "num_hidden_layers", *(f.name for f in fields(ModelConfig))} & kwargs.keys()
        if inside:  # transformers would keep them as attributes that change nothing
            raise UserError(
                f"StateTrackConfig: {', '.join(sorted(inside))} cannot be set here, the backbone says it: "
                "StateTrackConfig(backbone=model_config('deltanet', d_model=512, layers=6), vocab_size=...)."
            )
        config = ModelConfig() if self.backbone is None else self.backbone
        config = config if isinstance(config, ModelConfig) else _read(config)
        self.backbone = to_dict(config)
        if self.eigenvalues is None:
            self.eigenvalues = range_of(config)
        self.tie_word_embeddings = config.tied
        self.auto_map = {
            "AutoConfig": f"{SHIM}.StateTrackConfig",
            "AutoModelForCausalLM": f"{SHIM}.StateTrackForCausalLM",
        }
        kwargs.pop("auto_map", None)  # that of a folder, written by a version with another shim
        super().__post_init__(**kwargs)

    @property
    def model_config(self) -> ModelConfig:
        """The configuration of the backbone, checked field by field."""
        config = _read(self.backbone)
        if range_of(config) != self.eigenvalues:
            raise UserError(
                f"StateTrackConfig: eigenvalues is {self.eigenvalues!r}, but the layers of `backbone` have "
                f"{range_of(config)!r}. The range belongs to the layers: a model trained in one range "
                "computes something else in the other. To go on training in the other range, open the model "
                "with statetrack.lm.models.open_model(path, eigenvalues=...)."
            )
        if self.tie_word_embeddings != config.tied:
            raise UserError(
                f"StateTrackConfig: tie_word_embeddings is {self.tie_word_embeddings}, but `tied` of the "
                f"backbone is {config.tied}. Change it there."
            )
        return config

    @property
    def hidden_size(self) -> int:
        return self.model_config.d_model

    @property
    def num_hidden_layers(self) -> int:
        return self.model_config.layers


def range_of(config: ModelConfig) -> str | None:
    """The range of the eigenvalues of all layers, "mixed" if they differ, None if no layer has a choice."""
    mixers = [config.mixer_of(layer) for layer in range(config.layers)]
    ranges = {getattr(mixer, "eigenvalues", None) for mixer in mixers} - {None}
    return "mixed" if len(ranges) > 1 else next(iter(ranges), None)


def _read(backbone: Any) -> ModelConfig:
    config = from_dict(backbone, "StateTrackConfig: backbone")
    if not isinstance(config, ModelConfig):
        raise UserError(f"StateTrackConfig: backbone is a {type(config).__name__}, expected a ModelConfig.")
    return config

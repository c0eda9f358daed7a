"""`StateTrackForCausalLM`: the backbone of this library as a causal language model of transformers."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from statetrack.errors import UserError
from statetrack.files import write_text
from statetrack.integrations.huggingface.cache import StateCache
from statetrack.integrations.huggingface.configuration import SHIM, StateTrackConfig
from statetrack.layers import Model

SHIM_TEXT = (
    "from statetrack.integrations.huggingface import StateTrackConfig, StateTrackForCausalLM\n"
    '__all__ = ["StateTrackConfig", "StateTrackForCausalLM"]\n'
)


class StateTrackForCausalLM(PreTrainedModel, GenerationMixin):
    """Tokens (B, T) -> logits (B, T, vocab_size); `model` is the backbone, `statetrack.layers.Model`.

        model = StateTrackForCausalLM(StateTrackConfig(backbone=model_config("deltanet"), vocab_size=256))
        model.generate(tokens, max_new_tokens=20)

    While training, a call with `labels` returns the loss and no logits: those of a batch are never all in
    memory.
    """

    config_class = StateTrackConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # Trainer passes `num_items_in_batch`
    _tied_weights_keys = {"model.head.weight": "model.embedding.weight"}  # noqa: RUF012
    _no_split_modules = ["Block"]  # noqa: RUF012
    _supports_sdpa = True  # attention layers call it, whatever attn_implementation says
    _is_stateful = True  # no method of generation may take tokens back
    config: StateTrackConfig

    def __init__(self, config: StateTrackConfig):
        super().__init__(config)
        self.model = Model(config.model_config, config.vocab_size, config.vocab_size)
        if not self.model.embedding.weight.is_meta:
            for parameter in self.parameters():  # the layers have set the initial values
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        self.post_init()

    @classmethod
    def from_model(cls, model: Model, **options: Any) -> "StateTrackForCausalLM":
        """A wrapper around this very model; `options` are those of `StateTrackConfig`."""
        vocab_size = model.embedding.num_embeddings
        if model.head.out_features != vocab_size:
            raise UserError(
                f"StateTrackForCausalLM: the model has {vocab_size} tokens and {model.head.out_features} "
                "classes, expected as many of each. Only a model that predicts its own tokens is a language "
                "model."
            )
        config = StateTrackConfig(backbone=model.config, vocab_size=vocab_size, **options)
        with torch.device("meta"):
            wrapper = cls(config)
        wrapper.model = model
        config.dtype = model.embedding.weight.dtype
        return wrapper.train(model.training)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: StateCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        inputs_embeds: Tensor | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """`labels` (B, T) are shifted here: position t is scored on labels[:, t + 1]; -100 does not count.

        `attention_mask` (B, T) is 0 at padding, on either side; as everywhere in transformers it does not
        change `labels`. `logits_to_keep`: an integer n for the last n positions (0: all), or positions (n,)
        or (B, n). `inputs_embeds` (B, T, hidden_size) takes the place of `input_ids`.
        """
        _refuse(others)
        if output_attentions or output_hidden_states:
            raise UserError("StateTrackForCausalLM: it returns neither attentions nor hidden states.")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        tokens = _one_of(input_ids, inputs_embeds)
        if labels is not None and labels.shape != tokens.shape[:2]:
            expected = tuple(tokens.shape[:2])
            raise UserError(f"labels has shape {tuple(labels.shape)}, expected {expected} like the tokens.")
        run = partial(self._run, tokens, attention_mask, past_key_values, use_cache)
        loss, logits = None, None
        if labels is None:
            logits, states = run(keep=logits_to_keep)
        elif self.training and not self.config.training_logits:
            loss, states = run(targets=_shifted(labels))
        else:
            logits, states = run()
            loss = F.cross_entropy(logits.float().flatten(0, 1), _shifted(labels).flatten(), reduction="sum")
        if loss is not None and labels is not None:
            counted = (_shifted(labels) != -100).sum()
            loss = loss / (counted if num_items_in_batch is None else num_items_in_batch)
        cache = None
        if use_cache:
            cache = StateCache(len(self.model.blocks)) if past_key_values is None else past_key_values
            cache.update_states(states, tokens.shape[1])
        parts: dict[str, Any] = {"loss": loss, "logits": logits, "past_key_values": cache}
        output = CausalLMOutputWithPast(**parts)
        as_object = self.config.return_dict if return_dict is None else return_dict
        return output if as_object else output.to_tuple()

    def _run(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None,
        cache: StateCache | None,
        use_cache: bool,
        keep: int | Tensor = 0,
        targets: Tensor | None = None,
    ) -> tuple[Tensor, list[Any]]:
        """Logits at the positions to keep, or the sum of losses if there are targets; and the states."""
        mask = _padding(attention_mask, tokens, use_cache)
        at = _positions(keep, tokens)
        state = None if cache is None else _states(cache)
        result, states = self.model(tokens, state, at=at, targets=targets, attention_mask=mask)
        # a mask of positions to keep, as transformers has it: all logits, then those asked for
        return (result[keep] if isinstance(keep, Tensor) and keep.dtype == torch.bool else result), states

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, *args: Any, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        # `generate` looks for the name inputs_embeds in this signature
        inputs = super().prepare_inputs_for_generation(*args, inputs_embeds=inputs_embeds, **kwargs)  # type: ignore[misc]
        # the step after a prompt, not a prompt or a part of it that is one token long
        if kwargs.get("next_sequence_length") == 1 and not kwargs.get("is_first_iteration"):
            inputs.pop("attention_mask", None)  # a generated token is no padding; to look would stall a GPU
        return inputs

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `forward` makes its own

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.model.embedding = value

    def get_output_embeddings(self) -> nn.Module:
        return self.model.head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.model.head = new_embeddings

    def tie_weights(self, missing_keys: set[str] | None = None, recompute_mapping: bool = True) -> None:
        """Let a tied head read the embedding's table, as the backbone does; its files hold the table once."""
        if self.config.tie_word_embeddings:
            self.model.head.weight = self.model.embedding.weight
            self.model.head.out_features = self.model.embedding.num_embeddings
            if missing_keys is not None:
                missing_keys.discard("model.head.weight")

    def initialize_weights(self) -> None:
        """Give the weights that a checkpoint lacks their initial values; the layers have set all others."""
        lacking = [n for n, p in self.model.named_parameters() if not getattr(p, "_is_hf_initialized", False)]
        if lacking and not self.model.embedding.weight.is_meta:
            fresh = Model(self.config.model_config, self.config.vocab_size, self.config.vocab_size)
            initial, own = dict(fresh.named_parameters()), dict(self.model.named_parameters())
            with torch.no_grad():
                for name in lacking:
                    own[name].copy_(initial[name])

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = None, every_n_layers: int = 1
    ) -> None:
        """Recompute the blocks in the backward pass, by the backbone's own means."""
        if every_n_layers != 1:
            raise UserError(
                f"gradient_checkpointing_enable: every_n_layers is {every_n_layers}, expected 1: the "
                "backbone recomputes all of its blocks."
            )
        self.gradient_checkpointing = enable
        self.model.checkpoint_activations = enable  # type: ignore[assignment]

    def save_pretrained(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """As transformers does, with the module of two lines that `trust_remote_code=True` loads."""
        try:
            super().save_pretrained(save_directory, *args, **kwargs)
        except SafetensorError as error:  # such as a full disk
            raise OSError(f"{save_directory} cannot be written: {error}") from error
        if kwargs.get("is_main_process", True):
            write_text(Path(save_directory) / f"{SHIM}.py", SHIM_TEXT)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModelForCausalLM") -> None:
        """Nothing: transformers would copy this file beside saved weights; the shim takes its place."""


def _one_of(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    given = [x for x in (input_ids, inputs_embeds) if x is not None]
    if len(given) != 1:
        raise UserError(
            f"StateTrackForCausalLM: {'both' if given else 'neither'} of input_ids and inputs_embeds given, "
            "expected one of them."
        )
    (tokens,) = given
    dimensions = 2 if inputs_embeds is None else 3
    if tokens.ndim != dimensions or not tokens.shape[1]:
        name = "input_ids" if inputs_embeds is None else "inputs_embeds"
        axes = ("batch", "time", "hidden_size")[:dimensions]
        raise UserError(
            f"{name} has shape {tuple(tokens.shape)}, expected ({', '.join(axes)}) with at least one token."
        )
    return tokens


def _refuse(options: dict[str, Any]) -> None:
    """Refuse options of other models by name; None is as good as not given."""
    given = [name for name, value in options.items() if value is not None]
    if "position_ids" in given or "cu_seq_lens_q" in given:
        raise UserError(
            "StateTrackForCausalLM: position_ids and cu_seq_lens_q are not taken: positions count from the "
            "first real token of a row. For padded rows give attention_mask; for packed sequences call "
            "`model.model(tokens, packing=...)`."
        )
    if given:
        raise UserError(
            f"StateTrackForCausalLM: {', '.join(given)} not known. See help(type(model).forward)."
        )


def _shifted(labels: Tensor) -> Tensor:
    """The targets of all positions: the labels one position later, -100 at the last."""
    return F.pad(labels[:, 1:], (0, 1), value=-100)


def _padding(attention_mask: Tensor | None, tokens: Tensor, use_cache: bool) -> Tensor | None:
    """(B, T), True at real tokens; None where padding cannot change what is asked for.

    Logits before padding on the right do not depend on it, but the states after it do.
    """
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2 or attention_mask.shape[0] != tokens.shape[0]:
        raise UserError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, expected (batch, time) = "
            f"{tuple(tokens.shape[:2])}."
        )
    mask = attention_mask[:, -tokens.shape[1] :].bool()  # in generation it covers the tokens before, too
    if mask.shape != tokens.shape[:2]:
        raise UserError(
            f"attention_mask has {attention_mask.shape[1]} columns, expected those of input_ids, "
            f"{tokens.shape[1]}, or more."
        )
    harmless = mask if use_cache else mask[:, :-1] | ~mask[:, 1:]
    return None if bool(harmless.all()) else mask


def _positions(keep: int | Tensor, tokens: Tensor) -> Tensor | None:
    """`logits_to_keep` as positions (B, n); None for all."""
    batch, T = tokens.shape[:2]
    if isinstance(keep, int):
        if keep < 0:
            raise UserError(f"logits_to_keep is {keep}, expected 0 (all) or more.")
        if keep == 0 or keep >= T:
            return None
        keep = torch.arange(T - keep, T, device=tokens.device)
    if keep.dtype == torch.bool:
        return None
    return (keep % T).expand(batch, -1)


def _states(cache: Any) -> list[Any] | None:
    if not isinstance(cache, StateCache):
        raise UserError(
            f"past_key_values is a {type(cache).__name__}, expected the StateCache that the model returned, "
            "or None."
        )
    return cache.states

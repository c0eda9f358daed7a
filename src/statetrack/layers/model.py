"""One pre-norm backbone for every mixer, with or without an MLP."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from statetrack.config import added
from statetrack.errors import UserError, unknown_name
from statetrack.layers.checks import check_eps
from statetrack.layers.deltanet import DeltaNetConfig
from statetrack.layers.fusion import joined_product, joins, may_read, recomputes
from statetrack.layers.headwise import round_up
from statetrack.layers.initialisation import small_init, wang_init
from statetrack.layers.mixer import Mixer, MixerConfig, Packing
from statetrack.layers.norm import RMSNorm, normalise_sum
from statetrack.layers.padding import run_model_padded
from statetrack.layers.precision import at_least_float32
from statetrack.layers.recompute import recomputed
from statetrack.layers.tying import tie
from statetrack.ops.autograd import autocast_is_on
from statetrack.ops.checks import check_shape, require_tensors
from statetrack.ops.embedding import embedding
from statetrack.ops.geglu import geglu
from statetrack.ops.linear_cross_entropy import linear_cross_entropy
from statetrack.ops.swiglu import swiglu, swiglu_product

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


class SwiGLU(nn.Module):
    """W_down (silu(W_gate x) * W_up x)."""

    def __init__(self, d_model: int, ratio: float, layers: int):
        super().__init__()
        width = round(ratio * d_model)
        self.gate = nn.Linear(d_model, width, bias=False)
        self.up = nn.Linear(d_model, width, bias=False)
        self.down = nn.Linear(width, d_model, bias=False)
        for linear in (self.gate, self.up, self.down):
            nn.init.normal_(linear.weight, std=0.02)
        with torch.no_grad():
            self.down.weight /= math.sqrt(2 * layers)

    def forward(self, x: Tensor) -> Tensor:
        # gate and up must be equal halves of the joined product, so it cannot have padded columns
        if joins(x, self.gate, self.up) and self.gate.out_features % 4 == 0:
            gate_up = joined_product(x, (self.gate, self.up))
            if recomputes(x) and joins(gate_up, self.down):
                return swiglu_product(gate_up, self.down.weight)
            return self.down(swiglu(gate_up))
        return self.down(F.silu(self.gate(x)) * self.up(x))


class GeGLU(nn.Module):
    """W_down (gelu(W_gate x) * W_up x), with the width and the initialisation of the xlstm package."""

    def __init__(self, d_model: int, ratio: float, layers: int):
        super().__init__()
        width = round_up(ratio * d_model)
        self.gate = nn.Linear(d_model, width, bias=False)
        self.up = nn.Linear(d_model, width, bias=False)
        self.down = nn.Linear(width, d_model, bias=False)
        small_init(self.gate.weight, d_model)
        small_init(self.up.weight, d_model)
        wang_init(self.down.weight, d_model, layers)

    def forward(self, x: Tensor) -> Tensor:
        # as in SwiGLU: equal halves, no padded columns
        if joins(x, self.gate, self.up) and self.gate.out_features % 4 == 0:
            return self.down(geglu(joined_product(x, (self.gate, self.up))))
        return self.down(F.gelu(self.gate(x)) * self.up(x))


MLPS = {"swiglu": SwiGLU, "geglu": GeGLU}


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)) if there is an MLP; `residual=False` drops the x +.

    Attention blocks of a model with `attention_norm="post"`: x + norm(mixer(x)), then x + norm(mlp(x)).

    The stream enters and leaves as a pair x, y still to be added (y None: nothing to add), so that the next
    norm can add them in its own kernel.
    """

    def __init__(self, config: ModelConfig, layer: int = 0):
        super().__init__()
        self.residual = config.residual
        self.mixer_norm = _norm(config)
        self.mixer: Mixer = config.mixer_of(layer).build(config.d_model, config.layers)
        if isinstance(self.mixer, Mixer):
            self.mixer.place(layer, config.layers)
        self.mlp_norm, self.mlp = None, None
        if config.mlp_ratio > 0:
            self.mlp_norm = _norm(config)
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
            x, mixed = _select(x, at), _select(mixed, at)
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


class Model(nn.Module):
    """Tokens (B, T) -> logits (B, T, classes), plus one state per layer to continue from.

    >>> model = Model(ModelConfig(DeltaNetConfig(heads=2), d_model=32, layers=2), vocab_size=10, n_classes=5)
    >>> logits, state = model(torch.zeros(4, 16, dtype=torch.int64))     # 16 tokens
    >>> logits, state = model(torch.zeros(4, 1, dtype=torch.int64), state)   # and one more
    >>> logits.shape
    torch.Size([4, 1, 5])

    With `at` (B, n) only the logits at these positions are computed, (B, n, classes). `packing` gives the
    boundaries of sequences packed in one row of tokens (1, N). With `targets`, of the logits' shape but for
    classes, the loss is returned instead of logits: the sum of the cross-entropy over targets other than
    -100, a float32 scalar, without all logits in memory at once. Without `read_out`, what the head would read
    is returned, (B, T, d_model). `tokens` may also be what the embedding would give, (B, T, d_model).

    Packed sequences start from the given states, (S, ...) for S sequences, or from empty ones. With
    `packed_states` their last states are returned, to decode with: model(next_tokens (S, 1), states).

    `attention_mask` (B, T), 1 or True at real tokens, is for batches padded on either side: every row has the
    logits and the state that it has alone, and its logits are 0 at padding.

    `checkpoint_activations` = True saves memory in training: each block keeps its input only, and is
    computed a second time in the backward pass.
    """

    checkpoint_activations = False

    def __init__(self, config: ModelConfig, vocab_size: int, n_classes: int):
        super().__init__()
        _check(config, vocab_size, n_classes)
        self.config = config
        self.embedding = nn.Embedding(vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = _norm(config)
        self.head = nn.Linear(config.d_model, n_classes, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)
        if config.tied:
            tie(self, self.embedding, self.head)

    def forward(
        self,
        tokens: Tensor,
        state: Sequence[Any] | None = None,
        *,
        at: Tensor | None = None,
        packing: Packing | None = None,
        targets: Tensor | None = None,
        packed_states: bool = False,
        read_out: bool = True,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, list[Any]]:
        packing = self._packing(packing, packed_states)
        require_tensors("Model", tokens=tokens)
        _check_tokens(tokens, self.config.d_model)
        if state is not None and len(state) != len(self.blocks):
            raise UserError(
                f"Model: {len(state)} states for {len(self.blocks)} layers, expected what forward returned."
            )
        if attention_mask is not None:
            mask = _mask(attention_mask, tokens, packing)
            if not bool(mask.all()):
                return run_model_padded(self, self.packs, tokens, mask, state, at, targets, read_out)
        x, y = self._embed(tokens), None
        if self.config.half_stream and autocast_is_on(x.device):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        states, last = list(state or [None] * len(self.blocks)), len(self.blocks) - 1
        recompute = self.checkpoint_activations and torch.is_grad_enabled()
        if tokens.shape[1] > 0:  # without tokens there are no logits, and the states stay
            for i, block in enumerate(self.blocks):
                inputs = x, y, states[i], at if i == last else None, packing
                x, y, states[i] = recomputed(block, *inputs) if recompute else block(*inputs)
        hidden = normalise_sum(self.norm, x, y)[1]
        if not read_out:
            return hidden, states
        return self._read_out(hidden) if targets is None else self._loss(hidden, targets), states

    def _packing(self, packing: Packing | None, states: bool) -> Packing | None:
        if packing is None:
            if states:
                raise UserError("Model: packed_states is set without a packing, expected both or neither.")
            return None
        if not self.packs:
            refusing = {type(b.mixer).__name__: None for b in self.blocks if not _packs(b)}
            raise UserError(
                f"Model: {', '.join(refusing)} cannot take packed sequences. Give a batch with padding and "
                "its attention_mask."
            )
        return Packing(packing[0], packing[1], states)

    @property
    def packs(self) -> bool:
        """Whether `forward` takes a packing."""
        return all(_packs(block) for block in self.blocks)

    @property
    def packs_by_padding(self) -> bool:
        """Whether a mixer pads packed sequences inside, which then save it nothing."""
        return any(getattr(block.mixer, "packs_by_padding", False) for block in self.blocks)

    @property
    def is_recurrent(self) -> bool:
        """Whether every mixer is a recurrence, with a state of constant size: no attention."""
        return all(_is_recurrent(block) for block in self.blocks)

    def _embed(self, tokens: Tensor) -> Tensor:
        """The embedding. The op has a faster gradient, and none of the options of nn.Embedding."""
        if tokens.ndim == 3:  # embedded by the caller
            return tokens
        table = self.embedding
        if may_read(nn.Embedding, table) and _has_no_options(table):
            return embedding(tokens, table.weight)
        return table(tokens)

    def _read_out(self, x: Tensor) -> Tensor:
        """The head. Its columns are padded to a multiple of 8 in half precision on a GPU.

        Unaligned rows are slow: 121 columns take twice the time of 128, and the weight gradient of 3 columns
        eight times that of 8.
        """
        if x.dtype.itemsize < 4 and joins(x, self.head) and self.head.out_features % 8:
            return joined_product(x, (self.head,))[..., : self.head.out_features]
        return self.head(x)

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """The sum of the cross-entropy. A head with a hook or a LoRA wrapper is called, for all logits."""
        shape = tuple(x.shape[:-1])
        check_shape("Model", "targets", targets, shape, "the shape of the logits but for classes")
        if targets.numel() == 0:
            return at_least_float32(x).sum()  # 0, with a gradient
        if may_read(nn.Linear, self.head) and self.head.bias is None:
            return linear_cross_entropy(x, self.head.weight, targets)
        logits = at_least_float32(self.head(x)).flatten(0, -2)
        return F.cross_entropy(logits, targets.flatten().long(), reduction="sum")

    @torch.no_grad()
    def transition_eigenvalues(self, tokens: Tensor) -> list[Tensor | None]:
        """Per layer, the eigenvalues of its transitions on these tokens (see `Mixer`).

        None for the attention layers of a hybrid, which have no transition; attention alone is a `UserError`.
        """
        x, y, spectra = self._embed(tokens), None, []
        for block in self.blocks:
            assert isinstance(block, Block)
            normal = block._read(block.mixer_norm, x, y)[1]
            skipped = not _is_recurrent(block) and any(map(_is_recurrent, self.blocks))
            spectra.append(None if skipped else block.mixer.transition_eigenvalues(normal))
            x, y, _ = block(x, y)
        return spectra

    def extra_repr(self) -> str:
        """The eigenvalue range, the number of parameters, and whether the head is tied."""
        mixers = self.config.mixers or (self.config.mixer,)
        ranges = dict.fromkeys(x for mixer in mixers if (x := getattr(mixer, "eigenvalues", None)))
        shown = [f"eigenvalues={x}" for x in ranges]
        parameters = sum(p.numel() for p in self.parameters())
        return ", ".join([*shown, f"parameters={parameters:,}", f"tied={self.config.tied}"])


def _check_tokens(tokens: Tensor, d_model: int) -> None:
    if tokens.ndim == 3 and tokens.is_floating_point() and tokens.shape[2] == d_model:
        return
    if tokens.ndim != 2:
        raise UserError(
            f"Model: tokens has shape {tuple(tokens.shape)}, expected (batch, time), or for embeddings "
            f"(batch, time, d_model) = (batch, time, {d_model}). One sequence is tokens[None]."
        )


def _mask(attention_mask: Tensor, tokens: Tensor, packing: Packing | None) -> Tensor:
    """(B, T), True at real tokens."""
    if packing is not None:
        raise UserError("Model: give either attention_mask or packing: packed sequences have no padding.")
    check_shape(
        "Model", "attention_mask", attention_mask, tuple(tokens.shape[:2]), "(batch, time), as of tokens,"
    )
    return attention_mask.bool()


def _packs(block: nn.Module) -> bool:
    return getattr(block.mixer, "packs", False)


def _is_recurrent(block: nn.Module) -> bool:
    return getattr(block.mixer, "is_recurrent", True)


def _select(x: Tensor, at: Tensor) -> Tensor:
    """The positions `at` (B, n) of each sequence in x (B, T, D), (B, n, D)."""
    return x.gather(1, at[..., None].expand(-1, -1, x.shape[-1]))


def _has_no_options(table: nn.Embedding) -> bool:
    options = (table.padding_idx, table.max_norm, table.scale_grad_by_freq, table.sparse)
    return options == (None, None, False, False)


def _norm(config: ModelConfig) -> nn.Module:
    return nn.Identity() if config.norm == "none" else NORMS[config.norm](config.d_model, eps=config.norm_eps)


def _check(config: ModelConfig, vocab_size: int, n_classes: int) -> None:
    for name, value in (("d_model", config.d_model), ("layers", config.layers)):
        if value < 1:
            raise UserError(f"Model: {name} is {value}, expected at least 1.")
    if vocab_size < 1 or n_classes < 1:
        raise UserError(
            f"Model: vocab_size is {vocab_size} and n_classes {n_classes}, expected at least 1 each."
        )
    if not (config.mlp_ratio >= 0 and math.isfinite(config.mlp_ratio)):
        raise UserError(f"Model: mlp_ratio is {config.mlp_ratio}, expected 0 (no MLP) or more.")
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

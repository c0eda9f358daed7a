"""One pre-norm backbone for every mixer, with or without an MLP."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from statetrack.errors import UserError
from statetrack.layers.block import Block, ModelConfig, check_model, make_norm
from statetrack.layers.fusion import joined_product, joins, may_read
from statetrack.layers.mixer import Packing
from statetrack.layers.norm import normalise_sum
from statetrack.layers.padding import run_model_padded
from statetrack.layers.precision import at_least_float32
from statetrack.layers.recompute import recomputed
from statetrack.layers.tying import tie
from statetrack.ops.autograd import autocast_is_on
from statetrack.ops.checks import check_shape, require_tensors
from statetrack.ops.embedding import embedding
from statetrack.ops.linear_cross_entropy import linear_cross_entropy


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
        check_model(config, vocab_size, n_classes)
        self.config = config
        self.embedding = nn.Embedding(vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = make_norm(config)
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


def _has_no_options(table: nn.Embedding) -> bool:
    options = (table.padding_idx, table.max_norm, table.scale_grad_by_freq, table.sparse)
    return options == (None, None, False, False)

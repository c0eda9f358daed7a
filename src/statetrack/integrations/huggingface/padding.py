"""Batches with padding: every row is computed from its own tokens alone, wherever its padding is."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from statetrack.errors import UserError
from statetrack.layers import Model


def forward_padded(
    model: Model, tokens: Tensor, mask: Tensor, at: Tensor | None = None, targets: Tensor | None = None
) -> tuple[Tensor, list[Any]]:
    """Logits at the positions `at` (B, n), all if None, and the states after the last token of each row.

    tokens, mask, targets (B, T); mask is True at real tokens. Logits are 0 at padding. With targets the sum
    of losses is returned instead.
    """
    lengths = mask.sum(1)
    if not bool((lengths > 0).all()):
        row = int((lengths == 0).nonzero()[0])
        raise UserError(f"attention_mask: row {row} is all padding, expected at least one token in each row.")
    if at is None:
        at = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    # (B, T): the index of every real token among the real tokens of its row
    index = (mask.long().cumsum(1) - 1).clamp(min=0)
    result, states = _row_by_row(model, tokens, mask, index.gather(1, at), targets)
    if targets is None:
        result = result.masked_fill(~mask.gather(1, at)[..., None], 0.0)
    return result, states


def _row_by_row(
    model: Model, tokens: Tensor, mask: Tensor, at: Tensor, targets: Tensor | None
) -> tuple[Tensor, list[Any]]:
    results = []
    for b in range(len(tokens)):
        if targets is None:
            results.append(model(tokens[b, mask[b]][None], at=at[b][None]))
        else:
            results.append(model(tokens[b, mask[b]][None], targets=targets[b, mask[b]][None]))
    found, states = zip(*results, strict=True)
    layers = [joined(layer) for layer in zip(*states, strict=True)]
    return torch.cat(found) if targets is None else torch.stack(found).sum(), layers


def joined(states: tuple[Any, ...]) -> Any:
    """The states of one layer for several rows as the state of a batch."""
    return tree_map(_cat, *states)


def _cat(*tensors: Tensor) -> Tensor:
    if len({x.shape[1:] for x in tensors}) > 1:
        raise UserError(
            "attention_mask: rows of different lengths cannot share a cache in a model with attention "
            "layers, whose keys have one length. Generate from prompts of one length, or one prompt at a "
            "time."
        )
    return torch.cat(tensors)

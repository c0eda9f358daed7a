"""Batches with padding: every row is computed from its own tokens alone, wherever its padding is."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from statetrack.errors import UserError
from statetrack.layers import Model
from statetrack.layers.mixer import Packing


def forward_padded(
    model: Model,
    tokens: Tensor,
    mask: Tensor,
    state: Sequence[Any] | None = None,
    at: Tensor | None = None,
    targets: Tensor | None = None,
) -> tuple[Tensor, list[Any]]:
    """Logits at the positions `at` (B, n), all if None, and the states after the last token of each row.

    tokens, mask, targets (B, T); mask is True at real tokens. Logits are 0 at padding. With targets the sum
    of losses is returned instead. Rows are packed into one, without padding; models that cannot take packed
    sequences get them one by one.
    """
    lengths = mask.sum(1)
    if not bool((lengths > 0).all()):
        row = int((lengths == 0).nonzero()[0])
        raise UserError(f"attention_mask: row {row} is all padding, expected at least one token in each row.")
    if at is None:
        at = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    # (B, T): the index of every real token among the real tokens of its row
    index = (mask.long().cumsum(1) - 1).clamp(min=0)
    run = _packed if model.packs else _row_by_row
    result, states = run(model, tokens, mask, state, index.gather(1, at), targets)
    if targets is None:
        result = result.masked_fill(~mask.gather(1, at)[..., None], 0.0)
    return result, states


def _packed(
    model: Model,
    tokens: Tensor,
    mask: Tensor,
    state: Sequence[Any] | None,
    at: Tensor,
    targets: Tensor | None,
) -> tuple[Tensor, list[Any]]:
    starts = F.pad(mask.sum(1).cumsum(0), (1, 0))
    packing = Packing(starts, tokens.shape[1])
    row = tokens[mask][None]
    if targets is not None:
        return model(row, state, packing=packing, targets=targets[mask][None], packed_states=True)
    in_row = (at + starts[:-1, None]).reshape(1, -1)
    logits, states = model(row, state, at=in_row, packing=packing, packed_states=True)
    return logits.view(*at.shape, -1), states


def _row_by_row(
    model: Model,
    tokens: Tensor,
    mask: Tensor,
    state: Sequence[Any] | None,
    at: Tensor,
    targets: Tensor | None,
) -> tuple[Tensor, list[Any]]:
    results = []
    for b, real in enumerate(mask):
        before = None if state is None else tree_map_only(Tensor, lambda x, b=b: x[b : b + 1], list(state))
        row = tokens[b, real][None]
        if targets is None:
            results.append(model(row, before, at=at[b][None]))
        else:
            results.append(model(row, before, targets=targets[b, real][None]))
    found, states = zip(*results, strict=True)
    # parts of a state may be None
    joined = tree_map(lambda *rows: None if rows[0] is None else torch.cat(rows), *states)
    return torch.cat(found) if targets is None else torch.stack(found).sum(), joined

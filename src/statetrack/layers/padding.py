"""Batches with padding, in a layer and in a model: every row is computed from its own steps alone."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from statetrack.errors import UserError
from statetrack.layers.mixer import Mixer, Packing
from statetrack.ops.checks import check_shape


def run_padded(
    where: str, mixer: Mixer, x: Tensor, mask: Tensor, state: Any = None, packing: Packing | None = None
) -> tuple[Tensor, Any]:
    """Outputs of a mixer and the states after the last real step of every row.

    x, y (B, T, d_model); mask (B, T), True or not 0 at real steps. y is 0 at padding. Rows are packed into
    one, without padding; mixers that cannot take packed sequences get them one by one.
    """
    if packing is not None:
        raise UserError(f"{where}: give either attention_mask or packing: packed sequences have no padding.")
    check_shape(where, "attention_mask", mask, tuple(x.shape[:2]), "(batch, time)")
    mask = mask.bool()
    if bool(mask.all()):
        return mixer(x, state)
    steps, states = _packed(mixer, x, mask, state) if mixer.packs else _row_by_row(mixer, x, mask, state)
    y = steps.new_zeros(*mask.shape, steps.shape[-1])
    y[mask] = steps
    return y, states


def _packed(mixer: Mixer, x: Tensor, mask: Tensor, state: Any) -> tuple[Tensor, Any]:
    """Outputs of all real steps, row by row, and the states of the rows."""
    packing = Packing(F.pad(mask.sum(1).cumsum(0), (1, 0)), max(x.shape[1], 1), states=True)
    y, states = mixer(x[mask][None], state, packing=packing)  # type: ignore[call-arg]
    return y[0], states


def _row_by_row(mixer: Mixer, x: Tensor, mask: Tensor, state: Any) -> tuple[Tensor, Any]:
    refuse_empty_rows(type(mixer).__name__, mask)
    results = [mixer(x[b, real][None], _row_of(state, b)) for b, real in enumerate(mask)]
    found, states = zip(*results, strict=True)
    return torch.cat([y[0] for y in found]), _joined(states)


def run_model_padded(
    model: Callable[..., tuple[Tensor, list[Any]]],
    packs: bool,
    tokens: Tensor,
    mask: Tensor,
    state: Sequence[Any] | None = None,
    at: Tensor | None = None,
    targets: Tensor | None = None,
    read_out: bool = True,
) -> tuple[Tensor, list[Any]]:
    """What `Model.forward` returns for a batch with padding, and the states after the last token of each row.

    tokens, mask, targets (B, T); mask is True at real tokens. Tokens may be embedded, (B, T, d_model). Logits
    are at the positions `at` (B, n), all if None, and 0 at padding. Rows are packed into one, without
    padding; models that cannot take packed sequences get them one by one.
    """
    refuse_empty_rows("Model", mask)
    if at is None:
        at = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])
    # (B, T): the index of every real token among the real tokens of its row
    index = (mask.long().cumsum(1) - 1).clamp(min=0)
    places, run = index.gather(1, at), _model_packed if packs else _model_row_by_row
    result, states = run(model, tokens, mask, state, places, targets, read_out)
    if targets is None or not read_out:
        result = result.masked_fill(~mask.gather(1, at)[..., None], 0.0)
    return result, states


def refuse_empty_rows(where: str, mask: Tensor) -> None:
    lengths = mask.sum(1)
    if not bool((lengths > 0).all()):
        row = int((lengths == 0).nonzero()[0])
        raise UserError(
            f"{where}: row {row} of attention_mask is all padding, expected at least one token in each row."
        )


def _model_packed(model, tokens: Tensor, mask: Tensor, state, at: Tensor, targets, read_out: bool):
    starts = F.pad(mask.sum(1).cumsum(0), (1, 0))
    options: dict[str, Any] = {"packing": Packing(starts, tokens.shape[1]), "packed_states": True}
    row = tokens[mask][None]
    if targets is not None and read_out:
        return model(row, state, targets=targets[mask][None], **options)
    in_row = (at + starts[:-1, None]).reshape(1, -1)
    logits, states = model(row, state, at=in_row, read_out=read_out, **options)
    return logits.view(*at.shape, -1), states


def _model_row_by_row(model, tokens: Tensor, mask: Tensor, state, at: Tensor, targets, read_out: bool):
    results = []
    for b, real in enumerate(mask):
        row, before = tokens[b, real][None], None if state is None else _row_of(list(state), b)
        if targets is None or not read_out:
            results.append(model(row, before, at=at[b][None], read_out=read_out))
        else:
            results.append(model(row, before, targets=targets[b, real][None]))
    found, states = zip(*results, strict=True)
    loss = targets is not None and read_out
    return torch.stack(found).sum() if loss else torch.cat(found), _joined(states)


def _row_of(state: Any, row: int) -> Any:
    return tree_map_only(Tensor, lambda x: x[row : row + 1], state)


def _joined(states: Sequence[Any]) -> Any:
    """States of single rows as one of a batch; parts of a state may be None."""
    return tree_map(lambda *rows: None if rows[0] is None else torch.cat(rows), *states)

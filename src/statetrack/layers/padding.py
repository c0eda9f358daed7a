"""Batches with padding in one layer: every row is computed from its own steps, wherever its padding is."""

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
    results = []
    for b, real in enumerate(mask):
        before = tree_map_only(Tensor, lambda s, b=b: s[b : b + 1], state)
        results.append(mixer(x[b, real][None], before))
    found, states = zip(*results, strict=True)
    joined = tree_map(lambda *rows: None if rows[0] is None else torch.cat(rows), *states)
    return torch.cat([y[0] for y in found]), joined

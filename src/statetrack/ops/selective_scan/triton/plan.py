"""What the shapes and layouts of a scan's inputs decide: how the work is cut up, and what is kept."""

import os
from typing import Any, NamedTuple

from torch import Tensor

from statetrack.ops.selective_scan.triton.tiles import BY_CHANNEL, BY_NEITHER, BY_TIME
from statetrack.ops.triton_runtime.sizes import processors

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Tile(NamedTuple):
    steps: int
    channels: int


# Where channels lie next to each other, a lane takes two of them: half as many numbers are left to be summed
# over lanes. The interpreter visits a tile's numbers one by one, so its tiles are small.
SINGLE, PAIRED = (Tile(4, 8), Tile(2, 8)) if INTERPRETED else (Tile(16, 32), Tile(8, 64))
# Programs every processor should get, of which it runs sixteen at once forward and eight backward; and the
# fewest tiles worth a segment of their own.
PROGRAMS = 16
SHORTEST = 4
# Packed sequences that are put in order, at most: more keep the processors busy in any order.
MOST_ORDERED = 8192
# u, delta, A, B, C, D, z, bias, first state and cu_seqlens: tensors, or None for the last five
Inputs = tuple[Any, ...]


class Sizes(NamedTuple):
    tile: Tile
    blocks: int  # programs beside each other, along channels
    tiles: int  # along time; if sequences are packed, those of the row they lie in
    segments: int  # parts of time that run at once
    each: int  # tiles of a segment
    tail: int  # 1 if the last tile is half a one, or may be


def _tile_for(u: Tensor, number: int) -> Tile:
    """`PAIRED` if it can be and leaves programs enough to fill the GPU, without cutting time."""
    enough = PROGRAMS // 2 * processors(u.device) < number * (u.shape[1] // PAIRED.channels)
    return PAIRED if enough and u.shape[1] % 2 == 0 and _in_pairs(u) else SINGLE


def sizes(batch: int, channels: int, T: int, processors: int, tile: Tile = SINGLE) -> Sizes:
    """How the work is cut up: along time only if sequences and channels leave processors idle.

    A segment costs a further half pass forward and a quarter of a pass backward.
    """
    blocks, tiles = -(-channels // tile.channels), -(-T // tile.steps)
    segments = max(1, min(PROGRAMS * processors // (batch * blocks), tiles // SHORTEST))
    each = -(-tiles // segments)
    tail = int(0 < T % tile.steps <= tile.steps // 2)
    return Sizes(tile, blocks, tiles, -(-tiles // each), each, tail)


def sizes_for(u: Tensor, cu_seqlens: Tensor | None = None) -> Sizes:
    """Packed sequences run whole: one program walks along a sequence, however long, for a tile's channels."""
    (batch, channels, T), tile = u.shape, _tile_for(u, sequences(u, cu_seqlens))
    if cu_seqlens is not None:
        tiles = -(-T // tile.steps)
        return Sizes(tile, -(-channels // tile.channels), tiles, 1, tiles, 1)
    return sizes(batch, channels, T, processors(u.device), tile)


def sequences(u: Tensor, cu_seqlens: Tensor | None) -> int:
    return u.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def is_ordered(cu_seqlens: Tensor | None) -> bool:
    """Whether programs take packed sequences by their length."""
    return cu_seqlens is not None and cu_seqlens.shape[0] - 1 <= MOST_ORDERED


def keeps_ungated(u: Tensor, z: Tensor | None, cu_seqlens: Tensor | None) -> bool:
    """Whether the outputs before the gate are kept for the backward, and not computed again there.

    It saves a tile of registers, so that a processor runs twelve programs at once instead of eight.
    """
    return z is not None and sizes_for(u, cu_seqlens).tile == PAIRED


def saved_numbers(u: Tensor, A: Tensor, cu_seqlens: Tensor | None, save: bool) -> int:
    """Of the state before every tile but the first, and of what segments multiply a state by.

    A packed sequence of T > 0 steps has (T - 1) // L such states, with L steps in a tile; over all sequences
    of a row of R steps these add up to at most R // L, wherever the sequences begin.
    """
    (batch, channels, T), N, size = u.shape, A.shape[1], sizes_for(u, cu_seqlens)
    if not save:
        states = sequences(u, cu_seqlens) * size.segments
    else:
        states = batch * (size.tiles - 1) if cu_seqlens is None else T // size.tile.steps
    products = batch * size.segments if size.segments > 1 else 0
    return (states + products) * channels * N


def layout(inputs: Inputs) -> tuple:
    """All that the launches depend on: the shapes of u and A give those of the others."""
    u, A, cu_seqlens = inputs[0], inputs[2], inputs[9]
    return (
        u.shape,
        A.shape,
        None if cu_seqlens is None else cu_seqlens.shape,
        u.get_device(),
        *[None if x is None else (x.stride(), x.dtype) for x in inputs],
    )


def lies(x: Tensor) -> int:
    _, d, t = x.stride()
    return BY_CHANNEL if d == 1 else BY_TIME if t == 1 else BY_NEITHER


def alike(x: Tensor, *others: Tensor) -> bool:
    strides = x.stride()
    return all(y.stride() == strides for y in others)


def in_vectors(T: int, packed: bool, *tensors: Tensor) -> bool:
    """Whether eight numbers along time can be loaded at once wherever time is innermost."""
    if packed:  # a sequence may start at any step
        return False
    return T % 8 == 0 and not any(x.stride(0) % 8 or x.stride(1) % 8 for x in tensors if lies(x) == BY_TIME)


def _in_pairs(x: Tensor) -> bool:
    """Whether two neighbouring channels can be loaded at once."""
    return lies(x) == BY_CHANNEL and x.stride(0) % 2 == 0 and x.stride(2) % 2 == 0


def all_in_pairs(size: Sizes, *tensors: Tensor) -> bool:
    return size.tile == PAIRED and all(map(_in_pairs, tensors))


def is_filled(channels: int, T: int, size: Sizes, packed: bool) -> bool:
    """Whether every tile lies inside its sequence and inside the channels."""
    whole = channels % size.tile.channels == 0 and T % (size.tile.steps >> size.tail) == 0
    return whole and not packed

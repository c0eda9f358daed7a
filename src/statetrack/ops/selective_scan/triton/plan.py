"""How a scan is partitioned into programs, which layout flags its kernels get, and how much is saved.

All of it follows from shapes, strides and the number of multiprocessors; nothing is tuned at run time.
"""

import os
from typing import NamedTuple

from torch import Tensor

from statetrack.ops.selective_scan.arguments import ScanInputs
from statetrack.ops.selective_scan.triton.load_store import (
    CHANNELS_INNERMOST,
    NEITHER_INNERMOST,
    TIME_INNERMOST,
)
from statetrack.ops.triton_runtime.sizes import processors

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Tile(NamedTuple):
    steps: int
    channels: int


# One channel per lane, or two where channels are innermost: half as many numbers are then summed over lanes.
# The interpreter visits the numbers of a tile one by one, so its tiles are small.
SINGLE, PAIRED = (Tile(4, 8), Tile(2, 8)) if INTERPRETED else (Tile(16, 32), Tile(8, 64))
# Programs per multiprocessor to aim for (it runs sixteen at once forward and eight backward), and the fewest
# tiles worth a segment of their own.
PROGRAMS_PER_PROCESSOR = 16
MIN_SEGMENT_TILES = 4
# Packed sequences are sorted up to this number: more keep the multiprocessors busy in any order.
MAX_SORTED = 8192


class Partition(NamedTuple):
    tile: Tile
    channel_blocks: int  # programs along channels
    tiles: int  # along time; of the whole row if sequences are packed
    segments: int  # parts of time that run in parallel
    segment_tiles: int  # tiles of a segment
    half_tail: int  # 1 if the last tile has half the steps, or may have


def _tile_for(u: Tensor, sequences: int) -> Tile:
    """`PAIRED` if channels are innermost and there are programs enough to fill the GPU without segments."""
    enough = PROGRAMS_PER_PROCESSOR // 2 * processors(u.device) < sequences * (u.shape[1] // PAIRED.channels)
    return PAIRED if enough and u.shape[1] % 2 == 0 and _has_channel_pairs(u) else SINGLE


def partition(batch: int, channels: int, T: int, processors: int, tile: Tile = SINGLE) -> Partition:
    """Time is cut into segments only if sequences and channels leave multiprocessors idle.

    A segment costs another half pass forward and a quarter of a pass backward.
    """
    channel_blocks, tiles = -(-channels // tile.channels), -(-T // tile.steps)
    wanted = PROGRAMS_PER_PROCESSOR * processors // (batch * channel_blocks)
    if wanted == 2:  # costs more than it brings: 3.2 ms instead of 2.9 both ways, B16 T2048 D2048 on an H200
        wanted = 1
    segments = max(1, min(wanted, tiles // MIN_SEGMENT_TILES))
    segment_tiles = -(-tiles // segments)
    half_tail = int(0 < T % tile.steps <= tile.steps // 2)
    return Partition(tile, channel_blocks, tiles, -(-tiles // segment_tiles), segment_tiles, half_tail)


def partition_for(u: Tensor, cu_seqlens: Tensor | None = None) -> Partition:
    """The partition of a call. Packed sequences are not cut into segments: a program takes a whole one."""
    (batch, channels, T), tile = u.shape, _tile_for(u, sequence_count(u, cu_seqlens))
    if cu_seqlens is not None:
        tiles = -(-T // tile.steps)
        return Partition(tile, -(-channels // tile.channels), tiles, 1, tiles, 1)
    return partition(batch, channels, T, processors(u.device), tile)


def sequence_count(u: Tensor, cu_seqlens: Tensor | None) -> int:
    """The batch size, or the number of packed sequences."""
    return u.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def is_sorted(cu_seqlens: Tensor | None) -> bool:
    """Whether programs take packed sequences longest first."""
    return cu_seqlens is not None and cu_seqlens.shape[0] - 1 <= MAX_SORTED


def saves_y(u: Tensor, z: Tensor | None, cu_seqlens: Tensor | None) -> bool:
    """Whether y, the output before the gate, is saved for the backward rather than recomputed there.

    It saves a tile of registers, so that a multiprocessor runs twelve programs at once instead of eight.
    """
    return z is not None and partition_for(u, cu_seqlens).tile == PAIRED


def saved_size(u: Tensor, A: Tensor, cu_seqlens: Tensor | None, save: bool) -> int:
    """Numbers in the buffer of saved states: the state before every tile but the first, and segment decays.

    A packed sequence of T > 0 steps has (T - 1) // L such states, with L steps in a tile; over all sequences
    of a row of R steps these add up to at most R // L, wherever the sequences begin. Without `save` there is
    one state per sequence and segment, overwritten from tile to tile.
    """
    (batch, channels, T), N, size = u.shape, A.shape[1], partition_for(u, cu_seqlens)
    if not save:
        states = sequence_count(u, cu_seqlens) * size.segments
    else:
        states = batch * (size.tiles - 1) if cu_seqlens is None else T // size.tile.steps
    segment_decays = batch * size.segments if size.segments > 1 else 0
    return (states + segment_decays) * channels * N


def call_key(inputs: ScanInputs, *gradients: Tensor | None) -> tuple:
    """All that the launches depend on: the shapes of u and A give those of the others."""
    u, A, cu_seqlens = inputs.u, inputs.A, inputs.cu_seqlens
    return (
        u.shape,
        A.shape,
        None if cu_seqlens is None else cu_seqlens.shape,
        u.get_device(),
        *[None if x is None else (x.stride(), x.dtype) for x in (*inputs, *gradients)],
    )


def innermost(x: Tensor) -> int:
    """The LAYOUT constant of a (batch, channels, time) tensor: which axis has stride 1."""
    _, d, t = x.stride()
    return CHANNELS_INNERMOST if d == 1 else TIME_INNERMOST if t == 1 else NEITHER_INNERMOST


def same_strides(x: Tensor, *others: Tensor) -> bool:
    """Whether one set of offsets serves all these tensors."""
    strides = x.stride()
    return all(y.stride() == strides for y in others)


def has_vector_loads(T: int, packed: bool, *tensors: Tensor) -> bool:
    """Whether eight numbers along time can be loaded at once wherever time is innermost."""
    if packed:  # a sequence may start at any step
        return False
    by_time = [x for x in tensors if innermost(x) == TIME_INNERMOST]
    return T % 8 == 0 and not any(x.stride(0) % 8 or x.stride(1) % 8 for x in by_time)


def _has_channel_pairs(x: Tensor) -> bool:
    """Whether two neighbouring channels can be loaded at once."""
    return innermost(x) == CHANNELS_INNERMOST and x.stride(0) % 2 == 0 and x.stride(2) % 2 == 0


def has_channel_pairs(size: Partition, *tensors: Tensor) -> bool:
    """Whether two channels per lane can be loaded at once from all tensors."""
    return size.tile == PAIRED and all(map(_has_channel_pairs, tensors))


def is_unmasked(channels: int, T: int, size: Partition, packed: bool) -> bool:
    """Whether every tile lies inside its sequence and inside the channels."""
    whole = channels % size.tile.channels == 0 and T % (size.tile.steps >> size.half_tail) == 0
    return whole and not packed

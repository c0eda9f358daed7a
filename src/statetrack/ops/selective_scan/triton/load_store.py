"""Loads and stores of the tiled scan kernels: tiles of L steps by BD channels, and rows of B and C.

A warp holds a tile with its channels along the lanes and its steps in the registers of each lane. Tensors of
shape (batch, channels, time) come in any memory layout (`LAYOUT`); what the layout guarantees is told to
the compiler, so that it emits wide loads.
"""

import triton
import triton.language as tl

# After a branch on a constexpr the compiler continues, so the other branch needs its `else`.
# ruff: noqa: RET505

# LAYOUT of a (batch, channels, time) tensor: which axis has stride 1.
CHANNELS_INNERMOST, TIME_INNERMOST, NEITHER_INNERMOST = 0, 1, 2


@triton.jit
def multiple_of_8(x):
    """x, a multiple of eight, in a form that tells the compiler so: it then loads 16 bytes at once."""
    return (x // 8) * 8


@triton.jit
def multiple_of_2(x):
    """x, an even number, in a form that tells the compiler so: it then loads two channels at once."""
    return (x // 2) * 2


@triton.jit
def annotated_strides(
    x_b, x_d, x_t, LAYOUT: tl.constexpr, VECTOR_LOADS: tl.constexpr, CHANNEL_PAIRS: tl.constexpr
):
    """The strides with their divisibility: by eight if VECTOR_LOADS along time, even if CHANNEL_PAIRS."""
    if VECTOR_LOADS and LAYOUT == 1:
        x_b, x_d = multiple_of_8(x_b), multiple_of_8(x_d)
    if CHANNEL_PAIRS:
        x_b, x_t = multiple_of_2(x_b), multiple_of_2(x_t)
    return x_b, x_d, x_t


@triton.jit
def packed_sequence(cu_seqlens, s, L: tl.constexpr):
    """First step, length and number of tiles of packed sequence s, and 1 if its last tile is a half one.

    An empty sequence has one tile too, with no step inside: it copies the initial state to the last state.
    """
    start = tl.load(cu_seqlens + s).to(tl.int64)
    T = (tl.load(cu_seqlens + s + 1).to(tl.int64) - start).to(tl.int32)
    up = T + L - 1
    return start, T, tl.maximum(up // L, 1), (up % L < L // 2).to(tl.int32)


@triton.jit
def first_step(x, b, start, x_b, x_t, PACKED: tl.constexpr):
    """Pointer to the first step of sequence b, which is step `start` of the only row if PACKED."""
    if PACKED:
        return x + start * x_t
    else:
        return x + b * x_b


@triton.jit
def tile_offsets(x_d, x_t, d, t, LAYOUT: tl.constexpr):
    """Offsets (L, BD) inside one sequence. A stride of 1 is left out, so that the compiler knows it."""
    if LAYOUT == 0:
        return t * x_t + d[None, :]
    elif LAYOUT == 1:
        return (d * x_d)[None, :] + t
    else:
        return (d * x_d)[None, :] + t * x_t


@triton.jit
def load_masked(pointers, mask):
    """A load in float32, zeros where the mask is false."""
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_tile(pointers, inside, UNMASKED: tl.constexpr):
    """A tile in float32. UNMASKED: every tile of this call lies inside the tensor."""
    if UNMASKED:
        return tl.load(pointers).to(tl.float32)
    else:
        return load_masked(pointers, inside)


@triton.jit
def store_tile(pointers, x, inside, UNMASKED: tl.constexpr):
    """Store a tile in the dtype of the tensor. UNMASKED as in `load_tile`."""
    if UNMASKED:
        tl.store(pointers, x.to(pointers.dtype.element_ty))
    else:
        tl.store(pointers, x.to(pointers.dtype.element_ty), mask=inside)


@triton.jit
def channel_layout_zeros(like, d, t, unknown):
    """Zeros whose register layout, one channel per lane, spreads to whatever they are added to.

    The compiler lays out a computation like the last load that feeds it. Tensors with time innermost are
    loaded with lanes along time. This load comes after theirs and has lanes along channels, so they are
    transposed through shared memory. Its mask is always false, which the compiler cannot know.
    """
    return tl.load(like + t * unknown + d[None, :], mask=unknown < 0, other=0.0).to(tl.float32)


@triton.jit
def BC_pointers(B, C, t, B_t, C_t):
    """Pointers to B_t and C_t side by side, (steps, 2): one load and one pass through shared memory."""
    return tl.where(tl.arange(0, 2)[None, :] == 0, B + t * B_t, C + t * C_t)


@triton.jit
def split_BC(pair, L: tl.constexpr):
    """B and C, (L,) each, from a load of `BC_pointers`; a second copy below the first one is dropped."""
    if pair.shape[0] == L:
        return tl.split(pair)
    else:
        copies = tl.reshape(pair, (2, pair.shape[0] // 2, 2))
        once, _ = tl.split(tl.permute(copies, (1, 2, 0)))
        return split_BC(once, L)

// What the recurrences that work in chunks share: rows of a head, its state, and scratch memory.
#pragma once

#include "arguments.h"
#include "vector.h"

namespace {

// Prefetch a row: rows of one head lie far apart, so the hardware prefetcher does not see them coming.
INLINE void prefetch(const float* row, int64_t numbers) {
    for (int64_t i = 0; i < numbers; i += 16) __builtin_prefetch(row + i);
}

INLINE const float* at(const Tensor3& x, int64_t batch, int64_t t, int64_t h) {
    return x.data + batch * x.s0 + t * x.s1 + h * x.s2;
}

// A state (K, V) with padded rows: from x, or zero where x is null.
template <class Sizes>
void read_state(const Sizes& d, const float* x, float* S, int64_t K, int64_t V) {
    memset(S, 0, K * V * sizeof(float));
    if (x)
        for (int64_t i = 0; i < d.K; i++) copy_row(S + i * V, x + i * d.V, d.V, V);
}

template <class Sizes>
void write_state(const Sizes& d, const float* S, float* x, int64_t V) {
    for (int64_t i = 0; i < d.K; i++) write_row(x + i * d.V, S + i * V, d.V);
}

void scale_all(float* x, int64_t numbers, float factor) {
    if (factor != 1.0f)
        for (int64_t i = 0; i < numbers; i += W) store(x + i, factor * load(x + i));
}

// Whether neither NaN nor infinity is among the numbers: zero times either is NaN.
bool all_finite(const float* x, int64_t numbers) {
    vec zeros = (vec){};
    for (int64_t i = 0; i < numbers; i += W) zeros += 0.0f * load(x + i);
    return sum(zeros) == 0.0f;
}

// Rows x [rows][width] and their transpose out [width][ld].
void transpose_rows(float* x, int64_t rows, int64_t width, float* out, int64_t ld) {
    const int64_t padded = round_up(rows, W);
    if (rows < padded) memset(x + rows * width, 0, (padded - rows) * width * sizeof(float));
    transpose(x, width, out, ld, padded, width);
}

// Where a sequence's tokens are when it is cut into chunks of d.chunk, and which saved states are its own: one
// for every `group` chunks.
struct Stretch {
    int64_t batch, start, length, chunks, first_saved;

    static int64_t count(int64_t length, int64_t each) { return (length + each - 1) / each; }

    template <class Sizes>
    Stretch(const Sizes& d, int64_t group, int64_t s) {
        const int64_t* offsets = d.cu_seqlens;
        batch = offsets ? 0 : s;
        start = offsets ? offsets[s] : 0;
        length = offsets ? offsets[s + 1] - start : d.T;
        chunks = count(length, d.chunk);
        const int64_t between = d.chunk * group;  // tokens from one saved state to the next
        first_saved = offsets ? 0 : s * count(length, between);
        for (int64_t i = 0; offsets && i < s; i++)
            first_saved += count(offsets[i + 1] - offsets[i], between);
    }
};

// S (K, V), row i times factors[i].
INLINE void scale_rows(float* S, const float* factors, int64_t K, int64_t V) {
    for (int64_t i = 0; i < K; i++)
        for (int64_t j = 0; j < V; j += W) store(S + i * V + j, factors[i] * load(S + i * V + j));
}

// Rows too long for a sum of squares in float32 are measured in this unit, 2^-67.
constexpr float LONG = 0x1p-67f;

// 1 / |x| where |x|^2 overflows.
__attribute__((noinline, cold)) float long_scale(const float* x, int64_t width) {
    vec squares = (vec){};
    for (int64_t i = 0; i < width; i += W) squares += (LONG * load(x + i)) * (LONG * load(x + i));
    return LONG / __builtin_sqrtf(sum(squares));
}

// x times a factor, divided by sqrt(|x|^2 + 1e-6) if `l2norm`; returns what it was divided by, inverted.
INLINE float normalise(float* x, int64_t width, bool l2norm, float factor) {
    float scale = 1.0f;
    if (l2norm) {
        vec squares = (vec){};
        for (int64_t i = 0; i < width; i += W) squares += load(x + i) * load(x + i);
        scale = 1.0f / __builtin_sqrtf(sum(squares) + 1e-6f);
        if (__builtin_expect(scale == 0.0f, 0)) scale = long_scale(x, width);
    }
    const float both = scale * factor;
    if (both != 1.0f)
        for (int64_t i = 0; i < width; i += W) store(x + i, both * load(x + i));
    return scale;
}

// Scratch memory, allocated from one block; every allocation is a multiple of 16 floats.
struct Arena {
    float* next;
    float* operator()(int64_t numbers) { return (next += numbers) - numbers; }
};

}  // namespace

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

// Scratch memory, allocated from one block; every allocation is a multiple of 16 floats.
struct Arena {
    float* next;
    float* operator()(int64_t numbers) { return (next += numbers) - numbers; }
};

}  // namespace

// Products of gates between the steps of a short chunk, one gate per key channel:
//
//     out_ts = sum_c left_tc (a_{s+1} ... a_t)_c k_sc        s <= t
//
// Every product is formed from the gates themselves, step by step: no logarithm, no quotient, so signs, zeros
// and tiny gates need no case of their own.
#pragma once

#include "vector.h"

namespace {

// The most steps of a chunk with a gate per channel, whose pairs of steps all have products of their own.
constexpr int64_t MAX_PAIRED = 16;

// The rows t, ..., t + M - 1 of `out` for KINDS of left rows, W columns from the j-th on.
template <int64_t M, int64_t KINDS>
INLINE void pair_rows(int64_t t, int64_t j, int64_t width, int64_t K, const float* gates, float* decayed,
                      const float* const* left, float* const* out) {
    ivec column;
    for (int64_t i = 0; i < W; i++) column[i] = (int32_t)(j + i);
    vec total[M][KINDS];
    UNROLL for (int64_t i = 0; i < M; i++) UNROLL for (int64_t n = 0; n < KINDS; n++) total[i][n] = (vec){};
    for (int64_t c = 0; c < width; c++) {
        vec key = load(decayed + c * MAX_PAIRED + j);
        UNROLL for (int64_t i = 0; i < M; i++) {
            // only keys of earlier steps pass this gate; columns beyond t are of no use
            const ivec earlier = column < (int32_t)(t + i);
            key = earlier ? gates[(t + i) * K + c] * key : key;
            UNROLL for (int64_t n = 0; n < KINDS; n++) total[i][n] += left[n][(t + i) * K + c] * key;
        }
        store(decayed + c * MAX_PAIRED + j, key);
    }
    UNROLL for (int64_t i = 0; i < M; i++) UNROLL for (int64_t n = 0; n < KINDS; n++)
        store(out[n] + (t + i) * MAX_PAIRED + j, total[i][n]);
}

// out [rows][MAX_PAIRED] for KINDS of left rows, undefined above the diagonal. left and gates [rows][K];
// `decayed` holds the keys transposed, [K][MAX_PAIRED], and is overwritten.
template <int64_t KINDS>
void pair_steps(int64_t rows, int64_t width, int64_t K, const float* gates, float* decayed,
                const float* const* left, float* const* out) {
    constexpr int64_t M = 4;  // rows whose sums fill the registers
    for (int64_t j = 0; j < rows; j += W) {
        int64_t t = j;
        for (; t + M <= rows; t += M) pair_rows<M, KINDS>(t, j, width, K, gates, decayed, left, out);
        for (; t < rows; t++) pair_rows<1, KINDS>(t, j, width, K, gates, decayed, left, out);
    }
}

// Clear x_ts [rows][MAX_PAIRED] for s >= t + first.
INLINE void clear_from(float* x, int64_t rows, int64_t first) {
    const int64_t columns = round_up(rows, W);
    for (int64_t t = 0; t < rows; t++)
        if (t + first < columns) memset(x + t * MAX_PAIRED + t + first, 0, (columns - t - first) * sizeof(float));
}

}  // namespace

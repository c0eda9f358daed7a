// Products of gates between the steps of a short chunk, one gate per key channel:
//
//     out_ts = sum_c left_tc (a_{s+1} ... a_t)_c k_sc        s <= t
//
// for several kinds of left rows, and their gradients. Every product is formed from the gates themselves, step by
// step: no logarithm, no quotient, so signs, zeros and tiny gates need no case of their own.
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

// The gradients of a chunk with respect to left rows, keys and gates. The chunk used its products of gates for
// `out`, for P o left, for k_out = X o k and for P_C, with P_t = a_1 ... a_t and X_t = a_{t+1} ... a_C; dout, din,
// dk_out and dend are what these received. dout is [rows][MAX_PAIRED], dend [K], everything else [rows][K].
template <int64_t KINDS>
struct PairGradients {
    int64_t rows, K;
    const float *gates, *keys, *dk_out, *dend;
    const float *left[KINDS], *dout[KINDS], *din[KINDS];
    float *dleft[KINDS], *dkeys, *da;

    // A product w_t = a_t w_{t-1} has the gradient y_t = (what w_t was used for) + a_{t+1} y_{t+1}, and
    // da_t += y_t w_{t-1}: nothing is divided, and it is exact where a_t is 0. W channels at a time.
    void run() const {
        constexpr int64_t M = 2;  // keys that share the loads of a step
        for (int64_t i = 0; i < K; i += W) {
            Sums sums;
            from_start(i, sums);
            int64_t s = 0;
            for (; s + M <= rows; s += M) from_keys<M>(i, s, sums);
            for (; s < rows; s++) from_keys<1>(i, s, sums);
            for (int64_t t = 0; t < rows; t++) {
                UNROLL for (int64_t n = 0; n < KINDS; n++) store(dleft[n] + t * K + i, sums.dleft[n][t]);
                store(da + t * K + i, sums.da[t]);
            }
        }
    }

   private:
    struct Sums {
        vec dleft[KINDS][MAX_PAIRED], da[MAX_PAIRED];
    };

    // P: the products that start with 1 before the chunk.
    INLINE void from_start(int64_t i, Sums& sums) const {
        vec P[MAX_PAIRED], product = all(1.0f), y = load(dend + i);
        for (int64_t t = 0; t < rows; t++) P[t] = product *= load(gates + t * K + i);
        for (int64_t t = rows - 1; t >= 0; t--) {
            UNROLL for (int64_t n = 0; n < KINDS; n++) {
                const vec slope = load(din[n] + t * K + i);
                sums.dleft[n][t] = slope * P[t];
                y += slope * load(left[n] + t * K + i);
            }
            sums.da[t] = t ? y * P[t - 1] : y;
            y *= load(gates + t * K + i);
        }
    }

    // The products that start with the keys s, ..., s + M - 1.
    template <int64_t M>
    INLINE void from_keys(int64_t i, int64_t s, Sums& sums) const {
        vec w[M][MAX_PAIRED], y[M];
        UNROLL for (int64_t m = 0; m < M; m++) {
            vec product = w[m][s + m] = load(keys + (s + m) * K + i);
            for (int64_t t = s + m + 1; t < rows; t++) w[m][t] = product *= load(gates + t * K + i);
            y[m] = load(dk_out + (s + m) * K + i);
        }
        for (int64_t t = rows - 1; t >= s + M; t--) step<M>(i, s, t, M, w, y, sums);
        UNROLL for (int64_t m = M - 1; m >= 0; m--) {
            const int64_t t = s + m;  // where key m starts, and the keys before it pass a gate
            if (m) step<M>(i, s, t, m, w, y, sums);
            UNROLL for (int64_t n = 0; n < KINDS; n++) {
                const vec slope = all(dout[n][t * MAX_PAIRED + t]);
                sums.dleft[n][t] += slope * w[m][t];
                y[m] += slope * load(left[n] + t * K + i);
            }
            store(dkeys + t * K + i, y[m]);
        }
    }

    // Step t back, for the first `count` of M keys.
    template <int64_t M>
    INLINE void step(int64_t i, int64_t s, int64_t t, int64_t count, const vec (&w)[M][MAX_PAIRED], vec (&y)[M],
                     Sums& sums) const {
        const vec gate = load(gates + t * K + i);
        UNROLL for (int64_t n = 0; n < KINDS; n++) {
            const vec row = load(left[n] + t * K + i);
            vec total = sums.dleft[n][t];
            UNROLL for (int64_t m = 0; m < count; m++) {
                const vec slope = all(dout[n][t * MAX_PAIRED + s + m]);
                total += slope * w[m][t];
                y[m] += slope * row;
            }
            sums.dleft[n][t] = total;
        }
        vec total = sums.da[t];
        UNROLL for (int64_t m = 0; m < count; m++) {
            total += y[m] * w[m][t - 1];
            y[m] *= gate;
        }
        sums.da[t] = total;
    }
};

}  // namespace

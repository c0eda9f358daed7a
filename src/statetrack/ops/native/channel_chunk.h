// One chunk of the delta rule with a gate per key channel for one sequence and head, as both directions see it
// (docs/internals/gates.md). With P_t = a_1 ... a_t and X_t = a_{t+1} ... a_C (products per channel),
//
//     q_in = P o Q        k_in = P o K        k_out = X o K
//     A_ts = sum_c q_tc (a_{s+1} ... a_t)_c k_sc,  s <= t        L_ts = the same with k_t, s < t
//
// A chunk has `tokens` tokens and `rows` = tokens x householders steps, at most MAX_PAIRED. A token is read
// after the last of its steps, so the queries of the others are zero, and decays before the first, so the gates
// of the others are one. Widths are padded with zeros to multiples of 16.
#pragma once

#include "pairs.h"
#include "product.h"
#include "rows.h"
#include "threads.h"

namespace {

// Chunks per saved state; the backward computes the states between again. Python knows it too (native.py).
constexpr int64_t GROUP = 4;

struct ChannelChunk {
    const Delta& d;
    const Stretch& where;
    int64_t h, K, V;                    // widths, padded
    int64_t tokens, rows, token, step;  // of this chunk: counts, and the first token and step
    // [rows][K]; L and A [rows][MAX_PAIRED]; P_C [K]; b and 1 / |q|, 1 / |k| per row
    float *Q, *keys, *gates, *q_in, *k_in, *k_out, *L, *A, *end, *b, *scale_q, *scale_k;
    float* decayed;  // [K][MAX_PAIRED]

    ChannelChunk(const Delta& d, const Stretch& where, int64_t h)
        : d(d), where(where), h(h), K(round_up(d.K, 16)), V(round_up(d.V, 16)) {}

    int64_t floats() const { return MAX_PAIRED * (7 * K + 2 * MAX_PAIRED + 3) + K; }

    void place(Arena& take) {
        Q = take(MAX_PAIRED * K);
        keys = take(MAX_PAIRED * K);
        gates = take(MAX_PAIRED * K);
        q_in = take(MAX_PAIRED * K);
        k_in = take(MAX_PAIRED * K);
        k_out = take(MAX_PAIRED * K);
        decayed = take(MAX_PAIRED * K);
        L = take(MAX_PAIRED * MAX_PAIRED);
        A = take(MAX_PAIRED * MAX_PAIRED);
        b = take(MAX_PAIRED);
        scale_q = take(MAX_PAIRED);
        scale_k = take(MAX_PAIRED);
        end = take(K);
    }

    bool first_of_token(int64_t row) const { return row % d.householders == 0; }
    bool last_of_token(int64_t row) const { return (row + 1) % d.householders == 0; }
    // Where a step is in contiguous tensors with one row per step, and with one row per token.
    int64_t step_row(int64_t row) const {
        return (where.batch * d.T * d.householders + step + row) * d.H + h;
    }
    int64_t token_row(int64_t row) const {
        return (where.batch * d.T + token + row / d.householders) * d.H + h;
    }

    // Load keys and gates of a chunk, and compute what it adds to the state and keeps of it: k_out and P_C.
    // Prefetch the chunk `ahead` tokens further on, which comes next.
    void read_keys(int64_t chunk, int64_t ahead) {
        const int64_t n = d.householders;
        token = where.start + chunk * d.chunk, step = token * n;
        tokens = min(d.chunk, where.length - chunk * d.chunk), rows = tokens * n;
        for (int64_t i = 0; i < rows; i++) {
            copy_row(keys + i * K, at(d.k, where.batch, step + i, h), d.K, K);
            prefetch(at(d.k, where.batch, step + i + ahead * n, h), d.K);
            scale_k[i] = normalise(keys + i * K, K, d.l2norm, 1.0f);
            b[i] = *at(d.beta, where.batch, step + i, h);
            if (first_of_token(i)) {
                copy_row(gates + i * K, at(d.g, where.batch, token + i / n, h), d.K, K);
                prefetch(at(d.g, where.batch, token + i / n + ahead, h), d.K);
            } else {
                for (int64_t c = 0; c < K; c += W) store(gates + i * K + c, all(1.0f));
            }
        }
        for (int64_t c = 0; c < K; c += W) {
            vec product = all(1.0f);
            for (int64_t t = rows - 1; t >= 0; t--) {
                store(k_out + t * K + c, product * load(keys + t * K + c));
                product *= load(gates + t * K + c);
            }
            store(end + c, product);
        }
    }

    // The rest of the chunk, after `read_keys`: queries, q_in, k_in, L and A.
    void read_queries(int64_t ahead) {
        for (int64_t i = 0; i < rows; i++) {
            const int64_t t = token + i / d.householders;
            if (!last_of_token(i)) {
                memset(Q + i * K, 0, K * sizeof(float));
                continue;
            }
            copy_row(Q + i * K, at(d.q, where.batch, t, h), d.K, K);
            prefetch(at(d.q, where.batch, t + ahead, h), d.K);
            scale_q[i] = normalise(Q + i * K, K, d.l2norm, (float)d.scale);
        }
        for (int64_t c = 0; c < K; c += W) {
            vec product = all(1.0f);
            for (int64_t t = 0; t < rows; t++) {
                product *= load(gates + t * K + c);
                store(q_in + t * K + c, product * load(Q + t * K + c));
                store(k_in + t * K + c, product * load(keys + t * K + c));
            }
        }
        transpose_rows(keys, rows, K, decayed, MAX_PAIRED);
        const float* left[] = {keys, Q};
        float* out[] = {L, A};
        pair_steps<2>(rows, d.K, K, gates, decayed, left, out);
        clear_from(L, rows, 0);
        clear_from(A, rows, 1);
    }

    // S <- P_C o S + k_out^T U, after `read_keys`; without the first term where no state entered.
    void advance_state(const float* U, float* S, bool entered) const {
        if (entered) scale_rows(S, end, d.K, V);
        product(d.K, V, rows, transposed(rows_of(k_out, K)), U, V, S, V, 1.0f, entered);
    }
};

}  // namespace

// One chunk of gated linear attention for one sequence and head, as both directions see it (docs/internals/gates.md).
// With P_t = a_1 ... a_t and X_t = a_{t+1} ... a_C,
//
//     q_in = P o Q        k_out = X o K        A_ts = sum_k q_tk (a_{s+1} ... a_t)_k k_sk,  s <= t
//
// Every product of gates is formed from the gates themselves, step by step: no logarithm, no quotient, so
// signs, zeros and tiny gates need no case of their own. The gates are one per key channel or one per head.
// Widths are padded with zeros to multiples of 16, and so are steps where they become columns.
#pragma once

#include "pairs.h"
#include "product.h"
#include "rows.h"
#include "threads.h"

namespace {

struct GatedChunk {
    const Gated& d;
    const Stretch& where;
    int64_t h, K, V, steps;  // widths and the largest number of tokens, padded
    int64_t tokens, token;   // of this chunk: their number, and the first
    // [tokens][K], values [tokens][V]; gates [tokens][K] or [tokens]; A [tokens][steps]; P_C, spread, [K]
    float *Q, *keys, *values, *gates, *q_in, *k_out, *A, *end;
    float* keys_t;  // K^T [K][steps]; with a gate per channel it decays while A is built
    // only with a gate per head: Q K^T and products of gates [tokens][steps]; P, X [tokens]
    float *raw, *decay, *in, *out;

    GatedChunk(const Gated& d, const Stretch& where, int64_t h)
        : d(d), where(where), h(h), K(round_up(d.K, 16)), V(round_up(d.V, 16)),
          steps(round_up(d.chunk, 16)) {}

    int64_t floats() const {
        return steps * (5 * K + V + steps) + K + (d.per_channel ? steps * K : steps * (2 * steps + 3));
    }

    void place(Arena& take) {
        Q = take(steps * K);
        keys = take(steps * K);
        q_in = take(steps * K);
        k_out = take(steps * K);
        values = take(steps * V);
        A = take(steps * steps);
        end = take(K);
        keys_t = take(steps * K);
        raw = decay = in = out = nullptr;
        gates = take(d.per_channel ? steps * K : steps);
        if (d.per_channel) return;
        raw = take(steps * steps);
        decay = take(steps * steps);
        in = take(steps);
        out = take(steps);
    }

    // Load keys, values and gates of a chunk, and compute what it adds to the state and keeps of it:
    // k_out and P_C. Prefetch the chunk `ahead` tokens further on, which comes next.
    void read_keys(int64_t chunk, int64_t ahead) {
        token = where.start + chunk * d.chunk;
        tokens = min(d.chunk, where.length - chunk * d.chunk);
        for (int64_t i = 0; i < tokens; i++) {
            const int64_t t = token + i;
            copy_row(keys + i * K, at(d.k, where.batch, t, h), d.K, K);
            copy_row(values + i * V, at(d.v, where.batch, t, h), d.V, V);
            prefetch(at(d.k, where.batch, t + ahead, h), d.K);
            prefetch(at(d.v, where.batch, t + ahead, h), d.V);
            const float* a = at(d.a, where.batch, t, h);
            if (d.per_channel) {
                copy_row(gates + i * K, a, d.K, K);
                prefetch(at(d.a, where.batch, t + ahead, h), d.K);
            } else {
                gates[i] = *a;
            }
        }
        for (int64_t c = 0; c < K; c += W) {
            vec product = all(1.0f);
            for (int64_t t = tokens - 1; t >= 0; t--) {
                store(k_out + t * K + c, product * load(keys + t * K + c));
                product *= gate(t, c);
            }
            store(end + c, product);
        }
    }

    // The rest of the chunk, after `read_keys`: queries, q_in and A.
    void read_queries(int64_t ahead) {
        const float scale = (float)d.scale;
        for (int64_t i = 0; i < tokens; i++) {
            copy_row(Q + i * K, at(d.q, where.batch, token + i, h), d.K, K);
            prefetch(at(d.q, where.batch, token + i + ahead, h), d.K);
        }
        for (int64_t c = 0; c < K; c += W) {
            vec product = all(1.0f);
            for (int64_t t = 0; t < tokens; t++) {
                const vec query = scale * load(Q + t * K + c);
                product *= gate(t, c);
                store(Q + t * K + c, query);
                store(q_in + t * K + c, product * query);
            }
        }
        if (d.per_channel)
            pair_queries();
        else
            multiply_decay();
    }

    INLINE vec gate(int64_t t, int64_t c) const {
        return d.per_channel ? load(gates + t * K + c) : all(gates[t]);
    }

    // Clear what is above the diagonal of x [tokens][steps].
    void clear_above(float* x) const {
        const int64_t columns = round_up(tokens, W);
        for (int64_t t = 0; t + 1 < columns && t < tokens; t++)
            memset(x + t * steps + t + 1, 0, (columns - t - 1) * sizeof(float));
    }

   private:
    // A with a gate per channel.
    void pair_queries() {
        transpose_rows(keys, tokens, K, keys_t, steps);
        const float* left[] = {Q};
        float* out[] = {A};
        pair_steps<1>(tokens, d.K, K, gates, keys_t, left, out);
        clear_above(A);
    }

    // A with a gate per head: Q K^T times the products of gates, whose rows follow from one another.
    void multiply_decay() {
        const int64_t columns = round_up(tokens, W);
        transpose_rows(keys, tokens, K, keys_t, steps);
        product(tokens, columns, d.K, rows_of(Q, K), keys_t, steps, raw, steps, 1.0f, false, RESULT_LOWER);
        clear_above(raw);
        float total = 1.0f;
        for (int64_t t = 0; t < tokens; t++) {
            float* row = decay + t * steps;
            const vec a = all(gates[t]);
            for (int64_t j = 0; j < columns; j += W) {
                const vec before = t ? load(row - steps + j) : (vec){};
                store(row + j, a * before);
            }
            row[t] = 1.0f;
            for (int64_t j = 0; j < columns; j += W)
                store(A + t * steps + j, load(row + j) * load(raw + t * steps + j));
            in[t] = total *= gates[t];
        }
        for (int64_t j = 0; j < columns; j += W) store(out + j, load(decay + (tokens - 1) * steps + j));
    }
};

// S <- P_C o S + k_out^T V, after `read_keys`; without the first term where no state entered.
INLINE void advance_state(const GatedChunk& c, float* S, bool entered) {
    if (entered) scale_rows(S, c.end, c.d.K, c.V);
    product(c.d.K, c.V, c.tokens, transposed(rows_of(c.k_out, c.K)), c.values, c.V, S, c.V, 1.0f, entered);
}

}  // namespace

// One chunk of the delta rule for one sequence and head, as both directions see it (docs/internals/delta_rule.md):
//
//     P = strictly_lower(K K^T o exp(G_i - G_j))        A = lower(Q K^T o exp(G_i - G_j))
//
// A chunk has `tokens` tokens and `rows` = tokens x householders steps. Widths are padded with zeros to
// multiples of 16, and so are rows where they become columns. Without a gate (G = 0) decayed copies of Q
// and K are Q and K.
#pragma once

#include "arguments.h"
#include "product.h"
#include "rows.h"
#include "threads.h"

namespace {

// Lower bound of g: exp(-40) is zero for all purposes, and much smaller values would cost the precision of
// others.
constexpr float FLOOR = -40.0f;
// e^88 is the largest power of e that float32 holds.
constexpr float LARGEST = 88.0f;

// Where a sequence's tokens are and how it is cut: chunks of nearly equal length.
struct Sequence {
    int64_t batch, start, length, chunks, size, first_chunk;

    // The number of chunks whose length comes nearest to `chunk`, without those that would be empty because
    // the length is rounded up.
    static int64_t count(int64_t length, int64_t chunk) {
        if (length == 0) return 0;
        const int64_t nearest = (length + chunk / 2) / chunk, wanted = nearest ? nearest : 1;
        const int64_t size = (length + wanted - 1) / wanted;
        return (length + size - 1) / size;
    }

    Sequence(const Delta& d, int64_t s) {
        batch = d.cu_seqlens ? 0 : s;
        start = d.cu_seqlens ? d.cu_seqlens[s] : 0;
        length = d.cu_seqlens ? d.cu_seqlens[s + 1] - start : d.T;
        chunks = count(length, d.chunk);
        size = chunks ? (length + chunks - 1) / chunks : 0;
        first_chunk = d.cu_seqlens ? 0 : s * chunks;
        if (d.cu_seqlens)
            for (int64_t i = 0; i < s; i++) first_chunk += count(d.cu_seqlens[i + 1] - d.cu_seqlens[i],
            d.chunk);
    }

    int64_t tokens(int64_t chunk) const { return min(size, length - chunk * size); }
};

struct Chunk {
    const Delta& d;
    const Sequence& where;
    int64_t h, K, V, max_rows, max_tokens;  // widths and largest counts, padded
    int64_t tokens, rows, token, step;        // of this chunk: counts, and the first token and step
    // Q and q_in [tokens][K]; keys [rows][K] and K^T; P [rows][max_rows]; A [tokens][max_rows]; b [rows]
    float *Q, *keys, *keys_t, *P, *A, *b, *q_in, *k_in, *k_out;
    // Only with a gate, per step: G in two parts, the second what rounding took off the first; e^G and
    // e^(G_C - G). Behind closed gates, of FLOOR each, one part would lose the digits of later decays.
    float *G, *G_rest, *in, *out;
    float *decay_P, *decay_A;    // only with a gate: e^(G_i - G_j)
    float *scale_q, *scale_k;    // 1 / |q| and 1 / |k| per row, where rows are normalised

    Chunk(const Delta& d, const Sequence& where, int64_t h)
        : d(d), where(where), h(h), K(round_up(d.K, 16)), V(round_up(d.V, 16)),
          max_rows(round_up(where.size * d.householders, 16)), max_tokens(round_up(where.size, 16)) {}

    int64_t floats() const {
        const int64_t gate = d.g.data ? 4 * max_rows + (max_tokens + 2 * max_rows) * K +
                                            (max_rows + max_tokens) * max_rows
                                      : 0;
        return max_tokens * K + 2 * max_rows * K + (max_rows + max_tokens) * max_rows + 2 * max_rows +
               max_tokens + gate;
    }

    template <class Take>
    void place(Take take) {
        Q = take(max_tokens * K);
        keys = take(max_rows * K);
        keys_t = take(max_rows * K);
        P = take(max_rows * max_rows);
        A = take(max_tokens * max_rows);
        b = take(max_rows);
        scale_q = take(max_tokens);
        scale_k = take(max_rows);
        q_in = Q, k_in = k_out = keys;
        G = G_rest = in = out = decay_P = decay_A = nullptr;
        if (!d.g.data) return;
        G = take(max_rows);
        G_rest = take(max_rows);
        in = take(max_rows);
        out = take(max_rows);
        q_in = take(max_tokens * K);
        k_in = take(max_rows * K);
        k_out = take(max_rows * K);
        decay_P = take(max_rows * max_rows);
        decay_A = take(max_tokens * max_rows);
    }

    float end() const { return d.g.data ? in[rows - 1] : 1.0f; }  // e^(G_C), the decay of the state

    // Load a chunk and compute its P and A; prefetch the chunk `ahead` tokens further on, which comes next.
    void read(int64_t chunk, int64_t ahead) {
        tokens = where.tokens(chunk), rows = tokens * d.householders;
        token = where.start + chunk * where.size, step = token * d.householders;
        for (int64_t i = 0; i < tokens; i++) {
            copy_row(Q + i * K, at(d.q, where.batch, token + i, h), d.K, K);
            prefetch(at(d.q, where.batch, token + i + ahead, h), d.K);
            scale_q[i] = normalise(Q + i * K, K, d.l2norm, (float)d.scale);
        }
        for (int64_t i = 0; i < rows; i++) {
            copy_row(keys + i * K, at(d.k, where.batch, step + i, h), d.K, K);
            prefetch(at(d.k, where.batch, step + i + ahead * d.householders, h), d.K);
            scale_k[i] = normalise(keys + i * K, K, d.l2norm, 1.0f);
            b[i] = *at(d.beta, where.batch, step + i, h);
        }
        const int64_t columns = round_up(rows, W);
        if (rows < columns) memset(keys + rows * K, 0, (columns - rows) * K * sizeof(float));
        transpose(keys, K, keys_t, max_rows, columns, K);
        const Part part = d.householders == 1 ? RESULT_LOWER : FULL;
        product(rows, columns, d.K, rows_of(keys, K), keys_t, max_rows, P, max_rows, 1.0f, false,
                RESULT_LOWER);
        product(tokens, columns, d.K, rows_of(Q, K), keys_t, max_rows, A, max_rows, 1.0f, false, part);
        if (d.g.data) read_gate();
        clear_above();
    }

    // Clear the entries that are not causal: P_ij for j >= i, A_ij for steps after token i.
    void clear_above() const { clear_above(P, A); }
    void clear_above(float* P, float* A) const {
        const int64_t columns = round_up(rows, W);
        for (int64_t i = 0; i < rows; i++) memset(P + i * max_rows + i, 0, (columns - i) * sizeof(float));
        for (int64_t i = 0; i < tokens; i++) {
            const int64_t seen = (i + 1) * d.householders;
            memset(A + i * max_rows + seen, 0, (columns - seen) * sizeof(float));
        }
    }

   private:
    void read_gate() {
        double total = 0.0;
        for (int64_t i = 0; i < tokens; i++) {
            const float g = *at(d.g, where.batch, token + i, h);
            total += g < FLOOR ? FLOOR : g;
            for (int64_t j = 0; j < d.householders; j++) set_G(i * d.householders + j, total);
        }
        for (int64_t i = rows; i < round_up(rows, W); i++) set_G(i, total);
        for (int64_t i = 0; i < rows; i += W) {
            store(in + i, exp(load(G + i)));
            store(out + i, exp(from_G(rows - 1, i)));
        }
        for (int64_t i = 0; i < rows; i++) {
            decay_row(decay_P + i * max_rows, P + i * max_rows, i);
            for (int64_t c = 0; c < K; c += W) {
                const vec key = load(keys + i * K + c);
                store(k_in + i * K + c, in[i] * key);
                store(k_out + i * K + c, out[i] * key);
            }
        }
        for (int64_t i = 0; i < tokens; i++) {
            decay_row(decay_A + i * max_rows, A + i * max_rows, i * d.householders);
            for (int64_t c = 0; c < K; c += W)
                store(q_in + i * K + c, in[i * d.householders] * load(Q + i * K + c));
        }
    }

    void set_G(int64_t i, double total) {
        G[i] = (float)total;
        G_rest[i] = (float)(total - G[i]);
    }

    // G_i - G_j, ..., G_i - G_(j + W - 1): where first parts are near, their difference is exact.
    vec from_G(int64_t i, int64_t j) const { return (G[i] - load(G + j)) + (G_rest[i] - load(G_rest + j)); }

    // e^(G_i - G_j) for one i. Above the diagonal, where it could overflow, it is bounded: the backward
    // multiplies it by zero there. A bound of one would be wrong below the diagonal, where g may be positive.
    void decay_row(float* decay, float* products, int64_t i) const {
        for (int64_t j = 0; j < rows; j += W) {
            const vec e = exp(min(from_G(i, j), LARGEST));
            store(decay + j, e);
            store(products + j, e * load(products + j));
        }
    }
};

}  // namespace

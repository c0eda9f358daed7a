// The backward of the delta rule for one sequence and head, chunk by chunk from the last. D (K, V) is the
// gradient of the state that leaves the chunk:
//
//     dU = A^T dO + e^(G_C - G) K D        X + (diag(b) P)^T X = dU,  Y = diag(b) X
//     dV = Y        db = rowsum(X o E)     dA = lower(dO U^T)         dP = -strictly_lower(Y U^T)
//     dQ = (dA o e^..) K + e^G dO S^T
//     dK = ((dP + dP^T) o e^..) K + (dA o e^..)^T Q - e^G Y S^T + e^(G_C - G) U D^T
//     D <- e^(G_C) D + (e^G Q)^T dO - (e^G K)^T Y
//
// Products with S^T and D^T are done as (S dO^T)^T: the thin matrices are transposed, never the states. With
// a gate, every term that carries e^(G_i - G_j) adds its value times its gradient to dg_t for j < t <= i:
//
//     dg_t = sum_{i >= t > j} (dP o P + dA o A)_ij + sum_{i >= t} in_i + sum_{j < t} out_j + e^(G_C) <S, D>
//
// where in and out are the terms with e^G and e^(G_C - G). Differences of sums over all pairs would be
// shorter, but under a strong decay they would cancel to less than their rounding errors.
#pragma once

#include "delta_forward.h"

namespace {

struct Backward {
    const Delta& d;
    Chunk& c;
    float *S, *D, *E, *U, *X, *Y, *dO;             // S, D (K, V); [rows][V], dO [tokens][V]
    float *U_t, *Y_t, *dO_t;                       // [V][max_rows], [V][max_tokens]
    float *dP, *dA;                                // as P and A
    float *dQ, *dK, *dQ_t, *dK_t, *through_S;      // [tokens][K], [rows][K], [K][max_tokens], [K][max_rows]
    float *dg, *through_in, *through_out;          // only with a gate: [tokens]; in and out of dg, [rows]
    float *crossing;                               // only with a gate: sums over i of dP o P + dA o A, [rows]
};

// Multiply a row of dP or dA, from dP o (e^.. K K^T) to (dP o e^..) o K K^T, and add its terms to `crossing`.
INLINE void decay_gradient(float* gradient, const float* value, const float* decay, float* crossing,
                           int64_t columns) {
    for (int64_t j = 0; j < columns; j += W) {
        const vec slope = load(gradient + j);
        store(crossing + j, load(crossing + j) + slope * load(value + j));
        store(gradient + j, slope * load(decay + j));
    }
}

// dA and dP, with what they add to dg.
void inner_gradients(const Backward& w) {
    const Delta& d = w.d;
    const Chunk& c = w.c;
    const int64_t columns = round_up(c.rows, W), ld = c.max_rows, n = d.householders;
    product(c.tokens, columns, d.V, rows_of(w.dO, c.V), w.U_t, ld, w.dA, ld, 1.0f, false,
            n == 1 ? RESULT_LOWER : FULL);
    product(c.rows, columns, d.V, rows_of(w.Y, c.V), w.U_t, ld, w.dP, ld, -1.0f, false, RESULT_LOWER);
    c.clear_above(w.dP, w.dA);
    if (!d.g.data) return;
    memset(w.crossing, 0, columns * sizeof(float));
    for (int64_t t = c.tokens - 1; t >= 0; t--) {
        const int64_t seen = round_up((t + 1) * n, W);  // the rest of these rows is zero
        for (int64_t i = t * n; i < (t + 1) * n; i++)
            decay_gradient(w.dP + i * ld, c.P + i * ld, c.decay_P + i * ld, w.crossing, seen);
        decay_gradient(w.dA + t * ld, c.A + t * ld, c.decay_A + t * ld, w.crossing, seen);
        // `crossing` now sums over i >= t; those with j < t pass the decay of token t
        memset(w.crossing + t * n, 0, (seen - t * n) * sizeof(float));
        vec total = (vec){};
        for (int64_t j = 0; j < seen; j += W) total += load(w.crossing + j);
        w.dg[t] = sum(total);
    }
}

// Finish dg: what the state brings in to token t or later, what leaves from before it, and what passes
// through.
void gate_gradients(const Backward& w, bool passes) {
    const Chunk& c = w.c;
    const int64_t n = w.d.householders;
    float through = 0.0f;
    if (passes) {
        vec both = (vec){};
        for (int64_t i = 0; i < c.K * c.V; i += W) both += load(w.S + i) * load(w.D + i);
        through = c.end() * sum(both);
    }
    float later = 0.0f, earlier = 0.0f;
    for (int64_t t = c.tokens - 1; t >= 0; t--) {
        for (int64_t j = 0; j < n; j++) later += w.through_in[t * n + j];
        w.dg[t] += later;
    }
    for (int64_t t = 0; t < c.tokens; t++) {
        w.dg[t] += earlier + through;
        for (int64_t j = 0; j < n; j++) earlier += w.through_out[t * n + j];
    }
}

// dQ_t = e^G S dO^T and dK_t = -e^G S Y^T + e^(G_C - G) D U^T, time along the vectors.
void state_gradients(const Backward& w, bool entered, bool leaving) {
    const Delta& d = w.d;
    const Chunk& c = w.c;
    const int64_t rows = round_up(c.rows, W), tokens = round_up(c.tokens, W), ld = c.max_rows;
    const bool gate = d.g.data;
    if (entered) {
        transpose_rows(w.Y, c.rows, c.V, w.Y_t, ld);
        transpose_rows(w.dO, c.tokens, c.V, w.dO_t, c.max_tokens);
        product(d.K, tokens, d.V, rows_of(w.S, c.V), w.dO_t, c.max_tokens, w.dQ_t, c.max_tokens, 1.0f,
                false);
        product(d.K, rows, d.V, rows_of(w.S, c.V), w.Y_t, ld, w.dK_t, ld, -1.0f, false);
    }
    if (leaving)
        product(d.K, rows, d.V, rows_of(w.D, c.V), w.U_t, ld, gate ? w.through_S : w.dK_t, ld, 1.0f,
                entered && !gate);
    if (!gate) return;
    for (int64_t j = 0; j < rows; j += W) {
        vec to_in = (vec){}, to_out = (vec){};
        for (int64_t i = 0; i < d.K; i++) {
            const vec key = load(c.keys_t + i * ld + j);
            vec dk = (vec){};
            if (entered) {
                const vec part = load(w.dK_t + i * ld + j) * load(c.in + j);
                to_in += part * key;
                dk += part;
            }
            if (leaving) {
                const vec part = load(w.through_S + i * ld + j) * load(c.out + j);
                to_out += part * key;
                dk += part;
            }
            store(w.dK_t + i * ld + j, dk);
        }
        store(w.through_in + j, to_in);
        store(w.through_out + j, to_out);
    }
    if (entered)
        for (int64_t i = 0; i < c.tokens; i++) {
            float total = 0.0f;
            for (int64_t k = 0; k < d.K; k++) {
                float* x = w.dQ_t + k * c.max_tokens + i;
                *x *= c.in[i * d.householders];
                total += *x * c.Q[i * c.K + k];
            }
            w.through_in[i * d.householders] += total;
        }
    gate_gradients(w, entered && leaving);
}

// dQ and dK as rows, from their transposes and from dA and dP.
void gather_gradients(const Backward& w, bool entered, bool leaving) {
    const Delta& d = w.d;
    const Chunk& c = w.c;
    const int64_t ld = c.max_rows, K = c.K;
    const bool simple = d.householders == 1;
    if (entered) transpose(w.dQ_t, c.max_tokens, w.dQ, K, K, round_up(c.tokens, W));
    if (entered || leaving) transpose(w.dK_t, ld, w.dK, K, K, round_up(c.rows, W));
    const Matrix dA = rows_of(w.dA, ld), dP = rows_of(w.dP, ld);
    product(c.tokens, K, c.rows, dA, c.keys, K, w.dQ, K, 1.0f, entered, simple ? FACTOR_LOWER : FULL);
    product(c.rows, K, c.tokens, transposed(dA), c.Q, K, w.dK, K, 1.0f, entered || leaving,
            simple ? FACTOR_UPPER : FULL);
    product(c.rows, K, c.rows, dP, c.keys, K, w.dK, K, 1.0f, true, FACTOR_LOWER);
    product(c.rows, K, c.rows, transposed(dP), c.keys, K, w.dK, K, 1.0f, true, FACTOR_UPPER);
}

// Through the scale and the normalisation y = s x, s = 1 / |x|: dx = s (dy - y (y . dy)). y comes times
// `factor`.
void write_gradient(const Delta& d, float* dy, const float* y, float scale, float factor, int64_t width,
                    float* out) {
    float along = 0.0f;
    if (d.l2norm) {
        vec dot = (vec){};
        for (int64_t i = 0; i < width; i += W) dot += load(dy + i) * load(y + i);
        along = factor != 0.0f ? sum(dot) / factor : 0.0f;  // without it y is zero
    }
    for (int64_t i = 0; i < width; i += W)
        store(dy + i, scale * (factor * load(dy + i) - along * load(y + i)));
    write_row(out, dy, d.K);
}

// The gradients of one chunk; D goes from its leaving to its entering state.
void backward_chunk(const Backward& w, int64_t chunk, bool entered, bool leaving) {
    const Delta& d = w.d;
    Chunk& c = w.c;
    const Sequence& where = c.where;
    const int64_t K = c.K, V = c.V;
    c.read(chunk, -where.size);
    const int64_t first = where.batch * d.T + c.token;
    for (int64_t i = 0; i < c.tokens; i++)
        copy_row(w.dO + i * V, at(d.dout, where.batch, c.token + i, c.h), d.V, V);
    for (int64_t i = 0; i < c.rows; i++) {
        float* e = w.E + i * V;
        copy_row(e, d.errors + ((first * d.householders + i) * d.H + c.h) * d.V, d.V, V);
        for (int64_t j = 0; j < V; j += W) store(w.U + i * V + j, c.b[i] * load(e + j));
    }
    product(c.rows, V, c.tokens, transposed(rows_of(c.A, c.max_rows)), w.dO, V, w.X, V, 1.0f, false,
            d.householders == 1 ? FACTOR_UPPER : FULL);
    if (leaving) product(c.rows, V, d.K, rows_of(c.k_out, K), w.D, V, w.X, V, 1.0f, true);
    solve(c.rows, V, transposed(rows_of(c.P, c.max_rows)), true, c.b, w.X, w.Y);
    transpose_rows(w.U, c.rows, V, w.U_t, c.max_rows);
    inner_gradients(w);
    state_gradients(w, entered, leaving);
    gather_gradients(w, entered, leaving);
    if (entered) {
        if (leaving) scale_all(w.D, K * V, c.end());
        product(d.K, V, c.tokens, transposed(rows_of(c.q_in, K)), w.dO, V, w.D, V, 1.0f, leaving);
        product(d.K, V, c.rows, transposed(rows_of(c.k_in, K)), w.Y, V, w.D, V, -1.0f, true);
    }
    for (int64_t i = 0; i < c.rows; i++) {
        const int64_t row = (first * d.householders + i) * d.H + c.h;
        vec dot = (vec){};
        for (int64_t j = 0; j < V; j += W) dot += load(w.X + i * V + j) * load(w.E + i * V + j);
        d.dbeta[row] = sum(dot);
        write_row(d.dv + row * d.V, w.Y + i * V, d.V);
        write_gradient(d, w.dK + i * K, c.keys + i * K, c.scale_k[i], 1.0f, K, d.dk + row * d.K);
    }
    for (int64_t i = 0; i < c.tokens; i++)
        write_gradient(d, w.dQ + i * K, c.Q + i * K, c.scale_q[i], (float)d.scale, K,
                       d.dq + ((first + i) * d.H + c.h) * d.K);
    for (int64_t i = 0; d.g.data && i < c.tokens; i++) {
        const float g = *at(d.g, where.batch, c.token + i, c.h);
        d.dg[(first + i) * d.H + c.h] = g < FLOOR ? 0.0f : w.dg[i];  // below the floor g moves nothing
    }
}

void delta_backward_item(void* context, int64_t item) {
    const Delta& d = *(const Delta*)context;
    const int64_t s = item / d.H, h = item % d.H, own = (s * d.H + h) * d.K * d.V;
    const Sequence where(d, s);
    Chunk c(d, where, h);
    const int64_t K = c.K, V = c.V, R = c.max_rows, T = c.max_tokens;
    Arena take{scratch(c.floats() + K * V + (6 * R + 2 * T) * V + (R + T) * R + (3 * R + 2 * T) * K + 3 * R + T)};
    c.place([&](int64_t n) { return take(n); });
    Backward w = {d, c, nullptr, take(K * V), take(R * V), take(R * V), take(R * V), take(R * V), take(T * V),
                  take(R * V), take(R * V), take(T * V), take(R * R), take(T * R),
                  take(T * K), take(R * K), take(T * K), take(R * K), take(R * K),
                  take(T), take(R), take(R), take(R)};
    read_state(d, d.dfinal_state ? d.dfinal_state + own : nullptr, w.D, K, V);
    memset(w.dQ_t, 0, T * K * sizeof(float));
    memset(w.dK_t, 0, R * K * sizeof(float));
    for (int64_t chunk = where.chunks - 1; chunk >= 0; chunk--) {
        w.S = d.states + ((where.first_chunk + chunk) * d.H + h) * K * V;
        backward_chunk(w, chunk, d.initial_state || chunk, d.dfinal_state || chunk < where.chunks - 1);
    }
    if (d.dinitial_state) write_state(d, w.D, d.dinitial_state + own, V);
}

}  // namespace

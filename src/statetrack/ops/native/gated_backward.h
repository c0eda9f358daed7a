// The backward of gated linear attention for one sequence and head, chunk by chunk from the last. D (K, V)
// is the gradient of the state that leaves the chunk:
//
//     dV = A^T dO + k_out D        dA = lower(dO V^T)        dq_in = dO S^T        dk_out = V D^T
//     dP_C = rowsum(S o D)         D <- P_C o D + q_in^T dO
//
// dQ, dK and da follow from dA, dq_in, dk_out and dP_C by the chain rule through the products of gates, step
// by step and last step first. A product w_t = a_t w_{t-1} has the gradient
//
//     y_t = (what w_t was used for) + a_{t+1} y_{t+1}        da_t += y_t w_{t-1}
//
// which divides by nothing and is exact where a_t is 0. Products with S^T and D^T are done as (S dO^T)^T: the
// thin matrices are transposed, never the states.
#pragma once

#include "gated_forward.h"

namespace {

struct GatedBackward {
    const Gated& d;
    GatedChunk& c;
    float* D;                        // (K, V)
    float* states;                   // entering the chunks of a group: [group][K][V]
    float *dO, *dV, *dO_t, *V_t;     // [tokens][V], [V][steps]
    float *dA, *through;             // [tokens][steps]; [K][steps]: dq_in or dk_out before it is transposed
    float *dq_in, *dk_out;           // [tokens][K]
    float *dQ, *dK, *da, *dend;      // [tokens][K]; da [tokens][K] or [tokens]; dP_C [K]
    float *along;                    // only with a gate per head: gradients of a row of `decay`, [steps]
};

// factor x, and what y has to do with x: their scalar product.
INLINE float scale_and_dot(const float* x, const float* y, float factor, float* out, int64_t width) {
    vec dot = (vec){};
    for (int64_t i = 0; i < width; i += W) {
        const vec row = load(x + i);
        dot += row * load(y + i);
        store(out + i, factor * row);
    }
    return sum(dot);
}

// dQ, dK and da of a chunk with a gate per head, whose products of gates are `decay`, row after row, and P.
void head_gradients(const GatedBackward& w) {
    const GatedChunk& c = w.c;
    const int64_t K = c.K, n = c.tokens, columns = round_up(n, W);
    memset(w.along, 0, columns * sizeof(float));
    for (int64_t t = 0; t < n; t++)  // the last row of `decay` is X
        w.along[t] = scale_and_dot(w.dk_out + t * K, c.keys + t * K, c.out[t], w.dK + t * K, K);
    float along_P = 0.0f;
    for (int64_t i = 0; i < c.d.K; i++) along_P += w.dend[i];
    for (int64_t t = n - 1; t >= 0; t--) {
        along_P += scale_and_dot(w.dq_in + t * K, c.Q + t * K, c.in[t], w.dQ + t * K, K);
        float *slope = w.dA + t * c.steps, *decay = c.decay + t * c.steps;
        const float* raw = c.raw + t * c.steps;
        vec dot = (vec){};
        for (int64_t j = 0; j < columns; j += W) {
            const vec dA = load(slope + j), y = load(w.along + j) + dA * load(raw + j);
            if (t) dot += y * load(decay - c.steps + j);  // zero from the t-th column on
            store(w.along + j, c.gates[t] * y);
            store(slope + j, dA * load(decay + j));
        }
        w.da[t] = sum(dot) + along_P * (t ? c.in[t - 1] : 1.0f);
        along_P *= c.gates[t];
    }
    const Matrix dA = rows_of(w.dA, c.steps);
    product(n, K, n, dA, c.keys, K, w.dQ, K, 1.0f, true, FACTOR_LOWER);
    product(n, K, n, transposed(dA), c.Q, K, w.dK, K, 1.0f, true, FACTOR_UPPER);
}

// rows [tokens][K] = x state^T, where x_t (V, steps) is x transposed; zero where there is no state.
void through_state(const GatedBackward& w, const float* state, const float* x_t, float* rows, bool present) {
    const GatedChunk& c = w.c;
    const int64_t columns = round_up(c.tokens, W);
    if (!present) return (void)memset(rows, 0, c.tokens * c.K * sizeof(float));
    product(c.d.K, columns, c.d.V, rows_of((float*)state, c.V), x_t, c.steps, w.through, c.steps, 1.0f, false);
    transpose(w.through, c.steps, rows, c.K, c.K, columns);
}

// The gradients of one chunk; D goes from its leaving to its entering state.
void gated_backward_chunk(const GatedBackward& w, int64_t chunk, const float* S, bool entered, bool leaving) {
    const Gated& d = w.d;
    GatedChunk& c = w.c;
    const int64_t K = c.K, V = c.V, ld = c.steps;
    c.read_keys(chunk, -d.chunk);
    c.read_queries(-d.chunk);
    for (int64_t t = 0; t < c.tokens; t++) {
        copy_row(w.dO + t * V, at(d.dout, c.where.batch, c.token + t, c.h), d.V, V);
        prefetch(at(d.dout, c.where.batch, c.token + t - d.chunk, c.h), d.V);
    }
    transpose_rows(w.dO, c.tokens, V, w.dO_t, ld);
    transpose_rows(c.values, c.tokens, V, w.V_t, ld);
    product(c.tokens, V, c.tokens, transposed(rows_of(c.A, ld)), w.dO, V, w.dV, V, 1.0f, false, FACTOR_UPPER);
    if (leaving) product(c.tokens, V, d.K, rows_of(c.k_out, K), w.D, V, w.dV, V, 1.0f, true);
    product(c.tokens, round_up(c.tokens, W), d.V, rows_of(w.dO, V), w.V_t, ld, w.dA, ld, 1.0f, false,
            RESULT_LOWER);
    c.clear_above(w.dA);
    through_state(w, S, w.dO_t, w.dq_in, entered);
    through_state(w, w.D, w.V_t, w.dk_out, leaving);
    memset(w.dend, 0, K * sizeof(float));
    for (int64_t i = 0; entered && leaving && i < d.K; i++) {
        vec both = (vec){};
        for (int64_t j = 0; j < V; j += W) both += load(S + i * V + j) * load(w.D + i * V + j);
        w.dend[i] = sum(both);
    }
    if (d.per_channel)
        PairGradients<1>{c.tokens, K, c.gates, c.keys, w.dk_out, w.dend, {c.Q}, {w.dA}, {w.dq_in}, {w.dQ}, w.dK,
                         w.da}.run();
    else
        head_gradients(w);
    if (entered) {
        if (leaving) scale_rows(w.D, c.end, d.K, V);
        product(d.K, V, c.tokens, transposed(rows_of(c.q_in, K)), w.dO, V, w.D, V, 1.0f, leaving);
    }
}

void write_gradients(const GatedBackward& w) {
    const Gated& d = w.d;
    const GatedChunk& c = w.c;
    for (int64_t t = 0; t < c.tokens; t++) {
        const int64_t row = (c.where.batch * d.T + c.token + t) * d.H + c.h;
        for (int64_t i = 0; i < c.K; i += W)
            store(w.dQ + t * c.K + i, (float)d.scale * load(w.dQ + t * c.K + i));
        write_row(d.dq + row * d.K, w.dQ + t * c.K, d.K);
        write_row(d.dk + row * d.K, w.dK + t * c.K, d.K);
        write_row(d.dv + row * d.V, w.dV + t * c.V, d.V);
        if (d.per_channel)
            write_row(d.da + row * d.K, w.da + t * c.K, d.K);
        else
            d.da[row] = w.da[t];
    }
}

// The states that enter the chunks first <= i < last of a group, from the saved one.
void repeat_states(const GatedBackward& w, const float* saved, int64_t first, int64_t last) {
    const int64_t numbers = w.c.K * w.c.V;
    memcpy(w.states, saved, numbers * sizeof(float));
    for (int64_t chunk = first; chunk + 1 < last; chunk++) {
        float* S = w.states + (chunk - first) * numbers;
        w.c.read_keys(chunk, w.d.chunk);
        memcpy(S + numbers, S, numbers * sizeof(float));
        advance_state(w.c, S + numbers, w.d.initial_state || chunk);
    }
}

void gated_backward_item(void* context, int64_t item) {
    const Gated& d = *(const Gated*)context;
    const int64_t s = item / d.H, h = item % d.H, own = (s * d.H + h) * d.K * d.V;
    const Stretch where(d, d.group, s);
    GatedChunk c(d, where, h);
    const int64_t K = c.K, V = c.V, T = c.steps;
    Arena take{scratch(c.floats() + (1 + d.group) * K * V + 4 * T * V + T * T + 6 * T * K + K + T)};
    c.place(take);
    GatedBackward w = {d, c, take(K * V), take(d.group * K * V), take(T * V), take(T * V), take(T * V), take(T * V),
                       take(T * T), take(T * K), take(T * K), take(T * K), take(T * K), take(T * K), take(T * K),
                       take(K), take(T)};
    read_state(d, d.dfinal_state ? d.dfinal_state + own : nullptr, w.D, K, V);
    memset(w.through, 0, T * K * sizeof(float));  // its rows beyond d.K
    for (int64_t last = where.chunks; last > 0;) {
        const int64_t group = (last - 1) / d.group, first = group * d.group;
        repeat_states(w, d.states + ((where.first_saved + group) * d.H + h) * K * V, first, last);
        for (int64_t chunk = last - 1; chunk >= first; chunk--) {
            gated_backward_chunk(w, chunk, w.states + (chunk - first) * K * V, d.initial_state || chunk,
                                 d.dfinal_state || chunk < where.chunks - 1);
            write_gradients(w);
        }
        last = first;
    }
    if (d.dinitial_state) write_state(d, w.D, d.dinitial_state + own, V);
}

}  // namespace

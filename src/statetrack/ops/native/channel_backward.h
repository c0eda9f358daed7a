// The backward of the delta rule with a gate per key channel for one sequence and head, chunk by chunk from the
// last. D (K, V) is the gradient of the state that leaves the chunk:
//
//     dU = A^T dO + k_out D          X + (diag(b) L)^T X = dU,  Y = diag(b) X
//     dV = Y    db = rowsum(X o E)   dA = lower(dO U^T)         dL = -strictly_lower(Y U^T)
//     dq_in = dO S^T    dk_in = -Y S^T    dk_out = U D^T        dP_C = rowsum(S o D)
//     D <- P_C o D + q_in^T dO - k_in^T Y
//
// dQ, dK and da follow by the chain rule through the products of gates (pairs.h). Products with S^T and D^T are
// done as (S dO^T)^T: the thin matrices are transposed, never the states.
#pragma once

#include "channel_forward.h"
#include "delta_backward.h"

namespace {

struct ChannelBackward {
    const Delta& d;
    ChannelChunk& c;
    float *D, *states;             // (K, V); entering the chunks of a group: [GROUP][K][V]
    float *E, *U, *X, *Y, *dO;     // [rows][V]
    float *U_t, *Y_t, *dO_t;       // [V][MAX_PAIRED]
    float *dL, *dA;                // [rows][MAX_PAIRED]
    float *through;                // [K][MAX_PAIRED]: dq_in, dk_in or dk_out before it is transposed
    float *dq_in, *dk_in, *dk_out; // [rows][K]
    float *dQ, *dK, *da, *dend;    // [rows][K]; dP_C [K]
    float *dkeys;                  // [rows][K]: the part of dK through what later steps read
};

// rows [rows][K] = sign x state^T, where x_t (V, rows) is x transposed; zero where there is no state.
void through_state(const ChannelBackward& w, const float* state, const float* x_t, float* rows, float sign,
                   bool present) {
    const ChannelChunk& c = w.c;
    const int64_t columns = round_up(c.rows, W);
    if (!present) return (void)memset(rows, 0, c.rows * c.K * sizeof(float));
    product(c.d.K, columns, c.d.V, rows_of((float*)state, c.V), x_t, MAX_PAIRED, w.through, MAX_PAIRED, sign,
            false);
    transpose(w.through, MAX_PAIRED, rows, c.K, c.K, columns);
}

// E of a chunk, as the forward saved it, and U, after `read_keys`.
void read_errors(const ChannelBackward& w) {
    const ChannelChunk& c = w.c;
    for (int64_t i = 0; i < c.rows; i++) {
        float *e = w.E + i * c.V, *u = w.U + i * c.V;
        copy_row(e, w.d.errors + c.step_row(i) * w.d.V, w.d.V, c.V);
        for (int64_t j = 0; j < c.V; j += W) store(u + j, c.b[i] * load(e + j));
    }
}

// The gradients of one chunk; D goes from its leaving to its entering state.
void channel_backward_chunk(const ChannelBackward& w, int64_t chunk, const float* S, bool entered,
                            bool leaving) {
    const Delta& d = w.d;
    ChannelChunk& c = w.c;
    const int64_t K = c.K, V = c.V, R = MAX_PAIRED;
    c.read_keys(chunk, -d.chunk);
    c.read_queries(-d.chunk);
    read_errors(w);
    for (int64_t i = 0; i < c.rows; i++) {
        const int64_t t = c.token + i / d.householders;
        if (!c.last_of_token(i)) {
            memset(w.dO + i * V, 0, V * sizeof(float));
            continue;
        }
        copy_row(w.dO + i * V, at(d.dout, c.where.batch, t, c.h), d.V, V);
        prefetch(at(d.dout, c.where.batch, t - d.chunk, c.h), d.V);
    }
    product(c.rows, V, c.rows, transposed(rows_of(c.A, R)), w.dO, V, w.X, V, 1.0f, false, FACTOR_UPPER);
    if (leaving) product(c.rows, V, d.K, rows_of(c.k_out, K), w.D, V, w.X, V, 1.0f, true);
    solve(c.rows, V, transposed(rows_of(c.L, R)), true, c.b, w.X, w.Y);
    transpose_rows(w.U, c.rows, V, w.U_t, R);
    transpose_rows(w.Y, c.rows, V, w.Y_t, R);
    transpose_rows(w.dO, c.rows, V, w.dO_t, R);
    const int64_t columns = round_up(c.rows, W);
    product(c.rows, columns, d.V, rows_of(w.dO, V), w.U_t, R, w.dA, R, 1.0f, false, RESULT_LOWER);
    product(c.rows, columns, d.V, rows_of(w.Y, V), w.U_t, R, w.dL, R, -1.0f, false, RESULT_LOWER);
    through_state(w, S, w.dO_t, w.dq_in, 1.0f, entered);
    through_state(w, S, w.Y_t, w.dk_in, -1.0f, entered);
    through_state(w, w.D, w.U_t, w.dk_out, 1.0f, leaving);
    memset(w.dend, 0, K * sizeof(float));
    for (int64_t i = 0; entered && leaving && i < d.K; i++) {
        vec both = (vec){};
        for (int64_t j = 0; j < V; j += W) both += load(S + i * V + j) * load(w.D + i * V + j);
        w.dend[i] = sum(both);
    }
    clear_from(w.dL, c.rows, 0);
    PairGradients<2>{c.rows, K, c.gates, c.keys, w.dk_out, w.dend, {c.Q, c.keys}, {w.dA, w.dL},
                     {w.dq_in, w.dk_in}, {w.dQ, w.dK}, w.dkeys, w.da}.run();
    for (int64_t i = 0; i < c.rows * K; i += W) store(w.dK + i, load(w.dK + i) + load(w.dkeys + i));
    if (!entered) return;
    if (leaving) scale_rows(w.D, c.end, d.K, V);
    product(d.K, V, c.rows, transposed(rows_of(c.q_in, K)), w.dO, V, w.D, V, 1.0f, leaving);
    product(d.K, V, c.rows, transposed(rows_of(c.k_in, K)), w.Y, V, w.D, V, -1.0f, true);
}

void write_gradients(const ChannelBackward& w) {
    const Delta& d = w.d;
    const ChannelChunk& c = w.c;
    const int64_t K = c.K, V = c.V;
    for (int64_t i = 0; i < c.rows; i++) {
        const int64_t step = c.step_row(i), token = c.token_row(i);
        vec dot = (vec){};
        for (int64_t j = 0; j < V; j += W) dot += load(w.X + i * V + j) * load(w.E + i * V + j);
        d.dbeta[step] = sum(dot);
        write_row(d.dv + step * d.V, w.Y + i * V, d.V);
        write_gradient(d, w.dK + i * K, c.keys + i * K, c.scale_k[i], 1.0f, K, d.dk + step * d.K);
        if (c.last_of_token(i))
            write_gradient(d, w.dQ + i * K, c.Q + i * K, c.scale_q[i], (float)d.scale, K,
                           d.dq + token * d.K);
        if (c.first_of_token(i)) write_row(d.dg + token * d.K, w.da + i * K, d.K);
    }
}

// The states that enter the chunks first <= i < last of a group, from the saved one.
void repeat_states(const ChannelBackward& w, const float* saved, int64_t first, int64_t last) {
    const int64_t numbers = w.c.K * w.c.V;
    memcpy(w.states, saved, numbers * sizeof(float));
    for (int64_t chunk = first; chunk + 1 < last; chunk++) {
        float* S = w.states + (chunk - first) * numbers;
        w.c.read_keys(chunk, w.d.chunk);
        read_errors(w);
        memcpy(S + numbers, S, numbers * sizeof(float));
        w.c.advance_state(w.U, S + numbers, w.d.initial_state || chunk);
    }
}

void channel_backward_item(void* context, int64_t item) {
    const Delta& d = *(const Delta*)context;
    const int64_t s = item / d.H, h = item % d.H, own = (s * d.H + h) * d.K * d.V;
    const Stretch where(d, GROUP, s);
    ChannelChunk c(d, where, h);
    const int64_t K = c.K, V = c.V, R = MAX_PAIRED;
    Arena take{scratch(c.floats() + (1 + GROUP) * K * V + 8 * R * V + 2 * R * R + 8 * R * K + K)};
    c.place(take);
    ChannelBackward w = {d, c, take(K * V), take(GROUP * K * V), take(R * V), take(R * V), take(R * V), take(R * V),
                         take(R * V), take(R * V), take(R * V), take(R * V), take(R * R), take(R * R), take(R * K),
                         take(R * K), take(R * K), take(R * K), take(R * K), take(R * K), take(R * K), take(K),
                         take(R * K)};
    read_state(d, d.dfinal_state ? d.dfinal_state + own : nullptr, w.D, K, V);
    memset(w.through, 0, R * K * sizeof(float));  // its rows beyond d.K
    for (int64_t last = where.chunks; last > 0;) {
        const int64_t group = (last - 1) / GROUP, first = group * GROUP;
        repeat_states(w, d.states + ((where.first_saved + group) * d.H + h) * K * V, first, last);
        for (int64_t chunk = last - 1; chunk >= first; chunk--) {
            channel_backward_chunk(w, chunk, w.states + (chunk - first) * K * V, d.initial_state || chunk,
                                   d.dfinal_state || chunk < where.chunks - 1);
            write_gradients(w);
        }
        last = first;
    }
    if (d.dinitial_state) write_state(d, w.D, d.dinitial_state + own, V);
}

}  // namespace

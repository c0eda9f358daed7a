// The forward of the delta rule with a gate per key channel for one sequence and head, chunk by chunk, the state
// S (K, V) in the cache:
//
//     E = V - k_in S - L U,  U = diag(b) E        solved row by row
//     O = q_in S + A U                            S <- P_C o S + k_out^T U
//
// E and the state that enters every GROUP-th chunk are saved for the backward.
#pragma once

#include "channel_chunk.h"

namespace {

void channel_forward_item(void* context, int64_t item) {
    const Delta& d = *(const Delta*)context;
    const int64_t s = item / d.H, h = item % d.H, own = (s * d.H + h) * d.K * d.V;
    const Stretch where(d, GROUP, s);
    ChannelChunk c(d, where, h);
    const int64_t K = c.K, V = c.V;
    Arena take{scratch(c.floats() + K * V + 3 * MAX_PAIRED * V)};
    c.place(take);
    float *S = take(K * V), *O = take(MAX_PAIRED * V), *E = take(MAX_PAIRED * V), *U = take(MAX_PAIRED * V);
    read_state(d, d.initial_state ? d.initial_state + own : nullptr, S, K, V);
    for (int64_t chunk = 0; chunk < where.chunks; chunk++) {
        const bool entered = d.initial_state || chunk;
        c.read_keys(chunk, d.chunk);
        c.read_queries(d.chunk);
        for (int64_t i = 0; i < c.rows; i++) {
            copy_row(E + i * V, at(d.v, where.batch, c.step + i, h), d.V, V);
            prefetch(at(d.v, where.batch, c.step + i + d.chunk * d.householders, h), d.V);
        }
        if (d.states && chunk % GROUP == 0)
            memcpy(d.states + ((where.first_saved + chunk / GROUP) * d.H + h) * K * V, S,
                   K * V * sizeof(float));
        if (entered) product(c.rows, V, d.K, rows_of(c.k_in, K), S, V, E, V, -1.0f, true);
        solve(c.rows, V, rows_of(c.L, MAX_PAIRED), false, c.b, E, U);
        product(c.rows, V, c.rows, rows_of(c.A, MAX_PAIRED), U, V, O, V, 1.0f, false, FACTOR_LOWER);
        // the last step sees every row of U: where one is bad, so is its output
        if (!all_finite(O + (c.rows - 1) * V, V)) causal_product(c.rows, 1, rows_of(c.A, MAX_PAIRED), U, V, O);
        if (entered) product(c.rows, V, d.K, rows_of(c.q_in, K), S, V, O, V, 1.0f, true);
        c.advance_state(U, S, entered);
        for (int64_t i = 0; i < c.rows; i++) {
            if (c.last_of_token(i)) write_row(d.out + c.token_row(i) * d.V, O + i * V, d.V);
            if (d.errors) write_row(d.errors + c.step_row(i) * d.V, E + i * V, d.V);
        }
    }
    write_state(d, S, d.final_state + own, V);
}

}  // namespace

// The forward of the delta rule for one sequence and head, chunk by chunk, the state S (K, V) in the cache:
//
//     E = V - e^G K S - P U,  U = diag(b) E        solved row by row: E_t = v_t - S_{t-1}^T k_t
//     O = e^G Q S + A U                            S <- e^(G_C) S + (e^(G_C - G) K)^T U
//
// E and the state entering every chunk are saved for the backward, which then needs no solve of this system.
#pragma once

#include "delta_chunk.h"

namespace {

void delta_forward_item(void* context, int64_t item) {
    const Delta& d = *(const Delta*)context;
    const int64_t s = item / d.H, h = item % d.H, own = s * d.H + h;
    const Sequence where(d, s);
    Chunk c(d, where, h);
    const int64_t K = c.K, V = c.V;
    Arena take{scratch(c.floats() + K * V + (2 * c.max_rows + c.max_tokens) * V)};
    c.place([&](int64_t n) { return take(n); });
    float *S = take(K * V), *O = take(c.max_tokens * V);
    float *E = take(c.max_rows * V), *U = take(c.max_rows * V);
    read_state(d, d.initial_state ? d.initial_state + own * d.K * d.V : nullptr, S, K, V);
    for (int64_t chunk = 0; chunk < where.chunks; chunk++) {
        const bool entered = d.initial_state || chunk;
        c.read(chunk, where.size);
        for (int64_t i = 0; i < c.rows; i++) copy_row(E + i * V, at(d.v, where.batch, c.step + i, h), d.V, V);
        if (entered) {
            if (d.states)
                memcpy(d.states + ((where.first_chunk + chunk) * d.H + h) * K * V, S, K * V * sizeof(float));
            product(c.rows, V, d.K, rows_of(c.k_in, K), S, V, E, V, -1.0f, true);
        }
        solve(c.rows, V, rows_of(c.P, c.max_rows), false, c.b, E, U);
        product(c.tokens, V, c.rows, rows_of(c.A, c.max_rows), U, V, O, V, 1.0f, false,
                d.householders == 1 ? FACTOR_LOWER : FULL);
        // the last token sees every row of U: where one is bad, so is its output
        if (!all_finite(O + (c.tokens - 1) * V, V))
            causal_product(c.tokens, d.householders, rows_of(c.A, c.max_rows), U, V, O);
        if (entered) product(c.tokens, V, d.K, rows_of(c.q_in, K), S, V, O, V, 1.0f, true);
        scale_all(S, K * V, c.end());
        product(d.K, V, c.rows, transposed(rows_of(c.k_out, K)), U, V, S, V, 1.0f, true);
        const int64_t first = where.batch * d.T + c.token;
        for (int64_t i = 0; i < c.tokens; i++)
            write_row(d.out + ((first + i) * d.H + h) * d.V, O + i * V, d.V);
        if (d.errors)
            for (int64_t i = 0; i < c.rows; i++)
                write_row(d.errors + ((first * d.householders + i) * d.H + h) * d.V, E + i * V, d.V);
    }
    write_state(d, S, d.final_state + own * d.K * d.V, V);
}

}  // namespace

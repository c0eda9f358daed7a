// The forward of gated linear attention for one sequence and head, chunk by chunk, the state S (K, V) in the
// cache:
//
//     O = q_in S + A V        S <- P_C o S + k_out^T V
//
// The state that enters every `group`-th chunk is saved; the backward computes those between again.
#pragma once

#include "gated_chunk.h"

namespace {

void gated_forward_item(void* context, int64_t item) {
    const Gated& d = *(const Gated*)context;
    const int64_t s = item / d.H, h = item % d.H, own = (s * d.H + h) * d.K * d.V;
    const Stretch where(d, d.group, s);
    GatedChunk c(d, where, h);
    const int64_t K = c.K, V = c.V;
    Arena take{scratch(c.floats() + K * V + c.steps * V)};
    c.place(take);
    float *S = take(K * V), *O = take(c.steps * V);
    read_state(d, d.initial_state ? d.initial_state + own : nullptr, S, K, V);
    for (int64_t chunk = 0; chunk < where.chunks; chunk++) {
        const bool entered = d.initial_state || chunk;
        c.read_keys(chunk, d.chunk);
        c.read_queries(d.chunk);
        if (d.states && chunk % d.group == 0)
            memcpy(d.states + ((where.first_saved + chunk / d.group) * d.H + h) * K * V, S,
                   K * V * sizeof(float));
        product(c.tokens, V, c.tokens, rows_of(c.A, c.steps), c.values, V, O, V, 1.0f, false, FACTOR_LOWER);
        // the last token sees every row of V: where one is bad, so is its output
        if (!all_finite(O + (c.tokens - 1) * V, V))
            causal_product(c.tokens, 1, rows_of(c.A, c.steps), c.values, V, O);
        if (entered) product(c.tokens, V, d.K, rows_of(c.q_in, K), S, V, O, V, 1.0f, true);
        advance_state(c, S, entered);
        const int64_t first = where.batch * d.T + c.token;
        for (int64_t t = 0; t < c.tokens; t++) write_row(d.out + ((first + t) * d.H + h) * d.V, O + t * V, d.V);
    }
    write_state(d, S, d.final_state + own, V);
}

}  // namespace

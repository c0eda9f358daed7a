// The backward of the selective scan, one sequence and one group of channels, chunk by chunk from the last:
//
//     g_t = C_t dy_t + a_{t+1} g_{t+1}                         the gradient of h_t
//     dB_t = sum_d g_t x_t        dC_t = sum_d h_t dy_t        dx_t = sum_n B_t g_t
//     w_t = g_t h_{t-1} a'_t      ddelta_t = sum_n w_t A       dA = sum_t w_t delta_t
//
// a and h of a chunk are computed again from its saved state and kept in the cache until read. Sums over
// channels are kept per lane, added up once per group and then over groups; sums over the batch come last.
// The order of every sum depends on the shape alone, so results are the same for any number of threads.
#pragma once

#include "scan.h"

namespace {

// What one vector of channels works on along one chunk; all [steps][W].
struct Lanes {
    float *u, *raw, *delta, *x, *z, *dout, *dy, *y, *dx, *ddelta;
};

constexpr int64_t LANE_ARRAYS = sizeof(Lanes) / sizeof(float*);

// M states of one vector of channels along one chunk, against time. `dstate` holds a g of the step after, dA
// the sum so far; dB and dC [steps][M][W] are added to. a' is a, or a + 1 in the range [-1,1].
template <int64_t M, bool EXTENDED>
void run_gradients(int64_t steps, int64_t N, const float* A, const float* B, const float* C, const Lanes& l,
                   const float* keep_a, const float* keep_h, float* dstate, float* dA, float* dB, float* dC) {
    vec rate[M], carried[M], dA_sum[M];
    for (int64_t n = 0; n < M; n++) {
        rate[n] = load(A + n * W);
        carried[n] = load(dstate + n * W);
        dA_sum[n] = load(dA + n * W);
    }
    for (int64_t t = steps - 1; t >= 0; t--) {
        const vec dy = load(l.dy + t * W), x = load(l.x + t * W), delta = load(l.delta + t * W);
        vec dx = load(l.dx + t * W), ddelta = load(l.ddelta + t * W);
        for (int64_t n = 0; n < M; n++) {
            const int64_t here = (t * M + n) * W;
            const vec a = load(keep_a + here), before = load(keep_h + here), h = load(keep_h + here + M * W);
            const vec g = carried[n] + dy * C[t * N + n];
            store(dC + here, load(dC + here) + h * dy);
            store(dB + here, load(dB + here) + g * x);
            dx += g * B[t * N + n];
            // a' h before its product with g: where a has underflowed to zero, g h may overflow
            const vec w = (EXTENDED ? a * before + before : a * before) * g;
            ddelta += w * rate[n];
            dA_sum[n] += w * delta;
            carried[n] = a * g;
        }
        store(l.dx + t * W, dx);
        store(l.ddelta + t * W, ddelta);
    }
    for (int64_t n = 0; n < M; n++) {
        store(dstate + n * W, carried[n]);
        store(dA + n * W, dA_sum[n]);
    }
}

// out[t][n] = the sum over lanes of x [steps][M][W], for a row length N of out.
void sum_lanes(const float* x, int64_t steps, int64_t M, float* out, int64_t N) {
    const int64_t count = steps * M;
    for (int64_t i = 0; i < count; i += W) {
        vec tile[W];
        for (int64_t r = 0; r < W; r++) tile[r] = load(x + (i + r) * W);
        transpose_square(tile);
        for (int64_t half = W / 2; half; half /= 2)
            for (int64_t r = 0; r < half; r++) tile[r] += tile[r + half];
        float sums[W];
        store(sums, tile[0]);
        for (int64_t r = 0; r < min(W, count - i); r++) out[(i + r) / M * N + (i + r) % M] = sums[r];
    }
}

struct Group {
    const Scan& s;
    int64_t b, first, blocks, chunks, padded;
    float *rate, *rate_log2, *dstate, *dA, *dD, *dbias;  // [blocks][N][W], the last two [blocks][W]
    float *B, *C;                                        // [steps][N]
    float *keep_a, *keep_h, *dB, *dC, *state;            // [steps][NB][W]
    float *sum_B, *sum_C;                                // this group's dB and dC, (time, N)
    Lanes* lanes;
};

// M states from n on of all channels of the group, along one chunk.
template <int64_t M, bool EXTENDED>
void gradients_of_states(Group& g, int64_t chunk, int64_t steps, int64_t n) {
    const int64_t N = g.s.N, t = chunk * g.s.steps;
    const size_t size = round_up(steps * M, W) * W * sizeof(float);
    memset(g.dB, 0, size);
    memset(g.dC, 0, size);
    const float* saved = g.s.saved + ((g.b * g.chunks + chunk) * N + n) * g.padded + g.first;
    for (int64_t k = 0; k < g.blocks; k++) {
        const Lanes& l = g.lanes[k];
        const int64_t at = (k * N + n) * W;
        for (int64_t m = 0; m < M; m++) store(g.state + m * W, load(saved + m * g.padded + k * W));
        run_states<M, EXTENDED, true>(steps, N, g.rate_log2 + at, g.B + n, g.C + n, l.delta, l.x, g.state,
                                      l.y, g.keep_a, g.keep_h);
        run_gradients<M, EXTENDED>(steps, N, g.rate + at, g.B + n, g.C + n, l, g.keep_a, g.keep_h,
                                   g.dstate + at, g.dA + at, g.dB, g.dC);
    }
    sum_lanes(g.dB, steps, M, g.sum_B + t * N + n, N);
    sum_lanes(g.dC, steps, M, g.sum_C + t * N + n, N);
}

template <bool EXTENDED>
void gradients_of_chunk(Group& g, int64_t chunk, int64_t steps) {
    int64_t n = 0;
    for (; n + NB <= g.s.N; n += NB) gradients_of_states<NB, EXTENDED>(g, chunk, steps, n);
    for (; n < g.s.N; n++) gradients_of_states<1, EXTENDED>(g, chunk, steps, n);
}

// Read what vector k of the group needs for a chunk; dy = dout silu(z).
void prepare(const Group& g, int64_t k, int64_t t, int64_t steps) {
    const Scan& s = g.s;
    const Lanes& l = g.lanes[k];
    const int64_t c = g.first + k * W, lanes = min(W, s.channels - c);
    gather(s.u, g.b, c, lanes, t, steps, l.u);
    gather(s.delta, g.b, c, lanes, t, steps, l.raw);
    gather(s.dout, g.b, c, lanes, t, steps, l.dout);
    step_sizes(s, s.bias ? gather_channels(s.bias + c, lanes) : (vec){}, steps, l.raw, l.raw, l.delta);
    if (s.z.data) gather(s.z, g.b, c, lanes, t, steps, l.z);
    for (int64_t i = 0; i < steps * W; i += W) {
        const vec dout = load(l.dout + i), z = s.z.data ? load(l.z + i) : (vec){};
        store(l.x + i, load(l.delta + i) * load(l.u + i));
        store(l.dy + i, s.z.data ? dout * z * sigmoid(z) : dout);
        store(l.y + i, (vec){});
        store(l.dx + i, (vec){});
        store(l.ddelta + i, (vec){});
    }
}

// From dx and the part of ddelta that came through a: the gradients of u, delta, z, D and the bias.
void finish(const Group& g, int64_t k, int64_t t, int64_t steps) {
    const Scan& s = g.s;
    const Lanes& l = g.lanes[k];
    const int64_t c = g.first + k * W, lanes = min(W, s.channels - c);
    const vec D = s.D ? gather_channels(s.D + c, lanes) : (vec){};
    vec dD = load(g.dD + k * W), dbias = load(g.dbias + k * W);
    for (int64_t i = 0; i < steps * W; i += W) {
        const vec u = load(l.u + i), dy = load(l.dy + i), dx = load(l.dx + i);
        vec ddelta = load(l.ddelta + i) + dx * u;
        if (s.softplus) ddelta *= sigmoid(load(l.raw + i));
        if (s.z.data) {
            const vec z = load(l.z + i), gate = sigmoid(z);
            store(l.z + i, load(l.dout + i) * (load(l.y + i) + D * u) * gate * (1.0f + z * (1.0f - gate)));
        }
        dD += dy * u;
        dbias += ddelta;
        store(l.dx + i, dx * load(l.delta + i) + D * dy);
        store(l.ddelta + i, ddelta);
    }
    store(g.dD + k * W, dD);
    store(g.dbias + k * W, dbias);
    scatter(l.dx, s.du, s.out, g.b, c, lanes, t, steps);
    scatter(l.ddelta, s.ddelta, s.out, g.b, c, lanes, t, steps);
    if (s.z.data) scatter(l.z, s.dz, s.out, g.b, c, lanes, t, steps);
}

// Where the sums of every sequence and group go: dA (batch, N, padded), dD and dbias (batch, padded), dB and
// dC (batch, groups, time, N).
struct Partial {
    float *dA, *dD, *dbias, *dB, *dC;
    int64_t groups, padded;

    explicit Partial(const Scan& s) {
        groups = (s.channels + s.group - 1) / s.group;
        padded = round_up(s.channels, 16);
        dA = s.partial;
        dD = dA + s.batch * s.N * padded;
        dbias = dD + s.batch * padded;
        dB = groups == 1 ? s.dB : dbias + s.batch * padded;
        dC = groups == 1 ? s.dC : dB + s.batch * groups * s.T * s.N;
    }
};

void backward_item(void* context, int64_t item) {
    const Scan& s = *(const Scan*)context;
    const Partial partial(s);
    const int64_t N = s.N, L = s.steps, b = item / partial.groups, first = item % partial.groups * s.group;
    const int64_t blocks = (min(s.group, s.channels - first) + W - 1) / W;
    const int64_t states = blocks * N * W, kept = round_up((L + 1) * NB, W) * W;
    const int64_t pointers = blocks * sizeof(Lanes) / sizeof(float);
    float* p = scratch(4 * states + 2 * blocks * W + 2 * L * N + 4 * kept + NB * W +
                       LANE_ARRAYS * blocks * L * W + pointers);
    auto take = [&p](int64_t numbers) { return (p += numbers) - numbers; };
    Group g = {s, b, first, blocks, (s.T + L - 1) / L, partial.padded,
               take(states), take(states), take(states), take(states), take(blocks * W), take(blocks * W),
               take(L * N), take(L * N), take(kept), take(kept), take(kept), take(kept), take(NB * W),
               partial.dB + item * s.T * N, partial.dC + item * s.T * N, nullptr};
    float** arrays = (float**)take(pointers);
    g.lanes = (Lanes*)arrays;
    for (int64_t i = 0; i < blocks * LANE_ARRAYS; i++) arrays[i] = take(L * W);
    for (int64_t k = 0; k < blocks; k++) {
        const int64_t c = first + k * W, lanes = min(W, s.channels - c), at = k * N * W;
        gather_states(s.A + c * N, lanes, N, 1.0f, g.rate + at);
        gather_states(s.A + c * N, lanes, N, LOG2_E, g.rate_log2 + at);
        if (s.dlast)
            gather_states(s.dlast + (b * s.channels + c) * N, lanes, N, 1.0f, g.dstate + at);
        else
            memset(g.dstate + at, 0, N * W * sizeof(float));
    }
    memset(g.dA, 0, states * sizeof(float));
    memset(g.dD, 0, 2 * blocks * W * sizeof(float));
    for (int64_t chunk = g.chunks - 1; chunk >= 0; chunk--) {
        const int64_t t = chunk * L, steps = min(L, s.T - t);
        gather_weights(s.B, b, N, t, steps, g.B);
        gather_weights(s.C, b, N, t, steps, g.C);
        for (int64_t k = 0; k < blocks; k++) prepare(g, k, t, steps);
        (s.extended ? gradients_of_chunk<true> : gradients_of_chunk<false>)(g, chunk, steps);
        for (int64_t k = 0; k < blocks; k++) finish(g, k, t, steps);
    }
    for (int64_t k = 0; k < blocks; k++) {
        const int64_t c = first + k * W, lanes = min(W, s.channels - c);
        scatter_states(g.dstate + k * N * W, s.dstate + (b * s.channels + c) * N, lanes, N);
        for (int64_t n = 0; n < N; n++)
            store(partial.dA + (b * N + n) * partial.padded + c, load(g.dA + (k * N + n) * W));
        store(partial.dD + b * partial.padded + c, load(g.dD + k * W));
        store(partial.dbias + b * partial.padded + c, load(g.dbias + k * W));
    }
}

// Item i < batch: dB and dC of sequence i from its groups. The next N: dA of state n. Then dD, then the bias.
void reduce_item(void* context, int64_t item) {
    const Scan& s = *(const Scan*)context;
    const Partial partial(s);
    if (item < s.batch) {
        const int64_t size = s.T * s.N;
        if (partial.groups == 1) return;
        for (int weights = 0; weights < 2; weights++) {
            float* out = (weights ? s.dC : s.dB) + item * size;
            const float* x = (weights ? partial.dC : partial.dB) + item * partial.groups * size;
            memcpy(out, x, size * sizeof(float));
            for (int64_t group = 1; group < partial.groups; group++)
                for (int64_t i = 0; i < size; i++) out[i] += x[group * size + i];
        }
        return;
    }
    const int64_t n = item - s.batch;
    const int64_t rows = n < s.N ? s.N : 1;
    const float* x = n < s.N ? partial.dA + n * partial.padded : n == s.N ? partial.dD : partial.dbias;
    for (int64_t c = 0; c < s.channels; c += W) {
        vec total = (vec){};
        for (int64_t b = 0; b < s.batch; b++) total += load(x + b * rows * partial.padded + c);
        float lane[W];
        store(lane, total);
        for (int64_t l = 0; l < min(W, s.channels - c); l++)
            if (n < s.N)
                s.dA[(c + l) * s.N + n] = lane[l];
            else
                (n == s.N ? s.dD : s.dbias)[c + l] = lane[l];
    }
}

}  // namespace

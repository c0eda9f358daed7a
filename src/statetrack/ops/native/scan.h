// The selective scan of one sequence and one group of channels, forwards: what both directions share.
//
// W channels side by side fill a vector; NB of the N states per channel stay in registers along a chunk of
// time. Letters as in selective_scan/reference.py; lane-wise arrays are [..][W].
#pragma once

#include "arguments.h"
#include "threads.h"
#include "vector.h"

namespace {

#if LANES == 16
constexpr int64_t NB = 8;  // states per channel kept in registers
#else
constexpr int64_t NB = 2;
#endif

// W channels from c on (fewer at the edge: zeros fill up), `steps` times from t on, as out [steps][W].
void gather(const Tensor3& x, int64_t b, int64_t c, int64_t lanes, int64_t t, int64_t steps, float* out) {
    const float* p = x.data + b * x.s0 + c * x.s1 + t * x.s2;
    int64_t i = 0;
    if (lanes == W && x.s1 == 1)
        for (; i < steps; i++) store(out + i * W, load(p + i * x.s2));
    if (lanes == W && x.s2 == 1)
        for (; i + W <= steps; i += W) {
            vec tile[W];
            for (int64_t l = 0; l < W; l++) tile[l] = load(p + l * x.s1 + i);
            transpose_square(tile);
            for (int64_t l = 0; l < W; l++) store(out + (i + l) * W, tile[l]);
        }
    for (; i < steps; i++)
        for (int64_t l = 0; l < W; l++) out[i * W + l] = l < lanes ? p[l * x.s1 + i * x.s2] : 0.0f;
}

// The way back: x [steps][W] into `data`, which has the layout of `like`.
void scatter(const float* x, float* data, const Tensor3& like, int64_t b, int64_t c, int64_t lanes, int64_t t,
             int64_t steps) {
    float* p = data + b * like.s0 + c * like.s1 + t * like.s2;
    int64_t i = 0;
    if (lanes == W && like.s1 == 1)
        for (; i < steps; i++) store(p + i * like.s2, load(x + i * W));
    if (lanes == W && like.s2 == 1)
        for (; i + W <= steps; i += W) {
            vec tile[W];
            for (int64_t l = 0; l < W; l++) tile[l] = load(x + (i + l) * W);
            transpose_square(tile);
            for (int64_t l = 0; l < W; l++) store(p + l * like.s1 + i, tile[l]);
        }
    for (; i < steps; i++)
        for (int64_t l = 0; l < lanes; l++) p[l * like.s1 + i * like.s2] = x[i * W + l];
}

// B or C of one sequence, (states, time), as out [steps][N].
void gather_weights(const Tensor3& x, int64_t b, int64_t N, int64_t t, int64_t steps, float* out) {
    const float* p = x.data + b * x.s0 + t * x.s2;
    for (int64_t i = 0; i < steps; i++)
        for (int64_t n = 0; n < N; n++) out[i * N + n] = p[n * x.s1 + i * x.s2];
}

// x (channels, N) of W channels as out [N][W], times a factor; absent channels are zero.
void gather_states(const float* x, int64_t lanes, int64_t N, float factor, float* out) {
    for (int64_t n = 0; n < N; n++)
        for (int64_t l = 0; l < W; l++) out[n * W + l] = l < lanes ? factor * x[l * N + n] : 0.0f;
}

void scatter_states(const float* x, float* out, int64_t lanes, int64_t N) {
    for (int64_t n = 0; n < N; n++)
        for (int64_t l = 0; l < lanes; l++) out[l * N + n] = x[n * W + l];
}

// A few numbers, one per channel.
INLINE vec gather_channels(const float* x, int64_t lanes) {
    float lane[W];
    for (int64_t l = 0; l < W; l++) lane[l] = l < lanes ? x[l] : 0.0f;
    return load(lane);
}

// The step sizes: delta with its bias, in `raw`, and through softplus, in `delta` (they may be one array).
void step_sizes(const Scan& s, vec bias, int64_t steps, const float* raw_in, float* raw, float* delta) {
    for (int64_t t = 0; t < steps; t++) {
        const vec r = load(raw_in + t * W) + bias;
        store(raw + t * W, r);
        store(delta + t * W, s.softplus ? softplus(r) : r);
    }
}

// One chunk of one vector of channels, M states of each:
//     a = 2^(delta A log2 e) or twice that less one        h = a h + x B        y += C h
// KEEP stores every a in keep_a [steps][M][W] and, from the entering one on, every h in keep_h [..][M][W].
template <int64_t M, bool EXTENDED, bool KEEP>
void run_states(int64_t steps, int64_t N, const float* A, const float* B, const float* C, const float* delta,
                const float* x, float* state, float* y, float* keep_a, float* keep_h) {
    vec decay[M], h[M];
    for (int64_t n = 0; n < M; n++) {
        decay[n] = load(A + n * W);
        h[n] = load(state + n * W);
        if (KEEP) store(keep_h + n * W, h[n]);
    }
    for (int64_t t = 0; t < steps; t++) {
        const vec dt = load(delta + t * W), xt = load(x + t * W);
        vec yt = load(y + t * W);
        for (int64_t n = 0; n < M; n++) {
            vec a = exp2(dt * decay[n]);
            if (EXTENDED) a = 2.0f * a - 1.0f;
            h[n] = a * h[n] + xt * B[t * N + n];
            yt += h[n] * C[t * N + n];
            if (KEEP) {
                store(keep_a + (t * M + n) * W, a);
                store(keep_h + ((t + 1) * M + n) * W, h[n]);
            }
        }
        store(y + t * W, yt);
    }
    for (int64_t n = 0; n < M; n++) store(state + n * W, h[n]);
}

// All states of one vector of channels along one chunk, NB at a time.
template <bool EXTENDED>
void forward_chunk(int64_t steps, int64_t N, const float* A, const float* B, const float* C,
                   const float* delta, const float* x, float* state, float* y) {
    int64_t n = 0;
    for (; n + NB <= N; n += NB)
        run_states<NB, EXTENDED, false>(steps, N, A + n * W, B + n, C + n, delta, x, state + n * W, y,
                                        nullptr, nullptr);
    for (; n < N; n++)
        run_states<1, EXTENDED, false>(steps, N, A + n * W, B + n, C + n, delta, x, state + n * W, y, nullptr,
                                       nullptr);
}

void forward_item(void* context, int64_t item) {
    const Scan& s = *(const Scan*)context;
    const int64_t N = s.N, L = s.steps, groups = (s.channels + s.group - 1) / s.group;
    const int64_t b = item / groups, first = item % groups * s.group;
    const int64_t blocks = (min(s.group, s.channels - first) + W - 1) / W;
    const int64_t padded = round_up(s.channels, 16), chunks = (s.T + L - 1) / L;
    float* A = scratch(2 * blocks * N * W + 2 * L * N + 5 * L * W);
    float* state = A + blocks * N * W;
    float *B = state + blocks * N * W, *C = B + L * N;
    float *u = C + L * N, *delta = u + L * W, *x = delta + L * W, *y = x + L * W, *z = y + L * W;
    for (int64_t k = 0; k < blocks; k++) {
        const int64_t c = first + k * W, lanes = min(W, s.channels - c);
        gather_states(s.A + c * N, lanes, N, LOG2_E, A + k * N * W);
        if (s.state)
            gather_states(s.state + (b * s.channels + c) * N, lanes, N, 1.0f, state + k * N * W);
        else
            memset(state + k * N * W, 0, N * W * sizeof(float));
    }
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        const int64_t t = chunk * L, steps = min(L, s.T - t);
        gather_weights(s.B, b, N, t, steps, B);
        gather_weights(s.C, b, N, t, steps, C);
        for (int64_t k = 0; k < blocks; k++) {
            const int64_t c = first + k * W, lanes = min(W, s.channels - c);
            float* h = state + k * N * W;
            if (s.saved)
                for (int64_t n = 0; n < N; n++)
                    store(s.saved + ((b * chunks + chunk) * N + n) * padded + c, load(h + n * W));
            gather(s.u, b, c, lanes, t, steps, u);
            gather(s.delta, b, c, lanes, t, steps, delta);
            step_sizes(s, s.bias ? gather_channels(s.bias + c, lanes) : (vec){}, steps, delta, delta, delta);
            const vec D = s.D ? gather_channels(s.D + c, lanes) : (vec){};
            for (int64_t i = 0; i < steps; i++) {
                store(x + i * W, load(delta + i * W) * load(u + i * W));
                store(y + i * W, (vec){});
            }
            (s.extended ? forward_chunk<true> : forward_chunk<false>)(steps, N, A + k * N * W, B, C, delta, x,
                                                                      h, y);
            for (int64_t i = 0; i < steps; i++) store(y + i * W, load(y + i * W) + D * load(u + i * W));
            if (s.z.data) {
                gather(s.z, b, c, lanes, t, steps, z);
                for (int64_t i = 0; i < steps; i++) {
                    const vec gate = load(z + i * W);
                    store(y + i * W, load(y + i * W) * gate * sigmoid(gate));
                }
            }
            scatter(y, (float*)s.out.data, s.out, b, c, lanes, t, steps);
        }
    }
    for (int64_t k = 0; k < blocks; k++) {
        const int64_t c = first + k * W, lanes = min(W, s.channels - c);
        scatter_states(state + k * N * W, s.last + (b * s.channels + c) * N, lanes, N);
    }
}

}  // namespace

// The arguments from Python: one block of eight-byte fields per op, for both directions. Python packs the
// same fields in the same order (ops/*/native.py); pointers to absent tensors are null.
#pragma once

#include <cstdint>

// A tensor of up to three axes that are not contiguous; strides count numbers.
struct Tensor3 {
    const float* data;
    int64_t s0, s1, s2;
};

struct Scan {
    int64_t batch, channels, T, N;
    int64_t steps, group;  // between saved states; channels worked on together
    int64_t softplus, extended, threads;
    Tensor3 u, delta, z, dout;          // (batch, channels, time)
    Tensor3 B, C;                       // (batch, states, time)
    const float *A, *D, *bias, *state;  // contiguous; state (batch, channels, N)
    Tensor3 out;                        // (batch, channels, time); du, ddelta and dz have its layout
    float *last, *saved;                // (batch, channels, N); (batch, chunks, N, channels rounded up)
    const float* dlast;
    float *du, *ddelta, *dz, *dA, *dB, *dC, *dD, *dbias, *dstate;  // dB, dC (batch, time, N)
    float* partial;                                                // buffer for sums: `Partial`
};

// With one gate per head (delta_*.h), g holds logarithms, (batch, time, heads); with one per key channel
// (channel_*.h) the gates themselves, (batch, time, heads, K), and dg their gradients.
struct Delta {
    int64_t sequences, T, H, K, V;
    int64_t householders, chunk;  // steps per token; tokens per chunk. T is the length of the row when packed
    int64_t l2norm, threads;
    double scale;
    Tensor3 q, k, v, beta, g, dout;  // (batch, time, heads), the width contiguous
    const int64_t* cu_seqlens;       // offsets of packed sequences, or null
    const float* initial_state;      // (sequences, H, K, V)
    float *out, *final_state;
    float *states, *errors;  // saved: states entering chunks, padded, and v - S^T k of every step
    const float* dfinal_state;
    float *dq, *dk, *dv, *dbeta, *dg, *dinitial_state;
};

struct Gated {
    int64_t sequences, T, H, K, V;
    int64_t per_channel;   // a is (batch, time, heads, K), else (batch, time, heads)
    int64_t chunk, group;  // tokens per chunk; chunks per saved state. T is the length of the row when packed
    int64_t threads;
    double scale;
    Tensor3 q, k, v, a, dout;    // (batch, time, heads), the width contiguous
    const int64_t* cu_seqlens;   // offsets of packed sequences, or null
    const float* initial_state;  // (sequences, H, K, V)
    float *out, *final_state;
    float* states;  // saved: the state entering every group of chunks, padded
    const float* dfinal_state;
    float *dq, *dk, *dv, *da, *dinitial_state;
};

struct Convolution {
    int64_t batch, T, C, width, silu;
    int64_t rows;  // of a work item
    int64_t sequences, threads;
    Tensor3 x, dout;              // (batch, time, channels), the channels contiguous
    const int64_t* cu_seqlens;    // offsets of packed sequences, or null
    const float *weight, *bias;   // (channels, width); (channels,) or null
    float *out, *dx;              // (batch, time, channels); dx is null where not wanted
    float *dweight, *dbias;
    float* partial;  // sums of every block of rows, (blocks, width + 1, channels), or null: no dweight and dbias
};

// Vectors of the width the instruction set has, and the few functions the recurrences need on them.
//
// Every kernel file is compiled once per instruction set. All of it sits in an unnamed namespace and uses no
// templates of the standard library: the linker would otherwise keep one copy of a shared function, perhaps
// the one with instructions this processor lacks.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")  // arrays of vectors stay in registers only where no index varies

namespace {

typedef float vec __attribute__((vector_size(4 * LANES), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), may_alias));
typedef float unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

constexpr int64_t W = LANES;

INLINE vec load(const float* p) { return *(const unaligned*)p; }
INLINE void store(float* p, vec x) { *(unaligned*)p = x; }
INLINE vec all(float x) { return x - (vec){}; }
INLINE vec min(vec x, float high) { return x > high ? all(high) : x; }
INLINE vec max(vec x, float low) { return x < low ? all(low) : x; }

INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

// 2^x to one unit in the last place: zero far below 2^-126, infinity from 2^128 on, NaN for NaN.
// 2^x = 2^n 2^f with n whole and |f| <= 1/2; the polynomial is that of Cephes' exp2f.
INLINE vec exp2(vec x) {
#if defined(__AVX512F__)
    x = min(max(x, -200.0f), 128.0f);
    const vec n = (vec)_mm512_roundscale_ps((__m512)x, 0);
#else
    x = min(max(x, -127.0f), 128.0f);
    const vec magic = all(12582912.0f);  // 1.5 * 2^23: adding it leaves n in the low bits
    const vec shifted = x + magic;
    const vec n = shifted - magic;
#endif
    const vec f = x - n;
    vec p = all(1.535336188319500e-4f);
    p = p * f + 1.339887440266574e-3f;
    p = p * f + 9.618437357674640e-3f;
    p = p * f + 5.550332471162809e-2f;
    p = p * f + 2.402264791363012e-1f;
    p = p * f + 6.931472028550421e-1f;
    p = p * f + 1.0f;
#if defined(__AVX512F__)
    return (vec)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    const ivec power = ((ivec)shifted << 23) + 0x3f800000;
    return x < -126.0f ? (vec){} : p * (vec)power;
#endif
}

constexpr float LOG2_E = 1.44269504088896341f;

INLINE vec exp(vec x) { return exp2(x * LOG2_E); }
INLINE vec absolute(vec x) { return x < 0.0f ? -x : x; }
INLINE vec sigmoid(vec x) { return 1.0f / (1.0f + exp(-x)); }

// log(1 + exp(x)) = max(x, 0) + log1p(y) with y = exp(-|x|); log1p(y) = 2 artanh(s), s = y / (2 + y) <= 1/3,
// which keeps the relative precision of small results.
INLINE vec softplus(vec x) {
    const vec y = exp(-absolute(x));
    const vec s = y / (2.0f + y);
    const vec s2 = s * s;
    vec p = all(1.0f / 15);
    p = p * s2 + 1.0f / 13;
    p = p * s2 + 1.0f / 11;
    p = p * s2 + 1.0f / 9;
    p = p * s2 + 1.0f / 7;
    p = p * s2 + 1.0f / 5;
    p = p * s2 + 1.0f / 3;
    p = p * s2 + 1.0f;
    return max(x, 0.0f) + 2.0f * s * p;
}

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif

// The sum of the lanes, always in the same order: halves are added until one lane is left.
INLINE float sum(vec x) {
#if LANES == 16
    x += SHUFFLE(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    x += SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3);
    x += SHUFFLE(x, x, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1);
    x += SHUFFLE(x, x, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0);
#elif LANES == 8
    x += SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3);
    x += SHUFFLE(x, x, 2, 3, 0, 1, 2, 3, 0, 1);
    x += SHUFFLE(x, x, 1, 0, 1, 0, 1, 0, 1, 0);
#else
    x += SHUFFLE(x, x, 2, 3, 0, 1);
    x += SHUFFLE(x, x, 1, 0, 1, 0);
#endif
    return x[0];
}

#if LANES == 16
INLINE vec zip_low(vec a, vec b) {
    return SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
INLINE vec zip_high(vec a, vec b) {
    return SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
#elif LANES == 8
INLINE vec zip_low(vec a, vec b) { return SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
INLINE vec zip_high(vec a, vec b) { return SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
#else
INLINE vec zip_low(vec a, vec b) { return SHUFFLE(a, b, 0, 4, 1, 5); }
INLINE vec zip_high(vec a, vec b) { return SHUFFLE(a, b, 2, 6, 3, 7); }
#endif

// Transpose W vectors: log2(W) rounds, each zipping the first half of the rows with the second.
INLINE void transpose_square(vec* x) {
    vec y[W];
    for (int64_t round = 1; round < W; round *= 2) {
        for (int64_t i = 0; i < W / 2; i++) {
            y[2 * i] = zip_low(x[i], x[i + W / 2]);
            y[2 * i + 1] = zip_high(x[i], x[i + W / 2]);
        }
        for (int64_t i = 0; i < W; i++) x[i] = y[i];
    }
}

// out (columns, rows) = x (rows, columns)^T; both counts are multiples of W.
void transpose(const float* x, int64_t ldx, float* out, int64_t ldo, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; i += W)
        for (int64_t j = 0; j < columns; j += W) {
            vec tile[W];
            for (int64_t r = 0; r < W; r++) tile[r] = load(x + (i + r) * ldx + j);
            transpose_square(tile);
            for (int64_t r = 0; r < W; r++) store(out + (j + r) * ldo + i, tile[r]);
        }
}

// Copy n numbers and fill up with zeros to `padded`, a multiple of W.
INLINE void copy_row(float* out, const float* x, int64_t n, int64_t padded) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(out + i, load(x + i));
    for (; i < n; i++) out[i] = x[i];
    for (; i < padded; i++) out[i] = 0.0f;
}

INLINE void write_row(float* out, const float* x, int64_t n) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(out + i, load(x + i));
    for (; i < n; i++) out[i] = x[i];
}

}  // namespace

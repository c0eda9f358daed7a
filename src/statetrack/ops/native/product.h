// Small matrix products: MR rows times NV vectors of the result stay in registers for the whole sum.
#pragma once

#include "vector.h"

namespace {

#if LANES == 16
constexpr int64_t MR = 8;
#elif LANES == 8
constexpr int64_t MR = 6;
#else
constexpr int64_t MR = 4;
#endif

struct Matrix {
    float* data;
    int64_t row, column;  // strides
};

INLINE Matrix rows_of(float* data, int64_t width) { return {data, width, 1}; }
INLINE Matrix transposed(Matrix x) { return {x.data, x.column, x.row}; }

// out (M rows, NV vectors) = [out] + sign A B, summed over first <= p < last.
template <int64_t M, int64_t NV>
__attribute__((noinline)) void tile(Matrix A, const float* B, int64_t ldb, float* out, int64_t ldo,
                                    int64_t first, int64_t last, float sign, bool add) {
    vec sum[M][NV];
    UNROLL for (int64_t i = 0; i < M; i++) UNROLL for (int64_t j = 0; j < NV; j++) sum[i][j] = (vec){};
    const float* a = A.data + first * A.column;
    const float* b = B + first * ldb;
    for (int64_t p = first; p < last; p++, a += A.column, b += ldb) {
        vec row[NV];
        UNROLL for (int64_t j = 0; j < NV; j++) row[j] = load(b + j * W);
        UNROLL for (int64_t i = 0; i < M; i++) {
            const vec factor = all(a[i * A.row]);
            UNROLL for (int64_t j = 0; j < NV; j++) sum[i][j] += factor * row[j];
        }
    }
    UNROLL for (int64_t i = 0; i < M; i++) UNROLL for (int64_t j = 0; j < NV; j++) {
        float* target = out + i * ldo + j * W;
        store(target, add ? load(target) + sign * sum[i][j] : sign * sum[i][j]);
    }
}

template <int64_t M>
INLINE void band(int64_t rows, int64_t columns, Matrix A, const float* B, int64_t ldb, float* out,
                 int64_t ldo, int64_t first, int64_t last, float sign, bool add) {
    if constexpr (M > 0) {
        if (rows < M)
            return band<M - 1>(rows, columns, A, B, ldb, out, ldo, first, last, sign, add);
        int64_t j = 0;
        for (; j + 2 * W <= columns; j += 2 * W)
            tile<M, 2>(A, B + j, ldb, out + j, ldo, first, last, sign, add);
        if (j < columns) tile<M, 1>(A, B + j, ldb, out + j, ldo, first, last, sign, add);
    }
}

// Which triangle of a factor or a result is used: the rest of a factor is zero, the rest of a result
// undefined.
enum Part { FULL, FACTOR_LOWER, FACTOR_UPPER, RESULT_LOWER };

// out (M, N) = [out] + sign A (M, P) B (P, N). B and out are contiguous along N, a multiple of W.
void product(int64_t M, int64_t N, int64_t P, Matrix A, const float* B, int64_t ldb, float* out, int64_t ldo,
             float sign, bool add, Part part = FULL) {
    for (int64_t i = 0; i < M; i += MR) {
        const int64_t rows = min(MR, M - i);
        const int64_t first = part == FACTOR_UPPER ? i : 0;
        const int64_t last = part == FACTOR_LOWER ? min(P, i + rows) : P;
        const int64_t columns = part == RESULT_LOWER ? min(N, round_up(i + rows, W)) : N;
        const Matrix a = {A.data + i * A.row, A.row, A.column};
        band<MR>(rows, columns, a, B, ldb, out + i * ldo, ldo, first, last, sign, add);
    }
}

// out = A B, whose row i sees the first (i + 1) * each rows of B, with no product of the zeros beyond them:
// times NaN they would make earlier rows NaN.
__attribute__((noinline, cold)) void causal_product(int64_t rows, int64_t each, Matrix A, const float* B,
                                                    int64_t width, float* out) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = 0; c < width; c += W) {
            vec row = (vec){};
            for (int64_t j = 0; j < (i + 1) * each; j++)
                row += A.data[i * A.row + j * A.column] * load(B + j * width + c);
            store(out + i * width + c, row);
        }
}

// Solve X + P diag(b) X = R in place, X over R, and give Y = diag(b) X. P (rows, rows) is strictly lower
// (first row first), or seen through `transposed` strictly upper (last row first).
void solve(int64_t rows, int64_t width, Matrix P, bool upper, const float* b, float* X, float* Y) {
    const int64_t blocks = (rows + MR - 1) / MR;
    for (int64_t step = 0; step < blocks; step++) {
        const int64_t start = (upper ? blocks - 1 - step : step) * MR;
        const int64_t stop = min(rows, start + MR);
        const Matrix block = {P.data + start * P.row, P.row, P.column};
        const int64_t first = upper ? stop : 0, last = upper ? rows : start;
        if (first < last)
            band<MR>(stop - start, width, block, Y, width, X + start * width, width, first, last, -1.0f,
                     true);
        for (int64_t s = 0; s < stop - start; s++) {
            const int64_t i = upper ? stop - 1 - s : start + s;
            float *x = X + i * width, *y = Y + i * width;
            const int64_t from = upper ? i + 1 : start, to = upper ? stop : i;
            for (int64_t c = 0; c < width; c += W) {
                vec row = load(x + c);
                for (int64_t j = from; j < to; j++)
                    row -= P.data[i * P.row + j * P.column] * load(Y + j * width + c);
                store(x + c, row);
                store(y + c, b[i] * row);
            }
        }
    }
}

}  // namespace

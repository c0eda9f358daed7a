// The causal depthwise convolution along time with its SiLU, and its gradients:
//
//     p_t = bias + sum_i weight_i x_{t - width + 1 + i}        y_t = p_t, or p_t sigmoid(p_t) with SiLU
//
// All steps of all sequences are the rows of one matrix. A work item is a block of rows by a block of columns;
// it goes through its rows sequence by sequence, and what lies before the first step of a sequence is zero.
// The backward computes p again, so the forward saves nothing:
//
//     dp_t = dy_t (p_t sigmoid(p_t))'        dx_t = sum_i weight_i dp_{t + width - 1 - i}
//     dweight_i = sum_t dp_t x_{t - width + 1 + i}        dbias = sum_t dp_t
//
// The sums over t are made per item and added up in the order of the rows, whichever thread had which.
#pragma once

#include "rows.h"

namespace {

constexpr int64_t COLUMNS = 64;  // of a block; rows in scratch memory are this long
constexpr int64_t MAX_TAPS = 8;

// Steps of one sequence in a block: `rows` of them from `row` on. `before` and `after` count the steps of the
// sequence around them that their results depend on.
struct Steps {
    int64_t row, rows, before, after;

    Steps(const Convolution& c, int64_t row, int64_t last) : row(row) {
        int64_t start = row / c.T * c.T, end = start + c.T;
        if (c.cu_seqlens) {
            int64_t low = 0, high = c.sequences;  // the sequence is among those from `low` on before `high`
            while (high - low > 1) {
                const int64_t middle = (low + high) / 2;
                (c.cu_seqlens[middle] <= row ? low : high) = middle;
            }
            start = c.cu_seqlens[low], end = c.cu_seqlens[high];
        }
        rows = min(end, last) - row;
        before = min(row - start, c.width - 1);
        after = min(end - row - rows, c.width - 1);
    }
};

struct ConvolutionBlock {
    const Convolution& c;
    int64_t index, first, last;     // of the blocks of rows, this one; its rows
    int64_t column, columns, used;  // first column, how many, and that rounded up to whole vectors
    float *weight, *bias;           // [width][COLUMNS], [COLUMNS]
    float* x;                       // [before, rows, after][COLUMNS]; zero before the sequence
    float* result;                  // a row of results

    ConvolutionBlock(const Convolution& c, int64_t item, int64_t more) : c(c) {
        const int64_t across = (c.C + COLUMNS - 1) / COLUMNS;
        index = item / across, column = item % across * COLUMNS;
        first = index * c.rows, last = min(first + c.rows, c.batch * c.T);
        columns = min(COLUMNS, c.C - column), used = round_up(columns, W);
        Arena take{scratch((3 * MAX_TAPS + c.rows + more) * COLUMNS)};
        weight = take(MAX_TAPS * COLUMNS), bias = take(COLUMNS), result = take(COLUMNS);
        x = take((c.rows + 2 * (MAX_TAPS - 1)) * COLUMNS);
        for (int64_t i = 0; i < c.width; i++)
            for (int64_t j = 0; j < used; j++)
                weight[i * COLUMNS + j] = j < columns ? c.weight[(column + j) * c.width + i] : 0.0f;
        if (c.bias)
            copy_row(bias, c.bias + column, columns, used);
        else
            memset(bias, 0, used * sizeof(float));
    }

    // Rows of `tensor` from `row` on, all of one sequence.
    void read(const Tensor3& tensor, int64_t row, int64_t rows, float* out) const {
        const float* from = at(tensor, row / c.T, row % c.T, 0) + column;
        for (int64_t t = 0; t < rows; t++) copy_row(out + t * COLUMNS, from + t * tensor.s1, columns, used);
    }

    void read_inputs(const Steps& s, int64_t after) const {
        const int64_t missing = c.width - 1 - s.before;
        memset(x, 0, missing * COLUMNS * sizeof(float));
        read(c.x, s.row - s.before, s.before + s.rows + after, x + missing * COLUMNS);
    }

    void write(float* out, int64_t row) const { write_row(out + row * c.C + column, result, columns); }
};

// sum_i weight_i x_i over `width` rows x_i, plus `start`.
INLINE vec over_taps(const float* weight, const float* x, int64_t width, vec start) {
    for (int64_t i = 0; i < width; i++) start += load(weight + i * COLUMNS) * load(x + i * COLUMNS);
    return start;
}

// `width` is c.width, as a constant where that pays.
INLINE void forward_steps(const ConvolutionBlock& b, const Steps& s, int64_t width) {
    for (int64_t t = 0; t < s.rows; t++) {
        for (int64_t j = 0; j < b.used; j += W) {
            const vec p = over_taps(b.weight + j, b.x + t * COLUMNS + j, width, load(b.bias + j));
            store(b.result + j, b.c.silu ? p / (1.0f + exp(-p)) : p);
        }
        b.write(b.c.out, s.row + t);
    }
}

void convolution_forward_item(void* context, int64_t item) {
    const Convolution& c = *(const Convolution*)context;
    const ConvolutionBlock b(c, item, 0);
    for (int64_t row = b.first; row < b.last;) {
        const Steps s(c, row, b.last);
        b.read_inputs(s, 0);
        c.width == 4 ? forward_steps(b, s, 4) : forward_steps(b, s, c.width);
        row += s.rows;
    }
}

// The gradients of the steps `s`, added to the sums of the block; dp has rows up to width - 1 steps behind them.
INLINE void backward_steps(const ConvolutionBlock& b, const Steps& s, float* dp, float* sums, int64_t width) {
    const Convolution& c = b.c;
    for (int64_t t = 0; c.silu && t < s.rows + s.after; t++)
        for (int64_t j = 0; j < b.used; j += W) {
            const vec p = over_taps(b.weight + j, b.x + t * COLUMNS + j, width, load(b.bias + j));
            const vec open = sigmoid(p);
            store(dp + t * COLUMNS + j, load(dp + t * COLUMNS + j) * open * (1.0f + p * (1.0f - open)));
        }
    for (int64_t t = 0; c.dx && t < s.rows; t++) {
        for (int64_t j = 0; j < b.used; j += W) {
            vec sum = (vec){};
            for (int64_t i = 0; i < width; i++)
                sum += load(b.weight + i * COLUMNS + j) * load(dp + (t + width - 1 - i) * COLUMNS + j);
            store(b.result + j, sum);
        }
        b.write(c.dx, s.row + t);
    }
    for (int64_t j = 0; c.partial && j < b.used; j += W) {
        vec sum[MAX_TAPS + 1];
        for (int64_t i = 0; i <= width; i++) sum[i] = load(sums + i * COLUMNS + j);
        for (int64_t t = 0; t < s.rows; t++) {
            const vec slope = load(dp + t * COLUMNS + j);
            for (int64_t i = 0; i < width; i++) sum[i] += slope * load(b.x + (t + i) * COLUMNS + j);
            sum[width] += slope;
        }
        for (int64_t i = 0; i <= width; i++) store(sums + i * COLUMNS + j, sum[i]);
    }
}

void convolution_backward_item(void* context, int64_t item) {
    const Convolution& c = *(const Convolution*)context;
    const ConvolutionBlock b(c, item, c.rows + 2 * MAX_TAPS);
    float* dp = b.x + (c.rows + 2 * (MAX_TAPS - 1)) * COLUMNS;  // [rows, after][COLUMNS]; zero behind the sequence
    float* sums = dp + (c.rows + MAX_TAPS - 1) * COLUMNS;       // [width, 1][COLUMNS]
    memset(sums, 0, (c.width + 1) * COLUMNS * sizeof(float));
    for (int64_t row = b.first; row < b.last;) {
        const Steps s(c, row, b.last);
        b.read_inputs(s, s.after);
        b.read(c.dout, s.row, s.rows + s.after, dp);
        memset(dp + (s.rows + s.after) * COLUMNS, 0, (c.width - 1 - s.after) * COLUMNS * sizeof(float));
        c.width == 4 ? backward_steps(b, s, dp, sums, 4) : backward_steps(b, s, dp, sums, c.width);
        row += s.rows;
    }
    for (int64_t i = 0; c.partial && i <= c.width; i++)
        write_row(c.partial + (b.index * (c.width + 1) + i) * c.C + b.column, sums + i * COLUMNS, b.columns);
}

// dweight and dbias of a block of columns.
void convolution_reduce_item(void* context, int64_t item) {
    const Convolution& c = *(const Convolution*)context;
    const int64_t column = item * COLUMNS, columns = min(COLUMNS, c.C - column);
    const int64_t blocks = (c.batch * c.T + c.rows - 1) / c.rows;
    for (int64_t i = 0; i <= c.width; i++) {
        double total[COLUMNS] = {};
        for (int64_t block = 0; block < blocks; block++) {
            const float* part = c.partial + (block * (c.width + 1) + i) * c.C + column;
            for (int64_t j = 0; j < columns; j++) total[j] += part[j];
        }
        for (int64_t j = 0; j < columns; j++)
            (i < c.width ? c.dweight[(column + j) * c.width + i] : c.dbias[column + j]) = (float)total[j];
    }
}

}  // namespace

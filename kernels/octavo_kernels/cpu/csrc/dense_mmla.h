// Products of bfloat16 rows and weights of bfloat16 by Arm's BFMMLA, for any number of rows: 2 channels times 2 rows, 4 columns of
// each. Columns are added up four by four along the width, so the bits of a sum do not depend on the other rows.
//
// The instruction rounds each product, each sum of two of them and each total to odd, takes denormals as zeros, and knows one
// NaN, whatever the thread's own mode is. Widths are padded with zeros to fours.
//
// Rows are packed [four columns][row][4]: two rows are one operand, the last of an odd number half of one. A row alone is packed as
// it lies. Weights are read as they lie: of two steps, interleaved, each vector is 2 channels of 4 columns.
#pragma once
#include "linear_ops.h"
#include "simd.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAS_BF16_MMLA 1
#define MMLA_ROWS 10  // of a tile: 5 pairs times 4 pairs of channels stay in registers
#define SUM_ROWS MMLA_ROWS
#define STEP_STRIDE (DENSE_BLOCK * 4)  // bytes

// Fours of columns [first, end) of row `row` of x, as row i of `rows`
INLINE void pack_mmla_row(const struct dense_linear_args *a, uint8_t *to, int64_t row, int64_t i, int64_t rows, int64_t first,
                          int64_t end) {
    const uint16_t *from = (const uint16_t *)a->x + row * a->width;
    for (int64_t k = first; k < end; k++) {
        uint64_t four = 0;
        if (a->width - 4 * k >= 4) memcpy(&four, from + 4 * k, 8);
        else memcpy(&four, from + 4 * k, (size_t)(a->width - 4 * k) * 2);
        memcpy(to + (k * rows + i) * 8, &four, 8);
    }
}

// The first row of tile i: all but the last tile have an even number of rows
INLINE int64_t mmla_begin(int64_t rows, int64_t i) {
    return MIN(rows, CEIL_DIV(rows, 2) * i / CEIL_DIV(rows, MMLA_ROWS) * 2);
}

// All rows, packed; x itself where that is the same. Two phases.
static const void *packed_fours(const struct dense_linear_args *a, struct team_member *m) {
    enum { PART = 128 };  // fours of an item
    const int64_t fours = CEIL_DIV(a->width, 4), parts = CEIL_DIV(fours, PART), items = CEIL_DIV(a->rows, MMLA_ROWS) * parts;
    if (a->rows == 1 && a->width % 4 == 0) return a->x;
    uint8_t *packed = team_workspace(m, (size_t)(a->rows * fours * 8));
    for (int64_t n; (n = team_take_item(m, items)) >= 0; team_item_done(m)) {
        const int64_t row = mmla_begin(a->rows, n / parts), rows = mmla_begin(a->rows, n / parts + 1) - row, first = n % parts * PART;
        for (int64_t i = 0; i < rows; i++)
            pack_mmla_row(a, packed + row * fours * 8, row + i, i, rows, first, MIN(fours, first + PART));
    }
    team_finish_phase(m, items);
    return packed;
}

// sums += two steps of `vectors` vectors of channels, or one and zeros, times four columns of each row
INLINE void mmla_step(float32x4_t (*sums)[2][MMLA_ROWS / 2], const uint8_t *weight, const uint8_t *x, const int steps,
                      const int vectors, const int rows) {
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) {
        const uint32x4_t first = vreinterpretq_u32_u8(vld1q_u8(weight + v * 16));
        const uint32x4_t second = steps == 2 ? vreinterpretq_u32_u8(vld1q_u8(weight + STEP_STRIDE + v * 16)) : vdupq_n_u32(0);
        const bfloat16x8_t lower = vreinterpretq_bf16_u32(vzip1q_u32(first, second)),
                           upper = vreinterpretq_bf16_u32(vzip2q_u32(first, second));
#pragma GCC unroll 5
        for (int p = 0; p < (rows + 1) / 2; p++) {
            const uint8x16_t two = 2 * p + 1 < rows ? vld1q_u8(x + p * 16) : vcombine_u8(vld1_u8(x + p * 16), vdup_n_u8(0));
            sums[v][0][p] = vbfmmlaq_f32(sums[v][0][p], lower, vreinterpretq_bf16_u8(two));
            sums[v][1][p] = vbfmmlaq_f32(sums[v][1][p], upper, vreinterpretq_bf16_u8(two));
        }
    }
}

// sums [vectors][rows]
INLINE void mmla_tile(const uint8_t *weight, const uint8_t *x, int64_t steps, struct prefetch ahead, vf (*sums)[SUM_ROWS],
                      const int vectors, const int rows) {
    float32x4_t c[BLOCK_VECTORS][2][MMLA_ROWS / 2];  // [vector][its first or last two channels][pair of rows]
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++)
#pragma GCC unroll 5
        for (int p = 0; p < (rows + 1) / 2; p++) c[v][0][p] = c[v][1][p] = vdupq_n_f32(0.0f);
    for (int64_t s = 0; s + 2 <= steps; s += 2, weight += 2 * STEP_STRIDE, x += rows * 8) {
        for (int64_t n = 2 * ahead.lines; n > 0; n--, ahead.next += 64) __builtin_prefetch(ahead.next, 0, 3);
        mmla_step(c, weight, x, 2, vectors, rows);
    }
    if (steps % 2) mmla_step(c, weight, x, 1, vectors, rows);
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) {
#pragma GCC unroll 5
        for (int p = 0; p < (rows + 1) / 2; p++) {
            sums[v][2 * p] = (vf)vuzp1q_f32(c[v][0][p], c[v][1][p]);
            if (2 * p + 1 < rows) sums[v][2 * p + 1] = (vf)vuzp2q_f32(c[v][0][p], c[v][1][p]);
        }
    }
}

// A block of channels: all at once for few rows, so that there are sums enough to hide their latency
INLINE void mmla_block(const uint8_t *weight, const uint8_t *x, int64_t steps, struct prefetch ahead, vf (*sums)[SUM_ROWS],
                       const int rows) {
    const int vectors = rows <= 2 ? 8 : rows <= 6 ? 4 : 2;
#pragma GCC unroll 1
    for (int v = 0; v < BLOCK_VECTORS; v += vectors) {
        mmla_tile(weight + v * 16, x, steps, ahead, sums + v, vectors, rows);
        ahead.lines = 0;
    }
}

static void __attribute__((noinline)) tile_mmla(const uint8_t *weight, const void *x, int64_t steps, struct prefetch ahead,
                                                vf (*sums)[SUM_ROWS], int64_t rows) {
#define MMLA_CASE(n) \
    case n: mmla_block(weight, x, steps, ahead, sums, n); break;
    switch (rows) {
        MMLA_CASE(1) MMLA_CASE(2) MMLA_CASE(3) MMLA_CASE(4) MMLA_CASE(5) MMLA_CASE(6)
        MMLA_CASE(7) MMLA_CASE(8) MMLA_CASE(9) MMLA_CASE(10)
    }
#undef MMLA_CASE
}
#else
#define HAS_BF16_MMLA 0
#endif

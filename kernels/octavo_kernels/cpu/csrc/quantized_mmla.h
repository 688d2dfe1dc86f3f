// The sums of groups of quantized_tile.h by Arm's USMMLA: 2 channels of unsigned codes times 2 rows of int8, 8 columns of each. The
// integers are the same, and their lanes are put in the same order afterwards: nothing depends on which instruction made them.
//
// A vector of codes is 4 columns of 2 channels and both groups; of two steps, interleaved, it is 8 columns of 2 channels of one
// group. Rows are interleaved alike.
#pragma once
#include "dot.h"
#include "linear_ops.h"

#if HAS_INT8_MMLA
#define PAIRS_OF_ROWS ((QMR + 1) / 2)

// Sums of a pair of rows, whose lanes are (channel, group), to those of each group, whose lanes are (channel, row), or back
INLINE void swap_groups_and_rows(int32x4_t *first, int32x4_t *second) {
    const int32x4_t even = vtrn1q_s32(*first, *second), odd = vtrn2q_s32(*first, *second);
    *first = even, *second = odd;
}

// c[pair][n][group] += steps `step` and step + 1 of rows [from, to), times the codes of either for both vectors n
INLINE void mmla_steps(int32x4_t (*c)[2][2], const vbytes *codes, const vbytes *next, const struct row_pair *x, int64_t stride,
                       const int step, const int from, const int to) {
    uint8x16_t w[2][2];  // [n][group]
#pragma GCC unroll 2
    for (int n = 0; n < 2; n++) {
        const uint32x4_t a = (uint32x4_t)codes[n], b = (uint32x4_t)next[n];
        w[n][0] = (uint8x16_t)vtrn1q_u32(a, b), w[n][1] = (uint8x16_t)vtrn2q_u32(a, b);
    }
#pragma GCC unroll 4
    for (int i = from; i < to; i += 2) {
        const int32x4_t even = vld1q_s32((const int32_t *)x[i * stride].values[step]),
                        odd = i + 1 < to ? vld1q_s32((const int32_t *)x[(i + 1) * stride].values[step]) : even;
        const int8x16_t rows[2] = {(int8x16_t)vuzp1q_s32(even, odd), (int8x16_t)vuzp2q_s32(even, odd)};
        int32x4_t(*sums)[2] = c[(i - from) / 2];
#pragma GCC unroll 2
        for (int n = 0; n < 2; n++)
#pragma GCC unroll 2
            for (int g = 0; g < 2; g++) sums[n][g] = vusmmlaq_s32(sums[n][g], w[n][g], rows[g]);
    }
}

// Rows [from, to) of acc, which are `across` vectors apart, as pairs of rows; and back
INLINE void load_sums(int32x4_t (*c)[2][2], const vi *acc, const int across, const int from, const int to) {
#pragma GCC unroll 4
    for (int i = from; i < to; i += 2) {
#pragma GCC unroll 2
        for (int n = 0; n < 2; n++) {
            int32x4_t *sums = c[(i - from) / 2][n];
            sums[0] = (int32x4_t)acc[i * across + n], sums[1] = (int32x4_t)acc[MIN(i + 1, to - 1) * across + n];
            swap_groups_and_rows(sums, sums + 1);
        }
    }
}
INLINE void store_sums(int32x4_t (*c)[2][2], vi *acc, const int across, const int from, const int to) {
#pragma GCC unroll 4
    for (int i = from; i < to; i += 2) {
#pragma GCC unroll 2
        for (int n = 0; n < 2; n++) {
            int32x4_t *sums = c[(i - from) / 2][n];
            swap_groups_and_rows(sums, sums + 1);
            acc[i * across + n] = (vi)sums[0];
            if (i + 1 < to) acc[(i + 1) * across + n] = (vi)sums[1];
        }
    }
}

// What dots() adds up, for several rows
INLINE void mmla_dots(vi (*acc)[2 * ACROSS], const uint8_t *codes, const struct row_pair *x, int64_t stride, const int half,
                      vbytes table, const int kind, const int mr) {
    const int halves = kind_has(kind, HALVES);
    int32x4_t c[PAIRS_OF_ROWS][2][2];
    load_sums(c, acc[0], 2 * ACROSS, 0, mr);
#pragma GCC unroll 2
    for (int step = 0; step < 4; step += 2) {
        vbytes low[2][2], high[2][2];  // [step][n]
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) load_codes(codes, step + i / 2, i % 2, table, kind, low[i / 2] + i % 2, high[i / 2] + i % 2);
        if (!halves || half == 0) mmla_steps(c, low[0], low[1], x, stride, step, 0, mr);
        if (!halves || half == 1) mmla_steps(c, high[0], high[1], x, stride, step + 4, 0, mr);
    }
    store_sums(c, acc[0], 2 * ACROSS, 0, mr);
}

// What dots_float() adds up, for several rows
INLINE void mmla_dots_float(vi (*acc)[2], const uint8_t *codes, const struct row_pair *x, int64_t stride, vbytes table,
                            const int kind, const int from, const int to) {
    const int packed = kind_bits(kind) == 4, steps = packed ? 4 : 8;
    int32x4_t c[PAIRS_OF_ROWS][2][2];
    load_sums(c, acc[0], 2, from, to);
#pragma GCC unroll 4
    for (int step = 0; step < steps; step += 2) {
        vbytes low[2][2], high[2][2];  // [step][n]
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            if (packed) load_codes(codes, step + i / 2, i % 2, table, kind, low[i / 2] + i % 2, high[i / 2] + i % 2);
            else low[i / 2][i % 2] = load_bytes(codes + (2 * step + i) * 64);
        }
        mmla_steps(c, low[0], low[1], x, stride, step, from, to);
        if (packed) mmla_steps(c, high[0], high[1], x, stride, step + 4, from, to);
    }
    store_sums(c, acc[0], 2, from, to);
}
#endif

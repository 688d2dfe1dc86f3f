// The products of row_scaled_tile.h by Arm's USMMLA: 2 channels of unsigned codes times 2 rows of int8, 8 columns of each. Sums
// are the same integers, so nothing depends on which instruction makes them: a row alone, which would leave half of one idle, is
// multiplied by dot products. Rows and weights are read as they lie, and interleaved.
#pragma once
#include "dot.h"
#include "linear_ops.h"

#if HAS_INT8_MMLA
// c += 2 steps of `vectors` vectors of channels times 8 columns of each row, `stride` bytes apart
INLINE void scaled_mmla_step(int32x4_t (*c)[2][SCALED_ROWS / 2], const uint8_t *codes, const int8_t *x, int64_t stride,
                             const int vectors, const int mr) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
        const uint32x4_t first = vreinterpretq_u32_u8(vld1q_u8(codes + v * 16)),
                         second = vreinterpretq_u32_u8(vld1q_u8(codes + STEP_BYTES + v * 16));
        const uint8x16_t lower = vreinterpretq_u8_u32(vzip1q_u32(first, second)),
                         upper = vreinterpretq_u8_u32(vzip2q_u32(first, second));
#pragma GCC unroll 4
        for (int p = 0; p < (mr + 1) / 2; p++) {
            const int8_t *one = x + 2 * p * stride, *other = 2 * p + 1 < mr ? one + stride : one;
            const int8x16_t two = vcombine_s8(vld1_s8(one), vld1_s8(other));
            c[v][0][p] = vusmmlaq_s32(c[v][0][p], lower, two);
            c[v][1][p] = vusmmlaq_s32(c[v][1][p], upper, two);
        }
    }
}

// part[mr][from ...] = sums over all columns
INLINE void scaled_mmla_sums(const struct weight_block *b, const uint8_t *codes, const uint8_t *values, int64_t stride, int64_t lines,
                             vi (*part)[SCALED_ACROSS], const int from, const int vectors, const int mr) {
    const uint8_t *prefetch = b->prefetch;
    int32x4_t c[SCALED_ACROSS][2][SCALED_ROWS / 2];  // [vector][its first or last two channels][pair of rows]
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++)
#pragma GCC unroll 4
        for (int p = 0; p < (mr + 1) / 2; p++) c[v][0][p] = c[v][1][p] = vdupq_n_s32(0);
    for (int64_t k = 0; k < b->count * PAIR; k += 8, codes += 2 * STEP_BYTES) {
        for (int64_t line = 0; line < lines; line++, prefetch += 64) __builtin_prefetch(prefetch, 0, 3);
        scaled_mmla_step(c, codes, (const int8_t *)values + k, stride, vectors, mr);
    }
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
#pragma GCC unroll 4
        for (int p = 0; p < (mr + 1) / 2; p++) {
            part[2 * p][from + v] = (vi)vuzp1q_s32(c[v][0][p], c[v][1][p]);
            if (2 * p + 1 < mr) part[2 * p + 1][from + v] = (vi)vuzp2q_s32(c[v][0][p], c[v][1][p]);
        }
    }
}

INLINE void mmla_by_row(const struct weight_block *b, const struct activations *x, int64_t row, vf (*sums)[MAX_ROWS],
                        const int kind, const int mr) {
    if (mr == 1) {
        tile_by_row(b, x, row, sums, kind, 1);
        return;
    }
    const int vectors = mr <= 4 ? SCALED_ACROSS : SCALED_ACROSS / 2;  // whose sums stay in registers
    const int64_t groups = x->groups, stride = scaled_row_bytes(groups);
    const struct scaled_row *first = scaled_row_at(x->pairs, row, groups);
    const uint8_t *values = first->data + scaled_row_steps(groups);
#pragma GCC unroll 1
    for (int v = 0; v < BLOCK / VW; v += SCALED_ACROSS) {
        const uint8_t *codes = b->pairs + v * VW * 4;
        vi part[SCALED_ROWS][SCALED_ACROSS];
        for (int n = 0; n < SCALED_ACROSS; n += vectors)
            scaled_mmla_sums(b, codes + n * VW * 4, values, stride, v + n == 0 ? b->lines / 8 : 0, part, n, vectors, mr);
        scaled_second(part, codes, first->data, groups, stride, mr);
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++) {
            const struct scaled_row *at = scaled_row_at(x->pairs, row + i, groups);
            for (int n = 0; n < SCALED_ACROSS; n++) {
                const vf scale = splat(at->scale) * vload((const float *)b->head + (v + n) * VW);
                sums[v + n][i] = __builtin_convertvector(part[i][n] - splat_int(at->sum * 128), vf) * scale;
            }
        }
    }
}
#endif

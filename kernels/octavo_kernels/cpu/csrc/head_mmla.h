// Products of bfloat16 rows of a head with its bfloat16 weight by Arm's BFMMLA (dense_mmla.h), for any number of rows. A weight
// [width, channels] is packed for all rows of an item, four columns of each channel together; rows are read as they lie. Widths and
// channels are padded with zeros.
#pragma once
#include "attention_ops.h"
#include "simd.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAS_HEAD_MMLA 1
enum { MMLA_CHANNELS = 16, MMLA_HEAD_ROWS = 4, FOUR_BYTES = MMLA_CHANNELS * 8 };

// Four columns of channels first .. first + count, from column k on: [channel][4]
INLINE void pack_four(const struct head_linear_args *a, int64_t head, int64_t k, int64_t first, int64_t count, uint8_t *to) {
    const uint16_t *weight = (const uint16_t *)a->weight + head * a->width * a->channels + first;
    uint16_t columns[4][MMLA_CHANNELS] = {{0}};
    for (int64_t i = 0; i < MIN(4, a->width - k); i++) memcpy(columns[i], weight + (k + i) * a->channels, (size_t)count * 2);
    for (int v = 0; v < MMLA_CHANNELS; v += 8, to += 64) {
        uint16x8_t c[4];
        for (int i = 0; i < 4; i++) c[i] = vld1q_u16(columns[i] + v);
        const uint32x4_t early[2] = {(uint32x4_t)vzip1q_u16(c[0], c[1]), (uint32x4_t)vzip2q_u16(c[0], c[1])},
                         late[2] = {(uint32x4_t)vzip1q_u16(c[2], c[3]), (uint32x4_t)vzip2q_u16(c[2], c[3])};
        for (int i = 0; i < 2; i++) {
            vst1q_u8(to + i * 32, (uint8x16_t)vzip1q_u32(early[i], late[i]));
            vst1q_u8(to + i * 32 + 16, (uint8x16_t)vzip2q_u32(early[i], late[i]));
        }
    }
}

// sums [pair of channels][pair of rows] += four columns
INLINE void head_mmla_step(float32x4_t (*sums)[MMLA_HEAD_ROWS / 2], const uint8_t *w, const uint16_t *const *x, int64_t k,
                           const int rows) {
    bfloat16x8_t two[MMLA_HEAD_ROWS / 2];
#pragma GCC unroll 2
    for (int p = 0; p < (rows + 1) / 2; p++)
        two[p] = (bfloat16x8_t)vcombine_u16(vld1_u16(x[2 * p] + k), vld1_u16(x[MIN(2 * p + 1, rows - 1)] + k));
#pragma GCC unroll 8
    for (int c = 0; c < MMLA_CHANNELS / 2; c++)
#pragma GCC unroll 2
        for (int p = 0; p < (rows + 1) / 2; p++)
            sums[c][p] = vbfmmlaq_f32(sums[c][p], (bfloat16x8_t)vld1q_u8(w + c * 16), two[p]);
}

// Rows row .. row + rows of a head times packed channels, of which there are `count`
INLINE void head_mmla_rows(const struct head_linear_args *a, int64_t head, int64_t row, int64_t first, int64_t count,
                           const uint8_t *w, const int rows) {
    float32x4_t sums[MMLA_CHANNELS / 2][MMLA_HEAD_ROWS / 2];
    const uint16_t *x[MMLA_HEAD_ROWS];
    uint16_t last[MMLA_HEAD_ROWS][4] = {{0}};
    const int64_t whole = a->width / 4 * 4;
#pragma GCC unroll 8
    for (int c = 0; c < MMLA_CHANNELS / 2; c++) sums[c][0] = sums[c][1] = vdupq_n_f32(0.0f);
    for (int i = 0; i < rows; i++) {
        x[i] = (const uint16_t *)a->x + (row + i) * a->x_row + head * a->x_head;
        memcpy(last[i], x[i] + whole, (size_t)(a->width - whole) * 2);
    }
    for (int64_t k = 0; k < whole; k += 4, w += FOUR_BYTES) head_mmla_step(sums, w, x, k, rows);
    if (whole < a->width) {
        for (int i = 0; i < rows; i++) x[i] = last[i];
        head_mmla_step(sums, w, x, 0, rows);
    }
    for (int i = 0; i < rows; i++) {
        for (int v = 0; v < MMLA_CHANNELS / VW && v * VW < count; v++) {
            const int64_t at = (row + i) * a->out_row + head * a->out_head + first + v * VW;
            const float32x4_t lower = sums[2 * v][i / 2], upper = sums[2 * v + 1][i / 2];
            const vf sum = (vf)(i % 2 ? vuzp2q_f32(lower, upper) : vuzp1q_f32(lower, upper));
            if (count - v * VW >= VW) store_as(a->out, at, sum, BFLOAT16);
            else store_part(a->out, at, count - v * VW, sum, BFLOAT16);
        }
    }
}

// All rows of a head times channels first .. first + count, at most MMLA_CHANNELS
static void head_mmla(const struct head_linear_args *a, int64_t head, int64_t first, int64_t count) {
    uint8_t *packed = thread_scratch((size_t)(CEIL_DIV(a->width, 4) * FOUR_BYTES));
    for (int64_t k = 0; k < a->width; k += 4) pack_four(a, head, k, first, count, packed + k / 4 * FOUR_BYTES);
    for (int64_t row = 0; row < a->rows; row += MMLA_HEAD_ROWS) {
        switch (MIN(MMLA_HEAD_ROWS, a->rows - row)) {
        case 1: head_mmla_rows(a, head, row, first, count, packed, 1); break;
        case 2: head_mmla_rows(a, head, row, first, count, packed, 2); break;
        case 3: head_mmla_rows(a, head, row, first, count, packed, 3); break;
        default: head_mmla_rows(a, head, row, first, count, packed, 4);
        }
    }
}
#else
#define HAS_HEAD_MMLA 0
#endif

// Products of bfloat16 rows of a head with its bfloat16 weight by matrix tiles (amx.h), for any number of rows. The columns of a
// weight [width, channels] are packed in pairs, tile by tile, for all rows of an item; rows are read as they lie. Widths and
// channels are padded with zeros.
#pragma once
#include "amx.h"

#if HAS_AMX
enum { HEAD_BLOCK = 32, STEP_PAIRS = TILE_WIDTH / 2 };  // channels, and pairs of columns, that are multiplied at once

// Two rows of HALF_ROWS channels, interleaved
INLINE void store_pairs(uint16_t *to, const uint16_t *even, const uint16_t *odd) {
    typedef uint16_t channels __attribute__((vector_size(32), aligned(2), may_alias));
    const channels a = *(const channels *)even, b = *(const channels *)odd;
    *(channels *)to = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    *(channels *)(to + 16) = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

// Channels first .. first + HEAD_BLOCK of a head's weight, of which there are `count`: [pair of columns][channel][2]
static void pack_head(const struct head_linear_args *a, int64_t head, int64_t first, int64_t count, uint16_t *to) {
    const uint16_t *weight = (const uint16_t *)a->weight + head * a->width * a->channels + first;
    for (int64_t k = 0; k < CEIL_DIV(a->width, TILE_WIDTH) * TILE_WIDTH; k += 2, to += 2 * HEAD_BLOCK) {
        uint16_t rows[2][HEAD_BLOCK] = {{0}};
        const uint16_t *two[2] = {weight + k * a->channels, weight + (k + 1) * a->channels};
        for (int odd = 0; odd < 2; odd++) {
            if (k + odd < a->width && count == HEAD_BLOCK) continue;
            if (k + odd < a->width) memcpy(rows[odd], two[odd], (size_t)count * 2);
            two[odd] = rows[odd];
        }
        store_pairs(to, two[0], two[1]);
        store_pairs(to + HEAD_BLOCK, two[0] + HALF_ROWS, two[1] + HALF_ROWS);
    }
}

// C += tiles of rows, `stride` bytes apart, times 16 pairs of columns
INLINE void head_step(const uint8_t *upper, const uint8_t *lower, int64_t stride, const uint16_t *b, int has_lower) {
    TILE_LOAD(0, upper, stride);
    TILE_LOAD(2, b, B_STRIDE);
    TILE_DOT_BF16(4, 0, 2);
    TILE_LOAD(3, b + HEAD_BLOCK, B_STRIDE);
    TILE_DOT_BF16(5, 0, 3);
    if (!has_lower) return;
    TILE_LOAD(1, lower, stride);
    TILE_DOT_BF16(6, 1, 2);
    TILE_DOT_BF16(7, 1, 3);
}

// c [rows, HEAD_BLOCK] = up to AMX_ROWS rows from `row` on times packed channels
static void head_matrix(const struct head_linear_args *a, int64_t head, int64_t row, int64_t rows, const uint16_t *b,
                        float (*c)[HEAD_BLOCK]) {
    const int has_lower = rows > HALF_ROWS;
    const int64_t stride = a->x_row * 2, rest = a->width % TILE_WIDTH;
    const uint8_t *upper = (const uint8_t *)((const uint16_t *)a->x + row * a->x_row + head * a->x_head);
    amx_configure(MIN(rows, HALF_ROWS), MAX(0, rows - HALF_ROWS), HALF_ROWS);
    TILE_ZERO(4);
    TILE_ZERO(5);
    if (has_lower) {
        TILE_ZERO(6);
        TILE_ZERO(7);
    }
    for (int64_t k = 0; k < a->width / TILE_WIDTH; k++, upper += TILE_ROW, b += STEP_PAIRS * 2 * HEAD_BLOCK)
        head_step(upper, upper + HALF_ROWS * stride, stride, b, has_lower);
    if (rest) {
        _Alignas(64) uint8_t last[AMX_ROWS][TILE_ROW] = {{0}};
        for (int64_t i = 0; i < rows; i++) memcpy(last[i], upper + i * stride, (size_t)rest * 2);
        head_step(last[0], last[HALF_ROWS], TILE_ROW, b, has_lower);
    }
    TILE_STORE(4, c, sizeof(*c));
    TILE_STORE(5, c[0] + 16, sizeof(*c));
    if (has_lower) {
        TILE_STORE(6, c + HALF_ROWS, sizeof(*c));
        TILE_STORE(7, c[HALF_ROWS] + 16, sizeof(*c));
    }
}

// All rows of a head times channels first .. first + count
static void head_block(const struct head_linear_args *a, int64_t head, int64_t first, int64_t count) {
    const int64_t padded = CEIL_DIV(a->width, TILE_WIDTH) * TILE_WIDTH;
    uint16_t *packed = thread_scratch((size_t)(padded * HEAD_BLOCK) * 2);
    pack_head(a, head, first, count, packed);
    for (int64_t row = 0; row < a->rows; row += AMX_ROWS) {
        const int64_t rows = MIN(AMX_ROWS, a->rows - row);
        float c[AMX_ROWS][HEAD_BLOCK];
        head_matrix(a, head, row, rows, packed, c);
        for (int64_t i = 0; i < rows; i++) {
            for (int64_t v = 0; v < count; v += VW) {
                const int64_t at = (row + i) * a->out_row + head * a->out_head + first + v;
                if (count - v >= VW) store_as(a->out, at, vload(c[i] + v), BFLOAT16);
                else store_part(a->out, at, count - v, vload(c[i] + v), BFLOAT16);
            }
        }
    }
}
#endif

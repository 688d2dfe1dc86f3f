// Many rows of attention in pairs of bfloat16 by matrix tiles (attention_matrix.h), a whole split of positions at a time: 32 rows
// meet 32 positions, or 32 columns of values, so that two tiles of A and two of B make four products. Keys and values of a split
// stay in the second-level cache while all rows of an item meet them, and a few rows' sums in the first while they meet the
// split. Each row is added up as attend_matrix() adds it, to the bit.
#pragma once
#include "attention_items.h"
#include "attention_matrix.h"

#if HAS_MATRIX_ATTENTION
enum { SQUARE = AMX_ROWS, SQUARES_OF_TILE = TILE / SQUARE, SPLIT_CHUNKS = SPLIT / CHUNK };

// C4 to C7 += rows of A, 32 or 16, times two tiles of B
INLINE void square_step(const void *rows, int64_t stride, const void *left, const void *right, const int has_lower) {
    TILE_LOAD(0, rows, stride);
    TILE_LOAD(2, left, TILE_ROW);
    TILE_DOT_BF16(4, 0, 2);
    TILE_LOAD(3, right, TILE_ROW);
    TILE_DOT_BF16(5, 0, 3);
    if (!has_lower) return;
    TILE_LOAD(1, (const char *)rows + HALF_ROWS * stride, stride);
    TILE_DOT_BF16(6, 1, 2);
    TILE_DOT_BF16(7, 1, 3);
}
INLINE void store_square(float *to, int64_t stride, const int has_lower) {
    TILE_STORE(4, to, stride * 4);
    TILE_STORE(5, to + HALF_ROWS, stride * 4);
    if (!has_lower) return;
    TILE_STORE(6, to + HALF_ROWS * stride, stride * 4);
    TILE_STORE(7, to + HALF_ROWS * stride + HALF_ROWS, stride * 4);
}

// matrix_scores() of up to SQUARE rows: s [SQUARE][TILE]
INLINE void square_scores(const float *q, int64_t depth, int64_t head_size, const void *const *keys, float *s,
                          struct prefetch *prefetch, int64_t lines, const int has_lower) {
    for (int n = 0; n < SQUARES_OF_TILE; n++) {
        zero_sums();
        for (int64_t d = 0; d < head_size / 2; d += TILE_WIDTH / 2) {
            const int64_t at = d * CHUNK * 4;
            square_step(q + d, depth * 4, (const char *)keys[2 * n] + at, (const char *)keys[2 * n + 1] + at, has_lower);
            prefetch_lines(prefetch, lines);
        }
        store_square(s + n * SQUARE, TILE, has_lower);
    }
}

// matrix_accumulate_pv() of up to SQUARE rows, with the values of copy_value_tiles()
INLINE void square_accumulate_pv(float *acc, int64_t depth, const float *rescale, const float *p, const float *values, float *sums,
                                 int64_t rows, struct prefetch *prefetch, int64_t lines, const int has_lower) {
    for (int64_t d = 0; d < depth; d += SQUARE) {
        zero_sums();
        for (int j = 0; j < SQUARES_OF_TILE; j++) {
            const float *left = values + j * SQUARE / 2 * depth + d * HALF_ROWS;
            square_step(p + j * TILE_WIDTH / 2, TILE / 2 * 4, left, left + HALF_ROWS * HALF_ROWS, has_lower);
            prefetch_lines(prefetch, lines);
        }
        store_square(sums, SQUARE, has_lower);
        for (int64_t i = 0; i < rows; i++) {
            float *row = acc + i * depth + d;
            const vf scale = splat(rescale[i]);
#pragma GCC unroll 2
            for (int n = 0; n < SQUARE; n += VW) vstore(row + n, vfma(vload(row + n), scale, vload(sums + i * SQUARE + n)));
        }
    }
}

// The values of a tile of positions as tiles of B: [32 positions][16 columns][pair][column], zeros as in copy_value_chunks()
INLINE void copy_value_tiles(const void *const *values, float *to, int64_t from, int64_t count, int64_t depth) {
    for (int64_t c = 0; c < CHUNKS; c++) {
        const int64_t here = c < from ? 0 : MAX(0, MIN(CHUNK, count - c * CHUNK));
        float *square = to + c / 2 * SQUARE / 2 * depth + c % 2 * CHUNK / 2 * HALF_ROWS;
        for (int64_t j = 0; j < CHUNK / 2; j++) {
            const float *row = (const float *)values[c] + j * depth;
            const vu keep = (vu)splat_int(2 * j + 1 < here ? -1 : 2 * j < here ? 0xffff : 0);
            for (int64_t d = 0; d < depth; d += VW)
                vstore(square + d * HALF_ROWS + j * HALF_ROWS, (vf)((vu)vload(row + d) & keep));
        }
    }
}
#endif

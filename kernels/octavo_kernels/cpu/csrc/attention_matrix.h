// A tile of attention in pairs of bfloat16 by matrix tiles (amx.h), for any number of rows: queries and weights are A, keys and
// values B. Keys are B as the cache holds them; values are copied, since those of 32 positions must lie together. A row's sums
// are added up in one order, so its bits do not depend on the rows beside it. Rows of A past the last are whatever memory holds:
// their sums are never read.
#pragma once
#include "amx.h"
#include "attention_tile.h"

#if HAS_AMX && HAS_BF16_PAIRS
#define HAS_MATRIX_ATTENTION 1
#define MATRIX_ROWS HALF_ROWS
#define MATRIX_COLUMNS 64  // of values that are multiplied at once: four tiles of sums
#define TILE_STEP(c, b, from, stride)  \
    do {                               \
        TILE_LOAD(b, from, stride);    \
        TILE_DOT_BF16(c, 0, b);        \
    } while (0)

INLINE void zero_sums(void) {
    TILE_ZERO(4);
    TILE_ZERO(5);
    TILE_ZERO(6);
    TILE_ZERO(7);
}
INLINE void store_sums(float *to) {
    TILE_STORE(4, to, MATRIX_COLUMNS * 4);
    TILE_STORE(5, to + 16, MATRIX_COLUMNS * 4);
    TILE_STORE(6, to + 32, MATRIX_COLUMNS * 4);
    TILE_STORE(7, to + 48, MATRIX_COLUMNS * 4);
}

// s [MATRIX_ROWS][TILE] = q [MATRIX_ROWS][head_size] (pairs, `depth` floats apart) . keys, chunks [head_size / 2][CHUNK] of pairs;
// `lines` are prefetched between the products of 32 columns
INLINE void matrix_scores(const float *q, int64_t depth, int64_t head_size, const void *const *keys, float *s,
                          struct prefetch *prefetch, int64_t lines) {
    _Static_assert(TILE == MATRIX_COLUMNS && CHUNKS == 4, "the sums of a tile of positions are four tiles");
    zero_sums();
    for (int64_t d = 0; d < head_size / 2; d += TILE_WIDTH / 2) {
        const int64_t at = d * CHUNK * 4;
        TILE_LOAD(0, q + d, depth * 4);
        TILE_STEP(4, 2, (const char *)keys[0] + at, TILE_ROW);
        TILE_STEP(5, 3, (const char *)keys[1] + at, TILE_ROW);
        TILE_STEP(6, 2, (const char *)keys[2] + at, TILE_ROW);
        TILE_STEP(7, 3, (const char *)keys[3] + at, TILE_ROW);
        prefetch_lines(prefetch, lines);
    }
    store_sums(s);
}

// acc [rows][depth] = acc * rescale + p . values: weights p [MATRIX_ROWS][TILE / 2] and values [TILE / 2][depth], both of pairs
INLINE void matrix_accumulate_pv(float *acc, int64_t depth, const float *rescale, const float *p, const float *values, float *sums,
                                 int64_t rows, struct prefetch *prefetch, int64_t lines) {
    for (int64_t d = 0; d < depth; d += MATRIX_COLUMNS) {
        const int64_t columns = MIN(MATRIX_COLUMNS, depth - d);
        zero_sums();
        for (int64_t j = 0; j < TILE / 2; j += TILE_WIDTH / 2) {
            const float *from = values + j * depth + d;
            TILE_LOAD(0, p + j, TILE / 2 * 4);
            TILE_STEP(4, 2, from, depth * 4);
            TILE_STEP(5, 3, from + 16, depth * 4);
            if (columns == MATRIX_COLUMNS) {
                TILE_STEP(6, 2, from + 32, depth * 4);
                TILE_STEP(7, 3, from + 48, depth * 4);
            }
            prefetch_lines(prefetch, lines);
        }
        store_sums(sums);
        for (int64_t i = 0; i < rows; i++) {
            float *row = acc + i * depth + d;
            for (int64_t n = 0; n < columns; n += VW)
                vstore(row + n, vfma(vload(row + n), splat(rescale[i]), vload(sums + i * MATRIX_COLUMNS + n)));
        }
    }
}

// Values in chunks, put together: [TILE / 2][depth]. Those of positions before `from` chunks and from `count` positions on are
// zeros, whatever the page holds.
INLINE void copy_value_chunks(const void *const *values, float *to, int64_t from, int64_t count, int64_t depth) {
    for (int64_t c = 0; c < CHUNKS; c++, to += CHUNK / 2 * depth) {
        const int64_t here = c < from ? 0 : MIN(CHUNK, count - c * CHUNK);
        if (here <= 0) memset(to, 0, (size_t)(CHUNK / 2 * depth) * 4);
        else if (here < CHUNK) zero_pad_values(values[c], to, here, depth);
        else
            for (int64_t i = 0; i < CHUNK / 2 * depth; i += VW) vstore(to + i, vload((const float *)values[c] + i));
    }
}
#else
#define HAS_MATRIX_ATTENTION 0
#endif

// Attention over an int8 cache (attention_int8.h) of many rows by matrix tiles (amx.h): queries and weights are A, keys and
// values B. All sums are exact integers and what follows is done in the same order, so that the bits are those of the other way.
//
// Scores have a scale for each KV_GROUP elements, half of what a row of A holds: a block of 64 elements comes twice, once with
// zeros in the place of each half. Keys are B as the cache holds them; values are copied, since those of 64 positions must lie
// together, in the order in which pack_steps() leaves weights. Rows of A past the last are whatever memory holds: their sums are
// never read.
#pragma once
#include "amx.h"
#include "attention_int8.h"

#if HAS_AMX
#define HAS_INT8_MATRIX_ATTENTION 1
#define INT8_MATRIX_ROWS HALF_ROWS
#define HALVES_BYTES 128     // of a block of a query: its halves, each beside zeros
#define INT8_MOST_ROWS 128   // whose halves fit in `kt`
#define PAIR_COLUMNS 32      // of two tiles of sums
#define PAIR_SUMS (2 * INT8_MATRIX_ROWS * PAIR_COLUMNS)
_Static_assert(TILE == TILE_ROW && KV_GROUP == TILE_ROW / 2 && CHUNK == 16, "a chunk of keys is a tile");

INLINE int32_t *matrix_starts(const float *q, int64_t depth) { return (int32_t *)((char *)q + 3 * depth); }

// halves [rows][depth / 64][2][64] of the queries q [rows][depth], and the initial sums of their products with unsigned codes
INLINE void int8_split_queries(const float *q, int64_t depth, int64_t rows, int8_t *halves) {
    for (int64_t r = 0; r < rows; r++, q += depth) {
        const int8_t *codes = query_codes(q);
        for (int64_t g = 0; g < depth / KV_GROUP; g++, halves += HALVES_BYTES / 2) {
            int32_t sum = 0;
            for (int k = 0; k < KV_GROUP; k++) sum += codes[g * KV_GROUP + k];
            matrix_starts(q, depth)[g] = -128 * sum;
            memset(halves, 0, HALVES_BYTES / 2);
            memcpy(halves + g % 2 * KV_GROUP, codes + g * KV_GROUP, KV_GROUP);
        }
    }
}

// Values in chunks, put together: to [16][depth][4], four positions a row
INLINE void int8_copy_values(const void *const *values, int8_t *to, int64_t depth) {
    for (int64_t j = 0; j < TILE / 4; j++)
        memcpy(to + packed_at(j) * depth, (const int8_t *)values[j * 4 / CHUNK] + j * 4 % CHUNK * depth, (size_t)(4 * depth));
}

// sums [2][INT8_MATRIX_ROWS][PAIR_COLUMNS] of both tiles of A and both tiles of B
INLINE void store_pair_sums(int32_t *sums) {
    const int64_t stride = PAIR_COLUMNS * 4;
    int32_t *second = sums + PAIR_SUMS / 2;
    TILE_STORE(4, sums, stride);
    TILE_STORE(5, sums + HALF_ROWS, stride);
    TILE_STORE(6, second, stride);
    TILE_STORE(7, second + HALF_ROWS, stride);
}
INLINE void zero_pair_sums(void) {
    TILE_ZERO(4);
    TILE_ZERO(5);
    TILE_ZERO(6);
    TILE_ZERO(7);
}

// Adds the scores of one block of elements: s [rows][TILE] += sums * scales, for the positions of chunks c and c + 1
INLINE void int8_add_scores(const float *q, int64_t depth, int64_t block, const void *const *keys, int64_t c, const int32_t *sums,
                            float *s, int64_t rows) {
    for (int64_t half = 0; half < 2; half++) {
        const int64_t g = 2 * block + half;
        vf scales[PAIR_COLUMNS / VW];
        for (int n = 0; n < PAIR_COLUMNS / VW; n++) {
            const int64_t at = n * VW;
            const uint16_t *of_chunk = (const uint16_t *)((const char *)keys[c + at / CHUNK] + depth * CHUNK);
            scales[n] = load_as(of_chunk + g * CHUNK, at % CHUNK, BFLOAT16);
        }
        for (int64_t i = 0; i < rows; i++) {
            const vi start = splat_int(matrix_starts(q + i * depth, depth)[g]);
            const vf scale = splat(query_scales(q + i * depth, depth)[g]);
            const int32_t *from = sums + (half * INT8_MATRIX_ROWS + i) * PAIR_COLUMNS;
            float *to = s + i * TILE + c * CHUNK;
#pragma GCC unroll 4
            for (int n = 0; n < PAIR_COLUMNS / VW; n++) {
                const vf part = __builtin_convertvector((vi)vload((const float *)(from + n * VW)) + start, vf) * scale;
                vstore(to + n * VW, vfma(part, scales[n], g ? vload(to + n * VW) : splat(0.0f)));
            }
        }
    }
}

// s [rows][TILE] = queries . keys. While the units multiply for a pair of chunks, the sums of the pair before are scaled.
INLINE void int8_matrix_scores(const float *q, const int8_t *halves, int64_t depth, const void *const *keys, float *s, int32_t *sums,
                               int64_t rows, struct prefetch *prefetch, int64_t lines) {
    const int64_t pairs = CHUNKS / 2, steps = depth / TILE_ROW * pairs;
    for (int64_t n = 0; n <= steps; n++) {
        const int64_t block = n / pairs, c = n % pairs * 2, before = n - 1;
        if (n < steps) {
            const int64_t at = block * TILE_ROW * CHUNK;
            zero_pair_sums();
            if (c == 0) {
                TILE_LOAD(0, halves + block * HALVES_BYTES, 2 * depth);
                TILE_LOAD(1, halves + block * HALVES_BYTES + TILE_ROW, 2 * depth);
            }
            TILE_LOAD(2, (const uint8_t *)keys[c] + at, TILE_ROW);
            TILE_DOT_INT8(4, 0, 2);
            TILE_DOT_INT8(6, 1, 2);
            TILE_LOAD(3, (const uint8_t *)keys[c + 1] + at, TILE_ROW);
            TILE_DOT_INT8(5, 0, 3);
            TILE_DOT_INT8(7, 1, 3);
            store_pair_sums(sums + n % 2 * PAIR_SUMS);
            prefetch_lines(prefetch, lines);
        }
        if (n > 0) int8_add_scores(q, depth, before / pairs, keys, before % pairs * 2, sums + before % 2 * PAIR_SUMS, s, rows);
    }
}

// Columns d .. d + PAIR_COLUMNS of acc [rows][depth] = acc * rescale + sums of both terms
INLINE void int8_add_values(float *acc, int64_t depth, const float *rescale, int64_t d, const int32_t *sums, int64_t rows) {
    for (int64_t i = 0; i < rows; i++) {
        const int32_t *high = sums + i * PAIR_COLUMNS, *low = high + INT8_MATRIX_ROWS * PAIR_COLUMNS;
        float *to = acc + i * depth + d;
#pragma GCC unroll 4
        for (int n = 0; n < PAIR_COLUMNS; n += VW) {
            const vi sum = ((vi)vload((const float *)(high + n)) << 7) + (vi)vload((const float *)(low + n));
            vstore(to + n, vfma(__builtin_convertvector(sum, vf), splat(1.0f / WEIGHT_STEPS), vload(to + n) * splat(rescale[i])));
        }
    }
}

// acc [rows][depth] = acc * rescale + contributions p [INT8_MATRIX_ROWS][2 terms][TILE] . values [TILE / 4][depth][4]
INLINE void int8_matrix_pv(float *acc, int64_t depth, const float *rescale, const uint8_t *p, const int8_t *values, int32_t *sums,
                           int64_t rows, struct prefetch *prefetch, int64_t lines) {
    const int64_t steps = depth / PAIR_COLUMNS;
    TILE_LOAD(0, p, 2 * TILE);
    TILE_LOAD(1, p + TILE, 2 * TILE);
    for (int64_t n = 0; n <= steps; n++) {
        if (n < steps) {
            const int8_t *from = values + n * PAIR_COLUMNS * 4;
            zero_pair_sums();
            TILE_LOAD(2, from, depth * 4);
            TILE_DOT_UINT8(4, 0, 2);
            TILE_DOT_UINT8(6, 1, 2);
            TILE_LOAD(3, from + TILE_ROW, depth * 4);
            TILE_DOT_UINT8(5, 0, 3);
            TILE_DOT_UINT8(7, 1, 3);
            store_pair_sums(sums + n % 2 * PAIR_SUMS);
            prefetch_lines(prefetch, lines);
        }
        if (n > 0) int8_add_values(acc, depth, rescale, (n - 1) * PAIR_COLUMNS, sums + (n - 1) % 2 * PAIR_SUMS, rows);
    }
}
#else
#define HAS_INT8_MATRIX_ATTENTION 0
#endif

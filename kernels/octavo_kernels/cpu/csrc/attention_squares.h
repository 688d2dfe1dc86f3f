// Many rows of attention in pairs of bfloat16 by matrix tiles (attention_matrix.h), a whole split of positions at a time: 32 rows
// meet 32 positions, or 32 columns of values, so that two tiles of A and two of B make four products. Keys and values of a split
// stay in the second-level cache while all rows of an item meet them, and a few rows' sums in the first while they meet the
// split. Each row is added up as attend_matrix() adds it, to the bit.
#pragma once
#include "attention_scratch.h"

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

// Rows r .. r + rows of the item, at most SQUARE, against the tile of positions start .. start + TILE
INLINE void attend_square(const struct item *it, struct buffers *w, int64_t start, int64_t r, int64_t rows,
                          const void *const *keys, const float *values, int64_t lines, const int has_lower) {
    float s[SQUARE * TILE] __attribute__((aligned(64))), p[SQUARE * TILE / 2] __attribute__((aligned(64)));
    float rescale[SQUARE + VW];
    uint64_t visible[SQUARE];
    const int64_t depth = it->depth;
    if (!find_visible_rows(it, w, start, r, rows, visible)) return;
    square_scores(w->q + r * depth, depth, it->a->head_size, keys, s, &w->prefetch, lines, has_lower);
    bf16_softmax_rows(it, w, r, rows, s, p, visible, rescale);
    square_accumulate_pv(w->acc + r * depth, depth, rescale, p, values, s, rows, &w->prefetch, lines, has_lower);
}

// All rows of the item against positions [begin, end) of one split: attend_split() of many rows
static void __attribute__((noinline)) attend_split_squares(const struct item *it, struct buffers *w, int64_t begin, int64_t end,
                                                           const struct item *next) {
    const void *keys[SPLIT_CHUNKS], *values[SPLIT_CHUNKS], *ahead[2 * SPLIT_CHUNKS];
    const int64_t depth = it->depth, piece_bytes = kv_row_bytes(it->a->head_size, BF16_PAIRS) * CHUNK;
    float *tiles = w->kt;  // and w->vt behind it
    for (int64_t start = begin, n = 0; start < end; start += TILE, n++) {
        const int64_t count = locate_tile(it, start, keys + n * CHUNKS, values + n * CHUNKS);
        copy_value_tiles(values + n * CHUNKS, tiles + n * TILE / 2 * depth,
                         (first_seen(it->a, it->first_position) - start) / CHUNK, count, depth);
    }
    int64_t pieces = 0;
    if (next) {
        const int64_t from = next == it ? end : next->begin, to = MIN(next->end, (from / SPLIT + 1) * SPLIT);
        for (int64_t start = from; start < to; start += TILE, pieces += 2 * CHUNKS)
            locate_tile(next, start, ahead + pieces, ahead + pieces + CHUNKS);
    }
    w->prefetch = (struct prefetch){.rows = ahead, .row_bytes = piece_bytes, .end = pieces};
    const int64_t steps = CEIL_DIV(it->rows, SQUARE) * CEIL_DIV(end - begin, TILE) * SQUARES_OF_TILE * 2 * (depth / SQUARE),
                  lines = CEIL_DIV(pieces * CEIL_DIV(piece_bytes, 64), steps);
    for (int64_t r = 0; r < it->rows; r += SQUARE) {
        const int64_t rows = MIN(SQUARE, it->rows - r);
        for (int64_t start = begin, n = 0; start < end; start += TILE, n++) {
            const float *here = tiles + n * TILE / 2 * depth;
            if (rows > HALF_ROWS) attend_square(it, w, start, r, rows, keys + n * CHUNKS, here, lines, 1);
            else attend_square(it, w, start, r, rows, keys + n * CHUNKS, here, lines, 0);
        }
    }
}
#endif

// Items of many rows are computed so: their keys and values are read once for all of them
INLINE int in_squares(const struct paged_attention_args *a) {
    return HAS_MATRIX_ATTENTION && a->kv_dtype == BF16_PAIRS && a->head_size % TILE_WIDTH == 0;
}

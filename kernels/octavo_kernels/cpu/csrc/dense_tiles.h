// Products of bfloat16 rows and weights of bfloat16 by matrix tiles (amx.h), for any number of rows: each sum is added up tile by
// tile along the width, so its bits do not depend on the other rows. Widths are padded with zeros to whole tiles.
//
// Rows are packed as tiles of A, up to 32 together: [first 16, then the rest][tile along the width][row][64 bytes]. Weights are
// read as they lie.
#pragma once
#include "amx.h"

#if HAS_AMX
#define SUM_ROWS AMX_ROWS

INLINE int64_t tiles_across(int64_t width) { return CEIL_DIV(width, TILE_WIDTH); }

// Tiles [first, end) along row `row` of x, as row i of `rows`
INLINE void pack_tile_row(const struct dense_linear_args *a, uint8_t *to, int64_t row, int64_t i, int64_t rows, int64_t first,
                          int64_t end) {
    const int64_t lower = i / HALF_ROWS, together = lower ? rows - HALF_ROWS : MIN(rows, HALF_ROWS);
    const uint16_t *from = (const uint16_t *)a->x + row * a->width;
    to += (lower * HALF_ROWS * tiles_across(a->width) + i % HALF_ROWS) * TILE_ROW;
    for (int64_t k = first; k < end; k++) {
        const int64_t left = a->width - k * TILE_WIDTH;
        uint16_t part[TILE_WIDTH] = {0};
        memcpy(part, from + k * TILE_WIDTH, left < TILE_WIDTH ? (size_t)left * 2 : TILE_ROW);
        memcpy(to + k * together * TILE_ROW, part, TILE_ROW);
    }
}

// All rows, packed; x itself where that is the same. Two phases.
static const void *packed_tiles(const struct dense_linear_args *a, struct team_member *m) {
    enum { PART = 16 };  // tiles of an item
    const int64_t across = tiles_across(a->width), parts = CEIL_DIV(across, PART), items = CEIL_DIV(a->rows, AMX_ROWS) * parts;
    if (a->rows == 1 && a->width % TILE_WIDTH == 0) return a->x;
    uint8_t *packed = team_workspace(m, (size_t)(a->rows * across * TILE_ROW));
    for (int64_t n; (n = team_take_item(m, items)) >= 0; team_item_done(m)) {
        const int64_t row = n / parts * AMX_ROWS, rows = MIN(AMX_ROWS, a->rows - row), first = n % parts * PART;
        for (int64_t i = 0; i < rows; i++)
            pack_tile_row(a, packed + row * across * TILE_ROW, row + i, i, rows, first, MIN(across, first + PART));
    }
    team_finish_phase(m, items);
    return packed;
}

// C += the product of 16 steps of a block, `b`
INLINE void tile_step(const uint8_t *upper, const uint8_t *lower, const uint8_t *b, const int has_lower) {
    TILE_LOAD(0, upper, TILE_ROW);
    TILE_LOAD(2, b, B_STRIDE);
    TILE_DOT_BF16(4, 0, 2);
    TILE_LOAD(3, b + TILE_ROW, B_STRIDE);
    TILE_DOT_BF16(5, 0, 3);
    if (!has_lower) return;
    TILE_LOAD(1, lower, TILE_ROW);
    TILE_DOT_BF16(6, 1, 2);
    TILE_DOT_BF16(7, 1, 3);
}

// Sums of a tile's rows: of 16 channels, then of the next 16
struct tile_sums {
    _Alignas(64) float half[2][AMX_ROWS][HALF_ROWS];
};

// Products of `steps` steps from `step` on of a block with packed rows, of which each has `all` steps; added to sums if `more`
INLINE void multiply_tiles(const uint8_t *weight, const uint8_t *x, int64_t all, int64_t step, int64_t steps,
                           struct prefetch ahead, struct tile_sums *sums, int more, int64_t rows, const int has_lower) {
    const int64_t upper_rows = MIN(rows, HALF_ROWS), lower_rows = rows - upper_rows, rest = steps % B_STEPS,
                  before = step / B_STEPS * TILE_ROW;
    const uint8_t *lower = x + CEIL_DIV(all, B_STEPS) * upper_rows * TILE_ROW + before * lower_rows;
    x += before * upper_rows, weight += step * B_STRIDE;
    if (more) {
        TILE_LOAD(4, sums->half[0], TILE_ROW);
        TILE_LOAD(5, sums->half[1], TILE_ROW);
    } else {
        TILE_ZERO(4);
        TILE_ZERO(5);
    }
    if (has_lower && more) {
        TILE_LOAD(6, sums->half[0][HALF_ROWS], TILE_ROW);
        TILE_LOAD(7, sums->half[1][HALF_ROWS], TILE_ROW);
    } else if (has_lower) {
        TILE_ZERO(6);
        TILE_ZERO(7);
    }
    for (int64_t k = 0; k < steps / B_STEPS; k++, weight += B_STEPS * B_STRIDE) {
        for (int64_t n = ahead.lines; n > 0; n--, ahead.next += 64) __builtin_prefetch(ahead.next, 0, 2);
        tile_step(x, lower, weight, has_lower);
        x += upper_rows * TILE_ROW, lower += lower_rows * TILE_ROW;
    }
    if (rest) {
        _Alignas(64) uint8_t last[B_STEPS * B_STRIDE] = {0};  // what follows may be a NaN, and NaN times 0 is NaN
        memcpy(last, weight, (size_t)(rest * B_STRIDE));
        tile_step(x, lower, last, has_lower);
    }
    TILE_STORE(4, sums->half[0], TILE_ROW);
    TILE_STORE(5, sums->half[1], TILE_ROW);
    if (has_lower) {
        TILE_STORE(6, sums->half[0][HALF_ROWS], TILE_ROW);
        TILE_STORE(7, sums->half[1][HALF_ROWS], TILE_ROW);
    }
}

static void __attribute__((noinline)) part_of_matrix(const uint8_t *weight, const void *x, int64_t all, int64_t step,
                                                     int64_t steps, struct prefetch ahead, struct tile_sums *sums, int more,
                                                     int64_t rows) {
    amx_configure(MIN(rows, HALF_ROWS), MAX(0, rows - HALF_ROWS), HALF_ROWS);
    if (rows > HALF_ROWS) multiply_tiles(weight, x, all, step, steps, ahead, sums, more, rows, 1);
    else multiply_tiles(weight, x, all, step, steps, ahead, sums, more, rows, 0);
}

INLINE void as_vectors(const struct tile_sums *from, vf (*sums)[SUM_ROWS], int64_t rows) {
    for (int v = 0; v < BLOCK_VECTORS; v++)
        for (int64_t i = 0; i < rows; i++) sums[v][i] = vload(from->half[v * VW / HALF_ROWS][i] + v * VW % HALF_ROWS);
}

static void tile_matrix(const uint8_t *weight, const void *x, int64_t steps, struct prefetch ahead, vf (*sums)[SUM_ROWS],
                        int64_t rows) {
#if VW == 16
    ahead.lines *= B_STEPS;
    part_of_matrix(weight, x, steps, 0, steps, ahead, (struct tile_sums *)sums, 0, rows);
#else
    struct tile_sums found;
    part_of_matrix(weight, x, steps, 0, steps, ahead, &found, 0, rows);
    as_vectors(&found, sums, rows);
#endif
}
#elif !HAS_BF16_MMLA
#define SUM_ROWS TILE_ROWS
#endif

// Products of bfloat16 rows and a bfloat16 matrix A of an adapter by matrix tiles (amx.h), for any number of rows. A's rows are
// those of an A tile as they lie; the rows of a step are the columns of B, [pair of columns][row][2], which a row alone already
// is. The width is padded with zeros.
#pragma once
#include "amx.h"
#include "transpose.h"

#if HAS_AMX
#define FETCH_TILES 4  // ahead of a product, of each row of A

// [tile along the width][pair][row][2]
static void pack_columns(const char *const *x, int64_t rows, int64_t width, uint32_t *to) {
    const int64_t pairs = CEIL_DIV(width, TILE_WIDTH) * (TILE_WIDTH / 2), whole = width / 2;
    int64_t p = 0;
    if (rows == 8) {
        for (; p + 8 <= whole; p += 8) {
            eight32 eight[8];
            for (int i = 0; i < 8; i++) eight[i] = *(const eight32 *)(x[i] + p * 4);
            TRANSPOSE(eight, eight32)
            for (int i = 0; i < 8; i++) *(eight32 *)(to + (p + i) * 8) = eight[i];
        }
    }
    for (; p < pairs; p++) {
        for (int64_t i = 0; i < rows; i++) {
            uint32_t pair = 0;
            if (p <= whole) memcpy(&pair, x[i] + p * 4, p < whole ? 4 : (size_t)(width % 2 * 2));
            to[p * rows + i] = pair;
        }
    }
}

// c [outputs, row] = outputs [j, j + count) of a matrix [last, width] times packed rows; count is at most AMX_ROWS
static void shrink_matrix(const uint8_t *w, const uint8_t *b, int64_t j, int64_t count, int64_t width, int64_t rows,
                          float (*c)[HALF_ROWS]) {
    const int64_t lower = MAX(0, count - HALF_ROWS), stride = width * 2, rest = width % TILE_WIDTH, columns = rows * 4;
    const uint8_t *a = w + j * stride;
    amx_configure(MIN(count, HALF_ROWS), lower, rows);
    TILE_ZERO(4);
    if (lower) TILE_ZERO(6);
    for (int64_t k = 0; k < width / TILE_WIDTH; k++, a += TILE_ROW, b += TILE_WIDTH / 2 * columns) {
        for (int64_t r = 0; r < count; r++) __builtin_prefetch(a + r * stride + FETCH_TILES * TILE_ROW);
        TILE_LOAD(2, b, columns);
        TILE_LOAD(0, a, stride);
        TILE_DOT_BF16(4, 0, 2);
        if (lower) {
            TILE_LOAD(1, a + HALF_ROWS * stride, stride);
            TILE_DOT_BF16(6, 1, 2);
        }
    }
    if (rest) {
        _Alignas(64) uint8_t last[AMX_ROWS][TILE_ROW] = {{0}};
        for (int64_t r = 0; r < count; r++) memcpy(last[r], a + r * stride, (size_t)rest * 2);
        TILE_LOAD(2, b, columns);
        TILE_LOAD(0, last[0], TILE_ROW);
        TILE_DOT_BF16(4, 0, 2);
        if (lower) {
            TILE_LOAD(1, last[HALF_ROWS], TILE_ROW);
            TILE_DOT_BF16(6, 1, 2);
        }
    }
    TILE_STORE(4, c, sizeof(*c));
    if (lower) TILE_STORE(6, c + HALF_ROWS, sizeof(*c));
}

// Outputs [first, last) of the rows of a tile
static void shrink_by_tiles(const char *const *x, const char *w, float *const *out, int64_t first, int64_t last, int64_t width,
                            int64_t rows) {
    const void *b = x[0];
    if (rows > 1 || width % TILE_WIDTH) {
        uint32_t *packed = thread_scratch((size_t)(CEIL_DIV(width, TILE_WIDTH) * TILE_WIDTH / 2 * rows) * 4);
        pack_columns(x, rows, width, packed);
        b = packed;
    }
    for (int64_t j = first; j < last; j += AMX_ROWS) {
        const int64_t count = MIN(AMX_ROWS, last - j);
        float c[AMX_ROWS][HALF_ROWS];
        shrink_matrix((const uint8_t *)w, b, j, count, width, rows, c);
        for (int64_t r = 0; r < count; r++)
            for (int64_t i = 0; i < rows; i++) out[i][j + r] = c[r][i];
    }
}
#endif

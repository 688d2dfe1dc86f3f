// Products of many rows and a block of channels by matrix tiles (dense_tiles.h), a part of the block's columns after the other: a
// part stays in the first-level cache from tile to tile of rows, where a whole block would be read from the second as often as
// there are tiles. Sums wait beside it from part to part, in float32 as in a tile, so that their bits are those of whole blocks.
// The next part is fetched meanwhile, a few lines with each step: all at once they would keep the rows waiting.
#pragma once
#if HAS_AMX
// Fetch where the sums of a block will be written: stores would wait for these lines one after the other
INLINE void prefetch_sums(const struct dense_linear_args *a, int64_t block, int64_t row, int64_t rows) {
    const int64_t size = a->out_dtype == BFLOAT16 ? 2 : 4;
    const char *out = (const char *)a->out + (row * a->out_stride + a->offset + block * DENSE_BLOCK) * size;
    for (int64_t i = 0; i < rows; i++, out += a->out_stride * size) __builtin_prefetch(out, 1, 3);
}

// A block of channels times tiles [first, end) of rows
static void multiply_parts(const struct dense_linear_args *a, int64_t block, int64_t first, int64_t end, const char *x) {
    enum { PART = 8 };  // tiles along the width: 16 KB
    const int64_t steps = CEIL_DIV(a->width, 2), row_bytes = ROW_BYTES(PAIRS, steps), across = tiles_across(a->width),
                  parts = MAX(1, (across + PART / 2) / PART), lines = CEIL_DIV(2 * B_STEPS, end - first);
    const uint8_t *weight = a->weight + block * steps * B_STRIDE;
    struct tile_sums *sums = thread_scratch((size_t)(end - first) * sizeof(*sums));
    for (int64_t part = 0; part < parts; part++) {
        const int64_t tile = across * part / parts, tiles = across * (part + 1) / parts - tile, step = tile * B_STEPS,
                      count = MIN(tiles * B_STEPS, steps - step);
        for (int64_t t = first; t < end; t++) {
            const int64_t row = t * AMX_ROWS, rows = MIN(AMX_ROWS, a->rows - row);
            const struct prefetch ahead = {weight + (step + count) * B_STRIDE + (t - first) * lines * tiles * 64, lines};
            if (part + 1 == parts) prefetch_sums(a, block, row, rows);
            part_of_matrix(weight, x + row * row_bytes, steps, step, count, ahead, sums + t - first, part > 0, rows);
            if (part + 1 < parts) continue;
#if VW == 16
            store_sums(a, block, row, rows, (vf(*)[SUM_ROWS])(sums + t - first));
#else
            vf vectors[BLOCK_VECTORS][SUM_ROWS];
            as_vectors(sums + t - first, vectors, rows);
            store_sums(a, block, row, rows, vectors);
#endif
        }
    }
}
#endif

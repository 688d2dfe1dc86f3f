// Products of rows of activations and weights of 16 or 32 bits.
//
// A weight [channels, width] lies in blocks of DENSE_BLOCK channels, each [steps][...] of two columns a step (a column of
// zeros is added to an odd width, channels of zeros to the last block):
//     bfloat16 [steps][DENSE_BLOCK][2], as products of pairs take them; float16 and float32 [steps][2][DENSE_BLOCK].
// Each sum of a row and a channel is added up column by column in one register: its bits do not depend on the other rows, the
// tiling or the threads.
#include "amx.h"
#include "moe.h"
#include "linear_ops.h"
#include "simd.h"
#include "transpose.h"

#define DENSE_BLOCK 32
#define BLOCK_VECTORS (DENSE_BLOCK / VW)
// Rows and vectors of a register tile. A few rows are multiplied with twice as many vectors where a block has them: one row
// would otherwise wait for its own sums.
#if VW == 16
#define TILE_ROWS 12
#define TILE_VECTORS 2
#elif defined(__aarch64__)
#define TILE_ROWS 6
#define TILE_VECTORS 4
#else
#define TILE_ROWS 6
#define TILE_VECTORS 2
#endif
#define WIDE_VECTORS (2 * TILE_VECTORS <= BLOCK_VECTORS ? 2 * TILE_VECTORS : TILE_VECTORS)
#define WIDE_ROWS (TILE_ROWS / 2)
// Bytes of rows that are multiplied with one block of channels after the other; and how far ahead of a tile memory is fetched
#define CHUNK_BYTES (HAS_AMX ? 1024 << 10 : 300 << 10)
#define FETCH_BYTES (HAS_AMX ? 8192 : 4096)

// How a weight is multiplied: pairs of bfloat16 with pairs of bfloat16 (in matrix tiles or by matrix instructions where there are
// any: dense_tiles.h, dense_mmla.h), or as float32 with float32
enum product { PAIRS, WIDE_BF16, WIDE_HALF, WIDE_FLOAT };

static enum product product_of(const struct dense_linear_args *a) {
    if (a->weight_dtype == FLOAT16) return WIDE_HALF;
    if (a->weight_dtype == FLOAT32) return WIDE_FLOAT;
#if HAS_AMX || defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    if (a->x_dtype == BFLOAT16) return PAIRS;
#endif
    return WIDE_BF16;
}
INLINE int64_t step_bytes(int64_t weight_dtype) { return DENSE_BLOCK * 2 * (weight_dtype == FLOAT32 ? 4 : 2); }

#if defined(__AVX512BF16__)
INLINE vf dot_pairs(vf sum, vi w, vi x) { return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x); }
#else
INLINE vf dot_pairs(vf sum, vi w, vi x) { return (void)w, (void)x, sum; }  // never called
#endif

// VW weights of column `odd` of a step; `at` is the byte of the vector's first channel in a row of 16 bits
INLINE vf weights_at(const uint8_t *step, int64_t channel, int odd, const enum product product) {
    if (product == WIDE_HALF) return load_half(step + (odd * DENSE_BLOCK + channel) * 2);
    if (product == WIDE_FLOAT) return vload((const float *)step + odd * DENSE_BLOCK + channel);
    const vu both = (vu)vload((const float *)step + channel);
    return (vf)(odd ? both & 0xffff0000u : both << 16);
}

// Memory to prefetch with each step of a tile
struct prefetch {
    const uint8_t *next;
    int64_t lines;
};

#include "dense_mmla.h"
#include "dense_tiles.h"

// sums[vectors][rows] = rows of x, packed by pack_rows(), times `vectors` x VW channels
INLINE void tile(const uint8_t *weight, const void *x, int64_t steps, struct prefetch ahead, vf (*sums)[SUM_ROWS],
                 const enum product product, const int vectors, const int rows) {
    const int64_t stride = step_bytes(product == WIDE_FLOAT ? FLOAT32 : BFLOAT16);
    vf sum[WIDE_VECTORS][TILE_ROWS];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++)
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) sum[v][i] = splat(0.0f);
    const int32_t *pairs = x;
    const float *values = x;
    for (int64_t s = 0; s < steps; s++, weight += stride) {
        for (int64_t n = ahead.lines; n > 0; n--, ahead.next += 64) __builtin_prefetch(ahead.next, 0, 3);
        if (product == PAIRS) {
            vi w[WIDE_VECTORS];
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) w[v] = (vi)vload((const float *)weight + v * VW);
#pragma GCC unroll 12
            for (int i = 0; i < rows; i++) {
                const vi pair = splat_int(pairs[i]);
#pragma GCC unroll 8
                for (int v = 0; v < vectors; v++) sum[v][i] = dot_pairs(sum[v][i], w[v], pair);
            }
            pairs += rows;
            continue;
        }
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++, values += rows) {
            vf w[WIDE_VECTORS];
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) w[v] = weights_at(weight, v * VW, odd, product);
#pragma GCC unroll 12
            for (int i = 0; i < rows; i++) {
                const vf value = splat(values[i]);
#pragma GCC unroll 8
                for (int v = 0; v < vectors; v++) sum[v][i] = vfma(w[v], value, sum[v][i]);
            }
        }
    }
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++)
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) sums[v][i] = sum[v][i];
}

// A block of channels times the rows of a tile: sums [BLOCK_VECTORS][TILE_ROWS]
INLINE void block_tile(const uint8_t *weight, const void *x, int64_t steps, struct prefetch ahead, vf (*sums)[SUM_ROWS],
                       const enum product product, const int rows) {
    const int vectors = rows <= WIDE_ROWS ? WIDE_VECTORS : TILE_VECTORS;
    const int64_t bytes = product == WIDE_FLOAT ? 4 : product == WIDE_HALF ? 2 : 4;  // from channel to channel of a step
#pragma GCC unroll 1
    for (int v = 0; v < BLOCK_VECTORS; v += vectors) {
        tile(weight + v * VW * bytes, x, steps, ahead, sums + v, product, vectors, rows);
        ahead.lines = 0;
    }
}

typedef void (*tile_fn)(const uint8_t *, const void *, int64_t, struct prefetch, vf (*)[SUM_ROWS], int64_t);
#define CASE(kind, n) \
    case n: block_tile(weight, x, steps, ahead, sums, kind, n); break;
#if TILE_ROWS == 12
#define MORE_ROWS(kind) CASE(kind, 7) CASE(kind, 8) CASE(kind, 9) CASE(kind, 10) CASE(kind, 11) CASE(kind, 12)
#else
#define MORE_ROWS(kind)
#endif
#define TILE(name, kind)                                                                                                    \
    static void __attribute__((noinline)) name(const uint8_t *weight, const void *x, int64_t steps, struct prefetch ahead, \
                                               vf(*sums)[SUM_ROWS], int64_t rows) {                                        \
        switch (rows) {                                                                                                     \
            CASE(kind, 1) CASE(kind, 2) CASE(kind, 3) CASE(kind, 4) CASE(kind, 5) CASE(kind, 6) MORE_ROWS(kind)             \
        }                                                                                                                   \
    }
#if HAS_AMX
#define tile_pairs tile_matrix
#elif HAS_BF16_MMLA
#define tile_pairs tile_mmla
#elif defined(__AVX512BF16__)
TILE(tile_pairs, PAIRS)
#else
#define tile_pairs NULL
#endif
TILE(tile_bf16, WIDE_BF16)
TILE(tile_half, WIDE_HALF)
TILE(tile_float, WIDE_FLOAT)
static tile_fn tile_function(enum product product) {
    return product == PAIRS ? tile_pairs : product == WIDE_BF16 ? tile_bf16 : product == WIDE_HALF ? tile_half : tile_float;
}

// Tiles have even sizes, 2 x 10 for 20 rows instead of 12 + 8; but matrix tiles are filled up, and matrix instructions take two
// rows.
#define IS_MATRIX(product) (HAS_AMX && (product) == PAIRS)
#if HAS_BF16_MMLA
#define TILE_ROWS_OF(product) ((product) == PAIRS ? MMLA_ROWS : TILE_ROWS)
#else
#define TILE_ROWS_OF(product) (IS_MATRIX(product) ? AMX_ROWS : TILE_ROWS)
#endif
static int64_t num_tiles(enum product product, int64_t rows) { return CEIL_DIV(rows, TILE_ROWS_OF(product)); }
static int64_t tile_begin(enum product product, int64_t rows, int64_t i) {
#if HAS_BF16_MMLA
    if (product == PAIRS) return mmla_begin(rows, i);
#endif
    return IS_MATRIX(product) ? MIN(rows, i * AMX_ROWS) : rows * i / num_tiles(product, rows);
}
// Bytes of a packed row
#if HAS_BF16_MMLA
#define ROW_BYTES(product, steps) ((product) == PAIRS ? CEIL_DIV(steps, 2) * 8 : (steps) * 8)
#else
#define ROW_BYTES(product, steps) \
    (IS_MATRIX(product) ? CEIL_DIV(steps, B_STEPS) * TILE_ROW : (steps) * ((product) == PAIRS ? 4 : 8))
#endif

// Steps [first, end) of row `row` of x, as row i of a tile, in the order in which tile() reads them: pairs [steps][rows], or
// float32 [steps][2][rows].
INLINE void pack_row(const struct dense_linear_args *a, void *to, int64_t row, int64_t i, int64_t rows, int64_t first, int64_t end,
                     const int pairs, const int dtype) {
    const int64_t at = row * a->width;
    for (int64_t s = first; s < end; s++) {
        const int64_t k = 2 * s, two = k + 1 < a->width;
        if (pairs) {
            uint32_t pair = 0;
            memcpy(&pair, (const uint16_t *)a->x + at + k, two ? 4 : 2);
            ((uint32_t *)to)[s * rows + i] = pair;
        } else {
            float even, odd = 0.0f;
            if (dtype == BFLOAT16) {
                uint32_t bits[2] = {(uint32_t)((const uint16_t *)a->x)[at + k] << 16, 0};
                if (two) bits[1] = (uint32_t)((const uint16_t *)a->x)[at + k + 1] << 16;
                memcpy(&even, bits, 4), memcpy(&odd, bits + 1, 4);
            } else {
                even = ((const float *)a->x)[at + k];
                if (two) odd = ((const float *)a->x)[at + k + 1];
            }
            ((float *)to)[2 * s * rows + i] = even;
            ((float *)to)[(2 * s + 1) * rows + i] = odd;
        }
    }
}
INLINE void pack_rows(const struct dense_linear_args *a, void *to, int64_t row, int64_t rows, int64_t first, int64_t end,
                      const int pairs, const int dtype) {
    for (int64_t i = 0; i < rows; i++) pack_row(a, to, row + i, i, rows, first, end, pairs, dtype);
}

// All rows as tile() reads them, tile by tile; x itself where that is the same. Two phases.
static const void *packed_rows(const struct dense_linear_args *a, enum product product, int64_t steps, struct team_member *m) {
    enum { PART = 256 };  // steps of an item
    const int pairs = product == PAIRS;
#if HAS_AMX
    if (pairs) return packed_tiles(a, m);
#elif HAS_BF16_MMLA
    if (pairs) return packed_fours(a, m);
#endif
    if (a->rows == 1 && a->width % 2 == 0 && (pairs || a->x_dtype == FLOAT32)) return a->x;
    const int64_t step = pairs ? 4 : 8, tiles = num_tiles(product, a->rows), parts = CEIL_DIV(steps, PART);
    char *packed = team_workspace(m, (size_t)(a->rows * steps * step));
    for (int64_t n; (n = team_take_item(m, tiles * parts)) >= 0; team_item_done(m)) {
        const int64_t row = tile_begin(product, a->rows, n / parts), rows = tile_begin(product, a->rows, n / parts + 1) - row,
                      first = n % parts * PART, end = MIN(steps, first + PART);
        char *to = packed + row * steps * step;
        if (pairs) pack_rows(a, to, row, rows, first, end, 1, BFLOAT16);
        else if (a->x_dtype == BFLOAT16) pack_rows(a, to, row, rows, first, end, 0, BFLOAT16);
        else pack_rows(a, to, row, rows, first, end, 0, FLOAT32);
    }
    team_finish_phase(m, tiles * parts);
    return packed;
}

static void store_sums(const struct dense_linear_args *a, int64_t block, int64_t row, int64_t rows, vf (*sums)[SUM_ROWS]) {
    const int dtype = (int)a->out_dtype;
#if defined(__AVX512BF16__)
    if (dtype == BFLOAT16 && !a->bias && (block + 1) * DENSE_BLOCK <= a->channels) {
        uint16_t *out = (uint16_t *)a->out + row * a->out_stride + a->offset + block * DENSE_BLOCK;
        for (int64_t i = 0; i < rows; i++) store_line(out + i * a->out_stride, sums[0][i], sums[1][i]);
        return;
    }
#endif
    for (int v = 0; v < BLOCK_VECTORS; v++) {
        const int64_t channel = block * DENSE_BLOCK + v * VW, count = MIN(VW, a->channels - channel);
        if (count <= 0) return;
        vf bias = {0};
        if (a->bias) bias = count == VW ? vload(a->bias + channel) : load_part(a->bias, channel, count, FLOAT32);
        for (int64_t i = 0; i < rows; i++) {
            const int64_t at = (row + i) * a->out_stride + a->offset + channel;
            const vf sum = a->bias ? sums[v][i] + bias : sums[v][i];
            if (count == VW) store_as(a->out, at, sum, dtype);
            else store_part(a->out, at, count, sum, dtype);
        }
    }
}

// Which memory to prefetch while tile `n` of `count` of a block computes: half of the next block in each of the first two. With
// one tile the hardware follows the blocks from the first line to the last, and is 5 to 15 % faster left alone; only pairs of
// many rows take so long that it falls behind.
INLINE struct prefetch plan_prefetch(const uint8_t *block, int64_t stride, int64_t steps, int64_t n, int64_t count, int far) {
    const int64_t lines = stride / 128;
    if (count == 1) return (struct prefetch){block + FETCH_BYTES, far ? 2 * lines : 0};
    return (struct prefetch){block + steps * stride + n * lines * 64 * steps, n < 2 ? lines : 0};
}

#include "dense_parts.h"

// A block of channels times tiles [first, end) of rows
INLINE void multiply_block(const struct dense_linear_args *a, int64_t block, int64_t first, int64_t end, const char *x,
                           const enum product product) {
    const int64_t steps = CEIL_DIV(a->width, 2), stride = step_bytes(a->weight_dtype),
                  row_bytes = ROW_BYTES(product, steps);
    const tile_fn compute = tile_function(product);
    const uint8_t *weight = a->weight + block * steps * stride;
#if HAS_AMX
    if (product == PAIRS && end - first > 1) {
        multiply_parts(a, block, first, end, x);
        return;
    }
#endif
    for (int64_t t = first; t < end; t++) {
        const int64_t row = tile_begin(product, a->rows, t), rows = tile_begin(product, a->rows, t + 1) - row;
        const int far = product == PAIRS && (HAS_AMX || rows > WIDE_ROWS);
        const struct prefetch ahead = plan_prefetch(weight, stride, steps, t - first, end - first, far);
        vf sums[BLOCK_VECTORS][SUM_ROWS];
        compute(weight, x + row * row_bytes, steps, ahead, sums, rows);
        store_sums(a, block, row, rows, sums);
    }
}

void op_dense_linear(const struct dense_linear_args *a, struct team_member *m) {
    const enum product product = product_of(a);
    const int64_t tiles = num_tiles(product, a->rows), blocks = CEIL_DIV(a->channels, DENSE_BLOCK), many = 4 * m->size;
    const char *x = packed_rows(a, product, CEIL_DIV(a->width, 2), m);
    // With enough tiles for each thread, a thread gets the same rows in all operations of a layer and reads every weight, for as
    // many rows at a time as the second-level cache holds beside it; with fewer, each weight is read by one thread, unless there
    // are too few blocks for that.
    const int64_t held = MAX(4, CHUNK_BYTES / (TILE_ROWS_OF(product) * ROW_BYTES(product, CEIL_DIV(a->width, 2))));
    int64_t chunks = MIN(m->size, tiles / 4);
    if (chunks == m->size) chunks *= CEIL_DIV(tiles, chunks * held);
    if (chunks < 2) chunks = m->size > 1 && blocks < many ? MIN(CEIL_DIV(many, blocks), tiles) : 1;
    chunks = MAX(1, chunks);
    // Blocks of an item: a thread waits for its stores after each.
    const int64_t group = tiles > 2 ? 1 : MAX(1, blocks / (64 * m->size)), groups = CEIL_DIV(blocks, group);
    for (int64_t n; (n = team_take_item(m, groups * chunks)) >= 0; team_item_done(m)) {
        const int64_t first = tiles * (n / groups) / chunks, end = tiles * (n / groups + 1) / chunks,
                      block = n % groups * group;
        for (int64_t i = block; i < MIN(blocks, block + group); i++) multiply_block(a, i, first, end, x, product);
    }
    team_finish_phase(m, groups * chunks);
}

#include "dense_packing.h"

void op_pack_dense(const struct pack_dense_args *a, struct team_member *m) {
    const int64_t items = CEIL_DIV(a->count, DENSE_BLOCK);
    for (int64_t n; (n = team_take_item(m, items)) >= 0; team_item_done(m)) {
        const int64_t first = n * DENSE_BLOCK, end = MIN(a->count, first + DENSE_BLOCK);
        if (a->dtype == FLOAT32) pack_channels(a, first, end, FLOAT32);
        else if (a->dtype == BFLOAT16) pack_channels(a, first, end, BFLOAT16);
        else pack_channels(a, first, end, FLOAT16);
    }
    team_finish_phase(m, items);
}

INLINE void embed_row(const struct dense_embedding_args *a, int64_t i, const int64_t weight_dtype, const int dtype) {
    const int64_t id = table_row(a->ids[i], a->from, a->channels);
    if (id < 0) {
        const int64_t bytes = a->width * (dtype == BFLOAT16 ? 2 : 4);
        memset((char *)a->out + i * bytes, 0, (size_t)bytes);
        return;
    }
    float values[VW];
    for (int64_t first = 0; first < a->width; first += VW) {
        const int64_t count = MIN(VW, a->width - first);
        for (int64_t k = 0; k < count; k++) {
            const uint8_t *from = weight_at(a->weight, a->width, id, first + k, weight_dtype);
            uint32_t bits;
            if (weight_dtype == FLOAT16) {
                values[k] = half_to_float(from);
            } else if (weight_dtype == BFLOAT16) {
                bits = 0;
                memcpy((uint8_t *)&bits + 2, from, 2), memcpy(values + k, &bits, 4);
            } else {
                memcpy(values + k, from, 4);
            }
        }
        if (count == VW) store_as(a->out, i * a->width + first, vload(values), dtype);
        else store_part(a->out, i * a->width + first, count, load_part(values, 0, count, FLOAT32), dtype);
    }
}

void op_dense_embedding(const struct dense_embedding_args *a, struct team_member *m) {
    const int dtype = (int)a->dtype;
    for (int64_t i, end; team_take_rows(m, a->count, &i, &end); team_item_done(m)) {
        for (; i < end; i++) {
            if (a->weight_dtype == FLOAT32) embed_row(a, i, FLOAT32, dtype);
            else if (a->weight_dtype == BFLOAT16) embed_row(a, i, BFLOAT16, dtype);
            else embed_row(a, i, FLOAT16, dtype);
        }
    }
    team_finish_phase(m, team_row_items(m, a->count));
}

// ---- mixtures of experts (moe.h)

// Rows as tile() reads them, in sorted order. `per_row` choices read the same row of x (0: x is sorted itself). One phase.
static void pack_sorted_rows(const struct dense_linear_args *a, const struct plan *p, int64_t per_row,
                             char *packed, int64_t row_bytes, struct team_member *m) {
    const enum product product = product_of(a);
    const int pairs = product == PAIRS;
    const int64_t steps = CEIL_DIV(a->width, 2);
    for (int64_t e, part; take_expert(p, 1, m, &e, &part); team_item_done(m)) {
        if (e < 0) continue;
        const int64_t begin = p->first[e], count = p->first[e + 1] - begin;
        for (int64_t t = 0; t < num_tiles(product, count); t++) {
            const int64_t row = begin + tile_begin(product, count, t), rows = begin + tile_begin(product, count, t + 1) - row;
            for (int64_t i = 0; i < rows; i++) {
                const int64_t from = per_row ? p->choices[row + i] / per_row : row + i;
                char *to = packed + row * row_bytes;
#if HAS_AMX
                if (pairs) pack_tile_row(a, (uint8_t *)to, from, i, rows, 0, tiles_across(a->width));
#elif HAS_BF16_MMLA
                if (pairs) pack_mmla_row(a, (uint8_t *)to, from, i, rows, 0, CEIL_DIV(a->width, 4));
#else
                if (pairs) pack_row(a, to, from, i, rows, 0, steps, 1, BFLOAT16);
#endif
                else if (a->x_dtype == BFLOAT16) pack_row(a, to, from, i, rows, 0, steps, 0, BFLOAT16);
                else pack_row(a, to, from, i, rows, 0, steps, 0, FLOAT32);
            }
        }
    }
    team_finish_phase(m, p->most);
}

void op_dense_experts_gated(const struct dense_experts_gated_args *g, struct team_member *m) {
    const struct dense_linear_args a = {.x = g->x, .width = g->width, .x_dtype = g->x_dtype, .weight_dtype = g->weight_dtype};
    const struct plan p = plan_of(g->plan, g->experts, g->rows * g->k);
    const enum product product = product_of(&a);
    const tile_fn compute = tile_function(product);
    const int64_t steps = CEIL_DIV(g->width, 2), stride = step_bytes(g->weight_dtype), row_bytes = ROW_BYTES(product, steps),
                  blocks = CEIL_DIV(g->inner, DENSE_BLOCK);
    const int dtype = (int)g->x_dtype;
    pack_sorted_rows(&a, &p, g->k, g->packed, row_bytes, m);
    for (int64_t e, block; take_expert(&p, blocks, m, &e, &block); team_item_done(m)) {
        if (e < 0) continue;
        const int64_t begin = p.first[e], count = p.first[e + 1] - begin, tiles = num_tiles(product, count);
        const int parts = g->ups[e].data == g->gates[e].data ? 1 : 2;  // ups may be their own gates
        const uint8_t *weights[2] = {g->gates[e].data + block * steps * stride, g->ups[e].data + block * steps * stride};
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t row = begin + tile_begin(product, count, t), rows = begin + tile_begin(product, count, t + 1) - row;
            vf sums[2][BLOCK_VECTORS][SUM_ROWS];
            for (int part = 0; part < parts; part++)
                compute(weights[part], (const char *)g->packed + row * row_bytes, steps,
                        plan_prefetch(weights[part], stride, steps, t, tiles, IS_MATRIX(product)), sums[part], rows);
            for (int v = 0; v < BLOCK_VECTORS; v++) {
                const int64_t channel = block * DENSE_BLOCK + v * VW, n = MIN(VW, g->inner - channel);
                if (n <= 0) break;
                for (int64_t i = 0; i < rows; i++) {
                    vf both[2];
                    for (int part = 0; part < parts; part++) {
                        vf sum = sums[part][v][i];
                        if (g->row_weights) sum *= splat(g->row_weights[p.choices[row + i]]);
                        if (g->bias) {
                            const float *bias = g->bias + (2 * e + part) * g->inner;
                            sum += n == VW ? vload(bias + channel) : load_part(bias, channel, n, FLOAT32);
                        }
                        both[part] = round_as(sum, dtype);
                    }
                    const vf y = gated_product(both[0], both[parts - 1], (int)g->activation, (float)g->limit, dtype);
                    const int64_t at = (row + i) * g->inner + channel;
                    if (n == VW) store_as(g->out, at, y, dtype);
                    else store_part(g->out, at, n, y, dtype);
                }
            }
        }
    }
    team_finish_phase(m, p.most * blocks);
}

void op_dense_experts_down(const struct dense_experts_down_args *d, struct team_member *m) {
    const struct dense_linear_args a = {.x = d->x, .width = d->width, .x_dtype = d->x_dtype, .weight_dtype = d->weight_dtype};
    const struct plan p = plan_of(d->plan, d->experts, d->rows * d->k);
    const enum product product = product_of(&a);
    const tile_fn compute = tile_function(product);
    const int64_t steps = CEIL_DIV(d->width, 2), stride = step_bytes(d->weight_dtype), row_bytes = ROW_BYTES(product, steps),
                  blocks = CEIL_DIV(d->channels, DENSE_BLOCK);
    pack_sorted_rows(&a, &p, 0, d->packed, row_bytes, m);
    for (int64_t e, block; take_expert(&p, blocks, m, &e, &block); team_item_done(m)) {
        if (e < 0) continue;
        const int64_t begin = p.first[e], count = p.first[e + 1] - begin, tiles = num_tiles(product, count);
        const uint8_t *weight = d->weights[e].data + block * steps * stride;
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t row = begin + tile_begin(product, count, t), rows = begin + tile_begin(product, count, t + 1) - row;
            vf sums[BLOCK_VECTORS][SUM_ROWS];
            compute(weight, (const char *)d->packed + row * row_bytes, steps,
                    plan_prefetch(weight, stride, steps, t, tiles, IS_MATRIX(product)), sums, rows);
            for (int v = 0; v < BLOCK_VECTORS; v++) {
                const int64_t channel = block * DENSE_BLOCK + v * VW, n = MIN(VW, d->channels - channel);
                if (n <= 0) break;
                for (int64_t i = 0; i < rows; i++) {
                    vf sum = sums[v][i];
                    if (d->bias) sum += load_part(d->bias + e * d->channels, channel, n, FLOAT32);
                    const int64_t at = p.choices[row + i] * d->channels + channel;
                    if (n == VW) vstore(d->out + at, sum);
                    else store_part(d->out, at, n, sum, FLOAT32);
                }
            }
        }
    }
    team_finish_phase(m, p.most * blocks);
}

// Products of quantised rows and packed weights (quant.h). Integers are summed exactly within a group; groups are added in
// float32 in their order. So a row's result is the same whatever the number of rows, the tiling or the threads.
#include "ops.h"
#include "rows.h"
#include "dot.h"

#if VW == 16
#define QMR 6  // rows of a register tile; it is QNV vectors of channels wide, integer and float sums both in registers
#elif defined(__aarch64__)
#define QMR 4
#else
#define QMR 2
#endif
#define QNV 2
#define AHEAD 8192  // bytes to fetch ahead in the stream of a weight; measured: +20 to +60 % over the hardware's own guess

// VW float16 as float32 (finite ones: a scale is never infinite)
INLINE vf load_half(const uint8_t *p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    vu h = __builtin_convertvector(*(const vh_unaligned *)p, vu);
    vf magnitude = (vf)((h & 0x7fff) << 13) * splat(0x1p112f);
    return (vf)((vu)magnitude | ((h & 0x8000) << 16));
#endif
}
INLINE float half_to_float(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, 2);
    uint32_t bits = (uint32_t)(h & 0x7fff) << 13, sign = (uint32_t)(h & 0x8000) << 16;
    float x;
    memcpy(&x, &bits, 4);
    x *= 0x1p112f;
    memcpy(&bits, &x, 4);
    bits |= sign;
    memcpy(&x, &bits, 4);
    return x;
}

// A block of channels as the kernel reads it.
struct block {
    const uint8_t *codes, *scales;  // of group 0
    int64_t stride, groups;  // bytes of a group
    const uint8_t *fetch;    // what is needed next, `lines` of 64 bytes with each group
    int64_t lines;
};

// Byte offset of vector v (of VW channels) within a 64-byte vector of 16 channels, or rather of its half of the group.
#define HALF(v) ((v)*VW / 16)
#define LANE(v) ((v)*VW % 16 * 4)

// acc[from .. to][QNV] += a group's dot products of those rows
INLINE void dots(vi (*acc)[QNV], const uint8_t *codes, int v, const int8_t *x, int64_t x_stride, const int nibbles,
                 const int bits, const int from, const int to) {
    if (!nibbles) {
#pragma GCC unroll 8
        for (int s = 0; s < 8; s++) {
            vbytes w[QNV];
#pragma GCC unroll 2
            for (int n = 0; n < QNV; n++) w[n] = load_bytes(codes + (HALF(v + n) * 8 + s) * 64 + LANE(v + n));
#pragma GCC unroll 6
            for (int i = from; i < to; i++) {
                vi a = splat_four(x + i * x_stride + s * 4);
#pragma GCC unroll 2
                for (int n = 0; n < QNV; n++) acc[i][n] = dot4(acc[i][n], w[n], a, bits);
            }
        }
    } else {
#pragma GCC unroll 4
        for (int s = 0; s < 4; s++) {
            vbytes low[QNV], high[QNV];
#pragma GCC unroll 2
            for (int n = 0; n < QNV; n++) {
                vbytes w = load_bytes(codes + (HALF(v + n) * 4 + s) * 64 + LANE(v + n));
                low[n] = w & 15;
                high[n] = (vbytes)((vu)w >> 4) & 15;
            }
#pragma GCC unroll 6
            for (int i = from; i < to; i++) {
                vi a = splat_four(x + i * x_stride + s * 4), c = splat_four(x + i * x_stride + s * 4 + 16);
#pragma GCC unroll 2
                for (int n = 0; n < QNV; n++) acc[i][n] = dot4(dot4(acc[i][n], low[n], a, 4), high[n], c, 4);
            }
        }
    }
}

// sums[mr][QNV]: mr rows of x, each of one or two terms, times channels of vectors v .. v + QNV of the block
INLINE void tile(const struct block *b, int v, const int8_t *x, int64_t x_stride, const struct group_meta *meta, vf *sums,
                 const int nibbles, const int bits, const int affine, const int terms, const int mr) {
    const int zero = affine || (bits == 8 && !UNSIGNED_CODES8) ? 0 : bits == 8 ? 128 : 8, half = (mr + 1) / 2;
    vf sum[QMR][QNV] = {0};
    const uint8_t *fetch = b->fetch;
    for (int64_t g = 0; g < b->groups; g++, x += GROUP) {
        const uint8_t *codes = b->codes + g * b->stride, *scales = b->scales + g * b->stride;
        for (int64_t n = b->lines; n > 0; n--, fetch += 64) __builtin_prefetch(fetch, 0, 2);
        vi acc[QMR][QNV] = {0};
        if (terms == 2) {
            dots(acc, codes, v, x, x_stride, nibbles, bits, 0, mr);
#pragma GCC unroll 6
            for (int i = 0; i < mr; i++)
#pragma GCC unroll 2
                for (int n = 0; n < QNV; n++) acc[i][n] <<= 8;
        }
        int rest[2] = {terms == 1, terms == 1};  // whether a row of either half has a second term here
#pragma GCC unroll 6
        for (int i = 0; i < mr; i++) {
            const struct group_meta *row = meta + i * b->groups + g;
            if (terms == 2) rest[i >= half] |= row->has_rest;
            if (zero)
#pragma GCC unroll 2
                for (int n = 0; n < QNV; n++) acc[i][n] -= splat_int(zero * row->sum);
        }
        const int8_t *last = terms == 2 ? x + x_stride / 2 : x;
        if (terms == 1) {
            dots(acc, codes, v, last, x_stride, nibbles, bits, 0, mr);
        } else {
            if (rest[0]) dots(acc, codes, v, last, x_stride, nibbles, bits, 0, half);
            if (rest[1]) dots(acc, codes, v, last, x_stride, nibbles, bits, half, mr);
        }
        vf scale[QNV], least[QNV];
#pragma GCC unroll 2
        for (int n = 0; n < QNV; n++) {
            scale[n] = load_half(scales + (v + n) * VW * 2);
            least[n] = affine ? load_half(scales + (BLOCK + (v + n) * VW) * 2) : splat(0.0f);
        }
#pragma GCC unroll 6
        for (int i = 0; i < mr; i++) {
            const struct group_meta *row = meta + i * b->groups + g;
#pragma GCC unroll 2
            for (int n = 0; n < QNV; n++) {
                sum[i][n] = vfma(__builtin_convertvector(acc[i][n], vf), scale[n] * splat(row->scale), sum[i][n]);
                if (affine) sum[i][n] = vfma(least[n], splat(row->scale_sum), sum[i][n]);
            }
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 2
        for (int n = 0; n < QNV; n++) sums[i * QNV + n] = sum[i][n];
}

// One function for each kind of codes, with one instance of the loop for each number of rows.
#define KIND(name, nibbles, bits, affine)                                                                              \
    static void __attribute__((noinline)) name(const struct block *b, int v, const int8_t *x, int64_t x_stride,        \
                                               const struct group_meta *meta, vf *sums, int terms, int64_t mr) {       \
        switch (terms * 8 + mr) {                                                                                      \
            ROWS(nibbles, bits, affine)                                                                                \
        }                                                                                                              \
    }
#define CASE(terms, mr, nibbles, bits, affine) \
    case terms * 8 + mr: tile(b, v, x, x_stride, meta, sums, nibbles, bits, affine, terms, mr); break;
#define EITHER(mr, n, b, a) CASE(1, mr, n, b, a) CASE(2, mr, n, b, a)
#define ROWS2(n, b, a) EITHER(1, n, b, a) EITHER(2, n, b, a)
#define ROWS4(n, b, a) ROWS2(n, b, a) EITHER(3, n, b, a) EITHER(4, n, b, a)
#define ROWS6(n, b, a) ROWS4(n, b, a) EITHER(5, n, b, a) EITHER(6, n, b, a)
#if QMR == 6
#define ROWS ROWS6
#elif QMR == 4
#define ROWS ROWS4
#else
#define ROWS ROWS2
#endif
KIND(tile_nibbles, 1, 4, 0)
KIND(tile_nibbles_affine, 1, 4, 1)
KIND(tile_bytes, 0, 8, 0)
typedef void (*tile_fn)(const struct block *, int, const int8_t *, int64_t, const struct group_meta *, vf *, int, int64_t);

static struct block find_block(const uint8_t *weight, int64_t index, int64_t groups, int64_t bits, int64_t affine) {
    int64_t codes = bits == 8 ? CODES8 : CODES4, stride = codes + BLOCK * 2 * (affine ? 2 : 1);
    const uint8_t *first = weight + index * groups * stride;
    return (struct block){first, first + codes, stride, groups, first, 0};
}

static void store_tile(const struct quantized_linear_args *a, int64_t row, int64_t rows, int64_t channel, const vf *sums) {
    for (int64_t i = 0; i < rows; i++)
        for (int n = 0; n < QNV; n++) {
            int64_t c = channel + n * VW, count = MIN(VW, a->channels - c);
            if (count <= 0) break;
            vf x = sums[i * QNV + n];
            if (a->bias) x += count == VW ? load_as(a->bias, c, FLOAT32) : load_part(a->bias, c, count, FLOAT32);
            int64_t at = (row + i) * a->out_stride + a->offset + c;
            if (count == VW) store_as(a->out, at, x, (int)a->dtype);
            else store_part(a->out, at, count, x, (int)a->dtype);
        }
}

static tile_fn tile_of(const struct quantized_linear_args *a) {
    return a->bits == 8 ? tile_bytes : a->affine ? tile_nibbles_affine : tile_nibbles;
}
static struct block block_of(const struct quantized_linear_args *a, int64_t index) {
    return find_block(a->weight, index, a->groups, a->bits, a->affine);
}
// Where tile i of the row tiles of rows [begin, end) begins. Even ones: 32 rows are 2 x 6 + 4 x 5 and not 5 x 6 + 2, since a
// tile of few rows waits for its own results
static int64_t row_tiles(int64_t begin, int64_t end) { return CEIL_DIV(end - begin, QMR); }
static int64_t tile_begin(int64_t begin, int64_t end, int64_t i) { return begin + (end - begin) * i / row_tiles(begin, end); }
// sums[rows][QNV] of vectors v .. v + QNV of a block. While it computes, tile number `index` of `tiles` has the memory bring
// what comes next: with few tiles what lies AHEAD in the weight, which only the first one waits for, else its share of
// block `next`. A little with each group: asked for many lines at once the core would stall.
INLINE void run_tile(const struct quantized_linear_args *a, tile_fn run, struct block *b, int v, int64_t row, int64_t rows,
                     int64_t index, int64_t tiles, const struct block *next, vf *sums) {
    int64_t width = a->groups * GROUP, lines = CEIL_DIV(b->stride, 64);
    if (tiles <= 2) {
        b->fetch = b->codes + AHEAD;
        b->lines = index == 0 ? lines : 0;
    } else {
        int64_t share = CEIL_DIV(lines, tiles);
        b->fetch = next->codes + index * share * 64 * a->groups;
        b->lines = index * share < lines ? share : 0;
    }
    run(b, v, a->values + row * a->terms * width, a->terms * width, a->meta + row * a->groups, sums, (int)a->terms, rows);
}

// Rows [begin, end) times one block of channels.
static void run_block(const struct quantized_linear_args *a, int64_t index, int64_t begin, int64_t end) {
    struct block b = block_of(a, index), next = block_of(a, index + 1);
    int64_t high = row_tiles(begin, end), tiles = high * (BLOCK / VW / QNV), n = 0;
    for (int64_t i = 0; i < high; i++) {
        int64_t row = tile_begin(begin, end, i), rows = tile_begin(begin, end, i + 1) - row;
        for (int v = 0; v < BLOCK / VW; v += QNV, n++) {
            vf sums[QMR * QNV];
            run_tile(a, tile_of(a), &b, v, row, rows, n, tiles, &next, sums);
            store_tile(a, row, rows, index * BLOCK + v * VW, sums);
        }
    }
}

// Rows [begin, end): one block of gates and the same one of ups, which together are a group of the result.
static void run_gated_block(const struct gated_linear_args *g, const struct quantized_linear_args *a, int64_t index,
                            int64_t begin, int64_t end) {
    int64_t blocks = g->inner / BLOCK, high = row_tiles(begin, end), tiles = high * (BLOCK / VW / QNV);
    struct block both[2] = {block_of(a, index), block_of(a, blocks + index)};
    struct block next[2] = {block_of(a, index + 1), block_of(a, blocks + index + 1)};
    int dtype = (int)g->dtype;
    for (int64_t tile = 0, t = 0; tile < high; tile++, t += BLOCK / VW / QNV) {
        int64_t row = tile_begin(begin, end, tile), rows = tile_begin(begin, end, tile + 1) - row;
        vf x[2][QMR][BLOCK / VW];
        for (int part = 0; part < 2; part++) {
            for (int v = 0; v < BLOCK / VW; v += QNV) {
                vf sums[QMR * QNV];
                run_tile(a, tile_of(a), &both[part], v, row, rows, t + v / QNV, tiles, &next[part], sums);
                for (int64_t i = 0; i < rows; i++)
                    for (int n = 0; n < QNV; n++) x[part][i][v + n] = round_as(sums[i * QNV + n], dtype);
            }
        }
        float groups[QMR][BLOCK];  // one loop after the other: rows then overlap in the core's pipeline
        for (int64_t i = 0; i < rows; i++)
            for (int v = 0; v < BLOCK / VW; v++) vstore(groups[i] + v * VW, silu_times(x[0][i][v], x[1][i][v], dtype));
        for (int64_t i = 0; i < rows; i++) {
            int8_t *q1 = g->out_values + (row + i) * g->out_terms * g->inner + index * GROUP;
            int8_t *q2 = g->out_terms == 2 ? q1 + g->inner : NULL;
            quantize_group(groups[i], q1, q2, 0.0f, g->out_meta + (row + i) * blocks + index);
        }
    }
}

// How an operation's rows and blocks of channels are shared out. Where there are a few tiles of rows for each thread, it has
// the same rows in all operations of a layer: what one of them leaves is in the cache of the core that needs it next
// (between two cores of a server a row takes as long as its arithmetic), and every thread reads every weight. Of fewer
// rows, and in the head, which nothing follows, each weight is read by one thread, unless there are too few of them.
struct shares {
    int64_t blocks, items, rows;  // an item: so many rows, one block
};
static struct shares share_out(const struct quantized_linear_args *a, int64_t blocks, const struct member *m) {
    int64_t chunks = a->margin > 0 ? 1 : MIN(m->size, a->rows / (4 * QMR)), many = 4 * m->size;
    if (chunks < 2) chunks = m->size > 1 && blocks < many ? MIN(CEIL_DIV(many, blocks), a->rows * a->terms / (4 * QMR)) : 1;
    int64_t rows = MAX(1, CEIL_DIV(a->rows, MAX(1, chunks)));
    return (struct shares){blocks, blocks * CEIL_DIV(a->rows, rows), rows};
}

void op_gated_linear(const struct gated_linear_args *g, struct member *m) {
    struct quantized_linear_args a = {.values = g->values, .meta = g->meta, .weight = g->weight, .rows = g->rows,
                                      .channels = 2 * g->inner, .groups = g->groups, .terms = g->terms, .bits = g->bits,
                                      .affine = g->affine};
    struct shares s = share_out(&a, g->inner / BLOCK, m);
    for (int64_t n; (n = team_take(m, s.items)) >= 0; team_done(m)) {
        int64_t begin = n / s.blocks * s.rows;
        run_gated_block(g, &a, n % s.blocks, begin, MIN(a.rows, begin + s.rows));
    }
    team_wait(m, s.items);
}

static void run_blocks(const struct quantized_linear_args *a, struct member *m) {
    struct shares s = share_out(a, CEIL_DIV(a->channels, BLOCK), m);
    for (int64_t n; (n = team_take(m, s.items)) >= 0; team_done(m)) {
        int64_t begin = n / s.blocks * s.rows;
        run_block(a, n % s.blocks, begin, MIN(a->rows, begin + s.rows));
    }
    team_wait(m, s.items);
}

// `a` for rows of which only the first of two terms is taken. Each thread makes them for itself: they are few.
static struct quantized_linear_args first_terms(const struct quantized_linear_args *a) {
    int64_t width = a->groups * GROUP;
    struct group_meta *meta = scratch((size_t)a->rows * ((size_t)width + (size_t)a->groups * sizeof(struct group_meta)));
    int8_t *values = (int8_t *)(meta + a->rows * a->groups);
    for (int64_t r = 0; r < a->rows; r++) {
        memcpy(values + r * width, a->values + 2 * r * width, (size_t)width);
        for (int64_t g = 0; g < a->groups; g++) {
            struct group_meta *to = meta + r * a->groups + g;
            int32_t sum = 0;
            for (int64_t k = 0; k < GROUP; k++) sum += values[r * width + g * GROUP + k];
            to->scale = 256.0f * a->meta[r * a->groups + g].scale;
            to->sum = sum;
            to->scale_sum = to->scale * (float)sum;
            to->has_rest = 0;
        }
    }
    struct quantized_linear_args first = *a;
    first.values = values, first.meta = meta, first.terms = 1;
    return first;
}

// One row once more with both terms, where it matters: blocks of channels with one within the margin of the best.
static void refine_row(const struct quantized_linear_args *a, int64_t row) {
    int64_t blocks = CEIL_DIV(a->channels, BLOCK);
    const float *out = (const float *)a->out + row * a->out_stride + a->offset;
    float *top = scratch((size_t)blocks * sizeof(float)), best = -INFINITY;
    for (int64_t n = 0; n < blocks; n++) {
        int64_t first = n * BLOCK, count = MIN(BLOCK, a->channels - first);
        vf highest = splat(-INFINITY);
        int64_t c = 0;
        for (; c + VW <= count; c += VW) highest = vmax(vload(out + first + c), highest);
        top[n] = vmax_all(highest);
        for (; c < count; c++) top[n] = MAX(out[first + c], top[n]);
        best = MAX(top[n], best);
    }
    for (int64_t n = 0; n < blocks; n++)
        if (top[n] >= best - (float)a->margin) run_block(a, n, row, row + 1);
}

void op_quantized_linear(const struct quantized_linear_args *a, struct member *m) {
    if (!(a->margin > 0 && a->terms == 2)) {
        run_blocks(a, m);
        return;
    }
    struct quantized_linear_args first = first_terms(a);
    run_blocks(&first, m);
    for (int64_t r; (r = team_take(m, a->rows)) >= 0; team_done(m)) refine_row(a, r);
    team_wait(m, a->rows);
}

// Code of one channel and column of a block.
static int code_at(const struct block *b, int64_t g, int64_t channel, int64_t column, int64_t bits) {
    const uint8_t *codes = b->codes + g * b->stride;
    int64_t half = channel / 16, step = column / 4, byte = channel % 16 * 4 + column % 4;
    if (bits == 8) return codes[(half * 8 + step) * 64 + byte];
    return codes[(half * 4 + step % 4) * 64 + byte] >> (step / 4 * 4) & 15;
}

static void embed_row(const struct quantized_embedding_args *a, int64_t i) {
    float row[GROUP];
    int64_t zero = a->affine ? 0 : a->bits == 8 ? 128 : 8;
    int64_t id = MAX(0, MIN(a->ids[i], a->channels - 1)), channel = id % BLOCK;
    struct block b = find_block(a->weight, id / BLOCK, a->groups, a->bits, a->affine);
    for (int64_t g = 0; g < a->groups; g++) {
        const uint8_t *scales = b.scales + g * b.stride;
        float scale = half_to_float(scales + channel * 2);
        float least = a->affine ? half_to_float(scales + (BLOCK + channel) * 2) : 0.0f;
        for (int64_t k = 0; k < GROUP; k++)
            row[k] = scale * (float)(code_at(&b, g, channel, k, a->bits) - zero) + least;
        int64_t first = g * GROUP, at = i * a->width + first;
        for (int64_t k = 0; k < GROUP && first + k < a->width; k += VW) {
            int64_t count = MIN(VW, a->width - first - k);
            if (count == VW) store_as(a->out, at + k, vload(row + k), (int)a->dtype);
            else store_part(a->out, at + k, count, vload(row + k), (int)a->dtype);
        }
    }
}

void op_quantized_embedding(const struct quantized_embedding_args *a, struct member *m) {
    for (int64_t i, end; team_take_rows(m, a->count, &i, &end); team_done(m))
        for (; i < end; i++) embed_row(a, i);
    team_wait(m, team_row_items(m, a->count));
}

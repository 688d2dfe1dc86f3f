// Products of quantised rows and packed weights (quant.h): how work is split into tiles, and what happens to the results.
#include "moe.h"
#include "quantized_tile.h"
#include "rows.h"

#define PREFETCH_BYTES 8192  // distance in a weight; measured 20 to 60 % faster than the hardware's own prefetching

static struct weight_block weight_block_at(const uint8_t *weight, int64_t index, int64_t groups, int kind) {
    if (kind_has(kind, BY_ROW)) {
        const uint8_t *block = weight + index * (BLOCK * 4 + groups * GROUP * BLOCK);
        return (struct weight_block){block, block + BLOCK * 4, PAIR * BLOCK, groups / 2, 0, block, 0};
    }
    const int64_t stride = kind_pair_bytes(kind), strip = kind_head_bytes(kind) + groups / 2 * stride;
    const uint8_t *first = weight + index * (BLOCK / STRIP) * strip;
    return (struct weight_block){first, first + kind_head_bytes(kind), stride, groups / 2, strip, first, 0};
}
static struct weight_block block_at(const struct quantized_linear_args *a, int64_t index) {
    return weight_block_at(a->weight, index, a->groups, KIND((int)a->bits, (int)a->flags));
}
static struct activations activations_of(const struct quantized_linear_args *a, int64_t terms) {
    return (struct activations){a->values, a->meta, a->groups, a->terms, terms};
}
static tile_fn tile_function(const struct quantized_linear_args *a, int64_t terms) {
    switch (KIND(a->bits, a->flags)) {
    case KIND(2, AFFINE): return tile_2bit_affine;
    case KIND(2, AFFINE | HALVES): return tile_2bit_affine_halves;
    case KIND(4, 0): return tile_4bit;
    case KIND(4, AFFINE): return tile_4bit_affine;
    case KIND(4, HALVES): return tile_4bit_halves;
    case KIND(4, TABLE): return terms == 2 ? tile_table_two_terms : tile_table;
    case KIND(4, TABLE | HALVES): return tile_table_halves;
    case KIND(5, 0): return tile_5bit;
    case KIND(5, AFFINE): return tile_5bit_affine;
    case KIND(6, HALVES): return tile_6bit_halves;
    case KIND(8, BY_ROW): return tile_8bit_by_row;
    default: return terms == 2 ? tile_8bit_two_terms : tile_8bit;
    }
}

static void add_bias(const float *bias, int64_t channels, int64_t rows, int64_t block, vf (*sums)[MAX_ROWS]) {
    for (int v = 0; bias && v < BLOCK / VW; v++) {
        const int64_t channel = block * BLOCK + v * VW, count = MIN(VW, channels - channel);
        if (count <= 0) return;
        const vf added = count == VW ? vload(bias + channel) : load_part(bias, channel, count, FLOAT32);
        for (int64_t i = 0; i < rows; i++) sums[v][i] += added;
    }
}

static void store_tile(const struct quantized_linear_args *a, int64_t row, int64_t rows, int64_t block, vf (*sums)[MAX_ROWS]) {
#if defined(__AVX512BF16__)
    if (a->dtype == BFLOAT16 && (block + 1) * BLOCK <= a->channels) {
        uint16_t *out = (uint16_t *)a->out + row * a->out_stride + a->offset + block * BLOCK;
        for (int64_t i = 0; i < rows; i++) store_line(out + i * a->out_stride, sums[0][i], sums[1][i]);
        return;
    }
#endif
    for (int v = 0; v < BLOCK / VW; v++) {
        const int64_t channel = block * BLOCK + v * VW, count = MIN(VW, a->channels - channel);
        if (count <= 0) return;
        for (int64_t i = 0; i < rows; i++) {
            int64_t at = (row + i) * a->out_stride + a->offset + channel;
            if (count == VW) store_as(a->out, at, sums[v][i], (int)a->dtype);
            else store_part(a->out, at, count, sums[v][i], (int)a->dtype);
        }
    }
}

// Fetch where the results of a tile will be written: stores would wait for these lines one after the other
INLINE void prefetch_results(const struct quantized_linear_args *a, int64_t row, int64_t rows, int64_t block) {
    const int64_t size = a->dtype == BFLOAT16 ? 2 : 4;
    const char *out = (const char *)a->out + (row * a->out_stride + a->offset + block * BLOCK) * size;
    for (int64_t i = 0; i < rows; i++, out += a->out_stride * size) __builtin_prefetch(out, 1, 3);
}

// First row of tile i of rows [begin, end). Tiles have even sizes, 2 x 7 + 3 x 6 for 32 rows instead of 4 x 7 + 4: a tile of
// few rows has too little work to hide the latency of its own results.
static int64_t row_tiles(const struct quantized_linear_args *a, int64_t begin, int64_t end) {
    if (HAS_INT8_MATRIX && a->flags & BY_ROW && end - begin > FEW_ROWS) return CEIL_DIV(end - begin, AMX_ROWS);
    return CEIL_DIV(end - begin, a->flags & BY_ROW ? SCALED_ROWS : QMR);
}
static int64_t tile_begin(int64_t begin, int64_t end, int64_t i, int64_t num_tiles) {
    if (HAS_INT8_MMLA) return MIN(end, begin + CEIL_DIV(end - begin, 2) * i / num_tiles * 2);  // whose instructions take two rows
    return begin + (end - begin) * i / num_tiles;
}

// Which memory to prefetch while tile `tile` of `num_tiles` computes. With one or two tiles, the bytes PREFETCH_BYTES ahead in
// this block, which only the first tile waits for; with more, half of block `next` in each of the first two tiles. The lines
// are spread over the pairs of groups: requesting many at once stalls the core.
INLINE void plan_prefetch(struct weight_block *b, const struct weight_block *next, int64_t tile, int64_t num_tiles) {
    const int64_t lines = CEIL_DIV(b->stride, 64);
#if HAS_INT8_MATRIX
    if (b->products) b->ready = b->products + tile;
#endif
    if (num_tiles <= 2) {
        b->prefetch = b->pairs + PREFETCH_BYTES;
        b->lines = tile == 0 ? lines : 0;
    } else {
        const int64_t share = CEIL_DIV(lines, 2);
        b->prefetch = next->head + tile * share * 64 * b->count * (b->next_strip ? BLOCK / STRIP : 1);
        b->lines = tile * share < lines ? share : 0;
    }
}

// Multiply `count` blocks before the tiles' turns where that is faster (multiply_long_block), into the thread's scratch memory
INLINE void multiply_ahead(const struct quantized_linear_args *a, const struct activations *x, struct weight_block *blocks,
                           int count, int64_t begin, int64_t end, int64_t num_tiles) {
#if HAS_INT8_MATRIX
    if (!(a->flags & BY_ROW) || num_tiles < LONG_TILES || long_block_parts(blocks->count) == 1) return;
    const size_t sums = (size_t)num_tiles * sizeof(struct matrix_sums);
    struct matrix_sums *c = thread_scratch((size_t)count * sums + (size_t)(num_tiles + 1) * sizeof(int64_t));
    int64_t *first = (int64_t *)(c + count * num_tiles);
    for (int64_t t = 0; t <= num_tiles; t++) first[t] = tile_begin(begin, end, t, num_tiles);
    for (int n = 0; n < count; n++) multiply_long_block(blocks + n, x, num_tiles, first, c + n * num_tiles);
#else
    (void)a, (void)x, (void)blocks, (void)count, (void)begin, (void)end, (void)num_tiles;
#endif
}

// Rows [begin, end) times one block of channels.
static void run_block(const struct quantized_linear_args *a, const struct activations *x, int64_t index, int64_t begin,
                      int64_t end) {
    const int64_t num_tiles = row_tiles(a, begin, end);
    struct weight_block b = block_at(a, index), next = block_at(a, index + 1);
    multiply_ahead(a, x, &b, 1, begin, end, num_tiles);
    for (int64_t tile = 0; tile < num_tiles; tile++) {
        int64_t row = tile_begin(begin, end, tile, num_tiles), rows = tile_begin(begin, end, tile + 1, num_tiles) - row;
        vf sums[BLOCK / VW][MAX_ROWS];
        plan_prefetch(&b, &next, tile, num_tiles);
        if (HAS_INT8_MATRIX && rows > FEW_ROWS) prefetch_results(a, row, rows, index);
        tile_function(a, x->terms)(&b, x, row, sums, rows);
        add_bias(a->bias, a->channels, rows, index, sums);
        store_tile(a, row, rows, index, sums);
    }
}

// Group `index` of `blocks` of a row of the result; the last one also pads its pair. finish_row_scales() must follow.
INLINE void store_quantized(const float *group, struct row_pair *values, void *metas, int64_t row, int64_t index, int64_t blocks,
                            int64_t terms) {
    const int64_t groups = blocks + blocks % 2, last = index == blocks - 1 ? groups : index + 1;
    struct row_pair *first = values + row * terms * groups / 2, *second = terms == 2 ? first + groups / 2 : NULL;
    const struct row_meta meta = row_meta_at(metas, row, groups);
    for (int64_t n = index; n < last; n++) {
        int8_t q1[GROUP], q2[GROUP];
        quantize_group(n == index ? group : (float[GROUP]){0}, n, q1, second ? q2 : NULL, 0.0f, meta);
        store_group(first + n / 2, n % 2, q1);
        if (second) store_group(second + n / 2, n % 2, q2);
    }
}

// Rows [begin, end) times one block of gates and the matching block of ups, which together give one group of the result. Rows
// with one scale are quantised when all of it is known: until then they are in `wide` [rows][inner], of g->dtype.
static void run_gated_block(const struct gated_linear_args *g, const struct quantized_linear_args *a, int64_t index,
                            int64_t begin, int64_t end, void *wide) {
    const int64_t blocks = g->inner / BLOCK, num_tiles = row_tiles(a, begin, end);
    const struct activations x = activations_of(a, a->terms);
    const int dtype = (int)g->dtype;
    struct weight_block both[2] = {block_at(a, index), block_at(a, blocks + index)};
    struct weight_block next[2] = {block_at(a, index + 1), block_at(a, blocks + index + 1)};
    multiply_ahead(a, &x, both, 2, begin, end, num_tiles);
    for (int64_t tile = 0; tile < num_tiles; tile++) {
        int64_t row = tile_begin(begin, end, tile, num_tiles), rows = tile_begin(begin, end, tile + 1, num_tiles) - row;
        vf sums[2][BLOCK / VW][MAX_ROWS];
        for (int part = 0; part < 2; part++) {
            plan_prefetch(&both[part], &next[part], tile, num_tiles);
            tile_function(a, a->terms)(&both[part], &x, row, sums[part], rows);
        }
        float group[MAX_ROWS][BLOCK];  // two loops instead of one: rows overlap in the core's pipeline
        for (int64_t i = 0; i < rows; i++) {
            for (int v = 0; v < BLOCK / VW; v++) {
                const vf gate = round_as(sums[0][v][i], dtype), up = round_as(sums[1][v][i], dtype);
                const vf y = silu_mul(gate, up, dtype);
                if (wide) store_as(wide, (row + i) * g->inner + index * BLOCK + v * VW, y, dtype);
                else vstore(group[i] + v * VW, y);
            }
        }
        for (int64_t i = 0; !wide && i < rows; i++)
            store_quantized(group[i], g->out_values, g->out_meta, row + i, index, blocks, g->out_terms);
    }
}

// How the rows and blocks of an operation are split into items. With enough tiles of rows for each thread, a thread gets the
// same rows in all operations of a layer and reads every weight: its inputs are then in its own core's cache (moving a row
// between two cores of a server takes as long as computing it). With fewer rows, and in the head, whose result no other
// operation of the step reads, each weight is read by one thread, unless there are too few blocks for that.
struct work_split {
    int64_t blocks, items, rows;  // an item: `rows` rows, one block
};
static struct work_split split_work(const struct quantized_linear_args *a, int64_t blocks, int is_head,
                                    const struct team_member *m) {
    int64_t chunks = is_head ? 1 : MIN(m->size, a->rows / (4 * QMR)), many = 4 * m->size;
    if (chunks < 2) chunks = m->size > 1 && blocks < many ? MIN(CEIL_DIV(many, blocks), a->rows * MAX(1, a->terms) / (4 * QMR)) : 1;
    int64_t rows = MAX(1, CEIL_DIV(a->rows, MAX(1, chunks)));
    return (struct work_split){blocks, blocks * CEIL_DIV(a->rows, rows), rows};
}
// Take the next item: rows [begin, end) and a block; 0 when none is left
static int take_item(const struct work_split *s, int64_t rows, struct team_member *m, int64_t *block, int64_t *begin,
                     int64_t *end) {
    const int64_t n = team_take_item(m, s->items);
    *block = n % s->blocks, *begin = n / s->blocks * s->rows, *end = MIN(rows, *begin + s->rows);
    return n >= 0;
}

void op_gated_linear(const struct gated_linear_args *g, struct team_member *m) {
    struct quantized_linear_args a = {.values = g->values,
                                      .meta = g->meta,
                                      .weight = g->weight,
                                      .rows = g->rows,
                                      .channels = 2 * g->inner,
                                      .groups = g->groups,
                                      .terms = g->terms,
                                      .bits = g->bits,
                                      .flags = g->flags};
    const struct work_split s = split_work(&a, g->inner / BLOCK, 0, m);
    const int64_t groups = CEIL_DIV(g->inner, PAIR) * 2;
    const size_t wide_bytes = (size_t)(g->rows * g->inner) * (g->dtype == BFLOAT16 ? 2 : 4);
    void *wide = g->out_terms == ROW_TERMS ? team_workspace(m, wide_bytes) : NULL;
    for (int64_t block, begin, end; take_item(&s, a.rows, m, &block, &begin, &end); team_item_done(m))
        run_gated_block(g, &a, block, begin, end, wide);
    team_finish_phase(m, s.items);
    float *one = wide ? thread_scratch((size_t)(groups * GROUP) * sizeof(float)) : NULL;
    for (int64_t r, end; team_take_rows(m, g->rows, &r, &end); team_item_done(m)) {
        for (; r < end; r++) {
            if (wide) {
                for (int64_t i = 0; i < groups * GROUP; i += VW)
                    vstore(one + i, i < g->inner ? load_as(wide, r * g->inner + i, (int)g->dtype) : splat(0.0f));
                quantize_scaled_row(one, g->inner, groups, scaled_row_at(g->out_values, r, groups));
                continue;
            }
            struct row_pair *pairs = g->out_values + r * g->out_terms * groups / 2;
            finish_row_scales(pairs, g->out_terms, groups, row_meta_at(g->out_meta, r, groups));
        }
    }
    team_finish_phase(m, team_row_items(m, g->rows));
}

void op_quantized_linear(const struct quantized_linear_args *a, struct team_member *m) {
    const struct work_split s = split_work(a, CEIL_DIV(a->channels, BLOCK), 0, m);
    const struct activations x = activations_of(a, a->terms);
    for (int64_t block, begin, end; take_item(&s, a->rows, m, &block, &begin, &end); team_item_done(m))
        run_block(a, &x, block, begin, end);
    team_finish_phase(m, s.items);
}

// The largest product of row i of a tile with a block; infinity if one is NaN, so that refine_row() examines the block
static float block_max(const struct quantized_linear_args *a, int64_t block, int64_t i, vf (*sums)[MAX_ROWS]) {
    vf highest = splat(-INFINITY);
    vi nan_lanes = {0};
    for (int v = 0; v < BLOCK / VW; v++) {
        const int64_t count = a->channels - block * BLOCK - v * VW;
        const vf x = vselect(lane_index() < splat_int((int32_t)MAX(0, MIN(VW, count))), sums[v][i], splat(-INFINITY));
        highest = vmax(x, highest);
        nan_lanes |= x != x;
    }
    return vmax_all_int(nan_lanes & 1) ? INFINITY : vmax_all(highest);
}

// Rows [begin, end) times one block of the head, with the first term only
static void run_head_block(const struct quantized_linear_args *a, int64_t index, int64_t begin, int64_t end, int stores_logits,
                           float *block_maxima) {
    const int64_t num_tiles = row_tiles(a, begin, end), blocks = CEIL_DIV(a->channels, BLOCK);
    const struct activations x = activations_of(a, 1);
    struct weight_block b = block_at(a, index), next = block_at(a, index + 1);
    for (int64_t tile = 0; tile < num_tiles; tile++) {
        int64_t row = tile_begin(begin, end, tile, num_tiles), rows = tile_begin(begin, end, tile + 1, num_tiles) - row;
        vf sums[BLOCK / VW][MAX_ROWS];
        plan_prefetch(&b, &next, tile, num_tiles);
        tile_function(a, 1)(&b, &x, row, sums, rows);
        add_bias(a->bias, a->channels, rows, index, sums);
        if (stores_logits) store_tile(a, row, rows, index, sums);
        for (int64_t i = 0; i < rows; i++) block_maxima[(row + i) * blocks + index] = block_max(a, index, i, sums);
    }
}

// Compute one row again with both terms, in those blocks that have a product within the margin of the row's largest
static void refine_row(const struct quantized_head_args *h, const struct quantized_linear_args *a, int64_t row,
                       int stores_logits, float *block_maxima) {
    const int64_t blocks = CEIL_DIV(a->channels, BLOCK);
    const struct activations x = activations_of(a, 2);
    float top = -INFINITY, highest = -INFINITY;
    int64_t at = 0;
    for (int64_t n = 0; n < blocks; n++) top = MAX(top, block_maxima[n]);
    for (int64_t n = 0; n < blocks; n++) {
        if (!(block_maxima[n] >= top - (float)h->margin)) continue;
        vf sums[BLOCK / VW][MAX_ROWS];
        float values[BLOCK];
        const struct weight_block b = block_at(a, n);
        tile_function(a, 2)(&b, &x, row, sums, 1);
        add_bias(a->bias, a->channels, 1, n, sums);
        if (stores_logits) store_tile(a, row, 1, n, sums);
        for (int v = 0; v < BLOCK / VW; v++) vstore(values + v * VW, sums[v][0]);
        block_maxima[n] = block_max(a, n, 0, sums);
        for (int64_t c = n * BLOCK; c < MIN(a->channels, (n + 1) * BLOCK) && !isnan(highest); c++)
            if (!(values[c % BLOCK] <= highest)) highest = values[c % BLOCK], at = c;
    }
    if (h->index) h->index[row] = at, h->best[row] = highest;
}

void op_quantized_head(const struct quantized_head_args *h, struct team_member *m) {
    const struct quantized_linear_args a = {.values = h->values,
                                            .meta = h->meta,
                                            .weight = h->weight,
                                            .bias = h->bias,
                                            .out = h->out,
                                            .rows = h->rows,
                                            .channels = h->channels,
                                            .groups = h->groups,
                                            .terms = 2,
                                            .bits = h->bits,
                                            .flags = h->flags,
                                            .out_stride = h->channels,
                                            .dtype = FLOAT32};
    const int64_t blocks = CEIL_DIV(a.channels, BLOCK);
    const int stores_logits = !h->wants_out || *h->wants_out;
    const struct work_split s = split_work(&a, blocks, 1, m);
    float *block_maxima = h->maxima ? h->maxima : team_workspace(m, (size_t)(a.rows * blocks) * sizeof(float));
    for (int64_t block, begin, end; take_item(&s, a.rows, m, &block, &begin, &end); team_item_done(m))
        run_head_block(&a, block, begin, end, stores_logits, block_maxima);
    team_finish_phase(m, s.items);
    for (int64_t r; (r = team_take_item(m, a.rows)) >= 0; team_item_done(m))
        refine_row(h, &a, r, stores_logits, block_maxima + r * blocks);
    team_finish_phase(m, a.rows);
}

// GROUP values of one channel, starting with group g
static void unpack_group(const uint8_t *strip, const uint8_t *pair, int64_t g, int64_t channel, int kind, float *out) {
    const int bits = kind_bits(kind), n = channel / 2 % 2;
    const int64_t lane = (channel / 4 * 2 + channel % 2) * 2 + g % 2;
    const uint8_t *codes = pair + n * 64 + lane * 4, *planes = codes + STRIP * PAIR / 2,
                  *scales = pair + kind_code_bytes(kind) + (channel * 2 + g % 2) * 2;
    const float float_scale = kind_is_float(kind) ? half_to_float(pair + kind_code_bytes(kind) + (n * STRIP + lane) * 2) : 0.0f;
    if (bits == 8) {
        for (int k = 0; k < GROUP; k++) out[k] = float_scale * (float)(codes[k / 4 * 128 + k % 4] - kind_zero(kind));
        return;
    }
    int16_t whole[4] = {0, 0, 0, 0};  // scales, offsets
    const int halves = kind_has(kind, HALVES), affine = kind_has(kind, AFFINE);
    float unit;
    for (int i = 0; i < (1 + halves) * (1 + affine); i++) memcpy(whole + i, scales + i * SCALE_BYTES, 2);
    memcpy(&unit, strip + channel * 4, 4);
    for (int k = 0; k < GROUP; k++) {
        const int step = k / 4, half = step / 4;
        int code = bits == 2 ? (codes[step % 2 * 128 + k % 4] >> step / 2 * 2 & 3) * kind_step(kind)
                             : codes[step % 4 * 128 + k % 4] >> half * 4 & 15;
        if (bits == 5) code |= (planes[k % 4] >> step & 1) << 4;
        if (bits == 6) code |= (planes[half * 128 + k % 4] >> step % 4 * 2 & 3) << 4;
        if (kind_has(kind, TABLE)) code = strip[UNIT_BYTES + code];
        const float scale = kind_is_float(kind) ? unit * float_scale
                                                : unit / (float)(1 << (SCALE_BITS + kind_shift(kind))) * (float)whole[halves & half];
        const float offset = affine ? unit / (1 << OFFSET_BITS) * (float)whole[1 + halves + (halves & half)] : 0.0f;
        out[k] = scale * (float)(code - kind_zero(kind)) + offset;
    }
}

static void embed_row(const struct quantized_embedding_args *a, int64_t i) {
    float row[GROUP];
    const int kind = KIND((int)a->bits, (int)a->flags);
    const int64_t id = table_row(a->ids[i], a->from, a->channels);
    if (id < 0) {
        const int64_t bytes = a->width * (a->dtype == BFLOAT16 ? 2 : 4);
        memset((char *)a->out + i * bytes, 0, (size_t)bytes);
        return;
    }
    const struct weight_block b = weight_block_at(a->weight, id / BLOCK, a->groups, kind);
    const uint8_t *strip = b.head + id % BLOCK / STRIP * b.next_strip, *pairs = strip + kind_head_bytes(kind);
    for (int64_t first = 0; first < a->width; first += GROUP) {
        const int64_t g = first / GROUP, at = i * a->width + first;
        unpack_group(strip, pairs + g / 2 * b.stride, g, id % STRIP, kind, row);
        for (int64_t k = 0; k < GROUP && first + k < a->width; k += VW) {
            int64_t count = MIN(VW, a->width - first - k);
            if (count == VW) store_as(a->out, at + k, vload(row + k), (int)a->dtype);
            else store_part(a->out, at + k, count, vload(row + k), (int)a->dtype);
        }
    }
}

void op_quantized_embedding(const struct quantized_embedding_args *a, struct team_member *m) {
    for (int64_t i, end; team_take_rows(m, a->count, &i, &end); team_item_done(m))
        for (; i < end; i++) embed_row(a, i);
    team_finish_phase(m, team_row_items(m, a->count));
}

// ---- mixtures of experts (moe.h)

static struct quantized_linear_args expert_args(const struct expert_weight *w, int64_t groups, int64_t terms) {
    return (struct quantized_linear_args){.weight = w->data, .groups = groups, .terms = terms, .bits = w->bits, .flags = w->flags};
}

// The rows of an expert, which are [first[e], first[e + 1]) of x, times one block of gates and the matching block of ups
static void run_expert_gated_block(const struct quantized_experts_gated_args *g, const struct plan *p, const struct activations *x,
                                   int64_t e, int64_t index) {
    const int64_t begin = p->first[e], end = p->first[e + 1], blocks = CEIL_DIV(g->inner, BLOCK);
    const struct quantized_linear_args parts[2] = {expert_args(g->gates + e, g->groups, g->terms),
                                                   expert_args(g->ups + e, g->groups, g->terms)};
    const int num_parts = g->ups[e].data == g->gates[e].data ? 1 : 2;  // ups may be their own gates
    const int64_t num_tiles = row_tiles(parts, begin, end);
    struct weight_block both[2] = {block_at(parts, index), block_at(parts + 1, index)};
    const struct weight_block next[2] = {block_at(parts, index + 1), block_at(parts + 1, index + 1)};
    const int64_t channels = MIN(BLOCK, g->inner - index * BLOCK);
    const int dtype = (int)g->dtype;
    for (int64_t tile = 0; tile < num_tiles; tile++) {
        const int64_t row = tile_begin(begin, end, tile, num_tiles), rows = tile_begin(begin, end, tile + 1, num_tiles) - row;
        vf sums[2][BLOCK / VW][MAX_ROWS];
        for (int part = 0; part < num_parts; part++) {
            plan_prefetch(&both[part], &next[part], tile, num_tiles);
            tile_function(parts + part, g->terms)(&both[part], x, g->rows == 1 ? 0 : row, sums[part], rows);
            for (int64_t i = 0; g->row_weights && i < rows; i++)
                for (int v = 0; v < BLOCK / VW; v++) sums[part][v][i] *= splat(g->row_weights[p->choices[row + i]]);
            if (g->bias) add_bias(g->bias + (2 * e + part) * g->inner, g->inner, rows, index, sums[part]);
        }
        float group[MAX_ROWS][BLOCK];
        for (int64_t i = 0; i < rows; i++) {
            for (int v = 0; v < BLOCK / VW; v++) {
                const vf gate = round_as(sums[0][v][i], dtype), up = num_parts == 1 ? gate : round_as(sums[1][v][i], dtype);
                const vf y = gated_product(gate, up, (int)g->activation, (float)g->limit, dtype);
                vstore(group[i] + v * VW, y);
            }
            for (int64_t c = channels; c < BLOCK; c++) group[i][c] = 0.0f;
        }
        for (int64_t i = 0; i < rows; i++) store_quantized(group[i], g->out_values, g->out_meta, row + i, index, blocks, g->out_terms);
    }
}

void op_quantized_experts_gated(const struct quantized_experts_gated_args *g, struct team_member *m) {
    const struct plan p = plan_of(g->plan, g->experts, g->rows * g->k);
    const int64_t count = g->rows * g->k, blocks = CEIL_DIV(g->inner, BLOCK), out_groups = CEIL_DIV(g->inner, PAIR) * 2;
    struct activations x = {g->values, g->meta, g->groups, g->terms, g->terms};
    if (g->rows > 1) {
        const size_t pair_bytes = (size_t)(g->terms * g->groups / 2) * sizeof(struct row_pair), meta_bytes = (size_t)row_words(g->groups) * 4;
        for (int64_t i, end; team_take_rows(m, count, &i, &end); team_item_done(m)) {
            for (end = MIN(end, p.first[g->experts]); i < end; i++) {
                const size_t from = (size_t)(p.choices[i] / g->k);
                memcpy((char *)g->sorted_values + (size_t)i * pair_bytes, (const char *)g->values + from * pair_bytes, pair_bytes);
                memcpy((char *)g->sorted_meta + (size_t)i * meta_bytes, (const char *)g->meta + from * meta_bytes, meta_bytes);
            }
        }
        team_finish_phase(m, team_row_items(m, count));
        x.pairs = g->sorted_values, x.meta = g->sorted_meta;
    }
    for (int64_t e, block; take_expert(&p, blocks, m, &e, &block); team_item_done(m))
        if (e >= 0) run_expert_gated_block(g, &p, &x, e, block);
    team_finish_phase(m, p.most * blocks);
    for (int64_t r, end; team_take_rows(m, count, &r, &end); team_item_done(m)) {
        for (end = MIN(end, p.first[g->experts]); r < end; r++) {
            struct row_pair *pairs = g->out_values + r * g->out_terms * out_groups / 2;
            finish_row_scales(pairs, g->out_terms, out_groups, row_meta_at(g->out_meta, r, out_groups));
        }
    }
    team_finish_phase(m, team_row_items(m, count));
}

void op_quantized_experts_down(const struct quantized_experts_down_args *d, struct team_member *m) {
    const struct plan p = plan_of(d->plan, d->experts, d->rows * d->k);
    const struct activations x = {d->values, d->meta, d->groups, d->terms, d->terms};
    const int64_t blocks = CEIL_DIV(d->channels, BLOCK);
    for (int64_t e, index; take_expert(&p, blocks, m, &e, &index); team_item_done(m)) {
        if (e < 0) continue;
        const struct quantized_linear_args a = expert_args(d->weights + e, d->groups, d->terms);
        const int64_t begin = p.first[e], end = p.first[e + 1], num_tiles = row_tiles(&a, begin, end);
        struct weight_block b = block_at(&a, index), next = block_at(&a, index + 1);
        for (int64_t tile = 0; tile < num_tiles; tile++) {
            const int64_t row = tile_begin(begin, end, tile, num_tiles), rows = tile_begin(begin, end, tile + 1, num_tiles) - row;
            vf sums[BLOCK / VW][MAX_ROWS];
            plan_prefetch(&b, &next, tile, num_tiles);
            tile_function(&a, d->terms)(&b, &x, row, sums, rows);
            if (d->bias) add_bias(d->bias + e * d->channels, d->channels, rows, index, sums);
            for (int v = 0; v < BLOCK / VW; v++) {
                const int64_t channel = index * BLOCK + v * VW, n = MIN(VW, d->channels - channel);
                if (n <= 0) break;
                for (int64_t i = 0; i < rows; i++) {
                    const int64_t at = p.choices[row + i] * d->channels + channel;
                    if (n == VW) vstore(d->out + at, sums[v][i]);
                    else store_part(d->out, at, n, sums[v][i], FLOAT32);
                }
            }
        }
    }
    team_finish_phase(m, p.most * blocks);
}

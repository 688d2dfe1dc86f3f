// Paged attention without gathering, for prefill and decode rows in one call.
//
// Work item: (sequence, kv head, tile of query tokens); the query heads that share the kv head are rows of the item, so its
// keys and values are read once for all of them. Keys come in tiles of TILE positions, so that scores are computed for whole
// vectors of positions: transposed into scratch, or, as PAIRS, lying so already. Values are used where they lie. Softmax is
// computed online (Milakov & Gimelshein 2018), as in FlashAttention.
//
// A row's result depends on nothing but the row and its sequence's keys and values: tiles and splits are counted from
// position 0, every row starts afresh at each multiple of SPLIT positions and the parts are merged in order, whether one
// thread does all of them or several do; masked positions weigh exactly 0, and the register tiles only decide how many rows
// are computed side by side, never in which order one row's terms are added.
#include "attention_int8.h"
#include "attention_items.h"
#include "attention_tile.h"

#define MAX_HEAD_SIZE 512  // also in octavo_kernels/cpu/attention.py

static const float ZEROS[MAX_HEAD_SIZE * CHUNK / 2];  // a row, or a chunk of pairs

// Scratch of one thread.
struct work {
    float *q, *kt, *vt, *acc, *total;  // [rows, depth], [depth, TILE], [TILE, depth], [rows, depth], [rows, depth]
    float *m, *l, *total_m, *total_l;  // [rows]
    float *lanes;                      // [rows, VW]: l of pairs, lane by lane
    int32_t *position;                 // [rows]
    const void *rows[2][2][2 * TILE];  // where this tile's and the next one's keys and values lie, row by row or in chunks
    struct ahead ahead;
};

static struct work get_work(int64_t rows, int64_t depth) {
    float *p = scratch((size_t)(3 * rows * depth + 2 * TILE * depth + (5 + VW) * rows + 64) * sizeof(float));
    struct work w;
    w.kt = p, p += TILE * depth;
    w.vt = p, p += TILE * depth;
    w.q = p, p += rows * depth;
    w.acc = p, p += rows * depth;
    w.total = p, p += rows * depth;
    w.lanes = p, p += rows * VW;
    w.m = p, p += rows;
    w.l = p, p += rows;
    w.total_m = p, p += rows;
    w.total_l = p, p += rows;
    w.position = (int32_t *)p;
    return w;
}

INLINE int in_chunks(const struct paged_attention_args *a) { return a->kv_dtype == PAIRS || a->kv_dtype == INT8; }

// Where the rows of positions start .. start + TILE lie, or their chunks; rows past the sequence are zeros (never what
// the page holds).
INLINE int64_t find_rows(const struct item *it, int64_t start, const void **keys, const void **values) {
    int64_t count = MIN(TILE, it->length - start), block_size = it->a->block_size;
    if (in_chunks(it->a)) {
        for (int64_t c = 0; c < CHUNKS; c++) {
            int64_t position = start + c * CHUNK, offset = position % block_size;
            if (position >= it->length) {
                keys[c] = values[c] = ZEROS;
                continue;
            }
            keys[c] = it->keys + it->table[position / block_size] * it->block_stride + offset * it->row_stride;
            values[c] = (const char *)keys[c] + it->value_offset;
        }
        return count;
    }
    for (int64_t j = 0; j < count;) {
        int64_t position = start + j, offset = position % block_size;
        const char *key = it->keys + it->table[position / block_size] * it->block_stride + offset * it->row_stride;
        for (int64_t end = MIN(count, j + block_size - offset); j < end; j++, key += it->row_stride) {
            keys[j] = key;
            values[j] = key + it->value_offset;
        }
    }
    for (int64_t j = MAX(0, count); j < TILE; j++) keys[j] = values[j] = ZEROS;
    return count;
}

// Bits [from, to) of TILE
INLINE uint64_t bits_between(int64_t from, int64_t to) {
    return (to >= TILE ? ~0ull : (1ull << MAX(0, to)) - 1) & (from >= TILE ? 0 : ~0ull << MAX(0, from));
}

// Which positions of the tile start .. start + TILE the rows r .. r + mr of an item see: of all rows together [from, to), of each
// a bit for every position.
struct sight {
    int64_t from, to;
    uint64_t visible[MR];
};
INLINE struct sight look(const struct item *it, const struct work *w, int64_t start, int64_t r, const int mr) {
    struct sight sight;
    int64_t window = it->a->window ? it->a->window : INT64_MAX / 2;
    int64_t first = w->position[r] - start, last = w->position[r + mr - 1] - start;
    sight.from = MAX(0, first - window + 1), sight.to = MIN(TILE, last + 1);
    for (int i = 0; i < mr; i++) {
        int64_t position = w->position[r + i] - start;
        sight.visible[i] = bits_between(MAX(0, position - window + 1), MIN(TILE, position + 1));
    }
    return sight;
}
INLINE int sees_some(const struct sight *sight) { return sight->from < TILE && sight->to > 0; }

// `tiles` times mr rows from row r on against a tile of an int8 cache, phase by phase: with two tiles of rows, what one of them
// needs of the phase before has long been there.
INLINE void int8_rows(const struct item *it, struct work *w, int64_t start, int64_t r, const void *const *keys,
                      const void *const *values, const int few, const int tiles, const int mr) {
    float s[2][MR * TILE] __attribute__((aligned(64))), shrink[2][ROUND_UP(MR)];
    uint8_t p[2][MR * TILE * 2] __attribute__((aligned(64)));
    struct sight sight[2];
    int64_t depth = it->depth;
    for (int t = 0; t < tiles; t++) sight[t] = look(it, w, start, r + t * mr, mr);
    for (int t = 0; t < tiles; t++) int8_scores(w->q + (r + t * mr) * depth, depth, keys, s[t], &w->ahead, few, mr);
    for (int t = 0; t < tiles; t++)
        int8_soften((float)it->a->scale, (float)it->a->softcap, s[t], values, depth, p[t], sight[t].visible, w->m + r + t * mr,
                    w->lanes + (r + t * mr) * VW, shrink[t], mr);
    for (int t = 0; t < tiles; t++)
        int8_weigh_all(w->acc + (r + t * mr) * depth, depth, shrink[t], p[t], values, MAX(0, sight[t].from), MAX(0, sight[t].to),
                       &w->ahead, few, mr);
}

// Rows r .. r + mr of the item against the tile of positions start .. start + TILE.
INLINE void tile_rows(const struct item *it, struct work *w, int64_t start, int64_t r, const void *const *keys,
                      const void *const *values, int kind, const int mr) {
    float s[MR * TILE] __attribute__((aligned(64))), p[MR * TILE / 2] __attribute__((aligned(64))), shrink[ROUND_UP(MR)];
    const struct sight sight = look(it, w, start, r, mr);
    if (!sees_some(&sight)) return;
    const int64_t depth = it->depth, from = sight.from, to = sight.to;
    const float scaling = (float)it->a->scale, softcap = (float)it->a->softcap;
    const int few = w->ahead.with_scores > 0;
    if (kind == INT8) {
        if (few) int8_rows(it, w, start, r, keys, values, 1, 1, mr);
        else int8_rows(it, w, start, r, keys, values, 0, 1, mr);
        w->ahead.with_scores = 0;
        return;
    }
#if HAS_PAIRS
    if (kind == PAIRS) {
        if (few) pair_scores(w->q + r * depth, depth, it->a->head_size, keys, s, &w->ahead, 1, mr);
        else pair_scores(w->q + r * depth, depth, it->a->head_size, keys, s, &w->ahead, 0, mr);
        pair_soften(scaling, softcap, s, p, sight.visible, w->m + r, w->lanes + r * VW, shrink, mr);
        if (few) pair_weigh_all(w->acc + r * depth, depth, shrink, p, values, from, to, &w->ahead, 1, mr);
        else pair_weigh_all(w->acc + r * depth, depth, shrink, p, values, from, to, &w->ahead, 0, mr);
        w->ahead.with_scores = 0;
        return;
    }
#endif
    (void)p, (void)keys, (void)shrink, (void)few;
    scores(w->q + r * depth, depth, it->a->head_size, w->kt, s, &w->ahead, mr);
    for (int i = 0; i < mr; i++) {
        const struct sight mine = look(it, w, start, r + i, 1);
        soften(scaling, softcap, s + i * TILE, mine.from, mine.to, w->m + r + i,
               w->l + r + i, w->acc + (r + i) * depth, depth);
    }
    weigh_all(w->acc + r * depth, depth, s, values, from, to, kind, &w->ahead, mr);
}

static void __attribute__((noinline)) tile_some(const struct item *it, struct work *w, int64_t start, int64_t r, int64_t mr,
                                                const void *const *keys, const void *const *values, int kind) {
#define CASE(n)                                                                                  \
    case n:                                                                                      \
        if (kind == INT8) tile_rows(it, w, start, r, keys, values, INT8, n);                     \
        else if (HAS_PAIRS && kind == PAIRS) tile_rows(it, w, start, r, keys, values, PAIRS, n); \
        else if (kind == BFLOAT16) tile_rows(it, w, start, r, keys, values, BFLOAT16, n);        \
        else tile_rows(it, w, start, r, keys, values, FLOAT32, n);                               \
        break;
    switch (mr) {
        CASE(1)
        CASE(2)
        CASE(3)
#if MR >= 6
        CASE(4)
        CASE(5)
        CASE(6)
#endif
    }
#undef CASE
}

// Two tiles of rows at once, if there are two and both see some of these positions.
static int __attribute__((noinline)) two_tiles(const struct item *it, struct work *w, int64_t start, int64_t r,
                                               const void *const *keys, const void *const *values) {
    if (it->rows - r < 2 * MR) return 0;
    const struct sight one = look(it, w, start, r, MR), other = look(it, w, start, r + MR, MR);
    if (!sees_some(&one) || !sees_some(&other)) return 0;
    int8_rows(it, w, start, r, keys, values, 0, 2, MR);
    return 1;
}

// All rows of the item against positions [begin, end) of one split: w->m, w->l, w->acc. `next` is what this thread will
// probably turn to afterwards; `it` itself when that is its next split.
INLINE void attend(const struct item *it, struct work *w, int64_t begin, int64_t end, const struct item *next, int kind) {
    int64_t rows = it->rows, depth = it->depth, head_size = it->a->head_size;
    for (int64_t r = 0; r < rows; r++) w->m[r] = -INFINITY, w->l[r] = 0.0f;
    memset(w->acc, 0, (size_t)(rows * depth) * sizeof(float));
    const int by_lanes = kind == PAIRS || kind == INT8;  // sums for each lane, maxima in powers of 2
    if (by_lanes) memset(w->lanes, 0, (size_t)(rows * VW) * sizeof(float));
    const int pack = !by_lanes && (depth != head_size || (kind == BFLOAT16 && rows > MR));
    // With few rows the memory is what takes time, and the next tile is fetched piecemeal: chunks by lines (fetch_lines).
    const int by_lines = rows <= 4 * MR && in_chunks(it->a), few = by_lines || (rows <= 4 * MR && !by_lanes);
    int now = 0;
    const int64_t pieces = in_chunks(it->a) ? CHUNKS : TILE, piece_bytes = it->row_stride * (TILE / pieces);
    const int64_t lines = 2 * pieces * CEIL_DIV(piece_bytes, 64), row_tiles = CEIL_DIV(rows, MR);
    int64_t count = find_rows(it, begin, w->rows[0][0], w->rows[0][1]);
    for (int64_t start = begin; start < end; start += TILE, now ^= 1) {
        int64_t next_count = 0;
        const void **next_keys = w->rows[!now][0], **next_values = w->rows[!now][1];
        if (start + TILE < end) next_count = find_rows(it, start + TILE, next_keys, next_values);
        else if (next) find_rows(next, next == it ? end : next->begin, next_keys, next_values);
        memcpy(next_keys + pieces, next_values, (size_t)pieces * sizeof(void *));  // one list for `ahead`
        w->ahead = (struct ahead){.rows = next_keys, .row_bytes = piece_bytes};
        if (start + TILE < end || next) w->ahead.end = 2 * pieces;
        const void **keys = w->rows[now][0], **values = w->rows[now][1];
#if HAS_PAIRS
        const void *chunks[2][CHUNKS];
        if (kind == PAIRS) {
            if (!in_chunks(it->a)) {
                pair_rows(keys, values, w->kt, w->vt, head_size);
                for (int64_t c = 0; c < CHUNKS; c++) {
                    chunks[0][c] = w->kt + c * CHUNK * head_size / 2;
                    chunks[1][c] = w->vt + c * CHUNK * head_size / 2;
                }
                keys = chunks[0], values = chunks[1];
            } else if (count < TILE && count % CHUNK) {
                pad_values(values[count / CHUNK], w->vt, count % CHUNK, depth);
                values[count / CHUNK] = w->vt;
            }
        }
#endif
        if (by_lines && w->ahead.end) w->ahead.with_scores = start + TILE < end ? CHUNKS : 2 * CHUNKS;
        if (!by_lanes) transpose_keys(keys, w->kt, count, head_size, kind, &w->ahead);
        const void *packed[TILE];
        if (pack) {
            for (int64_t j = 0; j < TILE; j++) {
                float *row = w->vt + j * depth;
                for (int64_t d = 0; d < head_size; d += VW) vstore(row + d, load_row(values[j], d, head_size, kind));
                packed[j] = row;
            }
            values = packed;
        }
        for (int64_t r = 0; r < rows; r += MR) {
            if (!few) fetch(&w->ahead, CEIL_DIV(lines, row_tiles));
            if (kind == INT8 && !few && two_tiles(it, w, start, r, keys, values)) {
                fetch(&w->ahead, CEIL_DIV(lines, row_tiles));
                r += MR;
                continue;
            }
            tile_some(it, w, start, r, MIN(MR, rows - r), keys, values, pack ? FLOAT32 : kind);
        }
        count = next_count;
    }
    if (by_lanes)
        for (int64_t r = 0; r < rows; r++) w->m[r] *= 0.693147180559945309f, w->l[r] = vsum(vload(w->lanes + r * VW));
}

// Fold one part (of a split) into a row's total, in order of position. Its sum l says whether there is anything in it: 0 if not,
// and NaN, which has to stay, if a score was NaN, whatever the maximum.
INLINE void merge(float *total, float *total_m, float *total_l, const float *part, float m, float l, int64_t depth) {
    if (l == 0.0f) return;
    if (*total_l == 0.0f) {
        memcpy(total, part, (size_t)depth * sizeof(float));
        *total_m = m, *total_l = l;
        return;
    }
    float highest = MAX(*total_m, m), keep = exp_one(*total_m - highest), add = exp_one(m - highest);
    for (int64_t d = 0; d < depth; d += VW) vstore(total + d, vfma(vload(part + d), splat(add), vload(total + d) * splat(keep)));
    *total_l = vfma(splat(l), splat(add), splat(*total_l * keep))[0];
    *total_m = highest;
}

INLINE int kind_of(const struct paged_attention_args *a) {
    if (in_chunks(a)) return (int)a->kv_dtype;
    return HAS_PAIRS && a->kv_dtype == BFLOAT16 && a->head_size % (2 * VW) == 0 ? PAIRS : (int)a->kv_dtype;
}

static void load_queries(const struct item *it, struct work *w) {
    const int pairs = kind_of(it->a) == PAIRS, int8 = it->a->kv_dtype == INT8, dtype = (int)it->a->dtype;
    const int64_t head_size = it->a->head_size;
    float row[MAX_HEAD_SIZE] __attribute__((aligned(64))), *q = w->q;
    struct cursor at = {0};
    for (int64_t r = 0; r < it->rows; r++, next_row(&at, it), q += it->depth) {
        w->position[r] = (int32_t)(it->first_position + at.token);
        for (int64_t d = 0; d < head_size; d += VW) {
            vf x = load_row(it->q + at.offset, d, head_size, dtype);
            if (int8) vstore(row + d, x);
            else if (pairs) store_as(q, d, x, BFLOAT16);
            else vstore(q + d, x);
        }
        if (int8) int8_query(row, it->depth, q);
    }
}

INLINE void finish_row(const struct item *it, const struct cursor *at, const float *total, float l) {
    const int64_t head_size = it->a->head_size;
    const int dtype = (int)it->a->dtype;
    char *out = it->out + at->offset;
    const vf share = splat(l == 0.0f ? 1.0f : 1.0f / l);  // NaN stays
    for (int64_t d = 0; d < head_size; d += VW) {
        int64_t n = MIN(VW, head_size - d);
        vf x = vload(total + d) * share;
        if (n == VW) store_as(out, d, x, dtype);
        else store_part(out, d, n, x, dtype);
    }
}

static void __attribute__((noinline)) attend_dispatch(const struct item *it, struct work *w, int64_t begin, int64_t end,
                                                      const struct item *next) {
    switch (kind_of(it->a)) {
        case INT8: attend(it, w, begin, end, next, INT8); break;
#if HAS_PAIRS
        case PAIRS: attend(it, w, begin, end, next, PAIRS); break;
#endif
        case BFLOAT16: attend(it, w, begin, end, next, BFLOAT16); break;
        default: attend(it, w, begin, end, next, FLOAT32);
    }
}

static void run_whole(const struct item *it, struct work *w, const struct item *next) {
    for (int64_t r = 0; r < it->rows; r++) w->total_m[r] = -INFINITY, w->total_l[r] = 0.0f;
    load_queries(it, w);
    for (int64_t split = it->begin / SPLIT * SPLIT; split < it->end; split += SPLIT) {
        int64_t end = MIN(it->end, split + SPLIT);
        attend_dispatch(it, w, MAX(it->begin, split), end, end == it->end ? next : it);
        for (int64_t r = 0; r < it->rows; r++)
            merge(w->total + r * it->depth, w->total_m + r, w->total_l + r, w->acc + r * it->depth, w->m[r], w->l[r],
                  it->depth);
    }
    struct cursor at = {0};
    for (int64_t r = 0; r < it->rows; r++, next_row(&at, it)) finish_row(it, &at, w->total + r * it->depth, w->total_l[r]);
}

// An item of one split into parts[rows][depth + 2]: m, l, acc
static void run_part(const struct item *it, struct work *w, const struct item *next, float *parts) {
    int some = it->begin < it->end;
    if (some) {
        load_queries(it, w);
        attend_dispatch(it, w, it->begin, it->end, next);
    }
    for (int64_t r = 0; r < it->rows; r++) {
        float *part = parts + r * (it->depth + 2);
        part[0] = some ? w->m[r] : -INFINITY;
        part[1] = some ? w->l[r] : 0.0f;
        if (some) memcpy(part + 2, w->acc + r * it->depth, (size_t)it->depth * sizeof(float));
    }
}

// parts[splits], `step` floats apart
static void merge_parts(const struct item *it, struct work *w, int64_t splits, int64_t step, const float *parts) {
    int64_t stride = it->depth + 2;
    struct cursor at = {0};
    for (int64_t r = 0; r < it->rows; r++, next_row(&at, it)) {
        float m = -INFINITY, l = 0.0f;
        for (int64_t s = 0; s < splits; s++) {
            const float *part = parts + s * step + r * stride;
            merge(w->total, &m, &l, part + 2, part[0], part[1], it->depth);
        }
        finish_row(it, &at, w->total, l);
    }
}

static void clear_padding(const struct paged_attention_args *a) {
    int64_t row = a->num_heads * row_bytes(a);
    if (a->rows > a->actual_rows) memset((char *)a->out + a->actual_rows * row, 0, (size_t)((a->rows - a->actual_rows) * row));
}

void op_paged_attention(const struct paged_attention_args *given, struct member *team_member) {
    // The walk is from the last row to the first; whoever has the first rows elsewhere has them here.
    struct member backwards = *team_member, *m = &backwards;
    m->rank = m->size - 1 - m->rank;
    // The number of rows in use is read here, not only when the call was packed: a recorded call is replayed with others.
    struct paged_attention_args mine = *given, *a = &mine;
    mine.actual_rows = MIN(given->actual_rows, given->query_start_loc[given->requests]);
    int64_t group = a->num_heads / a->num_kv_heads, tokens_per_item = MAX(1, ROWS / group), tokens = 0;
    for (int64_t r = 0; r < a->requests; r++) tokens += request_tokens(a, r);
    // Smaller items rather than parts of items, which have to be merged, as long as a key is still read for enough rows.
    const int64_t fair = tokens * a->num_kv_heads / (4 * m->size);
    if (fair * group >= LEAST_ROWS) tokens_per_item = MIN(tokens_per_item, fair);
    int64_t depth = CEIL_DIV(a->head_size, VW) * VW, rows = tokens_per_item * group, items = 0;
    struct work w = get_work(rows, depth);
    struct walk k = start_walk(a, tokens_per_item);
    for (int64_t r = 0; r < a->requests; r++) items += request_items(&k, r);
    if (m->size == 1 || items >= 4 * m->size) {
        // One item more than there are: the padding rows.
        for (int64_t n; (n = team_take(m, items + 1)) >= 0; team_done(m)) {
            if (n == items) {
                clear_padding(a);
                continue;
            }
            struct item it = find_item(&k, n, 0), next;
            struct walk after = k;
            if (n + 1 < items) next = find_item(&after, n + 1, 0);
            run_whole(&it, &w, n + 1 < items ? &next : NULL);
        }
        team_wait(m, items + 1);
        return;
    }
    // Too few items for the threads: share out the splits of each, then merge.
    int64_t parts = 0, part_size = rows * (depth + 2);
    for (int64_t r = 0; r < a->requests; r++) parts += request_items(&k, r) * request_splits(a, r);
    float *all = team_workspace(m, (size_t)(parts * part_size) * sizeof(float));
    for (int64_t n; (n = team_take(m, parts)) >= 0; team_done(m)) {
        struct item it = find_item(&k, n, 1), next;
        struct walk after = k;
        if (n + 1 < parts) next = find_item(&after, n + 1, 1);
        run_part(&it, &w, n + 1 < parts && next.begin < next.end ? &next : NULL, all + n * part_size);
    }
    team_wait(m, parts);
    k = start_walk(a, tokens_per_item);
    for (int64_t n; (n = team_take(m, items + 1)) >= 0; team_done(m)) {
        if (n == items) {
            clear_padding(a);
            continue;
        }
        find_unit(&k, n, 0);
        int64_t splits = request_splits(a, k.request), index = n - k.before;
        struct item it = make_item(&k, index);
        merge_parts(&it, &w, splits, part_size * k.here, all + (k.parts_before + index) * part_size);
    }
    team_wait(m, items + 1);
}

// Paged attention without gathering, for prefill and decode rows in one call.
//
// A work item is (sequence, kv head, tile of query tokens). The query heads that share the kv head are rows of the item, so its
// keys and values are read once for all of them. Keys come in tiles of TILE positions, so that scores are computed for whole
// vectors of positions: keys are transposed into scratch, unless the cache holds them as BF16_PAIRS or INT8. Values are used in
// place. Softmax is computed online (Milakov & Gimelshein 2018), as in FlashAttention.
//
// A row's result depends only on the row and its sequence's keys and values. Tiles and splits are counted from position 0;
// every row starts afresh at each multiple of SPLIT positions and the parts are merged in order, on one thread or several;
// masked positions have a weight of exactly 0; register tiles decide how many rows are computed side by side, never the order
// in which the terms of one row are added.
#include "attention_int8.h"
#include "attention_int8_matrix.h"
#include "attention_items.h"
#include "attention_matrix.h"
#include "attention_scratch.h"
#include "attention_squares.h"
#include "attention_tile.h"

// `tiles` times mr rows, starting with row r, against a tile of an int8 cache, phase by phase: with two tiles of rows, one's
// results of a phase are ready while the other's are computed.
INLINE void int8_attend_tiles(const struct item *it, struct buffers *w, int64_t start, int64_t r, const void *const *keys,
                              const void *const *values, const int few_rows, const int tiles, const int mr) {
    float s[2][MR * TILE] __attribute__((aligned(64))), rescale[2][ROUND_UP(MR)];
    uint8_t p[2][MR * TILE * 2] __attribute__((aligned(64)));
    struct visible_range range[2];
    int64_t depth = it->depth;
    for (int t = 0; t < tiles; t++) range[t] = find_visible(it, w, start, r + t * mr, mr);
    for (int t = 0; t < tiles; t++) int8_scores(w->q + (r + t * mr) * depth, depth, keys, s[t], &w->prefetch, few_rows, mr);
    for (int t = 0; t < tiles; t++)
        int8_softmax_tile((float)it->a->scale, (float)it->a->softcap, s[t], values, depth, p[t], range[t].visible,
                          w->m + r + t * mr, w->lanes + (r + t * mr) * VW, rescale[t], mr);
    for (int t = 0; t < tiles; t++)
        int8_accumulate_pv(w->acc + (r + t * mr) * depth, depth, rescale[t], p[t], values, MAX(0, range[t].from),
                           MAX(0, range[t].to), &w->prefetch, few_rows, mr);
}

// Rows r .. r + mr of the item against the tile of positions start .. start + TILE
INLINE void attend_tile(const struct item *it, struct buffers *w, int64_t start, int64_t r, const void *const *keys,
                        const void *const *values, int kind, const int mr) {
    float s[MR * TILE] __attribute__((aligned(64))), p[MR * TILE / 2] __attribute__((aligned(64))), rescale[ROUND_UP(MR)];
    const struct visible_range range = find_visible(it, w, start, r, mr);
    if (!any_visible(&range)) return;
    const int64_t depth = it->depth, from = range.from, to = range.to;
    const float scaling = (float)it->a->scale, softcap = (float)it->a->softcap;
    const int few_rows = w->prefetch.chunks_with_scores > 0;
    if (kind == INT8) {
        if (few_rows) int8_attend_tiles(it, w, start, r, keys, values, 1, 1, mr);
        else int8_attend_tiles(it, w, start, r, keys, values, 0, 1, mr);
        w->prefetch.chunks_with_scores = 0;
        return;
    }
#if HAS_BF16_PAIRS
    if (kind == BF16_PAIRS) {
        if (few_rows) bf16_scores(w->q + r * depth, depth, it->a->head_size, keys, s, &w->prefetch, 1, mr);
        else bf16_scores(w->q + r * depth, depth, it->a->head_size, keys, s, &w->prefetch, 0, mr);
        bf16_softmax_tile(scaling, softcap, s, p, range.visible, w->m + r, w->lanes + r * VW, rescale, mr);
        if (few_rows) bf16_accumulate_pv(w->acc + r * depth, depth, rescale, p, values, from, to, &w->prefetch, 1, mr);
        else bf16_accumulate_pv(w->acc + r * depth, depth, rescale, p, values, from, to, &w->prefetch, 0, mr);
        w->prefetch.chunks_with_scores = 0;
        return;
    }
#endif
    (void)p, (void)keys, (void)rescale, (void)few_rows;
    compute_scores(w->q + r * depth, depth, it->a->head_size, w->kt, s, &w->prefetch, mr);
    for (int i = 0; i < mr; i++) {
        const struct visible_range mine = find_visible(it, w, start, r + i, 1);
        softmax_tile(scaling, softcap, s + i * TILE, mine.from, mine.to, w->m + r + i, w->l + r + i, w->acc + (r + i) * depth,
                     depth);
    }
    accumulate_pv(w->acc + r * depth, depth, s, values, from, to, kind, &w->prefetch, mr);
}

#if HAS_AMX
// Rows r .. r + rows of the item, at most INT8_MATRIX_ROWS, against the tile of positions start .. start + TILE of an int8 cache
static void __attribute__((noinline)) attend_int8_matrix(const struct item *it, struct buffers *w, int64_t start, int64_t r,
                                                         int64_t rows, const void *const *keys, const void *const *values,
                                                         int64_t lines) {
    float s[INT8_MATRIX_ROWS * TILE] __attribute__((aligned(64))), rescale[INT8_MATRIX_ROWS + VW];
    uint8_t p[INT8_MATRIX_ROWS * TILE * 2] __attribute__((aligned(64)));
    int32_t sums[2 * PAIR_SUMS] __attribute__((aligned(64)));
    uint64_t visible[INT8_MATRIX_ROWS];
    if (!find_visible_rows(it, w, start, r, rows, visible)) return;
    const int64_t depth = it->depth, some = CEIL_DIV(lines, CHUNKS / 2 * (depth / TILE_ROW) + depth / PAIR_COLUMNS);
    const float scaling = (float)it->a->scale, softcap = (float)it->a->softcap;
    int8_matrix_scores(w->q + r * depth, (int8_t *)w->kt + r * 2 * depth, depth, keys, s, sums, rows, &w->prefetch, some);
    int64_t i = 0;
    for (; i + 4 <= rows; i += 4)
        int8_softmax_tile(scaling, softcap, s + i * TILE, values, depth, p + i * 2 * TILE, visible + i, w->m + r + i,
                          w->lanes + (r + i) * VW, rescale + i, 4);
    for (; i < rows; i++)
        int8_softmax_tile(scaling, softcap, s + i * TILE, values, depth, p + i * 2 * TILE, visible + i, w->m + r + i,
                          w->lanes + (r + i) * VW, rescale + i, 1);
    int8_matrix_pv(w->acc + r * depth, depth, rescale, p, (int8_t *)w->vt, sums, rows, &w->prefetch, some);
}
#endif

#if HAS_MATRIX_ATTENTION
// Rows r .. r + rows of the item, at most MATRIX_ROWS, against the tile of positions start .. start + TILE by matrix tiles
static void __attribute__((noinline)) attend_matrix(const struct item *it, struct buffers *w, int64_t start, int64_t r, int64_t rows,
                                                    const void *const *keys, const float *values, int64_t lines) {
    float s[MATRIX_ROWS * TILE] __attribute__((aligned(64))), p[MATRIX_ROWS * TILE / 2] __attribute__((aligned(64)));
    float rescale[MATRIX_ROWS + VW];
    uint64_t visible[MATRIX_ROWS];
    const int64_t depth = it->depth, head_size = it->a->head_size, steps = head_size / TILE_WIDTH + 2 * CEIL_DIV(depth, MATRIX_COLUMNS);
    if (!find_visible_rows(it, w, start, r, rows, visible)) return;
    matrix_scores(w->q + r * depth, depth, head_size, keys, s, &w->prefetch, CEIL_DIV(lines, steps));
    bf16_softmax_rows(it, w, r, rows, s, p, visible, rescale);
    matrix_accumulate_pv(w->acc + r * depth, depth, rescale, p, values, s, rows, &w->prefetch, CEIL_DIV(lines, steps));
}
#endif

static void __attribute__((noinline)) attend_tile_dispatch(const struct item *it, struct buffers *w, int64_t start, int64_t r,
                                                           int64_t mr, const void *const *keys, const void *const *values,
                                                           int kind) {
#define CASE(n)                                                                                                   \
    case n:                                                                                                       \
        if (kind == INT8) attend_tile(it, w, start, r, keys, values, INT8, n);                                    \
        else if (HAS_BF16_PAIRS && kind == BF16_PAIRS) attend_tile(it, w, start, r, keys, values, BF16_PAIRS, n); \
        else if (kind == BFLOAT16) attend_tile(it, w, start, r, keys, values, BFLOAT16, n);                       \
        else attend_tile(it, w, start, r, keys, values, FLOAT32, n);                                              \
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

// Two tiles of rows at once, if there are two and both may attend to some of these positions; returns whether it was done
static int __attribute__((noinline)) attend_two_tiles(const struct item *it, struct buffers *w, int64_t start, int64_t r,
                                                      const void *const *keys, const void *const *values) {
    if (it->rows - r < 2 * MR) return 0;
    const struct visible_range one = find_visible(it, w, start, r, MR), other = find_visible(it, w, start, r + MR, MR);
    if (!any_visible(&one) || !any_visible(&other)) return 0;
    int8_attend_tiles(it, w, start, r, keys, values, 0, 2, MR);
    return 1;
}

// All rows of the item against positions [begin, end) of one split, into w->m, w->l and w->acc. `next` is the item that this
// thread will probably process next, `it` itself if that is its next split: its first tile is prefetched.
INLINE void attend_split(const struct item *it, struct buffers *w, int64_t begin, int64_t end, const struct item *next,
                         int kind) {
    int64_t rows = it->rows, depth = it->depth, head_size = it->a->head_size;
    for (int64_t r = 0; r < rows; r++) w->m[r] = -INFINITY, w->l[r] = 0.0f;
    memset(w->acc, 0, (size_t)(rows * depth) * sizeof(float));
    const int by_lanes = kind == BF16_PAIRS || kind == INT8;  // l is kept for each lane, m in units of log2
    if (by_lanes) memset(w->lanes, 0, (size_t)(rows * VW) * sizeof(float));
    const int pack = !by_lanes && (depth != head_size || (kind == BFLOAT16 && rows > MR));
    // With few rows, memory bandwidth is the limit: the next tile is then prefetched line by line (prefetch_chunk_line).
    const int by_lines = rows <= 4 * MR && in_chunks(it->a), few_rows = by_lines || (rows <= 4 * MR && !by_lanes);
    int now = 0;
#if HAS_MATRIX_ATTENTION
    const int by_matrix = kind == BF16_PAIRS && head_size % TILE_WIDTH == 0;
    if (by_matrix) amx_configure(HALF_ROWS, HALF_ROWS, HALF_ROWS);
    if (in_squares(it->a) && rows > MATRIX_ROWS) {
        attend_split_squares(it, w, begin, end, next);
        begin = end;  // nothing is left
    }
#endif
#if HAS_INT8_MATRIX_ATTENTION
    const int int8_by_matrix = kind == INT8 && !few_rows && rows <= INT8_MOST_ROWS && head_size % TILE_ROW == 0;
    if (int8_by_matrix) {
        amx_configure(HALF_ROWS, HALF_ROWS, HALF_ROWS);
        int8_split_queries(w->q, depth, rows, (int8_t *)w->kt);
    }
#endif
    const int64_t pieces = in_chunks(it->a) ? CHUNKS : TILE, 
                  piece_bytes = kv_row_bytes(head_size, it->a->kv_dtype) * (TILE / pieces);
    const int64_t lines = 2 * pieces * CEIL_DIV(piece_bytes, 64), row_tiles = CEIL_DIV(rows, MR);
    int64_t count = locate_tile(it, begin, w->rows[0][0], w->rows[0][1]);
    for (int64_t start = begin; start < end; start += TILE, now ^= 1) {
        int64_t next_count = 0;
        const void **next_keys = w->rows[!now][0], **next_values = w->rows[!now][1];
        if (start + TILE < end) next_count = locate_tile(it, start + TILE, next_keys, next_values);
        else if (next) locate_tile(next, next == it ? end : next->begin, next_keys, next_values);
        memcpy(next_keys + pieces, next_values, (size_t)pieces * sizeof(void *));  // one list for `prefetch`
        w->prefetch = (struct prefetch){.rows = next_keys, .row_bytes = piece_bytes};
        if (start + TILE < end || next) w->prefetch.end = 2 * pieces;
        const void **keys = w->rows[now][0], **values = w->rows[now][1];
#if HAS_BF16_PAIRS
        const void *chunks[2][CHUNKS];
        if (kind == BF16_PAIRS) {
#if HAS_MATRIX_ATTENTION
            if (by_matrix && in_chunks(it->a)) {
                copy_value_chunks(values, w->vt, (first_seen(it->a, it->first_position) - start) / CHUNK, count, depth);
            } else
#endif
            if (!in_chunks(it->a)) {
                if (head_size % (2 * VW)) pack_rows_as_pairs(keys, values, w->kt, w->vt, head_size, depth, 0);
                else pack_rows_as_pairs(keys, values, w->kt, w->vt, depth, depth, 1);
                for (int64_t c = 0; c < CHUNKS; c++) {
                    chunks[0][c] = w->kt + c * CHUNK * depth / 2;
                    chunks[1][c] = w->vt + c * CHUNK * depth / 2;
                }
                keys = chunks[0], values = chunks[1];
            } else if (count < TILE && count % CHUNK) {
                zero_pad_values(values[count / CHUNK], w->vt, count % CHUNK, depth);
                values[count / CHUNK] = w->vt;
            }
        }
#endif
#if HAS_INT8_MATRIX_ATTENTION
        if (int8_by_matrix) {
            const int64_t groups = CEIL_DIV(rows, INT8_MATRIX_ROWS);
            int8_copy_values(values, (int8_t *)w->vt, depth);
            for (int64_t r = 0; r < rows; r += INT8_MATRIX_ROWS)
                attend_int8_matrix(it, w, start, r, MIN(INT8_MATRIX_ROWS, rows - r), keys, values, CEIL_DIV(lines, groups));
            count = next_count;
            continue;
        }
#endif
#if HAS_MATRIX_ATTENTION
        if (by_matrix) {
            const int64_t groups = CEIL_DIV(rows, MATRIX_ROWS);
            for (int64_t r = 0; r < rows; r += MATRIX_ROWS)
                attend_matrix(it, w, start, r, MIN(MATRIX_ROWS, rows - r), keys, w->vt, CEIL_DIV(lines, groups));
            count = next_count;
            continue;
        }
#endif
        if (by_lines && w->prefetch.end) w->prefetch.chunks_with_scores = start + TILE < end ? CHUNKS : 2 * CHUNKS;
        if (!by_lanes) transpose_keys(keys, w->kt, count, head_size, kind, &w->prefetch);
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
            if (!few_rows) prefetch_lines(&w->prefetch, CEIL_DIV(lines, row_tiles));
            if (kind == INT8 && !few_rows && attend_two_tiles(it, w, start, r, keys, values)) {
                prefetch_lines(&w->prefetch, CEIL_DIV(lines, row_tiles));
                r += MR;
                continue;
            }
            attend_tile_dispatch(it, w, start, r, MIN(MR, rows - r), keys, values, pack ? FLOAT32 : kind);
        }
        count = next_count;
    }
    if (by_lanes)
        for (int64_t r = 0; r < rows; r++) w->m[r] *= 0.693147180559945309f, w->l[r] = vsum(vload(w->lanes + r * VW));
}

// Merge one split's part into the total of a row, in order of position. l is 0 if the part is empty, and NaN, which must be
// kept, if a score was NaN, whatever the maximum.
INLINE void merge_partial(float *total, float *total_m, float *total_l, const float *part, float m, float l, int64_t depth) {
    if (l == 0.0f) return;
    if (*total_l == 0.0f) {
        memcpy(total, part, (size_t)depth * sizeof(float));
        *total_m = m, *total_l = l;
        return;
    }
    float highest = MAX(*total_m, m), keep = exp_scalar(*total_m - highest), add = exp_scalar(m - highest);
    for (int64_t d = 0; d < depth; d += VW)
        vstore(total + d, vfma(vload(part + d), splat(add), vload(total + d) * splat(keep)));
    *total_l = vfma(splat(l), splat(add), splat(*total_l * keep))[0];
    *total_m = highest;
}

INLINE int kernel_kind(const struct paged_attention_args *a) {
    if (in_chunks(a)) return (int)a->kv_dtype;
    // Without a cache an item has so many rows that heads of any even size are worth being packed.
    const int fits = a->head_size % (a->block_size == INT32_MAX ? 2 : 2 * VW) == 0;
    return HAS_BF16_PAIRS && a->kv_dtype == BFLOAT16 && fits ? BF16_PAIRS : (int)a->kv_dtype;
}

static void load_queries(const struct item *it, struct buffers *w) {
    const int pairs = kernel_kind(it->a) == BF16_PAIRS, int8 = it->a->kv_dtype == INT8, dtype = (int)it->a->dtype;
    const int64_t head_size = it->a->head_size;
    float row[MAX_HEAD_SIZE] __attribute__((aligned(64))), *q = w->q;
    struct row_cursor at = {0};
    for (int64_t r = 0; r < it->rows; r++, next_row(&at, it), q += it->depth) {
        w->position[r] = (int32_t)(it->first_position + at.token), w->last[r] = (int32_t)last_visible(it, at.token);
        for (int64_t d = 0; d < head_size; d += VW) {
            vf x = load_row(it->q + at.q, d, head_size, dtype);
            if (int8) vstore(row + d, x);
            else if (pairs) store_as(q, d, x, BFLOAT16);
            else vstore(q + d, x);
        }
        if (int8) int8_query(row, it->depth, q);
    }
}

// A sink is one more score in the denominator, with a value of zeros: added when all positions are, in every order of work.
INLINE void write_output_row(const struct item *it, const struct row_cursor *at, const float *total, float m, float l) {
    const int64_t head_size = it->a->head_size;
    const int dtype = (int)it->a->dtype;
    char *out = it->out + at->out;
    float scaling = l == 0.0f ? 1.0f : 1.0f / l;  // keeps NaN
    if (it->sinks && l != 0.0f) {
        const float sink = it->sinks[at->head], highest = MAX(m, sink), keep = exp_scalar(m - highest);
        scaling = keep / (l * keep + exp_scalar(sink - highest));
    }
    const vf share = splat(scaling);
    for (int64_t d = 0; d < head_size; d += VW) {
        int64_t n = MIN(VW, head_size - d);
        vf x = vload(total + d) * share;
        if (n == VW) store_as(out, d, x, dtype);
        else store_part(out, d, n, x, dtype);
    }
}

static void __attribute__((noinline)) attend_split_dispatch(const struct item *it, struct buffers *w, int64_t begin,
                                                            int64_t end, const struct item *next) {
    switch (kernel_kind(it->a)) {
        case INT8: attend_split(it, w, begin, end, next, INT8); break;
#if HAS_BF16_PAIRS
        case BF16_PAIRS: attend_split(it, w, begin, end, next, BF16_PAIRS); break;
#endif
        case BFLOAT16: attend_split(it, w, begin, end, next, BFLOAT16); break;
        default: attend_split(it, w, begin, end, next, FLOAT32);
    }
}

static void run_item(const struct item *it, struct buffers *w, const struct item *next) {
    for (int64_t r = 0; r < it->rows; r++) w->total_m[r] = -INFINITY, w->total_l[r] = 0.0f;
    load_queries(it, w);
    for (int64_t split = it->begin / SPLIT * SPLIT; split < it->end; split += SPLIT) {
        int64_t end = MIN(it->end, split + SPLIT);
        attend_split_dispatch(it, w, MAX(it->begin, split), end, end == it->end ? next : it);
        for (int64_t r = 0; r < it->rows; r++)
            merge_partial(w->total + r * it->depth, w->total_m + r, w->total_l + r, w->acc + r * it->depth, w->m[r], w->l[r],
                          it->depth);
    }
    struct row_cursor at = {0};
    for (int64_t r = 0; r < it->rows; r++, next_row(&at, it))
        write_output_row(it, &at, w->total + r * it->depth, w->total_m[r], w->total_l[r]);
}

// An item of one split into parts[rows][depth + 2]: m, l, acc
static void run_item_split(const struct item *it, struct buffers *w, const struct item *next, float *parts) {
    int some = it->begin < it->end;
    if (some) {
        load_queries(it, w);
        attend_split_dispatch(it, w, it->begin, it->end, next);
    }
    for (int64_t r = 0; r < it->rows; r++) {
        float *part = parts + r * (it->depth + 2);
        part[0] = some ? w->m[r] : -INFINITY;
        part[1] = some ? w->l[r] : 0.0f;
        if (some) memcpy(part + 2, w->acc + r * it->depth, (size_t)it->depth * sizeof(float));
    }
}

// Merge parts[splits], which lie `step` floats apart, and write the rows
static void merge_splits(const struct item *it, struct buffers *w, int64_t splits, int64_t step, const float *parts) {
    int64_t stride = it->depth + 2;
    struct row_cursor at = {0};
    for (int64_t r = 0; r < it->rows; r++, next_row(&at, it)) {
        float m = -INFINITY, l = 0.0f;
        for (int64_t s = 0; s < splits; s++) {
            const float *part = parts + s * step + r * stride;
            merge_partial(w->total, &m, &l, part + 2, part[0], part[1], it->depth);
        }
        write_output_row(it, &at, w->total, m, l);
    }
}

static void zero_padding(const struct paged_attention_args *a) {
    int64_t row = a->num_heads * row_bytes(a);
    if (a->rows > a->actual_rows) memset((char *)a->out + a->actual_rows * row, 0, (size_t)((a->rows - a->actual_rows) * row));
}

static void attend_all(const struct paged_attention_args *given, int without_cache, struct team_member *team_member) {
    // Items run from the last row to the first: reversing the ranks gives a thread the same rows as in other operations.
    struct team_member backwards = *team_member, *m = &backwards;
    m->rank = m->size - 1 - m->rank;
    // The number of rows in use is read now and not when the call was packed: a recorded call is replayed with other rows.
    struct paged_attention_args mine = *given, *a = &mine;
    mine.actual_rows = MIN(given->actual_rows, given->query_start_loc[given->requests]);
    const int64_t group = a->num_heads / a->num_kv_heads, most = in_squares(a) ? MAX_SQUARE_ROWS : MAX_ROWS;
    int64_t tokens_per_item = MAX(1, most / group), tokens = 0;
    for (int64_t r = 0; r < a->requests; r++) tokens += request_tokens(a, r);
    // Prefer smaller items to splits, which have to be merged, as long as enough rows share each key that is read.
    const int64_t fair = tokens * a->num_kv_heads / (4 * m->size);
    if (fair * group >= MIN_ROWS) tokens_per_item = MIN(tokens_per_item, fair);
    int64_t depth = CEIL_DIV(a->head_size, VW) * VW, rows = tokens_per_item * group, items = 0;
    struct buffers w = get_buffers(rows, depth);
    struct item_iterator k = start_iteration(a, without_cache, tokens_per_item);
    for (int64_t r = 0; r < a->requests; r++) items += request_items(&k, r);
    if (m->size == 1 || items >= 4 * m->size) {
        // The last item is the padding rows.
        for (int64_t n; (n = team_take_item(m, items + 1)) >= 0; team_item_done(m)) {
            if (n == items) {
                zero_padding(a);
                continue;
            }
            struct item it = item_at(&k, n, 0), next;
            struct item_iterator after = k;
            if (n + 1 < items) next = item_at(&after, n + 1, 0);
            run_item(&it, &w, n + 1 < items ? &next : NULL);
        }
        team_finish_phase(m, items + 1);
        return;
    }
    // Too few items for the threads: distribute the splits of each item, then merge them.
    int64_t parts = 0, part_size = rows * (depth + 2);
    for (int64_t r = 0; r < a->requests; r++) parts += request_items(&k, r) * request_splits(a, r);
    float *all = team_workspace(m, (size_t)(parts * part_size) * sizeof(float));
    for (int64_t n; (n = team_take_item(m, parts)) >= 0; team_item_done(m)) {
        struct item it = item_at(&k, n, 1), next;
        struct item_iterator after = k;
        if (n + 1 < parts) next = item_at(&after, n + 1, 1);
        run_item_split(&it, &w, n + 1 < parts && next.begin < next.end ? &next : NULL, all + n * part_size);
    }
    team_finish_phase(m, parts);
    k = start_iteration(a, without_cache, tokens_per_item);
    for (int64_t n; (n = team_take_item(m, items + 1)) >= 0; team_item_done(m)) {
        if (n == items) {
            zero_padding(a);
            continue;
        }
        seek_unit(&k, n, 0);
        int64_t splits = request_splits(a, k.request), index = n - k.before;
        struct item it = make_item(&k, index);
        merge_splits(&it, &w, splits, part_size * k.here, all + (k.parts_before + index) * part_size);
    }
    team_finish_phase(m, items + 1);
}

void op_paged_attention(const struct paged_attention_args *a, struct team_member *m) { attend_all(a, 0, m); }

void op_varlen_attention(const struct varlen_attention_args *v, struct team_member *m) {
    const struct paged_attention_args a = {.q = v->qkv,
                                           .kv_cache = v->qkv,
                                           .seq_lens = v->seq_lens,
                                           .query_start_loc = v->query_start_loc,
                                           .out = v->out,
                                           .rows = v->rows,
                                           .actual_rows = v->rows,
                                           .requests = v->requests,
                                           .num_heads = v->num_heads,
                                           .num_kv_heads = v->num_kv_heads,
                                           .head_size = v->head_size,
                                           .block_size = INT32_MAX,
                                           .window = v->window,
                                           .dtype = v->dtype,
                                           .kv_dtype = v->dtype,
                                           .scale = v->scale};
    attend_all(&a, 1, m);
}

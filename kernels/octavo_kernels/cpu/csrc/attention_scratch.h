// What a thread knows while it computes items of attention: scratch memory, where a tile of positions lies, and which of its
// positions each row may attend to.
#pragma once
#include "attention_items.h"
#include "attention_matrix.h"

#define MAX_HEAD_SIZE 576  // also in octavo_kernels/cpu/attention.py

static const float ZEROS[MAX_HEAD_SIZE * CHUNK / 2];  // a row, or a chunk of BF16_PAIRS

// Scratch memory of one thread
struct buffers {
    float *q, *kt, *vt, *acc, *total;  // [rows, depth], [depth, TILE], [TILE, depth], [rows, depth], [rows, depth]
    float *m, *l, *total_m, *total_l;  // [rows]
    float *lanes;                      // [rows, VW]: l before the sum over lanes
    int32_t *position, *last;          // [rows]: a row's own position, and the last that it attends to
    const void *rows[2][2][2 * TILE];  // [this tile, the next][keys, values]: addresses of rows or of chunks
    struct prefetch prefetch;
};

static struct buffers get_buffers(int64_t rows, int64_t depth) {
    const int64_t past = HAS_MATRIX_ATTENTION ? 16 * depth : 0;  // rows that are read with the last ones
    float *p = thread_scratch((size_t)(3 * rows * depth + 2 * TILE * depth + (6 + VW) * rows + past + 64) * sizeof(float));
    struct buffers w;
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
    w.position = (int32_t *)p, w.last = w.position + rows;
    return w;
}

INLINE int in_chunks(const struct paged_attention_args *a) { return a->kv_dtype == BF16_PAIRS || a->kv_dtype == INT8; }

// Find the rows of positions start .. start + TILE, or their chunks. Rows past the end of the sequence, and those that a
// window has passed, are zeros instead of what the page holds there: it may be another sequence's by now.
INLINE int64_t locate_tile(const struct item *it, int64_t start, const void **keys, const void **values) {
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
    int64_t j = MIN(count, MAX(0, first_seen(it->a, it->first_position) - start));
    for (int64_t i = 0; i < j; i++) keys[i] = values[i] = ZEROS;
    while (j < count) {
        int64_t position = start + j, offset = position % block_size;
        const char *key = it->keys + it->table[position / block_size] * it->block_stride + offset * it->row_stride;
        for (int64_t end = MIN(count, j + block_size - offset); j < end; j++, key += it->row_stride) {
            keys[j] = key;
            values[j] = key + it->value_offset;
        }
    }
    for (j = MAX(0, count); j < TILE; j++) keys[j] = values[j] = ZEROS;
    return count;
}

// Bits [from, to) of TILE bits
INLINE uint64_t bits_between(int64_t from, int64_t to) {
    return (to >= TILE ? ~0ull : (1ull << MAX(0, to)) - 1) & (from >= TILE ? 0 : ~0ull << MAX(0, from));
}

// Which positions of the tile start .. start + TILE rows r .. r + mr of an item may attend to: [from, to) for all rows
// together, and for each row a bit per position
struct visible_range {
    int64_t from, to;
    uint64_t visible[MR];
};
INLINE struct visible_range find_visible(const struct item *it, const struct buffers *w, int64_t start, int64_t r,
                                         const int mr) {
    struct visible_range range;
    range.from = MAX(0, first_seen(it->a, w->position[r]) - start), range.to = 0;
    for (int i = 0; i < mr; i++) {
        const int64_t first = first_seen(it->a, w->position[r + i]) - start, end = MIN(TILE, w->last[r + i] - start + 1);
        range.to = MAX(range.to, end);
        range.visible[i] = bits_between(MAX(0, first), end);
    }
    return range;
}
INLINE int any_visible(const struct visible_range *range) { return range->from < TILE && range->to > 0; }

#if HAS_AMX
// Which positions of the tile start .. start + TILE each of `rows` rows may attend to, a bit a position; returns any of them
static uint64_t find_visible_rows(const struct item *it, const struct buffers *w, int64_t start, int64_t r, int64_t rows,
                                  uint64_t *visible) {
    uint64_t any = 0;
    for (int64_t i = 0; i < rows; i++) {
        const int64_t first = first_seen(it->a, w->position[r + i]) - start, end = w->last[r + i] - start + 1;
        any |= visible[i] = bits_between(first, end);
    }
    return any;
}
#endif

#if HAS_MATRIX_ATTENTION
// bf16_softmax_tile() of rows r .. r + rows of the item, whose scores and weights begin at s and p
INLINE void bf16_softmax_rows(const struct item *it, struct buffers *w, int64_t r, int64_t rows, const float *s, float *p,
                              const uint64_t *visible, float *rescale) {
    const float scaling = (float)it->a->scale, softcap = (float)it->a->softcap;
    int64_t i = 0;
    for (; i + 4 <= rows; i += 4)
        bf16_softmax_tile(scaling, softcap, s + i * TILE, p + i * TILE / 2, visible + i, w->m + r + i, w->lanes + (r + i) * VW,
                          rescale + i, 4);
    for (; i < rows; i++)
        bf16_softmax_tile(scaling, softcap, s + i * TILE, p + i * TILE / 2, visible + i, w->m + r + i, w->lanes + (r + i) * VW,
                          rescale + i, 1);
}
#endif

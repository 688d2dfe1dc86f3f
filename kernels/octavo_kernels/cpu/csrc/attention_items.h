// The work items of attention and their order: tiles of a sequence's query tokens, for each kv head, possibly split by position
#pragma once
#include "attention_ops.h"
#include "simd.h"

#define SPLIT 256
#define MAX_ROWS 120       // in an item (or one token's group, if that is larger)
#define MAX_SQUARE_ROWS 256  // the same where matrix tiles do not wait for them: attention_squares.h
#define MIN_ROWS (2 * MR)  // in the items of a step with few rows

INLINE int64_t row_bytes(const struct paged_attention_args *a) { return a->head_size * (a->dtype == BFLOAT16 ? 2 : 4); }

// One item: the q rows of consecutive tokens, `group` rows per token, against positions [begin, end), which are all that some
// row attends to, or the part of them in one split
struct item {
    const struct paged_attention_args *a;
    const int32_t *table;
    const char *keys;                                    // of this head in block 0
    int64_t block_stride, row_stride, value_offset;      // bytes
    int64_t q_stride, ahead;                             // bytes from token to token; later positions that a row attends to
    int64_t group, rows, first_position, length, depth;  // depth: head size rounded up to whole vectors
    int64_t begin, end;
    const char *q;
    const float *sinks;    // of the group's heads, or NULL
    const int32_t *limit;  // of the tokens, or NULL
    char *out;
};

// The last position that a token of the item attends to
INLINE int64_t last_visible(const struct item *it, int64_t token) {
    return MIN(it->limit ? it->limit[token] : it->first_position + token + it->ahead, it->length - 1);
}

// Iterates over the rows of an item: row r is token r / group and head r % group; `q` and `out` are its places there.
struct row_cursor {
    int64_t token, head, q, out;  // q, out: bytes
};
INLINE void next_row(struct row_cursor *at, const struct item *it) {
    const int64_t bytes = row_bytes(it->a);
    at->head++, at->q += bytes, at->out += bytes;
    if (at->head < it->group) return;
    at->head = 0, at->token++, at->q += it->q_stride - it->group * bytes, at->out += (it->a->num_heads - it->group) * bytes;
}

// Iterates over the items in an order that all threads know: sequences from the last to the first (new prompts come last in a
// step and take longest), tiles from the end of a sequence (which attend to most positions), kv heads.
struct item_iterator {
    const struct paged_attention_args *a;
    int without_cache;                 // keys and values lie behind the queries of their rows, see varlen_attention_args
    int64_t tokens_per_item, request;
    int64_t before, here;              // units of the requests already passed, and of the current one
    int64_t parts_before, parts_here;  // the same for parts: an item has one per split of its sequence
};

static int64_t request_tokens(const struct paged_attention_args *a, int64_t r) {
    int64_t first = a->query_start_loc[r], last = MIN(a->query_start_loc[r + 1], a->actual_rows);
    return a->seq_lens[r] > 0 ? MAX(0, last - first) : 0;
}
static int64_t request_items(const struct item_iterator *k, int64_t r) {
    return CEIL_DIV(request_tokens(k->a, r), k->tokens_per_item) * k->a->num_kv_heads;
}
static int64_t request_splits(const struct paged_attention_args *a, int64_t r) { return CEIL_DIV(a->seq_lens[r], SPLIT); }

static struct item_iterator start_iteration(const struct paged_attention_args *a, int without_cache, int64_t tokens_per_item) {
    return (struct item_iterator){a, without_cache, tokens_per_item, a->requests};
}
// Move to the request that holds unit `n`. Units are items or, with `split`, the parts of items.
static void seek_unit(struct item_iterator *k, int64_t n, int split) {
    if (n < k->before) *k = start_iteration(k->a, k->without_cache, k->tokens_per_item);
    while (n >= k->before + k->here) {
        k->request--;
        k->before += k->here, k->parts_before += k->parts_here;
        int64_t items = request_items(k, k->request);
        k->parts_here = items * request_splits(k->a, k->request);
        k->here = split ? k->parts_here : items;
    }
}

// The first position that a row at `position` may attend to
INLINE int64_t first_seen(const struct paged_attention_args *a, int64_t position) {
    if (!a->window) return 0;
    return a->chunked ? position / a->window * a->window : MAX(0, position - a->window + 1);
}

// The keys and values of sequence `r` without a cache: one block, whose rows are those of qkv. Rows attend to both sides.
INLINE void place_in_rows(struct item *it, int64_t r, int64_t head) {
    static const int32_t FIRST_BLOCK = 0;
    const struct paged_attention_args *a = it->a;
    const int64_t bytes = row_bytes(a), window = a->window ? a->window - 1 : a->seq_lens[r];
    it->q_stride = it->row_stride = (a->num_heads + 2 * a->num_kv_heads) * bytes;
    it->table = &FIRST_BLOCK;
    it->value_offset = a->num_kv_heads * bytes;
    it->keys = (const char *)a->q + a->query_start_loc[r] * it->q_stride + (a->num_heads + head) * bytes;
    it->ahead = window;
    it->end = MIN(it->length, it->end + window);
}

static struct item make_item(const struct item_iterator *k, int64_t index) {
    const struct paged_attention_args *a = k->a;
    int64_t r = k->request, heads = a->num_kv_heads, tokens = request_tokens(a, r);
    int64_t tiles = CEIL_DIV(tokens, k->tokens_per_item), tile = tiles - 1 - index / heads, head = index % heads;
    int64_t first = tile * k->tokens_per_item;
    struct item it = {.a = a};
    it.group = a->num_heads / heads;
    it.rows = MIN(k->tokens_per_item, tokens - first) * it.group;
    it.first_position = a->seq_lens[r] - (a->query_start_loc[r + 1] - a->query_start_loc[r]) + first;
    it.length = a->seq_lens[r];
    it.begin = first_seen(a, it.first_position) / TILE * TILE;
    it.limit = a->limit ? a->limit + a->query_start_loc[r] + first : NULL;
    it.end = 0;
    for (int64_t token = 0; token < it.rows / it.group; token++) it.end = MAX(it.end, last_visible(&it, token) + 1);
    it.depth = CEIL_DIV(a->head_size, VW) * VW;
    it.table = a->block_table + r * a->table_stride;
    it.row_stride = kv_row_bytes(a->head_size, a->kv_dtype);
    it.block_stride = a->block_stride, it.value_offset = a->value_offset;
    it.keys = (const char *)a->kv_cache + head * a->block_size * it.row_stride;
    const int64_t token = a->query_start_loc[r] + first, bytes = row_bytes(a);
    it.q_stride = a->num_heads * bytes;
    if (k->without_cache) place_in_rows(&it, r, head);
    it.q = (const char *)a->q + token * it.q_stride + head * it.group * bytes;
    it.sinks = a->sinks ? a->sinks + head * it.group : NULL;
    it.out = (char *)a->out + (token * a->num_heads + head * it.group) * bytes;
    return it;
}

// Unit `n`, from any state of the iterator; with `split`, a part of an item
static struct item item_at(struct item_iterator *k, int64_t n, int split) {
    seek_unit(k, n, split);
    int64_t here = request_items(k, k->request), unit = n - k->before;
    struct item it = make_item(k, unit % here);
    if (split) {  // the last splits of all items come last: they are the shortest
        it.begin = MAX(it.begin, unit / here * SPLIT);
        it.end = MIN(it.end, (unit / here + 1) * SPLIT);
    }
    return it;
}

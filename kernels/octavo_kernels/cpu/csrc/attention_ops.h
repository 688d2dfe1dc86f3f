// Attention: the layouts of the KV cache, its inputs, rotations and the attention itself. See ops.h.
#pragma once
#include <stdint.h>

#include "thread_team.h"

// One layer's KV cache is [2, blocks, num_kv_heads, block_size, head_size] of float32 or bfloat16: keys, values. A block's heads
// lie beside each other; block_stride is the distance of blocks, value_offset that of a value from its key, both in bytes, as
// the blocks of all layers lie beside each other.
// On machines that multiply pairs of bfloat16 it is BF16_PAIRS if the sizes allow: each CHUNK of a block's positions holds its
// bfloat16 in the order in which these products take them, so that attention neither transposes nor interleaves:
//     keys [head_size / 2][CHUNK][2], pairs of neighbouring elements; values [CHUNK / 2][head_size][2], pairs of positions.
// An INT8 cache is [2, blocks, num_kv_heads, block_size, head_size + MAX(4, head_size / 16)] bytes. Each CHUNK of positions
// holds
//     keys: uint8 [head_size / 4][CHUNK][4], neighbouring elements, biased by 128, then scales, bfloat16
//     [head_size / KV_GROUP][CHUNK]; code * scale is the key with each KV_GROUP elements times the Hadamard matrix;
//     values: int8 [CHUNK / 4][head_size][4], neighbouring positions, then scales, float32 [CHUNK].
enum { BF16_PAIRS = 2, INT8 = 3 };  // values of kv_dtype besides those of enum dtype
#define CHUNK 16
#define KV_GROUP 32
// Bytes of the keys, or the values, of one position of one head
static inline int64_t kv_row_bytes(int64_t head_size, int64_t kv_dtype) {
    if (kv_dtype == INT8) return head_size + (head_size / 16 > 4 ? head_size / 16 : 4);
    return head_size * (kv_dtype == 0 ? 4 : 2);
}

// q_norm, k_norm and cos_sin may be NULL; dtype is that of qkv and q
struct rope_and_cache_args {
    const void *qkv;
    const int64_t *positions;
    const float *cos_sin;
    void *kv_cache;
    const int64_t *slots;
    const void *q_norm, *k_norm;
    void *q;
    int64_t rows, num_heads, num_kv_heads, head_size, rot_dim, max_position, block_size, block_stride, value_offset, dtype,
        kv_dtype, norm_dtype;
    double eps;
};

// Latent attention: row of latent [rows, latent_size + rot_dim] normalised and rotated to its slot, of which the cache has one
// "head"; the last rot_dim elements of each of q [rows, num_heads, q_size] rotated to the last of queries [rows, num_heads,
// latent_size + rot_dim]
struct latent_cache_args {
    const void *q, *latent;
    const int64_t *positions;
    const float *cos_sin;
    void *kv_cache;
    const int64_t *slots;
    const void *norm;
    void *queries;
    int64_t rows, num_heads, q_size, latent_size, rot_dim, max_position, block_size, block_stride, dtype, kv_dtype, norm_dtype;
    double eps;
};

// out = x . weight [heads, width, channels], head by head; rows and heads of x and out lie so many elements apart
struct head_linear_args {
    const void *x, *weight;
    void *out;
    int64_t rows, heads, width, channels, x_row, x_head, out_row, out_head, dtype, weight_dtype;
};

// window 0, softcap 0, sinks and limit NULL mean none; sinks [num_heads]; limit [rows]: the last position that a row attends to,
// its own or a later one; chunked: windows begin at multiples of `window` instead of sliding
struct paged_attention_args {
    const void *q, *kv_cache;
    const int32_t *block_table, *seq_lens, *query_start_loc;
    const float *sinks;
    const int32_t *limit;
    void *out;
    int64_t rows, actual_rows, requests, num_heads, num_kv_heads, head_size, block_size, block_stride, value_offset,
        table_stride, window, chunked, dtype, kv_dtype;
    double scale, softcap;
};

// Attention of whole sequences without a cache: rows of qkv are [num_heads + 2 num_kv_heads, head_size], those of out
// [num_heads, head_size]. A row attends to all rows of its sequence or, with a window, to those less than `window` away.
struct varlen_attention_args {
    const void *qkv;
    const int32_t *seq_lens, *query_start_loc;
    void *out;
    int64_t rows, requests, num_heads, num_kv_heads, head_size, window, dtype;
    double scale;
};

// Turns the first rot_dim elements of the first num_heads heads of each row of x, in place; rows are `stride` elements apart
struct rope_args {
    void *x;
    const int64_t *positions;
    const float *cos_sin;
    int64_t rows, num_heads, head_size, stride, rot_dim, max_position, dtype;
};

// blocks [num_blocks, block_bytes], of all layers; pairs [num_pairs, 2] (source, destination)
struct copy_blocks_args {
    char *blocks;
    const int64_t *pairs;
    int64_t num_pairs, block_bytes;
};

// Touches every page of blocks [first, end) without changing it; blocks as above
struct touch_blocks_args {
    char *blocks;
    int64_t block_bytes, first, end;
};

// Inputs of a step in which sequences rows[0 .. count) of a batch compute counts[i] tokens each, or one if that is NULL.
// num_computed, num_kv_tokens [sequences], token_ids [sequences, token_stride] and blocks [sequences, block_stride] belong to
// the batch, the others to the step (attention_metadata.py); table is [count, table_stride]. Positions below num_kv_tokens are
// in the cache: their slot is -1. The tokens are those `ahead` of their positions.
struct decode_inputs_args {
    const int64_t *rows, *counts, *num_computed, *num_kv_tokens;
    const int32_t *token_ids, *blocks;
    int64_t *input_ids, *positions, *slots;
    int32_t *query_start_loc, *seq_lens, *table;
    int64_t count, ahead, token_stride, block_stride, table_stride, block_size;
};

void op_rope_and_cache(const struct rope_and_cache_args *a, struct team_member *m);
void op_latent_cache(const struct latent_cache_args *a, struct team_member *m);
void op_head_linear(const struct head_linear_args *a, struct team_member *m);
void op_paged_attention(const struct paged_attention_args *a, struct team_member *m);
void op_varlen_attention(const struct varlen_attention_args *a, struct team_member *m);
void op_rope(const struct rope_args *a, struct team_member *m);
void op_copy_blocks(const struct copy_blocks_args *a, struct team_member *m);
void op_touch_blocks(const struct touch_blocks_args *a, struct team_member *m);
void op_decode_inputs(const struct decode_inputs_args *a, struct team_member *m);

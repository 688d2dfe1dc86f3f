// The operations and their arguments. Every field is 8 bytes wide, in the order in which octavo_kernels/cpu/library.py
// packs them; oct_run() refuses a call whose size differs from the struct's.
#pragma once
#include <stdint.h>

#include "quant.h"
#include "thread_team.h"

// x, weight, out [rows, width]; residual and residual_out NULL: plain RMS norm
struct rms_norm_args {
    const void *x, *residual, *weight;
    void *out, *residual_out;
    int64_t rows, width, dtype;
    double eps;
};

// x [rows, 2 * width] -> out [rows, width]
struct silu_and_mul_args {
    const void *x;
    void *out;
    int64_t rows, width, dtype;
};

// A KV cache is [2, blocks, num_kv_heads, block_size, head_size] of float32 or bfloat16. As PAIRS, where a machine multiplies
// pairs of bfloat16 (and the sizes allow it), each CHUNK of a block's positions is bfloat16 in the order in which those
// products take it, so that attention neither transposes nor interleaves:
//     keys [head_size / 2][CHUNK][2]: neighbouring elements of a position; values [CHUNK / 2][head_size][2]: neighbouring
//     positions.
// As INT8, [2, blocks, num_kv_heads, block_size, head_size + MAX(4, head_size / 16)] bytes, each CHUNK of positions is
//     keys uint8 [head_size / 4][CHUNK][4]: neighbouring elements, 128 more than they are; then their scales, bfloat16
//     [head_size / GROUP_K][CHUNK]. A key is code * scale, each GROUP_K elements times the Hadamard matrix;
//     values int8 [CHUNK / 4][head_size][4]: neighbouring positions; then their scales, float32 [CHUNK].
enum { PAIRS = 2, INT8 = 3 };  // of kv_dtype, beside the dtypes
#define CHUNK 16
#define GROUP_K 32
// Bytes of one position of one head, keys or values
static inline int64_t kv_row_bytes(int64_t head_size, int64_t kv_dtype) {
    if (kv_dtype == INT8) return head_size + (head_size / 16 > 4 ? head_size / 16 : 4);
    return head_size * (kv_dtype == 0 ? 4 : 2);
}

// norms and cos_sin may be NULL; dtype is qkv's and q's
struct rope_and_cache_args {
    const void *qkv;
    const int64_t *positions;
    const float *cos_sin;
    void *kv_cache;
    const int64_t *slots;
    const void *q_norm, *k_norm;
    void *q;
    int64_t rows, num_heads, num_kv_heads, head_size, rot_dim, max_position, block_size, num_blocks, dtype, kv_dtype;
    double eps;
};

// window 0: none; softcap 0: none
struct paged_attention_args {
    const void *q, *kv_cache;
    const int32_t *block_table, *seq_lens, *query_start_loc;
    void *out;
    int64_t rows, actual_rows, requests, num_heads, num_kv_heads, head_size, block_size, num_blocks, table_stride, window,
        dtype, kv_dtype;
    double scale, softcap;
};

// caches: base addresses of `count` layers, each [2, num_blocks, block_bytes]; pairs [num_pairs, 2] (source, destination)
struct copy_blocks_args {
    void *const *caches;
    const int64_t *pairs;
    int64_t count, num_pairs, num_blocks, block_bytes;
};

// Every page of blocks [first, end) is written to, and stays as it is; caches as above
struct touch_blocks_args {
    void *const *caches;
    int64_t count, num_blocks, block_bytes, first, end;
};

// Inputs of a step in which sequences rows[0 .. count) of a batch compute one token each. Of the batch: num_computed,
// num_kv_tokens [sequences], token_ids [sequences, token_stride], blocks [sequences, block_stride]; the others are a step's
// (attention_metadata.py), table [count, table_stride]. A position below num_kv_tokens is in the cache already: slot -1
struct decode_inputs_args {
    const int64_t *rows, *num_computed, *num_kv_tokens;
    const int32_t *token_ids, *blocks;
    int64_t *input_ids, *positions, *slots;
    int32_t *query_start_loc, *seq_lens, *table;
    int64_t count, token_stride, block_stride, table_stride, block_size;
};

// The lowest index of a largest element of each row of x [rows, width], and that element. A row with a NaN: the first of those
struct argmax_args {
    const float *x;
    int64_t *index;
    float *best;
    int64_t rows, width;
};

// Rows of activations to int8 (see quant.h), after what comes before the linear. x, residual, residual_out, norm_weight in
// `dtype`. kind 0: x [rows, width]; 1: RMS norm of x (plus residual, if there is one, kept in residual_out);
// 2: silu(x[:, :width]) * x[:, width:] of x [rows, 2 * width]
struct quantize_args {
    const void *x, *residual, *norm_weight;
    void *residual_out;
    struct row_pair *values;
    void *meta;
    int64_t kind, rows, width, groups, terms, dtype;
    double eps;
};

// out[:, offset : offset + channels] of [rows, out_stride] = quantised rows . packed weight^T + bias (float32, may be NULL).
struct quantized_linear_args {
    const struct row_pair *values;
    const void *meta;
    const uint8_t *weight;
    const float *bias;
    void *out;
    int64_t rows, channels, groups, terms, bits, affine, out_stride, offset, dtype;
};

// The same for a head, float32 [rows, channels] of rows with two terms: blocks with nothing within `margin` of the row's best
// make do with the first one. index, best: of each row the lowest index of a largest element, or of the first NaN, and that
// element; NULL: not asked for. wants_out: whether `out` is; NULL: it is
struct quantized_head_args {
    const struct row_pair *values;
    const void *meta;
    const uint8_t *weight;
    const float *bias;
    float *out;
    const int64_t *wants_out;
    int64_t *index;
    float *best;
    int64_t rows, channels, groups, bits, affine;
    double margin;
};

// Quantised rows . packed weight^T, whose first `inner` channels are gates, then silu(gate) * up, quantised to `out_terms`;
// what is in between is rounded to `dtype`. inner: a multiple of BLOCK
struct gated_linear_args {
    const struct row_pair *values;
    const void *meta;
    const uint8_t *weight;
    struct row_pair *out_values;
    void *out_meta;
    int64_t rows, inner, groups, terms, bits, affine, out_terms, dtype;
};

// out [count, width] = rows `ids` of a packed weight
struct quantized_embedding_args {
    const int64_t *ids;
    const uint8_t *weight;
    void *out;
    int64_t count, channels, width, groups, bits, affine, dtype;
};

// out [count, row_bytes] = rows `ids` of table [rows, row_bytes]
struct embedding_args {
    const int64_t *ids;
    const void *table;
    void *out;
    int64_t count, rows, row_bytes;
};

// Rows of a GGUF tensor, [channels, groups * block bytes], to the blocks of quant.h. kind 0: Q4_0, 1: Q4_1, 2: Q8_0
struct pack_gguf_args {
    const uint8_t *raw;
    uint8_t *out;
    int64_t channels, groups, kind;
};

// Benchmarks only. out int64 [threads]
struct read_memory_args {
    const void *memory;
    int64_t *out;
    int64_t bytes;
};
struct dot_products_args {
    int64_t *out;
    int64_t rounds;
};

void op_rms_norm(const struct rms_norm_args *a, struct member *m);
void op_silu_and_mul(const struct silu_and_mul_args *a, struct member *m);
void op_rope_and_cache(const struct rope_and_cache_args *a, struct member *m);
void op_paged_attention(const struct paged_attention_args *a, struct member *m);
void op_copy_blocks(const struct copy_blocks_args *a, struct member *m);
void op_argmax(const struct argmax_args *a, struct member *m);
void op_touch_blocks(const struct touch_blocks_args *a, struct member *m);
void op_quantize(const struct quantize_args *a, struct member *m);
void op_quantized_linear(const struct quantized_linear_args *a, struct member *m);
void op_quantized_head(const struct quantized_head_args *a, struct member *m);
void op_gated_linear(const struct gated_linear_args *a, struct member *m);
void op_quantized_embedding(const struct quantized_embedding_args *a, struct member *m);
void op_embedding(const struct embedding_args *a, struct member *m);
void op_pack_gguf(const struct pack_gguf_args *a, struct member *m);
void op_decode_inputs(const struct decode_inputs_args *a, struct member *m);
void op_read_memory(const struct read_memory_args *a, struct member *m);
void op_dot_products(const struct dot_products_args *a, struct member *m);

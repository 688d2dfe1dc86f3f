// The operations and their arguments. Every field is 8 bytes wide, in the order in which octavo_kernels/cpu/library.py packs
// them; oct_run() refuses a call whose size differs from the struct's.
#pragma once
#include <stdint.h>

#include "quant.h"
#include "thread_team.h"

// x, weight, out [rows, width]; residual and residual_out are NULL for a plain RMS norm. The normalised row is rounded to
// weight_dtype before the product: in `dtype` (Llama), or float32 (Gemma). So are those of rope_and_cache and quantize.
struct rms_norm_args {
    const void *x, *residual, *weight;
    void *out, *residual_out;
    int64_t rows, width, dtype, weight_dtype;
    double eps;
};

// x, out [rows, width]; residual, residual_out, weight and bias may be NULL
struct layer_norm_args {
    const void *x, *residual, *weight, *bias;
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

// f(x), times up unless that is NULL; rows of x are `stride` elements apart, those of up `up_stride`
// CLAMPED_SWIGLU: of experts alone
enum activation { RELU = 0, SILU = 1, GELU = 2, GELU_TANH = 3, CLAMPED_SWIGLU = 4, NONE = 5, SIGMOID_GATE = 6 };
struct activation_args {
    const void *x, *up;
    void *out;
    int64_t rows, width, kind, stride, up_stride, dtype;
};

// out = x + y, each of `rows` rows of `width` elements
struct add_args {
    const void *x, *y;
    void *out;
    int64_t rows, width, dtype;
};

// out = x * factor, then cap * tanh(out / cap) unless cap is 0
struct scale_args {
    const void *x;
    void *out;
    int64_t rows, width, dtype;
    double factor, cap;
};

// RMS norms in place, of `heads` times `width` columns of a tensor whose rows are `stride` elements apart
struct rms_norm_columns_args {
    void *x;
    const void *weight;
    int64_t rows, heads, width, stride, dtype, weight_dtype;
    double eps;
};

// out[:, i] = x[:, columns[i]], of elements of 2 or 4 bytes; x is [rows, width], out [rows, count].
struct take_columns_args {
    const void *x;
    const int32_t *columns;
    void *out;
    int64_t rows, width, count, size;
};

// One layer's KV cache is [2, blocks, num_kv_heads, block_size, head_size] of float32 or bfloat16: keys, values. A block's heads
// lie beside each other; block_stride is the distance of blocks, value_offset that of a value from its key, both in bytes, as
// the blocks of all layers lie beside each other. On machines that multiply pairs of
// bfloat16 it is BF16_PAIRS if the sizes allow: each CHUNK of a block's positions holds its bfloat16 in the order in which
// these products take them, so that attention neither transposes nor interleaves:
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

// For each row of x [rows, width] the lowest index of a largest element, and that element. A row with a NaN gives its first
// NaN. Rows are `stride` elements apart.
struct argmax_args {
    const float *x;
    int64_t *index;
    float *best;
    int64_t rows, width, stride;
};

// What a request asks of its tokens; the fields are those of REQUEST in octavo_kernels/cpu/drawing.py. temperature 0: greedy;
// top_p 1, min_p 0, top_k the vocabulary's size, repetition 1, slots -1, NULL: off. stream: of random numbers. Below min_position
// the `stops` are forbidden. bad_words: of each its length, then its tokens.
struct draw_request {
    double temperature, top_p, min_p, repetition, frequency, presence;
    int64_t top_k;
    uint64_t stream;
    int64_t num_prompt, min_position, slot, count_slot, num_logprobs;
    const uint32_t *allowed;
    const int32_t *stops;
    int64_t num_stops;
    const int32_t *bias_ids;
    const float *bias_values;
    int64_t num_bias;
    const int32_t *bad_words;
    int64_t bad_words_size;
};

// A token for each row of logits [num_rows, vocab], which may be overwritten; rows are `stride` elements apart. Row i is that of
// request rows[i] and of the token at positions[i]. best_index and best are as argmax has them; mask [num_rows, vocab / 32]
// holds what grammars allow; both may be NULL. history [slots, history_width], seen [slots, vocab / 32] and counts [slots,
// vocab]: see TokenPool; the token is added there. Log-probabilities are those of the logits as they came: of the drawn token, with
// its rank from 1, and of the best ones in order; logprob_ids, logprobs [num_rows, columns] and ranks [num_rows] may be NULL if no
// request wants them.
struct draw_args {
    float *logits;
    const struct draw_request *requests;
    const int64_t *rows, *positions, *best_index;
    const float *best;
    const uint32_t *mask;
    int32_t *history;
    uint32_t *seen;
    int32_t *counts;
    int64_t *tokens, *invalid, *logprob_ids, *ranks;
    float *logprobs;
    int64_t num_rows, vocab, stride, history_width, columns;
};

// Quantise rows of activations to int8 (quant.h), after the operation before the linear. x, residual and residual_out are in
// `dtype`, norm_weight in weight_dtype. kind 0: x [rows, width] as it is; 1: RMS norm of x, plus residual unless that is NULL (the sum is
// written to residual_out); 2: silu(x[:, :width]) * x[:, width:] of x [rows, 2 * width]. The rows that are quantised are written
// to plain [rows, width], too, unless that is NULL.
struct quantize_args {
    const void *x, *residual, *norm_weight;
    void *residual_out, *plain;
    struct row_pair *values;
    void *meta;
    int64_t kind, rows, width, groups, terms, dtype, weight_dtype;
    double eps;
};

// out[:, offset : offset + channels] of [rows, out_stride] = quantised rows . packed weight^T + bias (float32, may be NULL).
// bits and flags are those of quant.h's kinds, here and below.
struct quantized_linear_args {
    const struct row_pair *values;
    const void *meta;
    const uint8_t *weight;
    const float *bias;
    void *out;
    int64_t rows, channels, groups, terms, bits, flags, out_stride, offset, dtype;
};

// The same for a language model's head: float32 [rows, channels] from rows with two terms. Blocks of channels without a value
// within `margin` of the row's largest use the first term only. index and best: for each row the lowest index of a largest
// element, or of the first NaN, and that element; may be NULL. If wants_out is not NULL, `out` is written only where it is not
// 0.
struct quantized_head_args {
    const struct row_pair *values;
    const void *meta;
    const uint8_t *weight;
    const float *bias;
    float *out;
    const int64_t *wants_out;
    int64_t *index;
    float *best;
    int64_t rows, channels, groups, bits, flags;
    double margin;
};

// Quantised rows . packed weight^T, whose first `inner` channels are gates, then silu(gate) * up, quantised to `out_terms`.
// Intermediate results are rounded to `dtype`. inner must be a multiple of BLOCK.
struct gated_linear_args {
    const struct row_pair *values;
    const void *meta;
    const uint8_t *weight;
    struct row_pair *out_values;
    void *out_meta;
    int64_t rows, inner, groups, terms, bits, flags, out_terms, dtype;
};

// out[:, offset : offset + channels] of [rows, out_stride] = x [rows, width] . weight^T (packed as dense_linear.c says) + bias
// (float32, may be NULL). weight_dtype may be FLOAT16, the others may not.
struct dense_linear_args {
    const void *x;
    const uint8_t *weight;
    const float *bias;
    void *out;
    int64_t rows, channels, width, out_stride, offset, x_dtype, weight_dtype, out_dtype;
};

// Packs rows [count, width] as channels `channel` ... of such a weight, whose padding channels are left alone
struct pack_dense_args {
    const uint8_t *rows;
    uint8_t *weight;
    int64_t count, channel, width, dtype;
};

// out [count, width] = rows `ids` of such a weight. The table's first row is that of id `from`, here and below: rows of ids
// that it does not hold are 0. from -1: it holds all ids.
struct dense_embedding_args {
    const int64_t *ids;
    const uint8_t *weight;
    void *out;
    int64_t count, channels, width, weight_dtype, dtype, from;
};

// out [count, width] = rows `ids` of a packed weight, dequantised
struct quantized_embedding_args {
    const int64_t *ids;
    const uint8_t *weight;
    void *out;
    int64_t count, channels, width, groups, bits, flags, dtype, from;
};

// out [count, row_bytes] = rows `ids` of table [rows, row_bytes]
struct embedding_args {
    const int64_t *ids;
    const void *table;
    void *out;
    int64_t count, rows, row_bytes, from;
};

// The row of a table of `rows` rows that holds `id`; -1: none
static inline int64_t table_row(int64_t id, int64_t from, int64_t rows) {
    if (from < 0) return id < 0 ? 0 : id < rows ? id : rows - 1;
    return id - from < 0 || id - from >= rows ? -1 : id - from;
}

// Packs rows of a GGUF tensor, [channels, groups / groups of a block * block bytes], into the blocks of quant.h. type: see
// packing.c; bits and flags: the kind that it becomes.
struct pack_gguf_args {
    const uint8_t *raw;
    uint8_t *out;
    int64_t channels, groups, type, bits, flags;
};

// Streams of hidden states, see octavo_kernels.mix_streams: `first` of x and `second` of y, in each row side by side, become
// `made` of them. constants [made, first + second], matrix [.., depth], given [rows, depth].
struct mix_streams_args {
    const void *x, *y;
    const float *constants, *matrix, *given;
    void *out;
    int64_t rows, first, second, made, width, depth, dtype;
};

// Each `width` of `heads * width` columns of x, in place, times what gives it the root mean square of the row of `like`
struct match_rms_args {
    void *x;
    const void *like;
    int64_t rows, heads, width, like_stride, dtype;
    double floor;
};

// max(0, x - mean - factor * standard deviation) of each row, in place
struct sparsify_args {
    void *x;
    int64_t rows, width, stride, dtype;
    double factor;
};

// Recurrent layers. Where one layer's part of the states of a step's sequences lies (octavo_kernels/recurrence.py): granule g of
// a sequence is number g % per_block in block pages[g / per_block] of the pool. Of the rows of sequence s, `pending` ones and
// those from query_start_loc[s] on, all but the last num_kept[s] are committed, and the others are pending afterwards: `most` of
// each row of the batch.
struct state_args {
    char *pool;
    const int32_t *query_start_loc, *num_tokens, *num_pending, *num_kept, *batch_rows, *read_pages, *write_pages;
    int64_t sequences, page_stride, per_block, granule_bytes, block_bytes, most;
};

// out [rows, channels] = silu of the sums of the last `taps` inputs times weight [taps, channels]; rows of x are `stride`
// elements apart. pending [batch rows, most, channels]. A granule of a window is [taps - 1, piece], the first one `first`.
struct causal_conv_args {
    const void *x;
    const float *weight;
    float *out, *pending;
    struct state_args state;
    int64_t rows, channels, taps, stride, first, piece, dtype;
};

// qkv [rows, 2 key_heads key_size + value_heads value_size], whose queries and keys are scaled in place; rows of a and b are
// a_stride and b_stride elements apart; gates [rows, 2 value_heads + key_heads]: decay, beta, query . key; out [rows,
// value_heads value_size]. keys, updates and decays are pending. A granule of a matrix is [key_size, columns].
struct gated_delta_rule_args {
    float *qkv;
    const float *a, *b, *rate, *dt_bias;
    float *gates, *out, *keys, *updates, *decays;
    struct state_args state;
    int64_t rows, key_heads, value_heads, key_size, value_size, a_stride, b_stride, first, columns;
};

// out = RMS norm of each `width` of heads * width columns of x, times weight [width] and silu(gate); out and gate in dtype, rows of
// gate are `stride` elements apart
struct gated_norm_args {
    const float *x;
    const void *gate;
    const float *weight;
    void *out;
    int64_t rows, heads, width, stride, dtype;
    double eps;
};

// Mixtures of experts. For each row of logits [rows, experts] the k experts with the largest scores, and their weights; see
// octavo_kernels.topk_route. bias and expert_scale [experts] may be NULL. ids count from expert number `first` on.
enum routing { SOFTMAX = 0, SIGMOID = 1 };
struct topk_route_args {
    const float *logits, *bias, *expert_scale;
    int32_t *ids;
    float *weights;
    int64_t rows, experts, k, kind, groups, kept_groups, renormalise, first;
    double scale;
};

// The choices ids [rows, k], sorted by expert and then by row: plan (moe.h)
struct sort_choices_args {
    const int32_t *ids;
    int32_t *plan;
    int64_t rows, experts, k;
};

// What follows works on sorted choices. A table has the weights of all experts; biases are float32 and may be NULL.
struct expert_weight {
    const uint8_t *data;
    int64_t bits, flags;  // of quantised ones
};

// Quantised rows . gates and ups of their experts, bias [experts, 2 * inner], activation(gate) * up: quantised rows
// [rows * k], sorted. row_weights [rows, k] (NULL: none) multiply the products before the bias. sorted_values and
// sorted_meta: room for rows * k of the rows that are read.
struct quantized_experts_gated_args {
    const struct row_pair *values;
    const void *meta;
    const int32_t *plan;
    const struct expert_weight *gates, *ups;
    const float *bias, *row_weights;
    struct row_pair *sorted_values;
    void *sorted_meta;
    struct row_pair *out_values;
    void *out_meta;
    int64_t rows, experts, k, inner, groups, terms, out_terms, activation, dtype;
    double limit;
};

// Sorted quantised rows [rows * k] . weights of their experts [channels, width], bias [experts, channels]: out [rows, k,
// channels], in the order of the choices
struct quantized_experts_down_args {
    const struct row_pair *values;
    const void *meta;
    const int32_t *plan;
    const struct expert_weight *weights;
    const float *bias;
    float *out;
    int64_t rows, experts, k, channels, groups, terms;
};

// The same with weights of 16 or 32 bits, all of weight_dtype. x [rows, width]; out [rows * k, inner], sorted, in x_dtype.
// packed: room for rows * k of the rows that are read, padded to an even width, in float32.
struct dense_experts_gated_args {
    const void *x;
    const int32_t *plan;
    const struct expert_weight *gates, *ups;
    const float *bias, *row_weights;
    void *packed, *out;
    int64_t rows, experts, k, width, inner, activation, x_dtype, weight_dtype;
    double limit;
};
struct dense_experts_down_args {
    const void *x;
    const int32_t *plan;
    const struct expert_weight *weights;
    const float *bias;
    void *packed;
    float *out;
    int64_t rows, experts, k, channels, width, x_dtype, weight_dtype;
};

// out [rows, width] = results [rows, k, width] times weights [rows, k] (NULL: 1), added up, + shared [rows, width] times the
// sigmoid of shared_gate [rows]; both may be NULL. Results of choices, ids [rows, k], that are none of the experts are left out.
struct add_choices_args {
    const float *results, *weights;
    const int32_t *ids;
    const void *shared;
    const float *shared_gate;
    void *out;
    int64_t rows, k, experts, width, dtype, out_dtype;
};

// Between the processes that hold parts of one model, see collectives.c; `ranks` slots of slot_bytes for each of two turns lie
// behind the header of `shared`. What does not fit into a slot from element, or row, `first` on is another operation's.
#define MAX_RANKS 48
#define SHARED_HEADER 4096
struct exchange {
    void *shared;
    int64_t rank, ranks, slot_bytes;
};

// out [rows, width] = the sum of every rank's x, which may be in the same place if it is of the same dtype
struct all_reduce_args {
    const void *x;
    void *out;
    struct exchange exchange;
    int64_t rows, width, first, dtype, out_dtype;
};

// out [rows, total] = every rank's columns side by side. Ranks have ceil(total / ranks) of them, the last ones fewer; rows of x
// are `stride` elements of `size` bytes apart. Nothing happens where `wants` is not NULL and 0, on every rank.
struct all_gather_args {
    const void *x;
    const int64_t *wants;
    void *out;
    struct exchange exchange;
    int64_t rows, stride, total, first, size;
};

// argmax of all ranks' columns from those of each; `offset`: this rank's first column; index NULL: it has none
struct best_of_ranks_args {
    const int64_t *index;
    const float *value;
    int64_t *out_index;
    float *out_value;
    struct exchange exchange;
    int64_t rows, offset, first;
};

// Rows that ranks compute apart, counts[rank] each and one rank's after another's: out_* [sum of counts], from x, of
// `row_bytes` a row, ids and weights [counts[rank], k]. Ids are counted from first_expert in out_ids.
struct gather_rows_args {
    const void *x;
    const int32_t *ids;
    const float *weights;
    void *out_x;
    int32_t *out_ids;
    float *out_weights;
    const int64_t *counts;
    struct exchange exchange;
    int64_t row_bytes, k, first_expert, first;
};

// out [counts[rank], width] = the sum of every rank's parts [sum of counts, width] of this rank's rows, and sigmoid(shared_gate)
// times shared; both of these may be NULL, and are of this rank alone
struct sum_rows_args {
    const float *parts;
    const void *shared;
    const float *shared_gate;
    void *out;
    const int64_t *counts;
    struct exchange exchange;
    int64_t width, first, dtype;
};

// Low-rank adapters: row r has the one in slot slots[r], none below 0.
// The rows that have one, sorted by slot: rows [count]; tiles [1 + 3 * count] has the number of tiles, then each one's slot,
// first row in that order and number of rows
struct lora_tiles_args {
    const int32_t *slots;
    int32_t *rows, *tiles;
    int64_t count, num_slots;
};
// Slot s has rank ranks[s] (0: it leaves this layer alone) and its matrix at address weights[s]; order and tiles are rows and
// tiles of lora_tiles.
// out [rows, outputs] = x times weights[s] [parts * ranks[s], width]; only the first parts * ranks[s] of a row are written
struct lora_shrink_args {
    const void *x;
    const int32_t *order, *tiles, *ranks;
    const int64_t *weights;
    float *out;
    int64_t stride, width, parts, outputs, dtype, weight_dtype;
};
// The same of an embedding: out = weights[s] [count, ranks[s]] at ids - first, 0 outside
struct lora_gather_args {
    const int64_t *ids;
    const int32_t *slots, *ranks;
    const int64_t *weights;
    float *out;
    int64_t rows, first, count, outputs, weight_dtype;
};
// y[:, offsets[p] .. offsets[p + 1]) += h[:, p * ranks[s] .. (p + 1) * ranks[s]) times these columns of weights[s]
// [ranks[s], offsets[parts]]; h is [rows, inputs]
struct lora_expand_args {
    void *y;
    const float *h;
    const int32_t *order, *tiles, *ranks;
    const int64_t *weights, *offsets;
    int64_t stride, parts, inputs, dtype, weight_dtype;
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

void op_rms_norm(const struct rms_norm_args *a, struct team_member *m);
void op_silu_and_mul(const struct silu_and_mul_args *a, struct team_member *m);
void op_rope_and_cache(const struct rope_and_cache_args *a, struct team_member *m);
void op_latent_cache(const struct latent_cache_args *a, struct team_member *m);
void op_head_linear(const struct head_linear_args *a, struct team_member *m);
void op_paged_attention(const struct paged_attention_args *a, struct team_member *m);
void op_varlen_attention(const struct varlen_attention_args *a, struct team_member *m);
void op_rope(const struct rope_args *a, struct team_member *m);
void op_copy_blocks(const struct copy_blocks_args *a, struct team_member *m);
void op_argmax(const struct argmax_args *a, struct team_member *m);
void op_draw(const struct draw_args *a, struct team_member *m);
void op_touch_blocks(const struct touch_blocks_args *a, struct team_member *m);
void op_quantize(const struct quantize_args *a, struct team_member *m);
void op_quantized_linear(const struct quantized_linear_args *a, struct team_member *m);
void op_quantized_head(const struct quantized_head_args *a, struct team_member *m);
void op_gated_linear(const struct gated_linear_args *a, struct team_member *m);
void op_quantized_embedding(const struct quantized_embedding_args *a, struct team_member *m);
void op_embedding(const struct embedding_args *a, struct team_member *m);
void op_pack_gguf(const struct pack_gguf_args *a, struct team_member *m);
void op_dense_linear(const struct dense_linear_args *a, struct team_member *m);
void op_pack_dense(const struct pack_dense_args *a, struct team_member *m);
void op_dense_embedding(const struct dense_embedding_args *a, struct team_member *m);
void op_layer_norm(const struct layer_norm_args *a, struct team_member *m);
void op_activation(const struct activation_args *a, struct team_member *m);
void op_add(const struct add_args *a, struct team_member *m);
void op_take_columns(const struct take_columns_args *a, struct team_member *m);
void op_scale(const struct scale_args *a, struct team_member *m);
void op_rms_norm_columns(const struct rms_norm_columns_args *a, struct team_member *m);
void op_mix_streams(const struct mix_streams_args *a, struct team_member *m);
void op_match_rms(const struct match_rms_args *a, struct team_member *m);
void op_sparsify(const struct sparsify_args *a, struct team_member *m);
void op_topk_route(const struct topk_route_args *a, struct team_member *m);
void op_sort_choices(const struct sort_choices_args *a, struct team_member *m);
void op_quantized_experts_gated(const struct quantized_experts_gated_args *a, struct team_member *m);
void op_quantized_experts_down(const struct quantized_experts_down_args *a, struct team_member *m);
void op_dense_experts_gated(const struct dense_experts_gated_args *a, struct team_member *m);
void op_dense_experts_down(const struct dense_experts_down_args *a, struct team_member *m);
void op_add_choices(const struct add_choices_args *a, struct team_member *m);
void op_all_reduce(const struct all_reduce_args *a, struct team_member *m);
void op_all_gather(const struct all_gather_args *a, struct team_member *m);
void op_best_of_ranks(const struct best_of_ranks_args *a, struct team_member *m);
void op_lora_tiles(const struct lora_tiles_args *a, struct team_member *m);
void op_gather_rows(const struct gather_rows_args *a, struct team_member *m);
void op_sum_rows(const struct sum_rows_args *a, struct team_member *m);
void op_causal_conv(const struct causal_conv_args *a, struct team_member *m);
void op_gated_delta_rule(const struct gated_delta_rule_args *a, struct team_member *m);
void op_gated_norm(const struct gated_norm_args *a, struct team_member *m);
void op_lora_shrink(const struct lora_shrink_args *a, struct team_member *m);
void op_lora_gather(const struct lora_gather_args *a, struct team_member *m);
void op_lora_expand(const struct lora_expand_args *a, struct team_member *m);
void op_decode_inputs(const struct decode_inputs_args *a, struct team_member *m);
void op_read_memory(const struct read_memory_args *a, struct team_member *m);
void op_dot_products(const struct dot_products_args *a, struct team_member *m);

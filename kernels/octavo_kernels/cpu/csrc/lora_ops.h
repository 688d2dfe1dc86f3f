// Low-rank adapters (LoRA): row r has the one in slot slots[r], none below 0. See ops.h.
#pragma once
#include <stdint.h>

#include "thread_team.h"

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

void op_lora_tiles(const struct lora_tiles_args *a, struct team_member *m);
void op_lora_shrink(const struct lora_shrink_args *a, struct team_member *m);
void op_lora_gather(const struct lora_gather_args *a, struct team_member *m);
void op_lora_expand(const struct lora_expand_args *a, struct team_member *m);

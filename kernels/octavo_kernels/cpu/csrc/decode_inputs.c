// The inputs of a decoding step, from the arrays of a batch.
#include <string.h>

#include "attention_ops.h"
#include "simd.h"

void op_decode_inputs(const struct decode_inputs_args *a, struct team_member *m) {
    if (team_take_item(m, 1) >= 0) {
        int64_t at = 0;
        a->query_start_loc[0] = 0;
        for (int64_t i = 0; i < a->count; i++) {
            const int64_t row = a->rows[i], first = a->num_computed[row], end = first + (a->counts ? a->counts[i] : 1);
            const int32_t *blocks = a->blocks + row * a->block_stride, *tokens = a->token_ids + row * a->token_stride;
            for (int64_t position = first; position < end; position++, at++) {
                const int64_t slot = blocks[position / a->block_size] * a->block_size + position % a->block_size;
                a->input_ids[at] = tokens[MIN(position + a->ahead, a->token_stride - 1)];
                a->positions[at] = position;
                a->slots[at] = position < a->num_kv_tokens[row] ? -1 : slot;
            }
            a->query_start_loc[i + 1] = (int32_t)at;
            a->seq_lens[i] = (int32_t)end;
            memcpy(a->table + i * a->table_stride, blocks, (size_t)CEIL_DIV(end, a->block_size) * sizeof(int32_t));
        }
        team_item_done(m);
    }
    team_finish_phase(m, 1);
}

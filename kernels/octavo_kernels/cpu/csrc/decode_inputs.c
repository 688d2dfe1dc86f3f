// The inputs of a decoding step, from the arrays of a batch.
#include <string.h>

#include "ops.h"

void op_decode_inputs(const struct decode_inputs_args *a, struct team_member *m) {
    if (team_take_item(m, 1) >= 0) {
        a->query_start_loc[0] = 0;
        for (int64_t i = 0; i < a->count; i++) {
            const int64_t row = a->rows[i], position = a->num_computed[row], page = position / a->block_size;
            const int32_t *blocks = a->blocks + row * a->block_stride;
            const int64_t slot = blocks[page] * a->block_size + position % a->block_size;
            a->input_ids[i] = a->token_ids[row * a->token_stride + position];
            a->positions[i] = position;
            a->slots[i] = position < a->num_kv_tokens[row] ? -1 : slot;
            a->query_start_loc[i + 1] = (int32_t)i + 1;
            a->seq_lens[i] = (int32_t)position + 1;
            memcpy(a->table + i * a->table_stride, blocks, (size_t)(page + 1) * sizeof(int32_t));
        }
        team_item_done(m);
    }
    team_finish_phase(m, 1);
}

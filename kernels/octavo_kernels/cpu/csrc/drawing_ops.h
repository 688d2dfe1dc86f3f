// Choosing tokens from logits. See ops.h.
#pragma once
#include <stdint.h>

#include "thread_team.h"

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
// request rows[i] and of the token at positions[i]. best_index and best are as argmax has them; maxima [num_rows, vocab / part] are
// those of each `part` logits, 32 at least; mask [num_rows, vocab / 32] holds what grammars allow; all may be NULL. history [slots,
// history_width], seen [slots, vocab / 32] and counts [slots, vocab]: see TokenPool; the token is added there. Log-probabilities are
// those of the logits as they came: of the drawn token, with its rank from 1, and of the best ones in order; logprob_ids, logprobs
// [num_rows, columns] and ranks [num_rows] may be NULL if no request wants them. If `known` is not NULL, tokens are guesses behind
// the first known[i] of their sequences: they are not added, and no log-probabilities are told.
struct draw_args {
    float *logits;
    const struct draw_request *requests;
    const int64_t *rows, *positions, *best_index;
    const float *best, *maxima;
    const int64_t *known;
    const uint32_t *mask;
    int32_t *history;
    uint32_t *seen;
    int32_t *counts;
    int64_t *tokens, *invalid, *logprob_ids, *ranks;
    float *logprobs;
    int64_t num_rows, vocab, stride, history_width, columns, part;
};

void op_draw(const struct draw_args *a, struct team_member *m);

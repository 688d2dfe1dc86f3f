// A token for each row of logits: constraints, temperature, min-p, top-k, top-p, and the largest score + Gumbel noise.
//
// What a pass over the row can rule out is not looked at again. Tokens that no noise lifts to the best one are not hashed; of a
// row that is cut, only those that may be inside the cut become candidates: above the line of min-p, the k-th best, or so likely
// that not all of them and all below together could be the tail that top-p leaves out. No row is sorted, no softmax written. Where
// the head tells the maxima of a row's parts, parts that cannot matter are not read, and an edit costs the parts that it touches.
#include <float.h>
#include <stdlib.h>

#include "drawing.h"
#include "drawing_ops.h"

enum { PART = 128, LEAST_PART = 32 };  // tokens whose maximum is kept

// A row under way. Scores are logits / temperature.
struct row {
    float *logits;
    int64_t vocab;
    const struct draw_request *request;
    struct draw_key key;
    float temperature, best;  // the largest logit
    float *maxima;            // of the parts, NaN: not known any more; NULL: of none
    int64_t part;             // tokens of one; without maxima there is one part
    const float *raw;         // the logits as they came
    float *copy, *work;       // room for all logits
    float *room;              // for maxima
    float *scores;            // of the candidates, by ascending id
    int32_t *ids;
    int64_t candidates;
};

static size_t row_bytes(int64_t vocab) {
    return (size_t)(4 * (vocab + VW) + CEIL_DIV(vocab, LEAST_PART)) * 4;
}
static void place_row(struct row *r, float *memory) {
    r->work = memory, memory += r->vocab + VW;
    r->copy = memory, memory += r->vocab + VW;
    r->scores = memory, memory += r->vocab + VW;
    r->ids = (int32_t *)memory, memory += r->vocab + VW;
    r->room = memory;
}

// The largest logits of a part, lane by lane; `numbers` loses the lanes in which there is a NaN
INLINE vf best_of_part(const struct row *r, int64_t part, uint32_t *numbers) {
    const int64_t end = MIN(r->vocab, (part + 1) * r->part);
    vf top = splat(-INFINITY);
    for (int64_t i = part * r->part; i < end; i += VW) {
        const vf x = i + VW <= end ? vload(r->logits + i) : load_end(r->logits + i, end - i);
        top = vmax(x, top);
        *numbers &= lanes_at_least(x, x);
    }
    return top;
}

// The largest logit, NaN if there is one, and those of the parts
static void find_best(struct row *r) {
    vf highest = splat(-INFINITY);
    uint32_t numbers = ~0u;
    r->part = PART, r->maxima = r->room;
    for (int64_t part = 0; part < CEIL_DIV(r->vocab, PART); part++) {
        const vf top = best_of_part(r, part, &numbers);
        r->maxima[part] = vmax_all(top);
        highest = vmax(top, highest);
    }
    r->best = numbers == lanes_at_least(highest, highest) ? vmax_all(highest) : NAN;
}

// The same where only edited parts may have others than before
static void find_best_again(struct row *r) {
    const uint32_t all = lanes_at_least(splat(0.0f), splat(0.0f));
    uint32_t numbers = all;
    r->best = -INFINITY;
    for (int64_t part = 0; part < CEIL_DIV(r->vocab, r->part); part++) {
        if (isnan(r->maxima[part])) r->maxima[part] = vmax_all(best_of_part(r, part, &numbers));
        r->best = MAX(r->best, r->maxima[part]);
    }
    if (numbers != all) r->best = NAN;
}

static void edit(struct row *r, int64_t token, float logit) {
    r->logits[token] = logit;
    if (r->maxima) r->maxima[token / r->part] = NAN;
}

// The first part from `part` on that has a logit of at least `line`, or the number of parts
INLINE int64_t next_part(const struct row *r, int64_t part, float line) {
    const int64_t parts = CEIL_DIV(r->vocab, r->part);
    while (r->maxima && part < parts && !(r->maxima[part] >= line)) part++;
    return part;
}

// The lowest token of the largest logit
static int64_t best_token(const struct row *r) {
    int64_t i = next_part(r, 0, r->best) * r->part;
    while (r->logits[i] != r->best) i++;
    return i;
}

// ---- constraints

// Forbid the tokens whose bit is 0
static void apply_mask(struct row *r, const uint32_t *mask) {
    const vi lane_bits = splat_int(1) << lane_index();
    const int64_t vocab = r->vocab;
    float *x = r->logits;
    for (int64_t at = 0; at < vocab; at += 32) {
        const uint32_t allowed = mask[at / 32];
        if (allowed == ~0u) continue;
        if (r->maxima) r->maxima[at / r->part] = r->maxima[(MIN(vocab, at + 32) - 1) / r->part] = NAN;
        for (int64_t i = at; i < MIN(vocab, at + 32); i += VW) {
            const vi is_allowed = (splat_int((int32_t)(allowed >> (i - at))) & lane_bits) != 0;
            const int64_t n = MIN(VW, vocab - i);
            if (n == VW) vstore(x + i, vselect(is_allowed, vload(x + i), splat(-INFINITY)));
            else store_part(x, i, n, vselect(is_allowed, load_end(x + i, n), splat(-INFINITY)), FLOAT32);
        }
    }
}

static void apply_bad_words(const struct draw_args *a, struct row *r, int64_t position) {  // of the token after the known ones
    const struct draw_request *q = r->request;
    const int32_t *history = a->history + MAX(q->slot, 0) * a->history_width, *word = q->bad_words, *end = word + q->bad_words_size;
    for (; word < end; word += 1 + word[0]) {
        const int64_t prefix = word[0] - 1;
        int64_t same = 0;
        if (position - q->num_prompt < prefix) continue;
        while (same < prefix && history[position - prefix + same] == word[1 + same]) same++;
        if (same == prefix) edit(r, word[1 + prefix], -INFINITY);
    }
}

static void apply_penalties(const struct draw_args *a, struct row *r) {
    const struct draw_request *q = r->request;
    const int64_t words = CEIL_DIV(r->vocab, 32);
    const uint32_t *seen = a->seen + q->slot * words;
    const int32_t *counts = q->count_slot < 0 ? NULL : a->counts + q->count_slot * r->vocab;
    const float repetition = (float)q->repetition, frequency = (float)q->frequency, presence = (float)q->presence;
    for (int64_t w = 0; w < words; w++) {
        for (uint32_t bits = seen[w]; bits; bits &= bits - 1) {
            const int64_t token = w * 32 + __builtin_ctz(bits);
            const float x = r->logits[token];
            float y = x > 0 ? x / repetition : x * repetition;
            if (counts) y = y - frequency * (float)counts[token] - presence * (float)(counts[token] > 0);
            edit(r, token, y);
        }
    }
}

static int has_constraints(const struct draw_request *q, int64_t position) {
    return q->allowed || q->bad_words_size || position < q->min_position || q->num_bias || q->repetition != 1 ||
           q->count_slot >= 0;
}

static void constrain(const struct draw_args *a, struct row *r, const uint32_t *mask, int64_t position, int64_t known) {
    const struct draw_request *q = r->request;
    const int is_early = position < q->min_position, is_punished = q->repetition != 1 || q->count_slot >= 0;
    if (mask) apply_mask(r, mask);
    if (q->allowed) apply_mask(r, q->allowed);
    if (q->bad_words_size) apply_bad_words(a, r, known);
    for (int64_t i = 0; is_early && i < q->num_stops; i++) edit(r, q->stops[i], -INFINITY);
    for (int64_t i = 0; i < q->num_bias; i++) edit(r, q->bias_ids[i], r->logits[q->bias_ids[i]] + q->bias_values[i]);
    if (is_punished) apply_penalties(a, r);
}

// Note the token of a request whose history is kept
static void append(const struct draw_args *a, const struct draw_request *q, int64_t position, int64_t token) {
    if (q->slot < 0) return;
    a->history[q->slot * a->history_width + position] = (int32_t)token;
    a->seen[q->slot * CEIL_DIV(a->vocab, 32) + token / 32] |= 1u << token % 32;
    if (q->count_slot >= 0) a->counts[q->count_slot * a->vocab + token]++;
}

// ---- draws

// What of score + noise is worth computing exactly, given that `best` is reached
INLINE float near_to(double best) { return (float)(best - (1e-3 + 1e-6 * fabs(best))); }

// The token of the largest score + noise, of the row (ids NULL: x are its logits) or of its candidates (x are their scores): its
// index in x
INLINE int64_t noisy_best(const struct row *r, const float *x, int64_t n, const int32_t *ids, float temperature) {
    const float inverse = 1.0f / temperature, top = r->best / r->temperature;
    const int64_t size = ids ? n : r->part;
    double best = -INFINITY;
    int64_t at = 0;
    // By less than its rounding, inverse * x may be below the score: near_to() has room for that.
    float line = ids ? -INFINITY : near_to(top + LEAST_NOISE);
    for (int64_t part = 0; part * size < n; part++) {
        if (!ids && r->maxima && !(r->maxima[part] * inverse + MOST_NOISE >= line)) continue;
        for (int64_t i = part * size; i < MIN(n, (part + 1) * size); i += VW) {
            const int64_t count = MIN(VW, n - i);
            const vf v = (count == VW ? vload(x + i) : load_end(x + i, count)) * inverse;
            if (!lanes_at_least(v + MOST_NOISE, splat(line))) continue;
            vu tokens = (vu)(lane_index() + splat_int((int32_t)i));
            if (ids) memcpy(&tokens, ids + i, VW * 4);  // there is room behind the last
            const vi bits = noise_bits(tokens, r->key);
            for (uint32_t near = lanes_at_least(v + noise_bound(bits), splat(line)); near; near &= near - 1) {
                const int lane = __builtin_ctz(near);
                if (lane >= count) break;
                const double value = (double)(x[i + lane] / temperature) + noise_of(bits[lane]);
                if (value > best) {
                    best = value, at = i + lane;
                    line = MAX(line, near_to(best));
                }
            }
        }
    }
    return at;
}

// The sum of exp(score - best) of scores above `floor`, of n candidates or (scores NULL) of all tokens: in parts, so that it is
// nearly exact
static double sum_weights(const struct row *r, const float *scores, int64_t n, float floor) {
    const float *x = scores ? scores : r->logits;
    const vf temperature = splat(scores ? 1.0f : r->temperature), best = splat(r->best / r->temperature);
    double total = 0;
    for (int64_t part = 0; part < n; part += PART) {
        const int64_t end = MIN(n, part + PART);
        vf sum = splat(0.0f);
        for (int64_t i = part; i < end; i += VW) {
            vf v = i + VW <= end ? vload(x + i) : load_end(x + i, end - i);
            if (!scores && r->temperature != 1.0f) v = v / temperature;
            sum += vexp(vselect_less(splat(floor), v, v, splat(-INFINITY)) - best);
        }
        total += vsum(sum);
    }
    return total;
}

static float kth_logit(const struct row *r, int64_t k) {
    const int64_t parts = CEIL_DIV(r->vocab, r->part);
    float floor = -INFINITY;
    if (k <= parts) {
        memcpy(r->work, r->maxima, (size_t)parts * 4);
        floor = kth_largest(r->work, parts, k);
    }
    int64_t n = 0;
    for (int64_t part = 0; (part = next_part(r, part, floor)) < parts; part++) {
        for (int64_t i = part * r->part; i < MIN(r->vocab, (part + 1) * r->part); i++) {
            r->work[n] = r->logits[i];
            n += r->logits[i] >= floor;
        }
    }
    return kth_largest(r->work, n, k);
}

// Collect the tokens whose score is at least `line`
static void find_candidates(struct row *r, float line) {
    line = MAX(line, -FLT_MAX);  // forbidden tokens never are
    const float limit = line * r->temperature, floor = limit - 1e-6f * fabsf(limit);
    const vf temperature = splat(r->temperature);
    int64_t n = 0;
    for (int64_t part = 0; (part = next_part(r, part, floor)) * r->part < r->vocab; part++) {
        for (int64_t i = part * r->part; i < MIN(r->vocab, (part + 1) * r->part); i += VW) {
            const vf v = i + VW <= r->vocab ? vload(r->logits + i) : load_end(r->logits + i, r->vocab - i);
            if (!lanes_at_least(v, splat(floor))) continue;
            const vf score = v / temperature;
            const uint32_t chosen = lanes_at_least(score, splat(line));
            const vi ids = lane_index() + splat_int((int32_t)i);
#if defined(__AVX512F__)
            vstore(r->scores + n, (vf)_mm512_maskz_compress_ps((__mmask16)chosen, (__m512)score));
            vstore((float *)r->ids + n, (vf)_mm512_maskz_compress_epi32((__mmask16)chosen, (__m512i)ids));
            n += __builtin_popcount(chosen);
#else
            for (int lane = 0; lane < VW; lane++) {
                r->scores[n] = score[lane], r->ids[n] = ids[lane];
                n += chosen >> lane & 1;
            }
#endif
        }
    }
    r->candidates = n;
}

// Keep the candidates that are before number `at` in the order of scores, then ids
static void keep_before(struct row *r, int64_t at) {
    const float score = r->scores[at];
    int64_t n = 0;
    for (int64_t i = 0; i < r->candidates; i++) {
        const float s = r->scores[i];
        r->ids[n] = r->ids[i], r->scores[n] = s;
        n += s > score || (s == score && i < at);
    }
    r->candidates = n;
}

// Draw from what min-p, top-k and top-p leave. The winner of all candidates is the winner of those inside of top-p if it is inside.
// If it is outside, so is everything below it, and the rest draws again with the same noise.
static int64_t draw_truncated(struct row *r) {
    const struct draw_request *q = r->request;
    const float top = r->best / r->temperature;
    const int by_mass = q->top_p < 1, by_rank = q->top_k < r->vocab || q->min_p > 0;
    float line = q->min_p > 0 ? (float)((double)top + log(q->min_p)) : -INFINITY;
    if (q->top_k < r->vocab) line = MAX(line, kth_logit(r, q->top_k) / r->temperature);
    double total = 0;
    if (!by_rank) {
        total = sum_weights(r, NULL, r->vocab, -INFINITY);
        line = (float)(top + log((1 - q->top_p) * total / (double)r->vocab) - 1e-3 - 1e-6 * fabsf(top));
    }
    find_candidates(r, line);
    if (by_rank && by_mass) total = sum_weights(r, r->scores, r->candidates, -INFINITY);
    for (;;) {
        const int64_t at = noisy_best(r, r->scores, r->candidates, r->ids, 1.0f);
        if (!by_mass || r->candidates < 2) return r->ids[at];
        const float score = r->scores[at];
        int64_t equals = 0;
        for (int64_t i = 0; i < at; i++) equals += r->scores[i] == score;
        const double mass = sum_weights(r, r->scores, r->candidates, score) + (double)equals * (double)exp_scalar(score - top);
        if (!(mass >= q->top_p * total)) return r->ids[at];
        keep_before(r, at);
    }
}

// The first token whose score is infinite, as where the temperature is next to 0
static int64_t first_beyond(const struct row *r, float score) {
    int64_t i = 0;
    while (i < r->vocab - 1 && r->logits[i] / r->temperature != score) i++;
    return i;
}

static int64_t draw_random(struct row *r) {
    const struct draw_request *q = r->request;
    const float top = r->best / r->temperature;
    if (!isfinite(top)) return first_beyond(r, top);
    if (q->top_k < r->vocab || q->top_p < 1 || q->min_p > 0) return draw_truncated(r);
    return noisy_best(r, r->logits, r->vocab, NULL, r->temperature);
}

// ---- log-probabilities

static int ascending(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

// The n best tokens in order, the lower id first among equals
static void best_tokens(struct row *r, int64_t n, int64_t *ids) {
    const float line = kth_logit(r, n);
    uint64_t *better = (uint64_t *)r->scores;  // with the room of ids, behind it
    int32_t *equal = (int32_t *)r->copy;
    int64_t count = 0, equals = 0;
    for (int64_t part = 0; (part = next_part(r, part, line)) * r->part < r->vocab; part++) {
        for (int64_t i = part * r->part; i < MIN(r->vocab, (part + 1) * r->part); i++) {
            if (r->raw[i] > line) better[count++] = (uint64_t)~in_order(r->raw[i] + 0.0f) << 32 | (uint64_t)i;  // -0 is 0
            else if (r->raw[i] == line) equal[equals++] = (int32_t)i;
        }
    }
    qsort(better, (size_t)count, sizeof(*better), ascending);
    for (int64_t i = 0; i < n; i++) ids[i] = i < count ? (int64_t)(uint32_t)better[i] : equal[i - count];
}

// Of the row as it came: how likely the best tokens are. Returns by how much a logit is above its log-probability.
static double tell_best(const struct draw_args *a, struct row *r, int64_t i) {
    const int64_t n = r->request->num_logprobs;
    int64_t *ids = a->logprob_ids + i * a->columns;
    float *values = a->logprobs + i * a->columns;
    r->temperature = 1;
    if (!r->maxima) find_best(r);
    if (!isfinite(r->best)) {
        for (int64_t k = 0; k <= n; k++) ids[k] = 0, values[k] = NAN;
        return NAN;
    }
    const double all = (double)r->best + log(sum_weights(r, NULL, r->vocab, -INFINITY));
    if (n) best_tokens(r, n, ids + 1);
    for (int64_t k = 1; k <= n; k++) values[k] = (float)((double)r->raw[ids[k]] - all);
    return all;
}

static void tell_drawn(const struct draw_args *a, const struct row *r, int64_t i, int64_t token, double all) {
    const vf value = splat(r->raw[token]);
    const int is_as_it_came = r->raw == r->logits;  // and so are the maxima
    int64_t rank = 1;
    for (int64_t part = 0; part * r->part < r->vocab; part++) {
        if (is_as_it_came) part = next_part(r, part, r->raw[token]);
        for (int64_t at = part * r->part; at < MIN(r->vocab, (part + 1) * r->part); at += VW) {
            const vf x = at + VW <= r->vocab ? vload(r->raw + at) : load_end(r->raw + at, r->vocab - at);
            rank += VW - __builtin_popcount(lanes_at_least(value, x));
        }
    }
    a->logprob_ids[i * a->columns] = token;
    a->logprobs[i * a->columns] = (float)((double)r->raw[token] - all);
    a->ranks[i] = rank;
}

// What the head tells of a row
static void take_maxima(const struct draw_args *a, int64_t i, struct row *r) {
    const int64_t parts = CEIL_DIV(a->vocab, a->part);
    r->maxima = NULL, r->part = a->vocab;
    if (!a->maxima || !isfinite(a->best[i])) return;
    r->best = a->best[i], r->part = a->part;
    r->maxima = memcpy(r->room, a->maxima + i * parts, (size_t)parts * 4);
}

// True if the best token is known, and stays it under the mask
static int allows_best(const struct draw_args *a, int64_t i, const uint32_t *mask) {
    return a->best && isfinite(a->best[i]) && mask[a->best_index[i] / 32] >> a->best_index[i] % 32 & 1;
}

static void draw_row(const struct draw_args *a, int64_t i, struct row *r) {
    const int64_t position = a->positions[i];
    const struct draw_request *q = r->request = a->requests + a->rows[i];
    const uint32_t *mask = a->mask ? a->mask + i * CEIL_DIV(a->vocab, 32) : NULL;
    const int is_constrained = has_constraints(q, position), is_greedy = q->temperature <= 0;
    if (mask && is_greedy && !is_constrained && allows_best(a, i, mask)) mask = NULL;
    const int changes = mask || is_constrained, tells = q->num_logprobs >= 0 && !a->known, is_known = a->best && !changes;
    r->raw = r->logits = a->logits + i * a->stride;
    take_maxima(a, i, r);
    const double all = tells ? tell_best(a, r, i) : 0;
    if (changes) {
        if (tells) r->raw = memcpy(r->copy, r->logits, (size_t)r->vocab * 4);
        constrain(a, r, mask, position, a->known ? a->known[i] : position);
        if (!r->maxima || !isfinite(r->best)) find_best(r);
        else find_best_again(r);
    } else if (is_known && (is_greedy || (!r->maxima && q->top_k >= r->vocab))) {
        r->best = a->best[i];
    } else if (!r->maxima) {
        find_best(r);
    }
    int64_t token = 0;
    a->invalid[i] = !isfinite(r->best);
    if (isfinite(r->best)) {
        r->temperature = (float)q->temperature;
        r->key = key_at(q->stream, position);
        if (is_greedy) token = is_known ? a->best_index[i] : best_token(r);
        else token = draw_random(r);
    }
    if (tells) tell_drawn(a, r, i, token, all);
    if (!a->known) append(a, q, position, token);
    a->tokens[i] = token;
}

void op_draw(const struct draw_args *a, struct team_member *m) {
    struct row r = {.vocab = a->vocab};
    for (int64_t i; (i = team_take_item(m, a->num_rows)) >= 0; team_item_done(m)) {
        if (!r.work) place_row(&r, thread_scratch(row_bytes(a->vocab)));
        draw_row(a, i, &r);
    }
    team_finish_phase(m, a->num_rows);
}

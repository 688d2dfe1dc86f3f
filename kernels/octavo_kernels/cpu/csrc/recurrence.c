// Recurrent layers: a causal convolution, the gated delta rule and the norm behind it. Rows are computed one after the other, so
// that no bit depends on how steps are cut; a column of a state depends on no other one, nor does a channel.
#include "recurrence_ops.h"
#include "rows.h"
#include "simd.h"

// Granule number g of the state of sequence s
INLINE float *granule(const struct state_args *s, const int32_t *pages, int64_t sequence, int64_t g) {
    const int64_t block = pages[sequence * s->page_stride + g / s->per_block];
    return (float *)(s->pool + block * s->block_bytes + g % s->per_block * s->granule_bytes);
}

// The rows of a sequence in a step: `pending` ones and then its own, from row `begin` on. The first `committed` become part of the
// state, which is also written as it is before row `snapshot` (0: it is not).
struct turn {
    int64_t begin, pending, count, committed, snapshot, batch_row;
    int is_new;
};
INLINE struct turn turn_of(const struct state_args *s, int64_t sequence) {
    const int64_t begin = s->query_start_loc[sequence], pending = s->num_pending[sequence];
    const int64_t count = pending + s->query_start_loc[sequence + 1] - begin;
    const int64_t committed = count - s->num_kept[sequence], snapshot = s->num_before[sequence];
    return (struct turn){begin, pending, count, committed, snapshot, s->batch_rows[sequence], !s->num_tokens[sequence]};
}

// ---- convolution
enum { CHANNELS = 64, MAX_TAPS = 8 };  // channels of an item

INLINE void conv_channels(const struct causal_conv_args *a, int64_t sequence, int64_t first, int64_t n, int dtype) {
    const struct turn turn = turn_of(&a->state, sequence);
    const int64_t past = a->taps - 1, g = a->first + first / a->piece, offset = first % a->piece;
    float *pending = a->pending + turn.batch_row * a->state.most * a->channels + first;
    float inputs[MAX_TAPS][CHANNELS];  // the last ones, the oldest first; the last of all is the row's own
    memset(inputs, 0, sizeof(inputs));
    if (!turn.is_new) {
        const float *window = granule(&a->state, a->state.read_pages, sequence, g) + offset;
        for (int64_t i = 0; i < past; i++) memcpy(inputs[i], window + i * a->piece, (size_t)n * 4);
    }
    for (int64_t index = 0; index <= turn.count; index++) {
        if (index && (index == turn.committed || index == turn.snapshot)) {
            const int32_t *pages = index == turn.committed ? a->state.write_pages : a->state.snapshot_pages;
            float *window = granule(&a->state, pages, sequence, g) + offset;
            for (int64_t i = 0; i < past; i++) memcpy(window + i * a->piece, inputs[i], (size_t)n * 4);
        }
        if (index == turn.count) break;
        const int64_t row = turn.begin + index - turn.pending;
        float *own = inputs[past];
        if (index < turn.pending) {
            memcpy(own, pending + index * a->channels, (size_t)n * 4);
        } else {
            float *out = a->out + row * a->channels + first;
            for (int64_t i = 0; i < n; i += VW) {
                const int64_t lanes = MIN(VW, n - i);
                vstore(own + i, load_part(a->x, row * a->stride + first + i, lanes, dtype));
                vf sum = {0};
                for (int64_t tap = 0; tap <= past; tap++)
                    sum = vfma(load_part(a->weight, tap * a->channels + first + i, lanes, FLOAT32), vload(inputs[tap] + i), sum);
                store_part(out, i, lanes, vsilu(sum, FLOAT32), FLOAT32);
            }
        }
        if (index >= turn.committed) memcpy(pending + (index - turn.committed) * a->channels, own, (size_t)n * 4);
        for (int64_t i = 0; i < past; i++) memcpy(inputs[i], inputs[i + 1], (size_t)n * 4);
    }
}

void op_causal_conv(const struct causal_conv_args *a, struct team_member *m) {
    const int64_t size = MIN(CHANNELS, a->piece), parts = CEIL_DIV(a->channels, size), items = a->state.sequences * parts;
    for (int64_t item; (item = team_take_item(m, items)) >= 0; team_item_done(m)) {
        const int64_t first = item % parts * size, n = MIN(size, a->channels - first);
        if (a->dtype == BFLOAT16) conv_channels(a, item / parts, first, n, BFLOAT16);
        else conv_channels(a, item / parts, first, n, FLOAT32);
    }
    team_finish_phase(m, items);
}

// ---- gated delta rule
INLINE void scale_row(float *x, int64_t n, float factor) {
    for (int64_t i = 0; i < n; i += VW)
        store_part(x, i, MIN(VW, n - i), load_part(x, i, MIN(VW, n - i), FLOAT32) * splat(factor), FLOAT32);
}
INLINE float dot_row(const float *x, const float *y, int64_t n) {
    vf sum = {0};
    for (int64_t i = 0; i < n; i += VW) {
        const int64_t lanes = MIN(VW, n - i);
        sum = vfma(load_part(x, i, lanes, FLOAT32), load_part(y, i, lanes, FLOAT32), sum);
    }
    return vsum(sum);
}

static void prepare_row(const struct gated_delta_rule_args *a, int64_t row, int64_t width) {
    const int64_t n = a->key_size;
    float *queries = a->qkv + row * width, *keys = queries + a->key_heads * n;
    float *gates = a->gates + row * (2 * a->value_heads + a->key_heads), *betas = gates + a->value_heads;
    for (int64_t h = 0; h < a->key_heads; h++) {
        float *q = queries + h * n, *k = keys + h * n;
        scale_row(q, n, 1.0f / sqrtf(dot_row(q, q, n) + 1e-6f) / sqrtf((float)n));
        scale_row(k, n, 1.0f / sqrtf(dot_row(k, k, n) + 1e-6f));
        betas[a->value_heads + h] = dot_row(q, k, n);
    }
    for (int64_t h = 0; h < a->value_heads; h++) {
        const float x = a->a[row * a->a_stride + h] + a->dt_bias[h];
        gates[h] = exp_scalar(a->rate[h] * (x > 20.0f ? x : log1pf(exp_scalar(x))));
        betas[h] = 1.0f / (1.0f + exp_scalar(-a->b[row * a->b_stride + h]));
    }
}

// What a row makes of a state: decay * state + key * update
struct change {
    float decay;
    const float *key;
    vf update[2];
};

// Columns of a state after `change`, in `to`; sums over them of the row's key and query, in two chains by the key's parity, unless
// these are NULL. from: NULL for zeros. has_change 0: as they are, and then nothing is written.
INLINE void pass(const float *from, float *to, int64_t columns, int64_t n, int has_change, const struct change *change,
                 const float *key, const float *query, vf *key_sums, vf *query_sums, int vectors) {
    vf by_key[2][2] = {0}, by_query[2][2] = {0};
    for (int64_t i = 0; i < n; i++) {
        for (int v = 0; v < vectors; v++) {
            vf s = from ? vload(from + i * columns + v * VW) : (vf){0};
            if (has_change) {
                s = vfma(splat(change->key[i]), change->update[v], s * splat(change->decay));
                vstore(to + i * columns + v * VW, s);
            }
            if (key) {
                by_key[i & 1][v] = vfma(splat(key[i]), s, by_key[i & 1][v]);
                by_query[i & 1][v] = vfma(splat(query[i]), s, by_query[i & 1][v]);
            }
        }
    }
    if (!key) return;
    for (int v = 0; v < vectors; v++) {
        key_sums[v] = by_key[0][v] + by_key[1][v];
        query_sums[v] = by_query[0][v] + by_query[1][v];
    }
}

// `vectors` of the columns of granule `part` of value head h, from column `at` of it on
INLINE void scan(const struct gated_delta_rule_args *a, int64_t sequence, int64_t h, int64_t part, int64_t at, int64_t width,
                 float *scratch, int vectors) {
    const struct state_args *s = &a->state;
    const struct turn turn = turn_of(s, sequence);
    const int64_t n = a->key_size, parts = CEIL_DIV(a->value_size, a->columns), key_head = h / (a->value_heads / a->key_heads);
    const int64_t g = a->first + h * parts + part, column = part * a->columns + at;
    const int64_t kept = turn.batch_row * s->most;  // pending rows from here on
    float *updates = a->updates + (kept * a->value_heads + h) * a->value_size;
    const float *current = turn.is_new ? NULL : granule(s, s->read_pages, sequence, g) + at;
    float *target = granule(s, s->write_pages, sequence, g) + at;
    float *snapshot = turn.snapshot ? granule(s, s->snapshot_pages, sequence, g) + at : NULL;
    struct change change = {0};
    int has_change = 0;
    for (int64_t index = 0; index < turn.count; index++) {
        float *to = index == turn.committed ? target : snapshot && index == turn.snapshot ? snapshot : scratch;
        int64_t lanes[2];
        for (int v = 0; v < vectors; v++) lanes[v] = MAX(0, MIN(VW, a->value_size - column - v * VW));
        if (index < turn.pending) {
            if (has_change) pass(current, to, a->columns, n, 1, &change, NULL, NULL, NULL, NULL, vectors), current = to;
            change.decay = a->decays[(kept + index) * a->value_heads + h];
            change.key = a->keys + ((kept + index) * a->key_heads + key_head) * n;
            for (int v = 0; v < vectors; v++)
                change.update[v] =
                    load_part(updates + index * a->value_heads * a->value_size, column + v * VW, lanes[v], FLOAT32);
            has_change = 1;
            continue;
        }
        const int64_t row = turn.begin + index - turn.pending;
        const float *query = a->qkv + row * width + key_head * n, *key = query + a->key_heads * n;
        const float *value = a->qkv + row * width + 2 * a->key_heads * n + h * a->value_size;
        const float *gates = a->gates + row * (2 * a->value_heads + a->key_heads);
        const vf decay = splat(gates[h]), beta = splat(gates[a->value_heads + h]);
        const vf query_key = splat(gates[2 * a->value_heads + key_head]);
        vf by_key[2], by_query[2];
        if (has_change) {
            pass(current, to, a->columns, n, 1, &change, key, query, by_key, by_query, vectors);
            current = to;
        } else {
            pass(current, NULL, a->columns, n, 0, NULL, key, query, by_key, by_query, vectors);
        }
        for (int v = 0; v < vectors; v++) {
            const vf known = load_part(value, column + v * VW, lanes[v], FLOAT32);
            change.update[v] = beta * (known - decay * by_key[v]);
            const vf out = vfma(query_key, change.update[v], decay * by_query[v]);
            store_part(a->out + (row * a->value_heads + h) * a->value_size, column + v * VW, lanes[v], out, FLOAT32);
            if (index >= turn.committed)
                store_part(updates + (index - turn.committed) * a->value_heads * a->value_size, column + v * VW, lanes[v],
                           change.update[v], FLOAT32);
        }
        change.decay = gates[h], change.key = key;
        has_change = 1;
    }
    if (has_change && turn.committed == turn.count) pass(current, target, a->columns, n, 1, &change, NULL, NULL, NULL, NULL, vectors);
}

// Keys and decays of the rows that are pending now; what a step is padded with
static void keep_rows(const struct gated_delta_rule_args *a, int64_t sequence, int64_t width) {
    const struct turn turn = turn_of(&a->state, sequence);
    const int64_t keys = a->key_heads * a->key_size;
    for (int64_t index = turn.committed; index < turn.count; index++) {
        const int64_t row = turn.begin + index - turn.pending, to = turn.batch_row * a->state.most + index - turn.committed;
        memcpy(a->keys + to * keys, a->qkv + row * width + keys, (size_t)keys * 4);
        memcpy(a->decays + to * a->value_heads, a->gates + row * (2 * a->value_heads + a->key_heads), (size_t)a->value_heads * 4);
    }
    if (sequence == a->state.sequences - 1) {
        const int64_t end = a->state.query_start_loc[sequence + 1], size = a->value_heads * a->value_size;
        memset(a->out + end * size, 0, (size_t)((a->rows - end) * size) * 4);
    }
}

void op_gated_delta_rule(const struct gated_delta_rule_args *a, struct team_member *m) {
    const int64_t width = 2 * a->key_heads * a->key_size + a->value_heads * a->value_size;
    for (int64_t row, end; team_take_rows(m, a->rows, &row, &end); team_item_done(m))
        for (; row < end; row++) prepare_row(a, row, width);
    team_finish_phase(m, team_row_items(m, a->rows));
    const int64_t parts = CEIL_DIV(a->value_size, a->columns), of_sequence = a->value_heads * parts;
    const int64_t items = a->state.sequences * of_sequence;
    float *scratch = thread_scratch((size_t)(a->key_size * a->columns) * 4);
    for (int64_t item; (item = team_take_item(m, items)) >= 0; team_item_done(m)) {
        const int64_t sequence = item / of_sequence, h = item % of_sequence / parts, part = item % parts;
        for (int64_t at = 0; at < a->columns; at += 2 * VW) {
            if (a->columns - at >= 2 * VW) scan(a, sequence, h, part, at, width, scratch + at, 2);
            else scan(a, sequence, h, part, at, width, scratch + at, 1);
        }
    }
    team_finish_phase(m, items);
    for (int64_t sequence; (sequence = team_take_item(m, a->state.sequences)) >= 0; team_item_done(m))
        keep_rows(a, sequence, width);
    team_finish_phase(m, a->state.sequences);
}

// ---- norm
INLINE void gated_norm_head(const struct gated_norm_args *a, int64_t row, int64_t h, int dtype) {
    const int64_t n = a->width, at = (row * a->heads + h) * n, gate_at = row * a->stride + h * n;
    const float *x = a->x + at;
    const vf inverse = splat(inverse_rms(sum_of_squares(x, NULL, NULL, n, FLOAT32), n, (float)a->eps));
    for (int64_t i = 0; i < n; i += VW) {
        const int64_t lanes = MIN(VW, n - i);
        const vf y = load_part(x, i, lanes, FLOAT32) * inverse * load_part(a->weight, i, lanes, FLOAT32);
        const vf gate = vsilu(load_part(a->gate, gate_at + i, lanes, dtype), dtype);
        store_part(a->out, at + i, lanes, y * gate, dtype);
    }
}

void op_gated_norm(const struct gated_norm_args *a, struct team_member *m) {
    for (int64_t row, end; team_take_rows(m, a->rows, &row, &end); team_item_done(m)) {
        for (; row < end; row++) {
            for (int64_t h = 0; h < a->heads; h++) {
                if (a->dtype == BFLOAT16) gated_norm_head(a, row, h, BFLOAT16);
                else gated_norm_head(a, row, h, FLOAT32);
            }
        }
    }
    team_finish_phase(m, team_row_items(m, a->rows));
}

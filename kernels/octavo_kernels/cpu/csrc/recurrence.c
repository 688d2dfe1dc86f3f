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

// The row's own inputs of n channels from `first` on, to `own`, and what they give with those before
INLINE void conv_row(const struct causal_conv_args *a, float (*inputs)[CHANNELS], float *own, int64_t row, int64_t first, int64_t n,
                     int is_gated, int dtype) {
    const int64_t past = a->taps - 1;
    for (int64_t i = 0; i < n; i += VW) {
        const int64_t lanes = MIN(VW, n - i), at = row * a->stride + first + i, to = row * a->channels + first + i;
        vf x = load_part(a->x, is_gated ? at + 2 * a->channels : at, lanes, dtype);
        if (is_gated) x = x * load_part(a->x, at, lanes, dtype);
        vstore(own + i, x);
        vf sum = a->bias ? load_part(a->bias, first + i, lanes, FLOAT32) : (vf){0};
        for (int64_t tap = 0; tap <= past; tap++)
            sum = vfma(load_part(a->weight, tap * a->channels + first + i, lanes, FLOAT32), vload(inputs[tap] + i), sum);
        if (is_gated) store_part(a->out, to, lanes, sum * load_part(a->x, at + a->channels, lanes, dtype), dtype);
        else store_part(a->out, to, lanes, vsilu(sum, FLOAT32), FLOAT32);
    }
}

INLINE void conv_channels(const struct causal_conv_args *a, int64_t sequence, int64_t first, int64_t n, int is_gated, int dtype) {
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
        float *own = inputs[past];
        if (index < turn.pending) memcpy(own, pending + index * a->channels, (size_t)n * 4);
        else conv_row(a, inputs, own, turn.begin + index - turn.pending, first, n, is_gated, dtype);
        if (index >= turn.committed) memcpy(pending + (index - turn.committed) * a->channels, own, (size_t)n * 4);
        for (int64_t i = 0; i < past; i++) memcpy(inputs[i], inputs[i + 1], (size_t)n * 4);
    }
    if (!is_gated || sequence < a->state.sequences - 1) return;
    for (int64_t row = a->state.query_start_loc[sequence + 1]; row < a->rows; row++)  // what a step is padded with
        for (int64_t i = 0; i < n; i += VW) store_part(a->out, row * a->channels + first + i, MIN(VW, n - i), (vf){0}, dtype);
}

void op_causal_conv(const struct causal_conv_args *a, struct team_member *m) {
    const int64_t size = MIN(CHANNELS, a->piece), parts = CEIL_DIV(a->channels, size), items = a->state.sequences * parts;
    for (int64_t item; (item = team_take_item(m, items)) >= 0; team_item_done(m)) {
        const int64_t sequence = item / parts, first = item % parts * size, n = MIN(size, a->channels - first);
        if (a->is_gated && a->dtype == BFLOAT16) conv_channels(a, sequence, first, n, 1, BFLOAT16);
        else if (a->is_gated) conv_channels(a, sequence, first, n, 1, FLOAT32);
        else if (a->dtype == BFLOAT16) conv_channels(a, sequence, first, n, 0, BFLOAT16);
        else conv_channels(a, sequence, first, n, 0, FLOAT32);
    }
    team_finish_phase(m, items);
}

// ---- gated delta rule and state spaces
enum { DELTA, STATE_SPACE };

// Where in a row of x queries, keys and values begin
struct places {
    int64_t queries, keys, values, width;
};
INLINE struct places places_of(const struct recurrence_args *a, int kind) {
    const int64_t keys = a->key_heads * a->key_size, values = a->value_heads * a->value_size, width = 2 * keys + values;
    return kind == DELTA ? (struct places){0, keys, 2 * keys, width} : (struct places){values + keys, values, 0, width};
}

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

INLINE void prepare_row(const struct recurrence_args *a, int64_t row, int kind) {
    const int64_t n = a->key_size;
    const struct places at = places_of(a, kind);
    float *queries = a->x + row * at.width + at.queries, *keys = a->x + row * at.width + at.keys;
    float *gates = a->gates + row * (2 * a->value_heads + a->key_heads), *betas = gates + a->value_heads;
    for (int64_t h = 0; h < a->key_heads; h++) {
        float *q = queries + h * n, *k = keys + h * n;
        if (kind == DELTA) {
            scale_row(q, n, 1.0f / sqrtf(dot_row(q, q, n) + 1e-6f) / sqrtf((float)n));
            scale_row(k, n, 1.0f / sqrtf(dot_row(k, k, n) + 1e-6f));
        }
        betas[a->value_heads + h] = dot_row(q, k, n);
    }
    for (int64_t h = 0; h < a->value_heads; h++) {
        const float x = load_part(a->a, row * a->a_stride + h, 1, (int)a->dtype)[0] + a->dt_bias[h];
        float step = x > 20.0f ? x : log1pf(exp_scalar(x));
        if (kind == STATE_SPACE) step = step < (float)a->low ? (float)a->low : step > (float)a->high ? (float)a->high : step;
        gates[h] = exp_scalar(a->rate[h] * step);
        betas[h] = kind == DELTA ? 1.0f / (1.0f + exp_scalar(-a->b[row * a->b_stride + h])) : step;
    }
}

// What a row makes of a state: decay * state + key * update
struct change {
    float decay;
    const float *key;
    vf update[2];
};

// Columns of a state after `change`, in `to`; sums over them of the row's key and query, in two chains by the key's parity, where
// these are not NULL. from: NULL for zeros. has_change 0: as they are, and then nothing is written.
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
            if (key) by_key[i & 1][v] = vfma(splat(key[i]), s, by_key[i & 1][v]);
            if (query) by_query[i & 1][v] = vfma(splat(query[i]), s, by_query[i & 1][v]);
        }
    }
    for (int v = 0; v < vectors; v++) {
        if (key) key_sums[v] = by_key[0][v] + by_key[1][v];
        if (query) query_sums[v] = by_query[0][v] + by_query[1][v];
    }
}

// `vectors` of the columns of granule `part` of value head h, from column `at` of it on
INLINE void scan(const struct recurrence_args *a, int64_t sequence, int64_t h, int64_t part, int64_t at, float *scratch,
                 int vectors, int kind) {
    const struct state_args *s = &a->state;
    const struct places places = places_of(a, kind);
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
        const float *x = a->x + row * places.width, *query = x + places.queries + key_head * n;
        const float *key = x + places.keys + key_head * n, *value = x + places.values + h * a->value_size;
        const float *compared = kind == DELTA ? key : NULL;  // with the state
        const float *gates = a->gates + row * (2 * a->value_heads + a->key_heads);
        const vf decay = splat(gates[h]), beta = splat(gates[a->value_heads + h]);
        const vf query_key = splat(gates[2 * a->value_heads + key_head]);
        vf by_key[2], by_query[2];
        if (has_change) {
            pass(current, to, a->columns, n, 1, &change, compared, query, by_key, by_query, vectors);
            current = to;
        } else {
            pass(current, NULL, a->columns, n, 0, NULL, compared, query, by_key, by_query, vectors);
        }
        for (int v = 0; v < vectors; v++) {
            const vf known = load_part(value, column + v * VW, lanes[v], FLOAT32);
            change.update[v] = beta * (kind == DELTA ? known - decay * by_key[v] : known);
            vf out = vfma(query_key, change.update[v], decay * by_query[v]);
            if (kind == STATE_SPACE) out = vfma(splat(a->skip[h]), known, out);
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
static void keep_rows(const struct recurrence_args *a, int64_t sequence, struct places places) {
    const struct turn turn = turn_of(&a->state, sequence);
    const int64_t keys = a->key_heads * a->key_size;
    for (int64_t index = turn.committed; index < turn.count; index++) {
        const int64_t row = turn.begin + index - turn.pending, to = turn.batch_row * a->state.most + index - turn.committed;
        memcpy(a->keys + to * keys, a->x + row * places.width + places.keys, (size_t)keys * 4);
        memcpy(a->decays + to * a->value_heads, a->gates + row * (2 * a->value_heads + a->key_heads), (size_t)a->value_heads * 4);
    }
    if (sequence == a->state.sequences - 1) {
        const int64_t end = a->state.query_start_loc[sequence + 1], size = a->value_heads * a->value_size;
        memset(a->out + end * size, 0, (size_t)((a->rows - end) * size) * 4);
    }
}

INLINE void run_recurrence(const struct recurrence_args *a, struct team_member *m, int kind) {
    for (int64_t row, end; team_take_rows(m, a->rows, &row, &end); team_item_done(m))
        for (; row < end; row++) prepare_row(a, row, kind);
    team_finish_phase(m, team_row_items(m, a->rows));
    const int64_t parts = CEIL_DIV(a->value_size, a->columns), of_sequence = a->value_heads * parts;
    const int64_t items = a->state.sequences * of_sequence;
    float *scratch = thread_scratch((size_t)(a->key_size * a->columns) * 4);
    for (int64_t item; (item = team_take_item(m, items)) >= 0; team_item_done(m)) {
        const int64_t sequence = item / of_sequence, h = item % of_sequence / parts, part = item % parts;
        for (int64_t at = 0; at < a->columns; at += 2 * VW) {
            if (a->columns - at >= 2 * VW) scan(a, sequence, h, part, at, scratch + at, 2, kind);
            else scan(a, sequence, h, part, at, scratch + at, 1, kind);
        }
    }
    team_finish_phase(m, items);
    for (int64_t sequence; (sequence = team_take_item(m, a->state.sequences)) >= 0; team_item_done(m))
        keep_rows(a, sequence, places_of(a, kind));
    team_finish_phase(m, a->state.sequences);
}

void op_gated_delta_rule(const struct recurrence_args *a, struct team_member *m) { run_recurrence(a, m, DELTA); }
void op_state_space_scan(const struct recurrence_args *a, struct team_member *m) { run_recurrence(a, m, STATE_SPACE); }

// ---- norm
INLINE vf gated_input(const struct gated_norm_args *a, const float *x, int64_t gate_at, int64_t i, int64_t lanes, int dtype) {
    const vf y = load_part(x, i, lanes, FLOAT32);
    return a->gates_first ? y * vsilu(load_part(a->gate, gate_at + i, lanes, dtype), dtype) : y;
}

INLINE void gated_norm_head(const struct gated_norm_args *a, int64_t row, int64_t h, int dtype) {
    const int64_t n = a->width, at = (row * a->heads + h) * n, gate_at = row * a->stride + h * n;
    const float *x = a->x + at;
    vf inverse = splat(1.0f);
    if (a->weight && a->gates_first) {
        vf sum = {0};
        for (int64_t i = 0; i < n; i += VW) {
            const vf y = gated_input(a, x, gate_at, i, MIN(VW, n - i), dtype);
            sum = vfma(y, y, sum);
        }
        inverse = splat(inverse_rms(vsum(sum), n, (float)a->eps));
    } else if (a->weight) {
        inverse = splat(inverse_rms(sum_of_squares(x, NULL, NULL, n, FLOAT32), n, (float)a->eps));
    }
    for (int64_t i = 0; i < n; i += VW) {
        const int64_t lanes = MIN(VW, n - i);
        vf y = gated_input(a, x, gate_at, i, lanes, dtype);
        if (a->weight) y = y * inverse * load_part(a->weight, h * a->weight_stride + i, lanes, FLOAT32);
        if (!a->gates_first) y = y * vsilu(load_part(a->gate, gate_at + i, lanes, dtype), dtype);
        store_part(a->out, at + i, lanes, y, dtype);
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

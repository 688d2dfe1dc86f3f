// From the qkv projection to attention in one pass (per-head norm, rotary embedding, cache write); copies of KV blocks
#include <stdlib.h>

#include "attention_ops.h"
#include "int8_cache.h"
#include "simd.h"

// One head as float32 in `head`: normalised (rounded where the reference rounds), then rotated
INLINE void norm_and_rotate_head(const void *in, float *head, const void *norm, const float *cos_sin, int64_t size, int64_t rot,
                                 float eps, int dtype, int norm_dtype) {
    for (int64_t i = 0; i < size; i += VW) {
        int64_t n = MIN(VW, size - i);
        vstore(head + i, n == VW ? load_as(in, i, dtype) : load_part(in, i, n, dtype));  // `head` has room for whole vectors
    }
    if (norm) {
        vf sum = {0};
        for (int64_t i = 0; i < size; i += VW) {
            vf v = vload(head + i);
            sum = vfma(v, v, sum);
        }
        vf inverse = splat(1.0f / sqrtf(vsum(sum) / (float)size + eps));
        for (int64_t i = 0; i < size; i += VW) {
            int64_t n = MIN(VW, size - i);
            vf w = n == VW ? load_as(norm, i, norm_dtype) : load_part(norm, i, n, norm_dtype);
            vstore(head + i, round_as(round_as(vload(head + i) * inverse, norm_dtype) * w, dtype));
        }
    }
    if (cos_sin) {  // x1 * cos - x2 * sin and x2 * cos + x1 * sin, not fused, as torch computes it
        int64_t half = rot / 2, i = 0;
        float *first = head, *second = head + half;
        const float *cosine = cos_sin, *sine = cos_sin + half;
        for (; i + VW <= half; i += VW) {
            vf x1 = vload(first + i), x2 = vload(second + i), c = vload(cosine + i), s = vload(sine + i);
            vstore(first + i, x1 * c - x2 * s);
            vstore(second + i, x2 * c + x1 * s);
        }
        for (; i < half; i++) {
            float x1 = first[i], x2 = second[i];
            first[i] = x1 * cosine[i] - x2 * sine[i];
            second[i] = x2 * cosine[i] + x1 * sine[i];
        }
    }
}

INLINE void store_head(void *out, const float *head, int64_t size, int round_dtype, int dtype) {
    for (int64_t i = 0; i < size; i += VW) {
        int64_t n = MIN(VW, size - i);
        vf x = round_as(vload(head + i), round_dtype);  // to the activations' precision first, then to the cache's
        if (n == VW) store_as(out, i, x, dtype);
        else store_part(out, i, n, x, dtype);
    }
}

#if defined(__AVX512BF16__)
// Write the key and value of one position into their chunks of bfloat16 pairs (attention_ops.h). The store of a value must not touch the
// neighbouring position's bytes: another thread may be writing them.
INLINE void store_key_pairs(uint16_t *chunk, int64_t chunk_index, const float *head, int64_t size, int round_dtype) {
    for (int64_t i = 0; i < size; i += VW) {
        vh x = narrow(round_as(vload(head + i), round_dtype));
        for (int64_t j = 0; j < VW; j += 2) memcpy(chunk + (i + j) * CHUNK + 2 * chunk_index, (const uint16_t *)&x + j, 4);
    }
}
INLINE void store_value_pairs(uint16_t *chunk, int64_t chunk_index, const float *head, int64_t size, int round_dtype) {
    for (int64_t i = 0; i < size; i += VW) {
        vu x = (vu)round_bf16(round_as(vload(head + i), round_dtype));
        if (chunk_index % 2 == 0) x >>= 16;
        _mm512_mask_storeu_epi16(chunk + (chunk_index - chunk_index % 2) * size + 2 * i,
                                 chunk_index % 2 ? 0xaaaaaaaa : 0x55555555, (__m512i)x);
    }
}
#else
INLINE void store_key_pairs(uint16_t *chunk, int64_t chunk_index, const float *head, int64_t size, int round_dtype) {
    (void)chunk, (void)chunk_index, (void)head, (void)size, (void)round_dtype;
}
#define store_value_pairs store_key_pairs
#endif

// Write the key and value of one position into their int8 chunks (attention_ops.h). If they are not finite, attention to it gives NaN.
INLINE void store_key_int8(uint8_t *chunk, int64_t chunk_index, float *head, int64_t size, int round_dtype) {
    uint16_t *scales = (uint16_t *)(chunk + size * CHUNK);
    int8_t codes[KV_GROUP];
    for (int64_t g = 0; g < size / KV_GROUP; g++) {
        float *x = head + g * KV_GROUP;
        for (int64_t i = 0; i < KV_GROUP; i += VW) vstore(x + i, round_as(vload(x + i), round_dtype));
        hadamard(x);
        const uint16_t scale = bf16_round_up(int8_scale(x, KV_GROUP));
        int8_codes(x, KV_GROUP, bf16_value(scale), codes);
        for (int64_t i = 0; i < KV_GROUP; i += 4) {
            uint32_t four;
            memcpy(&four, codes + i, 4);
            four ^= 0x80808080u;
            memcpy(chunk + (g * KV_GROUP + i) * CHUNK + 4 * chunk_index, &four, 4);
        }
        // Keys and queries are multiplied with the matrix, which makes scores KV_GROUP times as large.
        scales[g * CHUNK + chunk_index] = bf16_round_up(bf16_value(scale) / KV_GROUP);
    }
}
INLINE void store_value_int8(int8_t *chunk, int64_t chunk_index, float *head, int64_t size, int round_dtype,
                             uint16_t *key_scale) {
    for (int64_t i = 0; i < size; i += VW) vstore(head + i, round_as(vload(head + i), round_dtype));
    const float scale = int8_scale(head, size);
    if (scale != scale) *key_scale = 0x7fc0;
    int8_t *to = chunk + chunk_index / 4 * 4 * size + chunk_index % 4;
    const vf inverse = splat(1.0f / scale);
    for (int64_t i = 0; i < size; i += VW) {
        vi code = vround(vload(head + i) * inverse);
#if defined(__AVX512F__)
        const int lane = (int)(chunk_index % 4);  // the other bytes belong to positions that another thread may write
        _mm512_mask_storeu_epi8(to - lane + 4 * i, 0x1111111111111111ull << lane, (__m512i)((vu)code << 8 * lane));
#else
        for (int j = 0; j < VW; j++) to[4 * (i + j)] = (int8_t)code[j];
#endif
    }
    memcpy(chunk + CHUNK * size + 4 * chunk_index, &scale, 4);
}

INLINE void rope_row(const struct rope_and_cache_args *a, int64_t row, float *head, int dtype, int kv_dtype) {
    int64_t size = a->head_size, width = dtype == BFLOAT16 ? 2 : 4, kv_row = kv_row_bytes(size, kv_dtype);
    int64_t heads = a->num_heads, kv_heads = a->num_kv_heads;
    const int norm_dtype = (int)a->norm_dtype;
    const char *in = (const char *)a->qkv + row * (heads + 2 * kv_heads) * size * width;
    int64_t position = MAX(0, MIN(a->positions[row], a->max_position - 1));
    const float *table = a->cos_sin ? a->cos_sin + position * a->rot_dim : NULL;
    int64_t slot = a->slots[row], block = slot / a->block_size, offset = slot % a->block_size;
    const int in_chunks = kv_dtype == BF16_PAIRS || kv_dtype == INT8;
    if (in_chunks && slot >= 0)  // a key is spread over its whole chunk: prefetch all of it
        for (int64_t h = 0; h < kv_heads; h++) {
            const char *chunk = (const char *)a->kv_cache + block * a->block_stride +
                                (h * a->block_size + offset / CHUNK * CHUNK) * kv_row;
            for (int64_t i = 0; i < CHUNK * kv_row; i += 64) __builtin_prefetch(chunk + i, 1, 3);
        }
    for (int64_t h = 0; h < heads; h++) {
        norm_and_rotate_head(in + h * size * width, head, a->q_norm, table, size, a->rot_dim, (float)a->eps, dtype, norm_dtype);
        store_head((char *)a->q + (row * heads + h) * size * width, head, size, FLOAT32, dtype);
    }
    if (slot < 0) return;
    for (int64_t h = 0; h < kv_heads; h++) {
        char *key = (char *)a->kv_cache + block * a->block_stride + (h * a->block_size + offset) * kv_row;
        char *value = key + a->value_offset;
        int64_t chunk_index = offset % CHUNK, before = chunk_index * kv_row;
        norm_and_rotate_head(in + (heads + h) * size * width, head, a->k_norm, table, size, a->rot_dim, (float)a->eps, dtype,
                             norm_dtype);
        if (kv_dtype == INT8) store_key_int8((uint8_t *)(key - before), chunk_index, head, size, dtype);
        else if (kv_dtype == BF16_PAIRS) store_key_pairs((uint16_t *)(key - before), chunk_index, head, size, dtype);
        else store_head(key, head, size, dtype, kv_dtype);
        norm_and_rotate_head(in + (heads + kv_heads + h) * size * width, head, NULL, NULL, size, 0, 0.0f, dtype, dtype);
        uint16_t *key_scale = (uint16_t *)(key - before + size * CHUNK) + chunk_index;
        if (kv_dtype == INT8) store_value_int8((int8_t *)(value - before), chunk_index, head, size, dtype, key_scale);
        else if (kv_dtype == BF16_PAIRS) store_value_pairs((uint16_t *)(value - before), chunk_index, head, size, dtype);
        else store_head(value, head, size, dtype, kv_dtype);
    }
}

void op_rope_and_cache(const struct rope_and_cache_args *a, struct team_member *m) {
    float *head = thread_scratch((size_t)(a->head_size + VW) * 4);
    for (int64_t row, end; team_take_rows(m, a->rows, &row, &end); team_item_done(m)) {
        for (; row < end; row++) {
            if (a->kv_dtype == INT8 && a->dtype == BFLOAT16) rope_row(a, row, head, BFLOAT16, INT8);
            else if (a->kv_dtype == INT8) rope_row(a, row, head, FLOAT32, INT8);
            else if (a->kv_dtype == BF16_PAIRS && a->dtype == BFLOAT16) rope_row(a, row, head, BFLOAT16, BF16_PAIRS);
            else if (a->kv_dtype == BF16_PAIRS) rope_row(a, row, head, FLOAT32, BF16_PAIRS);
            else if (a->dtype == BFLOAT16 && a->kv_dtype == BFLOAT16) rope_row(a, row, head, BFLOAT16, BFLOAT16);
            else if (a->dtype == BFLOAT16) rope_row(a, row, head, BFLOAT16, FLOAT32);
            else if (a->kv_dtype == BFLOAT16) rope_row(a, row, head, FLOAT32, BFLOAT16);
            else rope_row(a, row, head, FLOAT32, FLOAT32);
        }
    }
    team_finish_phase(m, team_row_items(m, a->rows));
}

INLINE void latent_row(const struct latent_cache_args *a, int64_t row, float *head, int dtype, int kv_dtype) {
    const int64_t width = dtype == BFLOAT16 ? 2 : 4, kv_width = kv_dtype == BFLOAT16 ? 2 : 4, latent = a->latent_size,
                  rot = a->rot_dim, slot = a->slots[row];
    const int64_t position = MAX(0, MIN(a->positions[row], a->max_position - 1));
    const float *table = a->cos_sin + position * rot;
    for (int64_t h = 0; h < a->num_heads; h++) {
        const char *in = (const char *)a->q + ((row * a->num_heads + h + 1) * a->q_size - rot) * width;
        char *out = (char *)a->queries + ((row * a->num_heads + h) * (latent + rot) + latent) * width;
        norm_and_rotate_head(in, head, NULL, table, rot, rot, 0.0f, dtype, dtype);
        store_head(out, head, rot, FLOAT32, dtype);
    }
    if (slot < 0) return;
    const char *in = (const char *)a->latent + row * (latent + rot) * width;
    char *to = (char *)a->kv_cache + slot / a->block_size * a->block_stride +
               slot % a->block_size * (latent + rot) * kv_width;
    norm_and_rotate_head(in, head, a->norm, NULL, latent, 0, (float)a->eps, dtype, (int)a->norm_dtype);
    store_head(to, head, latent, dtype, kv_dtype);
    norm_and_rotate_head(in + latent * width, head, NULL, table, rot, rot, 0.0f, dtype, dtype);
    store_head(to + latent * kv_width, head, rot, dtype, kv_dtype);
}

void op_latent_cache(const struct latent_cache_args *a, struct team_member *m) {
    float *head = thread_scratch((size_t)(MAX(a->latent_size, a->rot_dim) + VW) * 4);
    for (int64_t row, end; team_take_rows(m, a->rows, &row, &end); team_item_done(m)) {
        for (; row < end; row++) {
            if (a->dtype == BFLOAT16 && a->kv_dtype == BFLOAT16) latent_row(a, row, head, BFLOAT16, BFLOAT16);
            else if (a->dtype == BFLOAT16) latent_row(a, row, head, BFLOAT16, FLOAT32);
            else if (a->kv_dtype == BFLOAT16) latent_row(a, row, head, FLOAT32, BFLOAT16);
            else latent_row(a, row, head, FLOAT32, FLOAT32);
        }
    }
    team_finish_phase(m, team_row_items(m, a->rows));
}

void op_rope(const struct rope_args *a, struct team_member *m) {
    const int64_t width = a->dtype == BFLOAT16 ? 2 : 4, size = a->head_size;
    float *head = thread_scratch((size_t)(size + VW) * 4);
    for (int64_t row, end; team_take_rows(m, a->rows, &row, &end); team_item_done(m)) {
        for (; row < end; row++) {
            const float *table = a->cos_sin + MAX(0, MIN(a->positions[row], a->max_position - 1)) * a->rot_dim;
            for (int64_t h = 0; h < a->num_heads; h++) {
                char *x = (char *)a->x + (row * a->stride + h * size) * width;
                norm_and_rotate_head(x, head, NULL, table, size, a->rot_dim, 0.0f, (int)a->dtype, FLOAT32);
                store_head(x, head, size, FLOAT32, (int)a->dtype);
            }
        }
    }
    team_finish_phase(m, team_row_items(m, a->rows));
}

// An item is the same part of each block. Within it, all sources are read before anything is written.
#define COPY_PART (1 << 14)
void op_copy_blocks(const struct copy_blocks_args *a, struct team_member *m) {
    const int64_t parts = CEIL_DIV(a->block_bytes, COPY_PART);
    char *held = thread_scratch((size_t)(a->num_pairs * MIN(COPY_PART, a->block_bytes)));
    for (int64_t part; (part = team_take_item(m, parts)) >= 0; team_item_done(m)) {
        char *base = a->blocks + part * COPY_PART;
        const int64_t length = MIN(COPY_PART, a->block_bytes - part * COPY_PART);
        for (int64_t i = 0; i < a->num_pairs; i++)
            memcpy(held + i * length, base + a->pairs[2 * i] * a->block_bytes, (size_t)length);
        for (int64_t i = 0; i < a->num_pairs; i++)
            memcpy(base + a->pairs[2 * i + 1] * a->block_bytes, held + i * length, (size_t)length);
    }
    team_finish_phase(m, parts);
}

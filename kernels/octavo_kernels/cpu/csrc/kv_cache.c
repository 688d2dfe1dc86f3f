// Everything between the qkv projection and attention in one pass (per-head norm, rotation, cache write); block copies.
#include <stdlib.h>

#include "int8_cache.h"
#include "ops.h"
#include "simd.h"

INLINE float get(const void *p, int64_t i, int dtype) {
    if (dtype == FLOAT32) return ((const float *)p)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)p)[i] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// One head, read into `head` as float32: normed (rounded where the reference rounds), then rotated.
INLINE void prepare_head(const void *in, float *head, const void *norm, const float *cos_sin, int64_t size, int64_t rot,
                         float eps, int dtype) {
    for (int64_t i = 0; i < size; i += VW) {
        int64_t n = MIN(VW, size - i);
        vstore(head + i, n == VW ? load_as(in, i, dtype) : load_part(in, i, n, dtype));  // head has room for whole vectors
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
            vf w = n == VW ? load_as(norm, i, dtype) : load_part(norm, i, n, dtype);
            vstore(head + i, round_as(round_as(vload(head + i) * inverse, dtype) * w, dtype));
        }
    }
    if (cos_sin) {  // x1 * cos - x2 * sin and x2 * cos + x1 * sin, unfused, as torch computes it
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

INLINE void put_head(void *out, const float *head, int64_t size, int through, int dtype) {
    for (int64_t i = 0; i < size; i += VW) {
        int64_t n = MIN(VW, size - i);
        vf x = round_as(vload(head + i), through);  // a value has the activations' precision before it has the cache's
        if (n == VW) store_as(out, i, x, dtype);
        else store_part(out, i, n, x, dtype);
    }
}

#if defined(__AVX512BF16__)
// One position's key and value into their chunks of pairs (ops.h). A value's stores leave the bytes of its neighbour alone:
// another thread may be writing them.
INLINE void put_key_pairs(uint16_t *chunk, int64_t place, const float *head, int64_t size, int through) {
    for (int64_t i = 0; i < size; i += VW) {
        vh x = narrow(round_as(vload(head + i), through));
        for (int64_t j = 0; j < VW; j += 2) memcpy(chunk + (i + j) * CHUNK + 2 * place, (const uint16_t *)&x + j, 4);
    }
}
INLINE void put_value_pairs(uint16_t *chunk, int64_t place, const float *head, int64_t size, int through) {
    for (int64_t i = 0; i < size; i += VW) {
        vu x = (vu)round_bf16(round_as(vload(head + i), through));
        if (place % 2 == 0) x >>= 16;
        _mm512_mask_storeu_epi16(chunk + (place - place % 2) * size + 2 * i, place % 2 ? 0xaaaaaaaa : 0x55555555, (__m512i)x);
    }
}
#else
INLINE void put_key_pairs(uint16_t *chunk, int64_t place, const float *head, int64_t size, int through) {
    (void)chunk, (void)place, (void)head, (void)size, (void)through;
}
#define put_value_pairs put_key_pairs
#endif

// One position's key and value into their chunks of int8 (ops.h). What is not finite spoils the position, visibly: whoever
// sees it gets NaN.
INLINE void put_key_int8(uint8_t *chunk, int64_t place, float *head, int64_t size, int through) {
    uint16_t *scales = (uint16_t *)(chunk + size * CHUNK);
    int8_t codes[GROUP_K];
    for (int64_t g = 0; g < size / GROUP_K; g++) {
        float *x = head + g * GROUP_K;
        for (int64_t i = 0; i < GROUP_K; i += VW) vstore(x + i, round_as(vload(x + i), through));
        hadamard(x);
        const uint16_t scale = bf16_above(int8_scale(x, GROUP_K));
        int8_codes(x, GROUP_K, bf16_value(scale), codes);
        for (int64_t i = 0; i < GROUP_K; i += 4) {
            uint32_t four;
            memcpy(&four, codes + i, 4);
            four ^= 0x80808080u;
            memcpy(chunk + (g * GROUP_K + i) * CHUNK + 4 * place, &four, 4);
        }
        scales[g * CHUNK + place] = bf16_above(bf16_value(scale) / GROUP_K);  // the matrix twice is GROUP_K times as much
    }
}
INLINE void put_value_int8(int8_t *chunk, int64_t place, float *head, int64_t size, int through, uint16_t *key_scale) {
    for (int64_t i = 0; i < size; i += VW) vstore(head + i, round_as(vload(head + i), through));
    const float scale = int8_scale(head, size);
    if (scale != scale) *key_scale = 0x7fc0;
    int8_t *to = chunk + place / 4 * 4 * size + place % 4;
    const vf inverse = splat(1.0f / scale);
    for (int64_t i = 0; i < size; i += VW) {
        vi code = vround(vload(head + i) * inverse);
#if defined(__AVX512F__)
        const int lane = (int)(place % 4);  // the bytes between are other positions', which another thread may be writing
        _mm512_mask_storeu_epi8(to - lane + 4 * i, 0x1111111111111111ull << lane, (__m512i)((vu)code << 8 * lane));
#else
        for (int j = 0; j < VW; j++) to[4 * (i + j)] = (int8_t)code[j];
#endif
    }
    memcpy(chunk + CHUNK * size + 4 * place, &scale, 4);
}

INLINE void rope_row(const struct rope_and_cache_args *a, int64_t row, float *head, int dtype, int kv_dtype) {
    int64_t size = a->head_size, width = dtype == BFLOAT16 ? 2 : 4, kv_row = kv_row_bytes(size, kv_dtype);
    int64_t heads = a->num_heads, kv_heads = a->num_kv_heads;
    const char *in = (const char *)a->qkv + row * (heads + 2 * kv_heads) * size * width;
    int64_t position = MAX(0, MIN(a->positions[row], a->max_position - 1));
    const float *table = a->cos_sin ? a->cos_sin + position * a->rot_dim : NULL;
    int64_t slot = a->slots[row], block = slot / a->block_size, offset = slot % a->block_size;
    const int in_chunks = kv_dtype == PAIRS || kv_dtype == INT8;
    if (in_chunks && slot >= 0)  // a key is spread over its whole chunk: the lines are on their way meanwhile
        for (int64_t h = 0; h < kv_heads; h++) {
            const char *chunk = (const char *)a->kv_cache + ((block * kv_heads + h) * a->block_size + offset / CHUNK * CHUNK) * kv_row;
            for (int64_t i = 0; i < CHUNK * kv_row; i += 64) __builtin_prefetch(chunk + i, 1, 3);
        }
    for (int64_t h = 0; h < heads; h++) {
        prepare_head(in + h * size * width, head, a->q_norm, table, size, a->rot_dim, (float)a->eps, dtype);
        put_head((char *)a->q + (row * heads + h) * size * width, head, size, FLOAT32, dtype);
    }
    if (slot < 0) return;
    for (int64_t h = 0; h < kv_heads; h++) {
        char *key = (char *)a->kv_cache + (((block * kv_heads + h) * a->block_size) + offset) * kv_row;
        char *value = key + a->num_blocks * kv_heads * a->block_size * kv_row;
        int64_t place = offset % CHUNK, before = place * kv_row;
        prepare_head(in + (heads + h) * size * width, head, a->k_norm, table, size, a->rot_dim, (float)a->eps, dtype);
        if (kv_dtype == INT8) put_key_int8((uint8_t *)(key - before), place, head, size, dtype);
        else if (kv_dtype == PAIRS) put_key_pairs((uint16_t *)(key - before), place, head, size, dtype);
        else put_head(key, head, size, dtype, kv_dtype);
        prepare_head(in + (heads + kv_heads + h) * size * width, head, NULL, NULL, size, 0, 0.0f, dtype);
        uint16_t *key_scale = (uint16_t *)(key - before + size * CHUNK) + place;
        if (kv_dtype == INT8) put_value_int8((int8_t *)(value - before), place, head, size, dtype, key_scale);
        else if (kv_dtype == PAIRS) put_value_pairs((uint16_t *)(value - before), place, head, size, dtype);
        else put_head(value, head, size, dtype, kv_dtype);
    }
}

void op_rope_and_cache(const struct rope_and_cache_args *a, struct member *m) {
    float *head = scratch((size_t)(a->head_size + VW) * 4);
    for (int64_t row, end; team_take_rows(m, a->rows, &row, &end); team_done(m)) {
        for (; row < end; row++) {
            if (a->kv_dtype == INT8 && a->dtype == BFLOAT16) rope_row(a, row, head, BFLOAT16, INT8);
            else if (a->kv_dtype == INT8) rope_row(a, row, head, FLOAT32, INT8);
            else if (a->kv_dtype == PAIRS && a->dtype == BFLOAT16) rope_row(a, row, head, BFLOAT16, PAIRS);
            else if (a->kv_dtype == PAIRS) rope_row(a, row, head, FLOAT32, PAIRS);
            else if (a->dtype == BFLOAT16 && a->kv_dtype == BFLOAT16) rope_row(a, row, head, BFLOAT16, BFLOAT16);
            else if (a->dtype == BFLOAT16) rope_row(a, row, head, BFLOAT16, FLOAT32);
            else if (a->kv_dtype == BFLOAT16) rope_row(a, row, head, FLOAT32, BFLOAT16);
            else rope_row(a, row, head, FLOAT32, FLOAT32);
        }
    }
    team_wait(m, team_row_items(m, a->rows));
}

// Halves (keys, values) of layers are shared out; within one, all sources are read before anything is written.
void op_copy_blocks(const struct copy_blocks_args *a, struct member *m) {
    char *held = scratch((size_t)(a->num_pairs * a->block_bytes));
    for (int64_t half; (half = team_take(m, 2 * a->count)) >= 0; team_done(m)) {
        char *base = (char *)a->caches[half / 2] + (half % 2) * a->num_blocks * a->block_bytes;
        for (int64_t i = 0; i < a->num_pairs; i++)
            memcpy(held + i * a->block_bytes, base + a->pairs[2 * i] * a->block_bytes, (size_t)a->block_bytes);
        for (int64_t i = 0; i < a->num_pairs; i++)
            memcpy(base + a->pairs[2 * i + 1] * a->block_bytes, held + i * a->block_bytes, (size_t)a->block_bytes);
    }
    team_wait(m, 2 * a->count);
}

// Attention over an int8 cache (int8_cache.h). Both products are integer products, so a tile takes half the memory of a
// bfloat16 one and nothing has to be unpacked.
//
// Scores are sums of KV_GROUP exact integer products, scaled, in order of the groups. The factor of a value's integers is
// weight * scale, as an integer of 14 bits in two terms of 7. To bound it, softmax is computed relative to the largest of score
// + log2(scale): the largest *contribution* is then near 1. An attention sink, which has a large weight and a value near 0,
// takes no precision from the others.
#pragma once
#include "attention_tile.h"
#include "dot.h"
#include "int8_cache.h"

#define WEIGHT_STEPS 8191.0f  // per unit of a contribution, which is in [0, 2): below 2^14

// A row of queries in `depth` floats: codes [depth], then for each group a scale and the initial sum of its products
INLINE int8_t *query_codes(const float *q) { return (int8_t *)q; }
INLINE float *query_scales(const float *q, int64_t depth) { return (float *)((char *)q + depth); }
INLINE int32_t *query_starts(const float *q, int64_t depth) { return (int32_t *)((char *)q + 2 * depth); }

// Quantise x [head_size], which is overwritten, to the row `q`
INLINE void int8_query(float *x, int64_t head_size, float *q) {
    for (int64_t g = 0; g < head_size / KV_GROUP; g++) {
        hadamard(x + g * KV_GROUP);
        float scale = int8_scale(x + g * KV_GROUP, KV_GROUP);
        int32_t sum = int8_codes(x + g * KV_GROUP, KV_GROUP, scale, query_codes(q) + g * KV_GROUP);
        query_scales(q, head_size)[g] = scale;
        query_starts(q, head_size)[g] = UNSIGNED_CODES8 ? -128 * sum : 0;
    }
}

// s[mr][TILE] = q . keys
INLINE void int8_scores(const float *q, int64_t head_size, const void *const *keys, float *s, const struct prefetch *prefetch,
                        const int few_rows, const int mr) {
    if (few_rows) prefetch_scales(prefetch, head_size / 4);
    for (int c = 0; c < TILE; c += NV * VW) {
        const uint8_t *codes[NV];
#pragma GCC unroll 4
        for (int n = 0; n < NV; n++) codes[n] = (const uint8_t *)keys[(c + n * VW) / CHUNK] + (c + n * VW) % CHUNK * 4;
        vf total[MR][NV] = {0};
        for (int64_t g = 0; g < head_size / KV_GROUP; g++) {
            vi sum[MR][NV];
#pragma GCC unroll 6
            for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
                for (int n = 0; n < NV; n++) sum[i][n] = splat_int(query_starts(q + i * head_size, head_size)[g]);
#pragma GCC unroll 8
            for (int d = 0; d < KV_GROUP / 4; d++) {
                if (few_rows && c == 0) prefetch_with_scores(prefetch, g * KV_GROUP / 4 + d);
                vbytes k[NV];
#pragma GCC unroll 4
                for (int n = 0; n < NV; n++) k[n] = to_signed(load_bytes(codes[n] + (g * KV_GROUP / 4 + d) * CHUNK * 4));
#pragma GCC unroll 6
                for (int i = 0; i < mr; i++) {
                    vi x = splat_four(query_codes(q + i * head_size) + g * KV_GROUP + d * 4);
#pragma GCC unroll 4
                    for (int n = 0; n < NV; n++) sum[i][n] = dot4_wide(sum[i][n], k[n], x);
                }
            }
#pragma GCC unroll 4
            for (int n = 0; n < NV; n++) {
                int at = (c + n * VW) % CHUNK;
                const uint16_t *scales = (const uint16_t *)((const char *)keys[(c + n * VW) / CHUNK] + head_size * CHUNK);
                vf scale = load_as(scales + g * CHUNK, at, BFLOAT16);
#pragma GCC unroll 6
                for (int i = 0; i < mr; i++) {
                    vf part = __builtin_convertvector(sum[i][n], vf) * splat(query_scales(q + i * head_size, head_size)[g]);
                    total[i][n] = vfma(part, scale, total[i][n]);
                }
            }
        }
#pragma GCC unroll 6
        for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
            for (int n = 0; n < NV; n++) vstore(s + i * TILE + c + n * VW, total[i][n]);
    }
}

// a in lanes j where bit `from` + j of `bits` is set, else b
INLINE vf select_by_bits(uint64_t bits, int from, vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_mask_mov_ps((__m512)b, (__mmask16)(bits >> from), (__m512)a);
#else
    vi mask;
    for (int j = 0; j < VW; j++) mask[j] = -(int32_t)(bits >> (from + j) & 1);
    return vselect(mask, a, b);
#endif
}

// Split 4 * VW integers of 14 bits into bytes, the upper and the lower 7 bits. Groups of four stay together, as the products
// take them; packed_at() tells their offsets.
INLINE void pack_steps(const vi *steps, uint8_t *high, uint8_t *low) {
#if defined(__AVX512F__)
    __m512i a = _mm512_packus_epi32((__m512i)steps[0], (__m512i)steps[1]);
    __m512i b = _mm512_packus_epi32((__m512i)steps[2], (__m512i)steps[3]);
    _mm512_storeu_si512(high, _mm512_packus_epi16(_mm512_srli_epi16(a, 7), _mm512_srli_epi16(b, 7)));
    const __m512i mask = _mm512_set1_epi16(127);
    _mm512_storeu_si512(low, _mm512_packus_epi16(_mm512_and_si512(a, mask), _mm512_and_si512(b, mask)));
#elif defined(__AVX2__)
    __m256i a = _mm256_packus_epi32((__m256i)steps[0], (__m256i)steps[1]);
    __m256i b = _mm256_packus_epi32((__m256i)steps[2], (__m256i)steps[3]);
    _mm256_storeu_si256((__m256i *)high, _mm256_packus_epi16(_mm256_srli_epi16(a, 7), _mm256_srli_epi16(b, 7)));
    const __m256i mask = _mm256_set1_epi16(127);
    _mm256_storeu_si256((__m256i *)low, _mm256_packus_epi16(_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)));
#else
    for (int n = 0; n < 4; n++) {
        store_int8((int8_t *)high + n * VW, steps[n] >> 7);
        store_int8((int8_t *)low + n * VW, steps[n] & 127);
    }
#endif
}
// Byte offset of positions 4 * j .. 4 * j + 4
INLINE int64_t packed_at(int64_t j) {
    const int64_t lanes = VW / 4;
    return j / VW * (4 * VW) + (j % VW % lanes * 4 + j % VW / lanes) * 4;
}

// Maxima of rows v[count], which are overwritten: that of row j in lane j. count is 4, or 8 where VW is 16.
INLINE vf vmax_rows(vf *v, const int count) {
#pragma GCC unroll 4
    for (int half = count / 2; half > 0; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) v[i] = vmax(INTERLEAVE(v[i], v[i + half], LOW), INTERLEAVE(v[i], v[i + half], HIGH));
#if VW == 16
    v[0] = vmax(v[0], __builtin_shufflevector(v[0], v[0], 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    if (count == 4) v[0] = vmax(v[0], __builtin_shufflevector(v[0], v[0], 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3));
#elif VW == 8
    v[0] = vmax(v[0], __builtin_shufflevector(v[0], v[0], 4, 5, 6, 7, 0, 1, 2, 3));
#endif
    return v[0];
}

#define ROUND_UP(n) (CEIL_DIV(n, VW) * VW)
// Online softmax of mr rows: turns scores into contributions p[mr][2 terms][TILE], with m in units of log2 and l for each lane,
// l[mr][VW]; `rescale` is the factor for a row's acc. Row i attends to the positions in visible[i]. The maxima of all rows are
// computed together and before all weights, so that their latencies overlap.
INLINE void int8_softmax_tile(float scaling, float softcap, float *s, const void *const *values, int64_t head_size, uint8_t *p,
                              const uint64_t *visible, float *m, float *l, float *rescale, const int mr) {
    const vf log2e = splat(1.44269504088896341f), scale = softcap > 0 ? log2e : splat(scaling) * log2e;
    vf size[TILE / VW], exponent[TILE / VW], top[ROUND_UP(MR)];
    const int lanes = mr > 4 && VW == 16 ? 8 : 4;
    float highest[ROUND_UP(MR)] __attribute__((aligned(64)));
#pragma GCC unroll 4
    for (int n = 0; n < TILE / VW; n++) {
        size[n] = vload((const float *)((const char *)values[n * VW / CHUNK] + head_size * CHUNK) + n * VW % CHUNK);
        exponent[n] = __builtin_convertvector(((vi)size[n] >> 23) - 127, vf);  // log2 of the scale, rounded down
        size[n] *= splat(WEIGHT_STEPS);
    }
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) {
        top[i] = splat(-INFINITY);
#pragma GCC unroll 4
        for (int n = 0; n < TILE / VW; n++) {
            vf x = vload(s + i * TILE + n * VW);
            if (softcap > 0) {
                x = splat(softcap) * vtanh(x * splat(scaling) / splat(softcap));
                vstore(s + i * TILE + n * VW, x);
            }
            x = vfma(x, scale, exponent[n]);
            if (~visible[i]) x = select_by_bits(visible[i], n * VW, x, splat(-INFINITY));
            top[i] = vmax(top[i], x);
        }
    }
#pragma GCC unroll 2
    for (int i = 0; i < mr; i += lanes) {
#pragma GCC unroll 8
        for (int r = MAX(i, mr); r < i + lanes; r++) top[r] = top[i];
        vf before = vload(m + i), after = vmax(vmax_rows(top + i, lanes), before), base = vmax(after, splat(-FLT_MAX));
        vstore(highest + i, base);  // no visible position yet: weights become 2^-inf = 0
        vstore(rescale + i, vexp2(before - base));
        store_part(m, i, MIN(mr - i, lanes), after, FLOAT32);
    }
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) {
        const vf base = splat(highest[i]);
        vf sum = {0};
        vi steps[TILE / VW];
#pragma GCC unroll 4
        for (int n = 0; n < TILE / VW; n++) {
            vf weight = vexp2(vfma(vload(s + i * TILE + n * VW), scale, -base));
            if (~visible[i]) weight = select_by_bits(visible[i], n * VW, weight, splat(0.0f));
            vf contribution = weight * size[n];
            sum += weight;
            if (~visible[i]) contribution = select_by_bits(visible[i], n * VW, contribution, splat(0.0f));  // scales may be NaN
            steps[n] = vround(contribution);
        }
#pragma GCC unroll 4
        for (int n = 0; n < TILE / VW; n += 4)
            pack_steps(steps + n, p + i * 2 * TILE + n * VW, p + (i * 2 + 1) * TILE + n * VW);
        vstore(l + i * VW, vfma(vload(l + i * VW), splat(rescale[i]), sum));
    }
}

// acc[mr][nv vectors] = acc * rescale[mr] + contributions . values of chunks [first, last)
INLINE void int8_accumulate_pv_columns(float *acc, int64_t head_size, const float *rescale, const uint8_t *p,
                                       const void *const *values, int64_t d, int64_t first, int64_t last,
                                       const struct prefetch *prefetch, const int few_rows, const int mr, const int nv) {
    const int fetching = few_rows && d % TILE == 0;  // 4 positions a step: as many steps as lines of TILE elements
    vi high[MR][NV] = {0}, low[MR][NV] = {0};
    for (int64_t c = first; c < last; c++) {
        const uint8_t *chunk = (const uint8_t *)values[c] + d * 4;
#pragma GCC unroll 4
        for (int64_t j = 0; j < CHUNK / 4; j++) {
            const int64_t at = packed_at(c * CHUNK / 4 + j);
            if (fetching) prefetch_with_values(prefetch, d / 4 + c * CHUNK / 4 + j);
            vbytes v[NV];
#pragma GCC unroll 4
            for (int n = 0; n < nv; n++) v[n] = load_bytes(chunk + j * head_size * 4 + n * VW * 4);
#pragma GCC unroll 6
            for (int i = 0; i < mr; i++) {
                vi x = splat_four((const int8_t *)p + i * 2 * TILE + at),
                   y = splat_four((const int8_t *)p + (i * 2 + 1) * TILE + at);
#pragma GCC unroll 4
                for (int n = 0; n < nv; n++) high[i][n] = dot4(high[i][n], (vbytes)x, (vi)v[n]);
#pragma GCC unroll 4
                for (int n = 0; n < nv; n++) low[i][n] = dot4(low[i][n], (vbytes)y, (vi)v[n]);
            }
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
        for (int n = 0; n < nv; n++) {
            float *to = acc + i * head_size + d + n * VW;
            vf sum = __builtin_convertvector((high[i][n] << 7) + low[i][n], vf);
            vstore(to, vfma(sum, splat(1.0f / WEIGHT_STEPS), vload(to) * splat(rescale[i])));
        }
}

INLINE void int8_accumulate_pv(float *acc, int64_t head_size, const float *rescale, const uint8_t *p, const void *const *values,
                               int64_t from, int64_t to, const struct prefetch *prefetch, const int few_rows, const int mr) {
    int64_t d = 0, first = from / CHUNK, last = CEIL_DIV(to, CHUNK);
    if (VW == 16 && mr <= 3)  // two sums each take all registers
        for (; d + 4 * VW <= head_size; d += 4 * VW)
            int8_accumulate_pv_columns(acc, head_size, rescale, p, values, d, first, last, prefetch, few_rows, mr, 4);
    for (; d < head_size; d += 2 * VW)
        int8_accumulate_pv_columns(acc, head_size, rescale, p, values, d, first, last, prefetch, few_rows, mr, 2);
}

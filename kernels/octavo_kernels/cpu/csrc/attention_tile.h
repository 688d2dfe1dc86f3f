// One tile of attention: TILE positions of a sequence against a few rows of queries, in registers and the first-level cache.
//
// There are three kinds: keys and values in float32, in bfloat16, or as BF16_PAIRS: bfloat16 on a machine that multiplies pairs
// of them. Then queries and weights are rounded to bfloat16 too, as in attention kernels on GPUs, whether the cache is laid out
// in pairs (attention_ops.h) or its rows are packed into pairs first.
#pragma once
#include <float.h>

#include "attention_ops.h"
#include "simd.h"

#define TILE 64
#define CHUNKS (TILE / CHUNK)

// Prefetching of the next tile, line by line while this one is computed. Pages lie anywhere, so the hardware cannot predict
// them, and requesting all lines at once would stall the core for the whole latency of memory.
struct prefetch {
    const void *const *rows;  // addresses of keys, then of values: rows or chunks
    int64_t row, line, end, row_bytes;
    int chunks_with_scores;  // with few rows: number of chunks prefetched with the scores; 0: no prefetching by chunks
};
INLINE void prefetch_lines(struct prefetch *a, int64_t lines) {
    while (lines-- > 0 && a->row < a->end) {
        __builtin_prefetch((const char *)a->rows[a->row] + a->line, 0, 2);
        a->line += 64;
        if (a->line >= a->row_bytes) a->line = 0, a->row++;
    }
}

// The same for chunks and few rows, where computing a tile takes hardly longer than loading the next one. Products take as many
// steps as a chunk has lines of elements: each step prefetches one line of every chunk, and prefetch_scales() the scales. Keys
// are prefetched with the scores and values with the products of weights and values. Before a change of sequence or head, which
// is followed by work without products, all are prefetched with the scores.
INLINE void prefetch_chunk_line(const struct prefetch *a, const int first, int64_t line) {
#pragma GCC unroll 4
    for (int c = first; c < first + CHUNKS; c++) __builtin_prefetch((const char *)a->rows[c] + line * 64, 0, 3);
}
INLINE void prefetch_with_scores(const struct prefetch *a, int64_t line) {
    if (a->chunks_with_scores) prefetch_chunk_line(a, 0, line);
    if (a->chunks_with_scores > CHUNKS) prefetch_chunk_line(a, CHUNKS, line);
}
INLINE void prefetch_with_values(const struct prefetch *a, int64_t line) {
    if (a->chunks_with_scores == CHUNKS) prefetch_chunk_line(a, CHUNKS, line);
}
INLINE void prefetch_scales(const struct prefetch *a, int64_t lines) {
    for (; a->chunks_with_scores && lines * 64 < a->row_bytes; lines++)
        prefetch_chunk_line(a, 0, lines), prefetch_chunk_line(a, CHUNKS, lines);
}

INLINE vf load_row(const void *row, int64_t d, int64_t head_size, int dtype) {
    return d + VW <= head_size ? load_as(row, d, dtype) : load_part(row, d, head_size - d, dtype);
}

// Transpose a VW x VW square in registers, by interleaving rows i and i + VW / 2 log2(VW) times
INLINE void transpose_square(vf *r) {
    vf t[VW];
#pragma GCC unroll 4
    for (int round = 1; round < VW; round *= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < VW / 2; i++) {
            t[2 * i] = INTERLEAVE(r[i], r[i + VW / 2], LOW);
            t[2 * i + 1] = INTERLEAVE(r[i], r[i + VW / 2], HIGH);
        }
#pragma GCC unroll 16
        for (int i = 0; i < VW; i++) r[i] = t[i];
    }
}

// Keys [TILE, head_size] to kt [depth, TILE] in float32, square by square; two bfloat16 at a time, which halves the work
INLINE void transpose_keys(const void *const *keys, float *kt, int64_t count, int64_t head_size, int kind,
                           struct prefetch *prefetch) {
    int64_t paired = kind == FLOAT32 ? 0 : head_size / (2 * VW) * (2 * VW);
    for (int64_t j = 0; j < count; j += VW) {
        vf r[VW];
        for (int64_t d = 0; d < paired; d += 2 * VW) {
#pragma GCC unroll 16
            for (int i = 0; i < VW; i++) r[i] = vload((const float *)((const uint16_t *)keys[j + i] + d));
            transpose_square(r);
#pragma GCC unroll 16
            for (int i = 0; i < VW; i++) {
                vstore(kt + (d + 2 * i) * TILE + j, (vf)((vu)r[i] << 16));
                vstore(kt + (d + 2 * i + 1) * TILE + j, (vf)((vu)r[i] & 0xffff0000u));
            }
            prefetch_lines(prefetch, VW * VW / 16);
        }
        for (int64_t d = paired; d < head_size; d += VW) {
#pragma GCC unroll 16
            for (int i = 0; i < VW; i++) r[i] = load_row(keys[j + i], d, head_size, kind);
            transpose_square(r);
#pragma GCC unroll 16
            for (int i = 0; i < VW; i++) vstore(kt + (d + i) * TILE + j, r[i]);
            prefetch_lines(prefetch, VW * VW / 32);
        }
    }
}

// s[mr][TILE] = q[mr][head_size] . kt, with one accumulator per score; terms in order of the head's elements
INLINE void compute_scores(const float *q, int64_t depth, int64_t head_size, const float *kt, float *s,
                           struct prefetch *prefetch, const int mr) {
    for (int c = 0; c < TILE; c += NV * VW) {
        vf sum[MR][NV] = {0};
        for (int64_t d = 0; d < head_size; d++) {
            if (mr < MR) prefetch_lines(prefetch, 1);
            vf k[NV];
#pragma GCC unroll 4
            for (int n = 0; n < NV; n++) k[n] = vload(kt + d * TILE + c + n * VW);
#pragma GCC unroll 6
            for (int i = 0; i < mr; i++) {
                vf x = splat(q[i * depth + d]);
#pragma GCC unroll 4
                for (int n = 0; n < NV; n++) sum[i][n] = vfma(x, k[n], sum[i][n]);
            }
        }
#pragma GCC unroll 6
        for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
            for (int n = 0; n < NV; n++) vstore(s + i * TILE + c + n * VW, sum[i][n]);
    }
}

// acc[mr][nv vectors] += p[mr][from .. to] . values, terms in order of position
INLINE void accumulate_pv_columns(float *acc, int64_t depth, const float *p, const void *const *values, int64_t d, int64_t from,
                                  int64_t to, int dtype, struct prefetch *prefetch, const int mr, const int nv) {
    vf sum[MR][NV];
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
        for (int n = 0; n < nv; n++) sum[i][n] = vload(acc + i * depth + d + n * VW);
    for (int64_t j = from; j < to; j++) {
        if (mr < MR) prefetch_lines(prefetch, 2);
        vf v[NV];
#pragma GCC unroll 4
        for (int n = 0; n < nv; n++) v[n] = load_as(values[j], d + n * VW, dtype);
#pragma GCC unroll 6
        for (int i = 0; i < mr; i++) {
            vf x = splat(p[i * TILE + j]);
#pragma GCC unroll 4
            for (int n = 0; n < nv; n++) sum[i][n] = vfma(x, v[n], sum[i][n]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
        for (int n = 0; n < nv; n++) vstore(acc + i * depth + d + n * VW, sum[i][n]);
}

INLINE void accumulate_pv(float *acc, int64_t depth, const float *p, const void *const *values, int64_t from, int64_t to,
                          int dtype, struct prefetch *prefetch, const int mr) {
    int64_t d = 0;
    for (; d + 4 * VW <= depth; d += 4 * VW) accumulate_pv_columns(acc, depth, p, values, d, from, to, dtype, prefetch, mr, 4);
    for (; d + 2 * VW <= depth; d += 2 * VW) accumulate_pv_columns(acc, depth, p, values, d, from, to, dtype, prefetch, mr, 2);
    for (; d + VW <= depth; d += VW) accumulate_pv_columns(acc, depth, p, values, d, from, to, dtype, prefetch, mr, 1);
}

INLINE vf splat_bits(const float *p) {
    int32_t bits;
    memcpy(&bits, p, 4);
    return (vf)splat_int(bits);
}

#if defined(__AVX512BF16__)
// The same products for pairs of bfloat16: two terms at a time, exact except for the rounding of sums to float32
#define HAS_BF16_PAIRS 1
INLINE vf dot_bf16_pairs(vf sum, vf a, vf b) { return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }

// s[mr][TILE] = q[mr][head_size / 2 pairs] . keys, chunks [head_size / 2][CHUNK] of pairs
INLINE void bf16_scores(const float *q, int64_t depth, int64_t head_size, const void *const *keys, float *s,
                        const struct prefetch *prefetch, const int few_rows, const int mr) {
    vf sum[MR][CHUNKS] = {0};
    for (int64_t d = 0; d < head_size / 2; d++) {
        if (few_rows) prefetch_with_scores(prefetch, d);
        vf k[CHUNKS];
#pragma GCC unroll 4
        for (int n = 0; n < CHUNKS; n++) k[n] = vload((const float *)keys[n] + d * CHUNK);
#pragma GCC unroll 6
        for (int i = 0; i < mr; i++) {
            vf x = splat_bits(q + i * depth + d);
#pragma GCC unroll 4
            for (int n = 0; n < CHUNKS; n++) sum[i][n] = dot_bf16_pairs(sum[i][n], k[n], x);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
        for (int n = 0; n < CHUNKS; n++) vstore(s + i * TILE + n * VW, sum[i][n]);
}

// Pack rows of keys and values, [TILE] each, into chunks of pairs, which lie depth / 2 * CHUNK floats apart: keys square by
// square, values by two rows. `whole`: heads of whole squares.
INLINE void pack_rows_as_pairs(const void *const *keys, const void *const *values, float *key_chunks, float *value_chunks,
                               int64_t head_size, int64_t depth, const int whole) {
    _Static_assert(CHUNK == VW, "a chunk's keys are a vector");
    for (int64_t j = 0; j < TILE; j += VW, key_chunks += CHUNK * depth / 2)
        for (int64_t d = 0; d < head_size / 2; d += VW) {
            const int64_t pairs = whole ? VW : MIN(VW, head_size / 2 - d);
            vf r[VW];
#pragma GCC unroll 16
            for (int i = 0; i < VW; i++)
                r[i] = pairs == VW ? vload((const float *)keys[j + i] + d) : load_part(keys[j + i], d, pairs, FLOAT32);
            transpose_square(r);
            if (pairs == VW) {
#pragma GCC unroll 16
                for (int i = 0; i < VW; i++) vstore(key_chunks + (d + i) * CHUNK, r[i]);
            } else {
                for (int i = 0; i < pairs; i++) vstore(key_chunks + (d + i) * CHUNK, r[i]);
            }
        }
    for (int64_t j = 0; j < TILE; j += 2, value_chunks += depth)
        for (int64_t d = 0; d < depth; d += VW) {
            const int64_t size = whole ? depth : head_size;
            const vu even = (vu)load_row(values[j], d, size, BFLOAT16), odd = (vu)load_row(values[j + 1], d, size, BFLOAT16);
            vstore(value_chunks + d, (vf)(even >> 16 | odd));
        }
}

// Copy the first `count` values of a chunk and fill the rest with zeros, whatever it holds
INLINE void zero_pad_values(const float *chunk, float *out, int64_t count, int64_t depth) {
    for (int64_t j = 0; j < CHUNK / 2; j++) {
        const vu keep = (vu)splat_int(2 * j + 1 < count ? -1 : 2 * j < count ? 0xffff : 0);
        for (int64_t d = 0; d < depth; d += VW) vstore(out + j * depth + d, (vf)((vu)vload(chunk + j * depth + d) & keep));
    }
}

// acc[mr][nv vectors] = acc * rescale[mr] + p[mr][first .. last chunk] . values, with p in pairs too: [mr][TILE / 2]
INLINE void bf16_accumulate_pv_columns(float *acc, int64_t depth, const float *rescale, const float *p,
                                       const void *const *values, int64_t d, int64_t first, int64_t last,
                                       const struct prefetch *prefetch, const int few_rows, const int mr, const int nv) {
    vf sum[MR][NV];
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
        for (int n = 0; n < nv; n++) sum[i][n] = vload(acc + i * depth + d + n * VW) * splat(rescale[i]);
    for (int64_t c = first; c < last; c++) {
        const float *chunk = (const float *)values[c] + d, *weights = p + c * CHUNK / 2;
        for (int64_t j = 0; j < CHUNK / 2; j++) {
            if (few_rows) prefetch_with_values(prefetch, d / 2 + c * CHUNK / 2 + j);
            vf v[NV];
#pragma GCC unroll 4
            for (int n = 0; n < nv; n++) v[n] = vload(chunk + j * depth + n * VW);
#pragma GCC unroll 6
            for (int i = 0; i < mr; i++) {
                vf x = splat_bits(weights + i * TILE / 2 + j);
#pragma GCC unroll 4
                for (int n = 0; n < nv; n++) sum[i][n] = dot_bf16_pairs(sum[i][n], v[n], x);
            }
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
        for (int n = 0; n < nv; n++) vstore(acc + i * depth + d + n * VW, sum[i][n]);
}

// The products of weights p [mr][TILE / 2] (pairs) and values of positions [from, to), added to acc
INLINE void bf16_accumulate_pv(float *acc, int64_t depth, const float *rescale, const float *p, const void *const *values,
                               int64_t from, int64_t to, const struct prefetch *prefetch, const int few_rows, const int mr) {
    int64_t d = 0, first = from / CHUNK, last = CEIL_DIV(to, CHUNK);
    for (; d + 4 * VW <= depth; d += 4 * VW)
        bf16_accumulate_pv_columns(acc, depth, rescale, p, values, d, first, last, prefetch, few_rows, mr, 4);
    for (; d + 2 * VW <= depth; d += 2 * VW)
        bf16_accumulate_pv_columns(acc, depth, rescale, p, values, d, first, last, prefetch, few_rows, mr, 2);
    if (d < depth) bf16_accumulate_pv_columns(acc, depth, rescale, p, values, d, first, last, prefetch, few_rows, mr, 1);
}

INLINE vf vmax_lanes(vf x) {
    x = vmax(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    x = vmax(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    x = vmax(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    x = vmax(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
    return x;
}

// softmax_tile() for mr rows at once, with weights in pairs p[mr][TILE / 2], m in units of log2 and l for each lane: l[mr][VW].
// m is a row's maximum of some tile before: it follows once a score is 2^GROWTH times as heavy, which hardly ever happens behind
// the first tile of a split. So no row waits for its maximum, and the branch can be predicted. `rescale` is the factor for a row's
// acc, 1 unless m has grown. Row i attends to the positions in visible[i].
#define GROWTH 8.0f  // weights below 2^8 are as exact in bfloat16 as those below 1
INLINE void bf16_softmax_tile(float scaling, float softcap, const float *s, float *p, const uint64_t *visible, float *m,
                              float *l, float *rescale, const int mr) {
    const vf log2e = splat(1.44269504088896341f), scale = softcap > 0 ? log2e : splat(scaling) * log2e;
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) {
        vf x[TILE / VW], top = splat(-INFINITY), sum = {0};
#pragma GCC unroll 4
        for (int n = 0; n < TILE / VW; n++) {
            x[n] = vload(s + i * TILE + n * VW);
            if (softcap > 0) x[n] = splat(softcap) * vtanh(x[n] * splat(scaling) / splat(softcap));
            if (~visible[i])
                x[n] = (vf)_mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), (__mmask16)(visible[i] >> n * VW), (__m512)x[n]);
            top = vmax(top, x[n]);
        }
        const float before = m[i];
        rescale[i] = 1.0f;
        if (__builtin_expect(_mm512_cmp_ps_mask((__m512)(top * scale), (__m512)splat(before + GROWTH), _CMP_GT_OQ), 0)) {
            m[i] = vmax_lanes(top * scale)[0];
            rescale[i] = vexp2(splat(before - m[i]))[0];
        }
        const vf base = splat(MAX(m[i], -FLT_MAX));  // no visible position yet: weights become 2^-inf = 0
#pragma GCC unroll 4
        for (int n = 0; n < TILE / VW; n++) {
            x[n] = vexp2(x[n] * scale - base);  // rounded as the maximum was: the heaviest weight is 1, however large scores are
            sum += x[n];
        }
#pragma GCC unroll 2
        for (int n = 0; n < TILE / VW; n += 2)
            *(__m512bh *)(p + i * TILE / 2 + n / 2 * VW) = _mm512_cvtne2ps_pbh((__m512)x[n + 1], (__m512)x[n]);
        vstore(l + i * VW, vfma(vload(l + i * VW), splat(rescale[i]), sum));
    }
}
#else
#define HAS_BF16_PAIRS 0
#endif

// Online softmax of one row: turns scores s[TILE] into weights and updates the row's maximum m, sum l and acc. Positions
// outside [from, to) of the tile are masked.
INLINE void softmax_tile(float scaling, float softcap, float *s, int64_t from, int64_t to, float *m, float *l, float *acc,
                         int64_t depth) {
    const vf minus_infinity = splat(-INFINITY), scale = splat(scaling);
    vf x[TILE / VW], top = minus_infinity;
    int whole = from <= 0 && to >= TILE;
#pragma GCC unroll 16
    for (int n = 0; n < TILE / VW; n++) {
        x[n] = vload(s + n * VW) * scale;
        if (softcap > 0) x[n] = splat(softcap) * vtanh(x[n] / splat(softcap));
        if (!whole) {
            vi j = lane_index() + splat_int(n * VW);
            x[n] = vselect((j >= splat_int((int)from)) & (j < splat_int((int)to)), x[n], minus_infinity);
        }
        top = vmax(top, x[n]);
    }
    float highest = MAX(*m, vmax_all(top));
    if (highest == -INFINITY) highest = 0.0f;  // no visible position yet: weights become exp(-inf) = 0
    if (highest != *m && *m != -INFINITY) {
        float rescale = exp_scalar(*m - highest);
        *l *= rescale;
        for (int64_t d = 0; d < depth; d += VW) vstore(acc + d, vload(acc + d) * splat(rescale));
    }
    vf sum = {0};
#pragma GCC unroll 16
    for (int n = 0; n < TILE / VW; n++) {
        vf p = vexp(x[n] - splat(highest));
        vstore(s + n * VW, p);
        sum += p;
    }
    *l += vsum(sum);
    if (from < to) *m = highest;
}

// Arithmetic on one row that the plain and the quantising operations share, so that their results have the same bits.
#pragma once
#include "quant.h"
#include "simd.h"

// Vector i of a row: x, or x + residual rounded to the dtype, which is then kept in `total`.
INLINE vf take(const void *x, const void *residual, void *total, int64_t i, int64_t n, int dtype) {
    vf v = n == VW ? load_as(x, i, dtype) : load_part(x, i, n, dtype);
    if (residual) {
        v = round_as((n == VW ? load_as(residual, i, dtype) : load_part(residual, i, n, dtype)) + v, dtype);
        if (n == VW) store_as(total, i, v, dtype);
        else store_part(total, i, n, v, dtype);
    }
    return v;
}

// Sum of squares of a row, in an order fixed by its width.
INLINE float square_sum(const void *x, const void *residual, void *total, int64_t width, int dtype) {
    vf sums[NV] = {0};
    int64_t i = 0;
    for (; i + NV * VW <= width; i += NV * VW) {
#pragma GCC unroll 4
        for (int n = 0; n < NV; n++) {
            vf v = take(x, residual, total, i + n * VW, VW, dtype);
            sums[n] = vfma(v, v, sums[n]);
        }
    }
    for (; i < width; i += VW) {
        vf v = take(x, residual, total, i, MIN(VW, width - i), dtype);
        sums[0] = vfma(v, v, sums[0]);
    }
    return vsum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// 1 / root mean square: what a row is multiplied with
INLINE float inverse_rms(float squares, int64_t width, float eps) { return 1.0f / sqrtf(squares / (float)width + eps); }

INLINE vf silu_times(vf gate, vf up, int dtype) { return round_as(round_as(vsilu(gate, dtype), dtype) * up, dtype); }

INLINE void store_int8(int8_t *p, vi x) {
    typedef int8_t vb __attribute__((vector_size(VW), aligned(1), may_alias));
    *(vb *)p = __builtin_convertvector(x, vb);
}
// The bits of the largest magnitude, which are ordered as the magnitudes are
INLINE int32_t highest_bits(const float *x, int64_t count) {
    vi top = {0};
    for (int64_t i = 0; i < count; i += VW) top = vmax_int(top, (vi)vload(x + i) & 0x7fffffff);
    return vmax_all_int(top);
}

// One group of a row: q1 [GROUP], and with two terms q2 [GROUP], zeros where the group's largest is not a third of
// `row_highest`. place_pair() or place_group(), and share_scale() follow.
INLINE void quantize_group(const float *x, int64_t g, int8_t *q1, int8_t *q2, float row_highest, struct row_meta meta) {
    vi sum = {0}, rest_sum = {0};
    const int32_t bits = highest_bits(x, GROUP);
    float highest;
    memcpy(&highest, &bits, 4);
    const float inverse = 127.0f / highest;
    const int is_zero = !(inverse < INFINITY) || bits >= 0x7f800000;  // denormal input too
    const int has_rest = q2 && 3.0f * highest >= row_highest;
    for (int i = 0; i < GROUP; i += VW) {
        vf scaled = is_zero ? splat(0.0f) : vload(x + i) * splat(inverse);
        vi q = vround(scaled);
        store_int8(q1 + i, q);
        sum += q;
        if (q2) {
            vf rest = (scaled - __builtin_convertvector(q, vf)) * splat(256.0f);
            rest = vselect_less(splat(127.0f), rest, splat(127.0f), rest);
            rest = vselect_less(rest, splat(-127.0f), splat(-127.0f), rest);  // -128 has no negative
            vi second = has_rest ? vround(rest) : (vi){0};
            store_int8(q2 + i, second);
            rest_sum += second;
        }
    }
    meta.scale[g] = bits >= 0x7f800000 ? NAN : highest / 127.0f;  // an infinity or NaN spoils the row, visibly
    meta.sum[0][g] = vsum_int(sum);
    if (q2) meta.sum[1][g] = vsum_int(rest_sum);
    meta.has_rest[g] = has_rest;
}

// Two groups, or one of them, to where the kernels take them.
INLINE void place_pair(struct row_pair *to, const int8_t *first, const int8_t *second) {
    typedef int32_t fours __attribute__((vector_size(16), aligned(1), may_alias));
    for (int i = 0; i < GROUP; i += 16) {
        fours a = *(const fours *)(first + i), b = *(const fours *)(second + i);
        *(fours *)to->values[i / 4] = __builtin_shufflevector(a, b, 0, 4, 1, 5);
        *(fours *)to->values[i / 4 + 2] = __builtin_shufflevector(a, b, 2, 6, 3, 7);
    }
}
INLINE void place_group(struct row_pair *to, int64_t group, const int8_t *q) {
    for (int step = 0; step < GROUP / 4; step++) memcpy(to->values[step][group], q + 4 * step, 4);
}

// What follows from a row's scales and sums, when they are all there: its unit, and its pairs but for their values.
INLINE void share_scale(struct row_pair *pairs, int64_t terms, int64_t groups, struct row_meta meta) {
    vi top = {0};  // the bits of scales are ordered as they are, and those of a NaN above all
    for (int64_t g = 0; g < groups; g += VW) {
        vi bits = {0};
        if (groups - g >= VW) bits = (vi)vload(meta.scale + g);
        else memcpy(&bits, meta.scale + g, (size_t)(groups - g) * 4);
        top = vmax_int(top, bits);
    }
    const int32_t bits = vmax_all_int(top);
    memcpy(meta.unit, &bits, 4);
    const float unit = *meta.unit, inverse = unit > 0x1p-100f ? (float)(1 << SHARE_BITS) / unit : 0.0f;
    for (int64_t g = 0; g < groups; g += VW) {
        const int64_t n = MIN(VW, groups - g);
        // past the row's end lie other fields of meta: what is made of them is not stored
        const vf share = bits < 0x7f800000 ? vload(meta.scale + g) * splat(inverse) : splat(0.0f);
        for (int64_t term = 0; term < terms; term++) {
            typedef int16_t vs __attribute__((vector_size(VW * 2)));
            const vi sum = (vi)vload((const float *)meta.sum[term] + g), start = -ZERO4 * sum;
            const vf shared = __builtin_convertvector(sum, vf) * share * splat(1.0f / (1 << LEAST_BITS));
            const vs shares = __builtin_convertvector(vround(share), vs), sums = __builtin_convertvector(vround(shared), vs);
            struct row_pair *to = pairs + term * (groups / 2) + g / 2;
            for (int64_t i = 0; i < n; i += 2) {
                memcpy(to[i / 2].start, (const int32_t *)&start + i, 8);
                memcpy(to[i / 2].share, (const int16_t *)&shares + i, 4);
                memcpy(to[i / 2].shared_sum, (const int16_t *)&sums + i, 4);
            }
        }
    }
}

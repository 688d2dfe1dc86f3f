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

INLINE vf silu_times(vf gate, vf up, int dtype) { return round_as(round_as(vsilu(gate), dtype) * up, dtype); }

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

// One group of a row: q1 [GROUP], and with two terms q2 [GROUP], zeros where the group's largest is not a third of `row_highest`
INLINE void quantize_group(const float *x, int8_t *q1, int8_t *q2, float row_highest, struct group_meta *meta) {
    vi sum = {0};
    const int32_t bits = highest_bits(x, GROUP);
    float highest;
    memcpy(&highest, &bits, 4);
    float scale = highest / 127.0f, inverse = 127.0f / highest;
    if (bits >= 0x7f800000) scale = NAN;  // an infinity or NaN spoils the row, visibly
    const int is_zero = !(inverse < INFINITY) || bits >= 0x7f800000;  // denormal input too
    const int has_rest = q2 && 3.0f * highest >= row_highest;
    for (int i = 0; i < GROUP; i += VW) {
        vf scaled = is_zero ? splat(0.0f) : vload(x + i) * splat(inverse);
        vi q = vround(scaled);
        store_int8(q1 + i, q);
        if (q2) {
            vf rest = (scaled - __builtin_convertvector(q, vf)) * splat(256.0f);
            rest = vselect_less(splat(127.0f), rest, splat(127.0f), rest);
            rest = vselect_less(rest, splat(-127.0f), splat(-127.0f), rest);  // -128 has no negative
            vi second = has_rest ? vround(rest) : (vi){0};
            store_int8(q2 + i, second);
            q = (q << 8) + second;
        }
        sum += q;
    }
    if (q2) scale *= 1.0f / 256.0f;
    meta->sum = vsum_int(sum);
    meta->scale = scale;
    meta->scale_sum = scale * (float)meta->sum;
    meta->has_rest = has_rest;
}

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

INLINE vf vabs(vf x) { return (vf)((vi)x & splat_int(0x7fffffff)); }
INLINE vf round_even(vf x) {
    const vf magic = splat(12582912.0f);
    return x + magic - magic;
}

INLINE void store_int8(int8_t *p, vf x) {
    typedef int8_t vb __attribute__((vector_size(VW), aligned(1), may_alias));
    *(vb *)p = __builtin_convertvector(__builtin_convertvector(x, vi), vb);
}

// One group of a row: q1 [GROUP], and with two terms q2 [GROUP]
INLINE void quantize_group(const float *x, int8_t *q1, int8_t *q2, struct group_meta *meta) {
    vf top = {0}, taint = {0};
    for (int i = 0; i < GROUP; i += VW) {
        vf v = vload(x + i);
        top = vmax(top, vabs(v));
        taint += v * splat(0.0f);
    }
    float highest = vmax_all(top), scale = highest / 127.0f, inverse = highest > 0.0f ? 127.0f / highest : 0.0f;
    if (vsum(taint) != 0.0f) scale = NAN, inverse = 0.0f;  // an infinity or NaN spoils the row, visibly
    if (!(inverse < INFINITY)) inverse = 0.0f;             // denormal input
    vf sum = {0};
    for (int i = 0; i < GROUP; i += VW) {
        vf v = inverse > 0.0f ? vload(x + i) : splat(0.0f), scaled = v * splat(inverse), q = round_even(scaled);
        store_int8(q1 + i, q);
        if (q2) {
            vf rest = round_even((scaled - q) * splat(256.0f));
            rest = vselect_less(splat(127.0f), rest, splat(127.0f), rest);
            rest = vselect_less(rest, splat(-127.0f), splat(-127.0f), rest);  // -128 has no negative
            store_int8(q2 + i, rest);
            q = vfma(q, splat(256.0f), rest);
        }
        sum += q;
    }
    if (q2) scale *= 1.0f / 256.0f;
    meta->sum = (int32_t)vsum(sum);
    meta->scale = scale;
    meta->scale_sum = scale * (float)meta->sum;
    meta->unused = 0;
}

// Arithmetic on one row that the plain and the quantising operations share, so that their results have the same bits.
#pragma once
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

// Arithmetic on one row, shared by the plain and the quantising operations so that their results have the same bits.
#pragma once
#include "elementwise_ops.h"
#include "quant.h"
#include "simd.h"

// Vector i of a row: x, or x + residual rounded to the dtype, which is then also written to `total`.
INLINE vf load_with_residual(const void *x, const void *residual, void *total, int64_t i, int64_t n, int dtype) {
    vf v = n == VW ? load_as(x, i, dtype) : load_part(x, i, n, dtype);
    if (residual) {
        v = round_as((n == VW ? load_as(residual, i, dtype) : load_part(residual, i, n, dtype)) + v, dtype);
        if (n == VW) store_as(total, i, v, dtype);
        else store_part(total, i, n, v, dtype);
    }
    return v;
}

// Sum of squares of a row. The order of the additions depends on the width alone.
INLINE float sum_of_squares(const void *x, const void *residual, void *total, int64_t width, int dtype) {
    vf sums[NV] = {0};
    int64_t i = 0;
    for (; i + NV * VW <= width; i += NV * VW) {
#pragma GCC unroll 4
        for (int n = 0; n < NV; n++) {
            vf v = load_with_residual(x, residual, total, i + n * VW, VW, dtype);
            sums[n] = vfma(v, v, sums[n]);
        }
    }
    for (; i < width; i += VW) {
        vf v = load_with_residual(x, residual, total, i, MIN(VW, width - i), dtype);
        sums[0] = vfma(v, v, sums[0]);
    }
    return vsum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// 1 / root mean square: the factor of an RMS norm
INLINE float inverse_rms(float squares, int64_t width, float eps) { return 1.0f / sqrtf(squares / (float)width + eps); }

INLINE vf activate(vf x, int kind, int dtype) {
    switch (kind) {
        case RELU: return vselect_less(x, splat(0.0f), splat(0.0f), x);
        case SILU: return vsilu(x, dtype);
        case GELU: return vgelu(x);
        case NONE: return x;
        case SIGMOID_GATE: return splat(1.0f) / (splat(1.0f) + vexp(-x));
        default: return vgelu_tanh(x);
    }
}

INLINE vf silu_mul(vf gate, vf up, int dtype) { return round_as(round_as(vsilu(gate, dtype), dtype) * up, dtype); }

INLINE void store_int8(int8_t *p, vi x) {
    typedef int8_t vb __attribute__((vector_size(VW), aligned(1), may_alias));
    *(vb *)p = __builtin_convertvector(x, vb);
}
// The bits of the largest absolute value. As integers, these bits have the order of the values.
INLINE int32_t max_abs_bits(const float *x, int64_t count) {
    vi top = {0};
    for (int64_t i = 0; i < count; i += VW) top = vmax_int(top, (vi)vload(x + i) & 0x7fffffff);
    return vmax_all_int(top);
}

// Quantise one group of a row: q1 [GROUP] and, with two terms, q2 [GROUP], which is zero unless the group's largest value is at
// least a third of `row_max`. store_pair() or store_group(), then finish_row_scales() must follow.
INLINE void quantize_group(const float *x, int64_t g, int8_t *q1, int8_t *q2, float row_max, struct row_meta meta) {
    vi sum = {0}, second_sum = {0};
    int32_t half = 0, second_half = 0;
    const int32_t bits = max_abs_bits(x, GROUP);
    float highest;
    memcpy(&highest, &bits, 4);
    const float inverse = 127.0f / highest;
    const int is_zero = !(inverse < INFINITY) || bits >= 0x7f800000;  // also for denormal values
    const int has_second_term = q2 && 3.0f * highest >= row_max;
    for (int i = 0; i < GROUP; i += VW) {
        vf scaled = is_zero ? splat(0.0f) : vload(x + i) * splat(inverse);
        vi q = vround(scaled);
        store_int8(q1 + i, q);
        sum += q;
        if (i + VW == HALF) half = vsum_int(sum);
        if (q2) {
            vf rest = (scaled - __builtin_convertvector(q, vf)) * splat(256.0f);
            rest = vselect_less(splat(127.0f), rest, splat(127.0f), rest);
            rest = vselect_less(rest, splat(-127.0f), splat(-127.0f), rest);  // -128 has no positive counterpart
            vi second = has_second_term ? vround(rest) : (vi){0};
            store_int8(q2 + i, second);
            second_sum += second;
            if (i + VW == HALF) second_half = vsum_int(second_sum);
        }
    }
    meta.scale[g] = bits >= 0x7f800000 ? NAN : highest / 127.0f;  // an infinity or NaN makes the whole row NaN
    meta.sum[0][g] = vsum_int(sum);
    meta.half_sum[0][g] = half;
    if (q2) meta.sum[1][g] = vsum_int(second_sum), meta.half_sum[1][g] = second_half;
    meta.has_second_term[g] = has_second_term;
}

// Two groups, or one of them, in the order in which the kernels read them.
INLINE void store_pair(struct row_pair *to, const int8_t *first, const int8_t *second) {
    typedef int32_t fours __attribute__((vector_size(16), aligned(1), may_alias));
    for (int i = 0; i < GROUP; i += 16) {
        fours a = *(const fours *)(first + i), b = *(const fours *)(second + i);
        *(fours *)to->values[i / 4] = __builtin_shufflevector(a, b, 0, 4, 1, 5);
        *(fours *)to->values[i / 4 + 2] = __builtin_shufflevector(a, b, 2, 6, 3, 7);
    }
}
INLINE void store_group(struct row_pair *to, int64_t group, const int8_t *q) {
    for (int step = 0; step < GROUP / 4; step++) memcpy(to->values[step][group], q + 4 * step, 4);
}

// Fill in what depends on all scales and sums of a row: its largest scale, and the pairs' fields other than their values.
INLINE void finish_row_scales(struct row_pair *pairs, int64_t terms, int64_t groups, struct row_meta meta) {
    vi top = {0};  // as integers, the bits of scales have their order, and NaN is above all
    for (int64_t g = 0; g < groups; g += VW) {
        vi bits = {0};
        if (groups - g >= VW) bits = (vi)vload(meta.scale + g);
        else memcpy(&bits, meta.scale + g, (size_t)(groups - g) * 4);
        top = vmax_int(top, bits);
    }
    const int32_t bits = vmax_all_int(top);
    memcpy(meta.max_scale, &bits, 4);
    const float unit = *meta.max_scale, inverse = unit > 0x1p-100f ? (float)(1 << RELATIVE_BITS) / unit : 0.0f;
    for (int64_t g = 0; g < groups; g += VW) {
        const int64_t n = MIN(VW, groups - g);
        // past the last group lie other fields of meta; what is computed from them is not stored
        const vf relative_scale = bits < 0x7f800000 ? vload(meta.scale + g) * splat(inverse) : splat(0.0f);
        for (int64_t term = 0; term < terms; term++) {
            typedef int16_t vs __attribute__((vector_size(VW * 2)));
            const vi sum = (vi)vload((const float *)meta.sum[term] + g), start = -INITIAL_ZERO * sum;
            const vf scaled = __builtin_convertvector(sum, vf) * relative_scale * splat(1.0f / (1 << OFFSET_BITS));
            const vs relative_scales = __builtin_convertvector(vround(relative_scale), vs),
                     sums = __builtin_convertvector(vround(scaled), vs);
            struct row_pair *to = pairs + term * (groups / 2) + g / 2;
            for (int64_t i = 0; i < n; i += 2) {
                memcpy(to[i / 2].initial_sum, (const int32_t *)&start + i, 8);
                memcpy(to[i / 2].relative_scale, (const int16_t *)&relative_scales + i, 4);
                memcpy(to[i / 2].scaled_sum, (const int16_t *)&sums + i, 4);
            }
        }
    }
}

// Which of 8 steps of 4 integers are not zeros
INLINE unsigned steps_in_use(const int8_t *q) {
#if defined(__AVX2__)
    const __m256i empty = _mm256_cmpeq_epi32(_mm256_loadu_si256((const __m256i *)q), _mm256_setzero_si256());
    return (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(empty)) ^ 0xff;
#else
    unsigned steps = 0;
    int32_t fours[GROUP / 4];
    memcpy(fours, q, GROUP);
    for (int i = 0; i < GROUP / 4; i++) steps |= (unsigned)(fours[i] != 0) << i;
    return steps;
#endif
}

// Quantise a row with one scale. x [groups * GROUP] is followed by zeros from `width` on.
INLINE void quantize_scaled_row(const float *x, int64_t width, int64_t groups, struct scaled_row *to) {
    const int32_t bits = max_abs_bits(x, groups * GROUP);
    vf sizes[2] = {0};
    for (int64_t i = 0; i < groups * GROUP; i += 2 * VW) {
        sizes[0] += (vf)((vi)vload(x + i) & 0x7fffffff);
        sizes[1] += (vf)((vi)vload(x + i + VW) & 0x7fffffff);
    }
    float highest;
    memcpy(&highest, &bits, 4);
    const float most = MIN(highest, OUTLIER / (float)width * vsum(sizes[0] + sizes[1]));
    const float top = MAX(most, highest * (1.0f / SECOND_UNIT)), inverse = 127.0f / top;
    const int is_zero = !(inverse < INFINITY) || bits >= 0x7f800000;  // also for denormal values
    uint8_t *steps = to->data;
    int8_t *q1 = (int8_t *)steps + scaled_row_steps(groups), *q2 = q1 + groups * GROUP;
    vi sum = {0};
    for (int64_t g = 0; g < groups; g++) {
        for (int64_t i = g * GROUP; i < (g + 1) * GROUP; i += VW) {
            const vi q = is_zero ? (vi){0} : vround(vload(x + i) * splat(inverse));
            const vi second = vround(__builtin_convertvector(q, vf) * splat(1.0f / SECOND_UNIT));
            store_int8(q1 + i, q - second * SECOND_UNIT);
            store_int8(q2 + i, second);
            sum += q;
        }
        steps[g] = (uint8_t)steps_in_use(q2 + g * GROUP);
    }
    memset(steps + groups, 0, (size_t)(scaled_row_steps(groups) - groups));
    to->scale = bits >= 0x7f800000 ? NAN : top / 127.0f;  // an infinity or NaN makes the whole row NaN
    to->sum = vsum_int(sum);
}

// Keys, values and queries as int8: how one head of one token is quantised for products and for the cache, whose layout
// attention_ops.h describes.
//
// An outlier among the elements of a key would leave few of the 255 steps to the others. Multiplying keys and queries with one
// orthogonal matrix changes no score and spreads outliers over all elements (QuaRot, Ashkboos et al. 2024). The matrix is a
// Hadamard matrix, applied to KV_GROUP elements at a time. Values have no such outliers.
#pragma once
#include "attention_ops.h"
#include "rows.h"

// x [KV_GROUP] times the Hadamard matrix, not normalised. Each round adds and subtracts elements half the vector apart and
// interleaves sums and differences (Pease 1968).
INLINE void hadamard(float *x) {
    enum { N = KV_GROUP / VW };
    vf v[N], t[N];
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) v[i] = vload(x + i * VW);
#pragma GCC unroll 5
    for (int round = 1; round < KV_GROUP; round *= 2) {
#pragma GCC unroll 4
        for (int i = 0; i < N / 2; i++) {
            vf sum = v[i] + v[i + N / 2], difference = v[i] - v[i + N / 2];
            t[2 * i] = INTERLEAVE(sum, difference, LOW);
            t[2 * i + 1] = INTERLEAVE(sum, difference, HIGH);
        }
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) v[i] = t[i];
    }
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) vstore(x + i * VW, v[i]);
}

#define SMALLEST_SCALE 0x1p-60f  // smaller values become 0; powers of it stay far from float32's limits

// The scale that makes x [count] integers of at most 127; NaN if a value is not finite
INLINE float int8_scale(const float *x, int64_t count) {
    const int32_t bits = max_abs_bits(x, count);
    float highest;
    memcpy(&highest, &bits, 4);
    return bits >= 0x7f800000 ? NAN : MAX(highest / 127.0f, SMALLEST_SCALE);
}

// Round up to bfloat16; NaN stays NaN
INLINE uint16_t bf16_round_up(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)(bits > 0x7f800000u ? 0x7fc0 : (bits + 0xffff) >> 16);
}
INLINE float bf16_value(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// codes [count] = x / scale; returns their sum
INLINE int32_t int8_codes(const float *x, int64_t count, float scale, int8_t *codes) {
    const vf inverse = splat(1.0f / scale);
    vi sum = {0};
    for (int64_t i = 0; i < count; i += VW) {
        vi q = vround(vload(x + i) * inverse);
        store_int8(codes + i, q);
        sum += q;
    }
    return vsum_int(sum);
}

// Keys, values and queries in int8: how one head of one token becomes integers, for the cache (its layout is in ops.h) and for
// the products with it.
//
// An outlier among a key's elements would leave few of the 255 steps to the others. Multiplying keys and queries with one
// orthogonal matrix changes no score and spreads outliers over all elements (QuaRot, Ashkboos et al. 2024): the Hadamard
// matrix here, on GROUP_K elements at a time. Values have no such outliers.
#pragma once
#include "ops.h"
#include "rows.h"

// x [GROUP_K] times the Hadamard matrix, not normalised: each round adds and subtracts elements half the vector apart and
// brings sum and difference together (Pease 1968).
INLINE void hadamard(float *x) {
    enum { N = GROUP_K / VW };
    vf v[N], t[N];
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) v[i] = vload(x + i * VW);
#pragma GCC unroll 5
    for (int round = 1; round < GROUP_K; round *= 2) {
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

#define SMALLEST_SCALE 0x1p-60f  // of what is smaller nothing is kept; its powers stay far from float32's ends

// What x [count] is to be divided by to become integers of at most 127; NaN for what is not finite
INLINE float int8_scale(const float *x, int64_t count) {
    const int32_t bits = highest_bits(x, count);
    float highest;
    memcpy(&highest, &bits, 4);
    return bits >= 0x7f800000 ? NAN : MAX(highest / 127.0f, SMALLEST_SCALE);
}

// The nearest bfloat16 that is not less (NaN stays)
INLINE uint16_t bf16_above(float x) {
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

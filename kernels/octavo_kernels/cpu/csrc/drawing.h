// Random numbers and selections of drawing.c
#pragma once
#include <float.h>

#include "simd.h"

// Bits of the lanes where a >= b
INLINE uint32_t lanes_at_least(vf a, vf b) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ);
#elif defined(__AVX2__)
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GE_OQ));
#elif defined(__x86_64__)
    return (uint32_t)_mm_movemask_ps(_mm_cmpge_ps((__m128)a, (__m128)b));
#else
    return (uint32_t)vsum_int((a >= b) & (splat_int(1) << lane_index()));
#endif
}
// The first n < VW numbers of a row's end; -infinity in the other lanes
INLINE vf load_end(const float *x, int64_t n) {
    vf v = splat(-INFINITY);
    memcpy(&v, x, (size_t)n * 4);
    return v;
}

// ---- Gumbel noise: a hash of a draw's key and the token (octavo.sample.gumbel has the sources)
struct draw_key {
    uint32_t low, high;
};
static inline struct draw_key key_at(uint64_t stream, int64_t position) {
    uint64_t x = stream + ((uint64_t)position + 1) * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    x ^= x >> 31;
    return (struct draw_key){(uint32_t)x, (uint32_t)(x >> 32)};
}
#define MIX(x, added)         \
    x = x * 0x7FEB352Du;      \
    x ^= x >> 15;             \
    x = x + (added);          \
    x = x * 0x846CA68Bu;      \
    x ^= x >> 16
// In [1, 2^31)
INLINE vi noise_bits(vu ids, struct draw_key key) {
    vu x = ids ^ (ids >> 16);
    MIX(x, 0);
    x ^= key.low;
    MIX(x, key.high);
    return (vi)((x & 0x7FFFFFFFu) | 1u);
}
static inline double noise_of(int32_t bits) { return -log(-log1p(bits * -0x1p-31)); }
#define MOST_NOISE 21.5f   // -log(2^-31), and above
#define LEAST_NOISE -3.1f  // of 1 - 2^-31, and below
// No less than the noise, but for rounding: with u uniform it is at most -log(u), and a float's bits, read as a number, bound its
// logarithm from below.
INLINE vf noise_bound(vi bits) {
    const vf number = __builtin_convertvector((vi) __builtin_convertvector(bits, vf), vf);
    return vfma(number, splat((float)(-0.693147180559945309 / (1 << 23))), splat((float)(0.693147180559945309 * (127 + 31))));
}

// ---- The k-th largest of n numbers, 1 <= k <= n, which are overwritten: by digits from the top, so that no order of them is slow
static inline uint32_t in_order(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}
static float kth_largest(float *x, int64_t n, int64_t k) {
    static const int shifts[] = {21, 10, 0};
    static const uint32_t last[] = {2047, 2047, 1023};
    uint32_t counts[2048];
    for (int level = 0; level < 3; level++) {
        uint32_t digit = last[level];
        memset(counts, 0, sizeof(counts));
        for (int64_t i = 0; i < n; i++) counts[in_order(x[i]) >> shifts[level] & last[level]]++;
        while (counts[digit] < k) k -= counts[digit--];
        int64_t kept = 0;
        for (int64_t i = 0; i < n; i++) {
            const float value = x[i];
            x[kept] = value;
            kept += (in_order(value) >> shifts[level] & last[level]) == digit;
        }
        n = kept;
    }
    return x[0];
}

// Integer dot products: the arithmetic of quantised linears and of attention over an int8 cache
#pragma once
#include "simd.h"

typedef uint8_t vbytes __attribute__((vector_size(VW * 4)));
typedef vbytes vbytes_unaligned __attribute__((aligned(1), may_alias));
INLINE vbytes load_bytes(const uint8_t *p) { return *(const vbytes_unaligned *)p; }

// Each lane: acc + the sum of 4 products (w - zero) * a, where `a` holds 4 int8 in every lane. Where the instruction takes
// unsigned codes, the contribution of the zero point is subtracted beforehand (row_pair.initial_sum).
#if defined(__AVX512VNNI__)
#define UNSIGNED_CODES8 1
INLINE vi dot4(vi acc, vbytes w, vi a, const int bits) {
    (void)bits;
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)a);
}
#elif defined(__AVX2__)
#define UNSIGNED_CODES8 0
INLINE vi dot4(vi acc, vbytes w, vi a, const int bits) {
    __m256i x = (__m256i)w, y = (__m256i)a;
    if (bits == 8) {  // |w - 128| <= 128 and w * sign into a: pairs stay below 2^15, so the 16-bit sums are exact
        __m256i s = _mm256_xor_si256(x, _mm256_set1_epi8((char)0x80));
        x = _mm256_abs_epi8(s), y = _mm256_sign_epi8(y, s);
    }
    return acc + (vi)_mm256_madd_epi16(_mm256_maddubs_epi16(x, y), _mm256_set1_epi16(1));
}
#elif defined(__SSSE3__)
#define UNSIGNED_CODES8 0
INLINE vi dot4(vi acc, vbytes w, vi a, const int bits) {
    __m128i x = (__m128i)w, y = (__m128i)a;
    if (bits == 8) {
        __m128i s = _mm_xor_si128(x, _mm_set1_epi8((char)0x80));
        x = _mm_abs_epi8(s), y = _mm_sign_epi8(y, s);
    }
    return acc + (vi)_mm_madd_epi16(_mm_maddubs_epi16(x, y), _mm_set1_epi16(1));
}
#elif defined(__ARM_FEATURE_DOTPROD)
#define UNSIGNED_CODES8 0
INLINE vi dot4(vi acc, vbytes w, vi a, const int bits) {
    int8x16_t x = (int8x16_t)(bits == 8 ? w ^ 0x80 : w);
    return (vi)vdotq_s32((int32x4_t)acc, x, (int8x16_t)a);
}
#else
#define UNSIGNED_CODES8 0
INLINE vi dot4(vi acc, vbytes w, vi a, const int bits) {
    vi x = (vi)(bits == 8 ? w ^ 0x80 : w);
    for (int shift = 24; shift >= 0; shift -= 8) acc += ((x << shift) >> 24) * ((a << shift) >> 24);
    return acc;
}
#endif

// Each lane: acc + the sum of 4 products of `a`, in 0 .. 127, and int8 `b`
INLINE vi dot4_7bits(vi acc, vbytes a, vi b) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return acc + (vi)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)a, (__m256i)b), _mm256_set1_epi16(1));
#elif defined(__SSSE3__)
    return acc + (vi)_mm_madd_epi16(_mm_maddubs_epi16((__m128i)a, (__m128i)b), _mm_set1_epi16(1));
#elif defined(__ARM_FEATURE_DOTPROD)
    return (vi)vdotq_s32((int32x4_t)acc, (int8x16_t)a, (int8x16_t)b);
#else
    for (int shift = 24; shift >= 0; shift -= 8) acc += (((vi)a << shift) >> 24) * ((b << shift) >> 24);
    return acc;
#endif
}
// The same 4 bytes in every lane
INLINE vi splat_four(const int8_t *p) {
    int32_t four;
    memcpy(&four, p, 4);
    return splat_int(four);
}

// int16 vectors. Two int32 vectors packed with saturation, in turn 128 bits of the one and 128 bits of the other
INLINE vi pack_int16(vi a, vi b) {
#if defined(__AVX512BW__)
    return (vi)_mm512_packs_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (vi)_mm256_packs_epi32((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
    return (vi)_mm_packs_epi32((__m128i)a, (__m128i)b);
#else
    return (vi)vqmovn_high_s32(vqmovn_s32((int32x4_t)a), (int32x4_t)b);
#endif
}
// a * b / 2^15 to the nearest, ties upwards
INLINE vi multiply_int16(vi a, vi b) {
#if defined(__AVX512BW__)
    return (vi)_mm512_mulhrs_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (vi)_mm256_mulhrs_epi16((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
    return (vi)_mm_mulhrs_epi16((__m128i)a, (__m128i)b);
#else
    return (vi)vqrdmulhq_s16((int16x8_t)a, (int16x8_t)b);
#endif
}
// Each lane: acc + the sum of 2 products of int16
INLINE vi dot2(vi acc, vi a, vi b) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return acc + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
    return acc + (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    int32x4_t low = vmull_s16(vget_low_s16((int16x8_t)a), vget_low_s16((int16x8_t)b));
    return acc + (vi)vpaddq_s32(low, vmull_high_s16((int16x8_t)a, (int16x8_t)b));
#endif
}
// The same 2 int16, or the same 8 bytes, repeated over a vector
INLINE vi splat_two(const int16_t *p) {
    int32_t two;
    memcpy(&two, p, 4);
    return splat_int(two);
}
INLINE vi splat_eight(const void *p) {
    typedef int64_t vl __attribute__((vector_size(VW * 4)));
    int64_t eight;
    memcpy(&eight, p, 8);
    return (vi)(eight - (vl){0});
}

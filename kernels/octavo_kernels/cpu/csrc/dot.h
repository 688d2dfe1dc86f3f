// Integer dot products: the arithmetic of quantised linears and of attention over an int8 cache
#pragma once
#include "simd.h"

typedef uint8_t vbytes __attribute__((vector_size(VW * 4)));
typedef vbytes vbytes_unaligned __attribute__((aligned(1), may_alias));
INLINE vbytes load_bytes(const uint8_t *p) { return *(const vbytes_unaligned *)p; }

// vpdpbusd and vpdpwssd, where they exist
#if defined(__AVX512VNNI__) && VW == 16
#define DPBUSD(acc, a, b) (vi)_mm512_dpbusd_epi32((__m512i)(acc), (__m512i)(a), (__m512i)(b))
#define DPWSSD(acc, a, b) (vi)_mm512_dpwssd_epi32((__m512i)(acc), (__m512i)(a), (__m512i)(b))
#elif defined(__AVXVNNI__) && VW == 8
#define DPBUSD(acc, a, b) (vi)_mm256_dpbusd_avx_epi32((__m256i)(acc), (__m256i)(a), (__m256i)(b))
#define DPWSSD(acc, a, b) (vi)_mm256_dpwssd_avx_epi32((__m256i)(acc), (__m256i)(a), (__m256i)(b))
#elif defined(__AVX512VNNI__) && defined(__AVX512VL__) && VW == 8
#define DPBUSD(acc, a, b) (vi)_mm256_dpbusd_epi32((__m256i)(acc), (__m256i)(a), (__m256i)(b))
#define DPWSSD(acc, a, b) (vi)_mm256_dpwssd_epi32((__m256i)(acc), (__m256i)(a), (__m256i)(b))
#elif defined(__aarch64__) && defined(__ARM_FEATURE_MATMUL_INT8)  // USDOT does what vpdpbusd does
#define DPBUSD(acc, a, b) (vi)vusdotq_s32((int32x4_t)(acc), (uint8x16_t)(a), (int8x16_t)(b))
#define HAS_INT8_MMLA 1
#endif
#if !defined(HAS_INT8_MMLA)
#define HAS_INT8_MMLA 0
#endif

// 16-bit sums of pairs of products of uint8 and int8, saturating, and neighbours of these added up to 32 bits
#if defined(__AVX2__)
#define MADDUBS(a, b) (vi)_mm256_maddubs_epi16((__m256i)(a), (__m256i)(b))
#define WIDEN_SUMS(a) (vi)_mm256_madd_epi16((__m256i)(a), _mm256_set1_epi16(1))
#define ADD_SUMS(a, b) (vi)_mm256_add_epi16((__m256i)(a), (__m256i)(b))
#define SIGN(a, b) (vi)_mm256_sign_epi8((__m256i)(a), (__m256i)(b))
#define ABS(a) (vi)_mm256_abs_epi8((__m256i)(a))
#elif defined(__SSSE3__)
#define MADDUBS(a, b) (vi)_mm_maddubs_epi16((__m128i)(a), (__m128i)(b))
#define WIDEN_SUMS(a) (vi)_mm_madd_epi16((__m128i)(a), _mm_set1_epi16(1))
#define ADD_SUMS(a, b) (vi)_mm_add_epi16((__m128i)(a), (__m128i)(b))
#define SIGN(a, b) (vi)_mm_sign_epi8((__m128i)(a), (__m128i)(b))
#define ABS(a) (vi)_mm_abs_epi8((__m128i)(a))
#endif

// Each lane: acc + the sum of 4 products of `w`, in 0 .. 127, and int8 `a`
INLINE vi dot4(vi acc, vbytes w, vi a) {
#if defined(DPBUSD)
    return DPBUSD(acc, w, a);
#elif defined(MADDUBS)
    return acc + WIDEN_SUMS(MADDUBS(w, a));
#elif defined(__ARM_FEATURE_DOTPROD)
    return (vi)vdotq_s32((int32x4_t)acc, (int8x16_t)w, (int8x16_t)a);
#else
    for (int shift = 24; shift >= 0; shift -= 8) acc += (((vi)w << shift) >> 24) * ((a << shift) >> 24);
    return acc;
#endif
}
// The same for `w` in 0 .. 255 that stand for w - 128. Where the instruction takes unsigned codes, 128 times the sum of `a` is
// subtracted beforehand (row_pair.initial_sum); else to_signed() has made them int8.
#if defined(DPBUSD)
#define UNSIGNED_CODES8 1
INLINE vbytes to_signed(vbytes w) { return w; }
INLINE vi dot4_wide(vi acc, vbytes w, vi a) { return DPBUSD(acc, w, a); }
#else
#define UNSIGNED_CODES8 0
INLINE vbytes to_signed(vbytes w) { return w ^ 0x80; }
INLINE vi dot4_wide(vi acc, vbytes w, vi a) {
#if defined(MADDUBS)  // |w| <= 128 and w's sign into a: pairs stay below 2^15, so the 16-bit sums are exact
    return acc + WIDEN_SUMS(MADDUBS(ABS(w), SIGN(a, w)));
#else
    return dot4(acc, w, a);
#endif
}
#endif

// acc += all 4 products, as dot4 does, but `part`, which starts as 0, may hold them in 16 bits until it is added up by
// add_part(). The largest sum of a pair of products times the number of calls between must stay below 2^15.
#if !defined(DPBUSD) && defined(MADDUBS)
INLINE void dot4_in_parts(vi *acc, vi *part, vbytes w, vi a) {
    (void)acc;
    *part = ADD_SUMS(*part, MADDUBS(w, a));
}
INLINE void add_part(vi *acc, vi *part) {
    *acc += WIDEN_SUMS(*part);
    *part = (vi){0};
}
#else
INLINE void dot4_in_parts(vi *acc, vi *part, vbytes w, vi a) {
    (void)part;
    *acc = dot4(*acc, w, a);
}
INLINE void add_part(vi *acc, vi *part) { (void)acc, (void)part; }
#endif

// table[w] for w in 0 .. 15; `table` repeats the same 16 bytes
INLINE vbytes look_up(vbytes table, vbytes w) {
#if defined(__AVX512BW__) && VW == 16
    return (vbytes)_mm512_shuffle_epi8((__m512i)table, (__m512i)w);
#elif defined(__AVX2__)
    return (vbytes)_mm256_shuffle_epi8((__m256i)table, (__m256i)w);
#elif defined(__SSSE3__)
    return (vbytes)_mm_shuffle_epi8((__m128i)table, (__m128i)w);
#elif defined(__aarch64__)
    return (vbytes)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)w);
#else
    for (int i = 0; i < VW * 4; i++) w[i] = table[w[i]];
    return w;
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
INLINE vi subtract_int16(vi a, vi b) {
    typedef int16_t vshorts __attribute__((vector_size(VW * 4)));
    return (vi)((vshorts)a - (vshorts)b);
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
#if defined(DPWSSD)
    return DPWSSD(acc, a, b);
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

// Vectors of one width for every instruction set: GCC/Clang vector extensions, and intrinsics where the compilers have no
// portable spelling (a true fused multiply-add) or generate slow code. The files are compiled with -ffp-contract=off: only
// vfma() fuses, so a result has the same bits in whichever code path it is computed.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// For tests: the code for AVX2 with VNNI on a machine that has these instructions in their AVX-512 form alone
#if defined(VECTORS_OF_256_BITS)
#undef __AVX512F__
#undef __AVX512BW__
#undef __AVX512BF16__
#endif

#if defined(__AVX512F__)
#define VW 16  // floats in a vector
#define MR 6   // rows of a register tile: MR x NV accumulators stay in registers
#elif defined(__AVX2__)
#define VW 8
#define MR 3
#elif defined(__aarch64__)
#define VW 4
#define MR 6
#else
#define VW 4
#define MR 3
#endif
#define NV 4  // vectors across a register tile

#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define CEIL_DIV(a, b) (((a) + (b) - 1) / (b))

enum dtype { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };  // float16 is a dtype of weights alone

typedef float vf __attribute__((vector_size(VW * 4)));
typedef int32_t vi __attribute__((vector_size(VW * 4)));
typedef uint32_t vu __attribute__((vector_size(VW * 4)));
typedef uint16_t vh __attribute__((vector_size(VW * 2)));
typedef vf vf_unaligned __attribute__((aligned(1), may_alias));
typedef vh vh_unaligned __attribute__((aligned(1), may_alias));

INLINE vf vload(const float *p) { return *(const vf_unaligned *)p; }
INLINE void vstore(float *p, vf x) { *(vf_unaligned *)p = x; }
INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vi splat_int(int32_t x) { return x - (vi){0}; }
INLINE vf vselect(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
// a < b ? x : y, and a > b ? a : b (b where either is NaN). What compilers generate for them is three times as long.
INLINE vf vselect_less(vf a, vf b, vf x, vf y) {
#if defined(__AVX512F__)
    return (vf)_mm512_mask_blend_ps(_mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ), (__m512)y, (__m512)x);
#elif defined(__AVX2__)
    return (vf)_mm256_blendv_ps((__m256)y, (__m256)x, _mm256_cmp_ps((__m256)a, (__m256)b, _CMP_LT_OQ));
#else
    return vselect(a < b, x, y);
#endif
}
INLINE vf vmax(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__x86_64__)
    return (vf)_mm_max_ps((__m128)a, (__m128)b);
#else
    return vselect(a > b, a, b);
#endif
}

// a * b + c, with one rounding where the instruction exists
INLINE vf vfma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE vi lane_index(void) {
    vi x;
    for (int i = 0; i < VW; i++) x[i] = i;
    return x;
}

// Interleave the elements of two vectors: their lower halves (LOW), their upper halves (HIGH)
#if VW == 16
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif VW == 8
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define LOW 0, 4, 1, 5
#define HIGH 2, 6, 3, 7
#endif
#define INTERLEAVE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)

// Sums and maxima over a vector, by halving, so that their order is fixed
#if VW == 16
#define HALVES(x, op)                                                                                     \
    x = op(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15)); \
    x = op(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7));             \
    x = op(x, __builtin_shufflevector(x, x, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3));             \
    x = op(x, __builtin_shufflevector(x, x, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1))
#elif VW == 8
#define HALVES(x, op)                                                 \
    x = op(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 4, 5, 6, 7)); \
    x = op(x, __builtin_shufflevector(x, x, 2, 3, 2, 3, 2, 3, 2, 3)); \
    x = op(x, __builtin_shufflevector(x, x, 1, 1, 1, 1, 1, 1, 1, 1))
#else
#define HALVES(x, op)                                     \
    x = op(x, __builtin_shufflevector(x, x, 2, 3, 2, 3)); \
    x = op(x, __builtin_shufflevector(x, x, 1, 1, 1, 1))
#endif
INLINE vf vadd(vf a, vf b) { return a + b; }
INLINE vi vadd_int(vi a, vi b) { return a + b; }
INLINE vi vmax_int(vi a, vi b) {
#if defined(__AVX512F__)
    return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    return (vi)vselect(a > b, (vf)a, (vf)b);
#endif
}
// Round to the nearest integer, ties to even; |x| must be below 2^22
INLINE vi vround(vf x) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
    return (vi)_mm256_cvtps_epi32((__m256)x);
#else
    const vf magic = splat(12582912.0f);
    return __builtin_convertvector(x + magic - magic, vi);
#endif
}
INLINE float vsum(vf x) {
    HALVES(x, vadd);
    return x[0];
}
INLINE float vmax_all(vf x) {
    HALVES(x, vmax);
    return x[0];
}
INLINE int32_t vsum_int(vi x) {
    HALVES(x, vadd_int);
    return x[0];
}
INLINE int32_t vmax_all_int(vi x) {
    HALVES(x, vmax_int);
    return x[0];
}

// ---- float16 to float32: VW values, or one
INLINE vf load_half(const uint8_t *p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__aarch64__)
    uint16x4_t h;
    memcpy(&h, p, 8);
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(h));
#else
    vu h = __builtin_convertvector(*(const vh_unaligned *)p, vu), bits = (h & 0x7fff) << 13;
    vu is_special = (vu)((h & 0x7c00) == 0x7c00);  // infinity or NaN
    return (vf)((vu)((vf)bits * splat(0x1p112f)) | (is_special & (bits | 0x7f800000)) | ((h & 0x8000) << 16));
#endif
}
INLINE float half_to_float(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, 2);
    uint32_t bits = (uint32_t)(h & 0x7fff) << 13, sign = (uint32_t)(h & 0x8000) << 16;
    const uint32_t special = (h & 0x7c00) == 0x7c00 ? bits | 0x7f800000 : 0;  // infinity or NaN
    float x;
    memcpy(&x, &bits, 4);
    x *= 0x1p112f;
    memcpy(&bits, &x, 4);
    bits |= special | sign;
    memcpy(&x, &bits, 4);
    return x;
}

// ---- bfloat16: the upper half of a float32. Rounding is to nearest, ties to even, as in torch; only the instruction, where it
// exists, flushes denormal float32 to zero.
INLINE vf widen(vh h) {
#if defined(__AVX512F__)
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
#elif defined(__AVX2__)
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)h), 16);
#else
    return (vf)(__builtin_convertvector(h, vu) << 16);
#endif
}
#if defined(__AVX512BF16__)
INLINE vh narrow(vf x) { return (vh)_mm512_cvtneps_pbh((__m512)x); }
INLINE vf round_bf16(vf x) { return widen(narrow(x)); }
#elif defined(__aarch64__) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
INLINE vh narrow(vf x) { return (vh)vcvt_bf16_f32((float32x4_t)x); }
INLINE vf round_bf16(vf x) { return widen(narrow(x)); }
#else
INLINE vh narrow(vf x) {
    vu u = (vu)x;
    vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    vu is_nan = (vu)((u & 0x7fffffffu) > 0x7f800000u);
    return __builtin_convertvector((rounded & ~is_nan) | (0x7fc0u & is_nan), vh);
}
// widen(narrow(x)), without the conversion to 16 bits and back
INLINE vf round_bf16(vf x) {
    vu u = (vu)x;
    vf rounded = (vf)((u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u);
    return vselect_less((vf)(u & 0x7fffffffu), splat(INFINITY), rounded, x + x);  // x + x is an infinity or a quiet NaN
}
#endif

// Elements i .. i + VW of an array of either dtype (which should be a compile-time constant on hot paths)
INLINE vf load_as(const void *p, int64_t i, int dtype) {
    return dtype == BFLOAT16 ? widen(*(const vh_unaligned *)((const uint16_t *)p + i)) : vload((const float *)p + i);
}
INLINE void store_as(void *p, int64_t i, vf x, int dtype) {
    if (dtype == BFLOAT16) *(vh_unaligned *)((uint16_t *)p + i) = narrow(x);
    else vstore((float *)p + i, x);
}
#if defined(__AVX512BF16__)
// 32 elements in bfloat16: a line of memory, which is then written as a whole
INLINE void store_line(uint16_t *p, vf low, vf high) {
    _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
}
#endif
// The last n < VW elements: nothing past them is read or written, and the rest of the vector is 0
INLINE vf load_part(const void *p, int64_t i, int64_t n, int dtype) {
    if (dtype == BFLOAT16) {
        vh h = {0};
        memcpy(&h, (const uint16_t *)p + i, (size_t)n * 2);
        return widen(h);
    }
    vf x = {0};
    memcpy(&x, (const float *)p + i, (size_t)n * 4);
    return x;
}
INLINE void store_part(void *p, int64_t i, int64_t n, vf x, int dtype) {
    if (dtype == BFLOAT16) {
        vh h = narrow(x);
        memcpy((uint16_t *)p + i, &h, (size_t)n * 2);
    } else {
        memcpy((float *)p + i, &x, (size_t)n * 4);
    }
}
INLINE vf round_as(vf x, int dtype) { return dtype == BFLOAT16 ? round_bf16(x) : x; }

// exp by range reduction to |r| <= ln2 / 2 and a polynomial of degree 6 (Cephes' expf), within about 1 ulp. exp(0) is exactly
// 1; x below -87.3 (also -inf) gives 0; NaN stays NaN.
INLINE vf vexp(vf x) {
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    vf clamped = vselect_less(splat(88.7f), x, splat(88.7f), x);
    clamped = vselect_less(clamped, splat(-87.3f), splat(-87.3f), clamped);
    vf n = vfma(clamped, splat(1.44269504088896341f), magic) - magic;
    vf r = vfma(n, splat(-0.693359375f), clamped);
    r = vfma(n, splat(2.12194440e-4f), r);
    vf p = splat(1.9875691500e-4f);
    p = vfma(p, r, splat(1.3981999507e-3f));
    p = vfma(p, r, splat(8.3334519073e-3f));
    p = vfma(p, r, splat(4.1665795894e-2f));
    p = vfma(p, r, splat(1.6666665459e-1f));
    p = vfma(p, r, splat(5.0000001201e-1f));
    p = vfma(p, r * r, r) + splat(1.0f);
    vi exponent = __builtin_convertvector(n, vi) << 23;
    vf result = (vf)((vi)p + exponent);
    return vselect_less(x, splat(-87.3f), splat(0.0f), result);
}
// 2^x within 2e-7 for x in -126 .. 126, and 0 for -infinity: 2^floor(x) times a polynomial in the fraction, which is fitted for
// the least relative error and exact at 0
INLINE vf vexp2(vf x) {
#if defined(__AVX512F__)
    vf f = (vf)_mm512_reduce_ps((__m512)x, 9);  // x - floor(x)
    vf p = splat(0.001867130515165627f);
    p = vfma(p, f, splat(0.009017028845846653f));
    p = vfma(p, f, splat(0.05579991266131401f));
    p = vfma(p, f, splat(0.24016444385051727f));
    p = vfma(p, f, splat(0.6931512951850891f));
    p = vfma(p, f, splat(1.0f));
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
    return vexp(x * splat(0.693147180559945309f));
#endif
}
INLINE float exp_scalar(float x) { return vexp(splat(x))[0]; }
// tanh as in Cephes' tanhf: a polynomial near 0, where 1 - 2 / (exp(2x) + 1) loses digits
INLINE vf vtanh(vf x) {
    vf z = x * x;
    vf p = splat(-5.70498872745e-3f);
    p = vfma(p, z, splat(2.06390887954e-2f));
    p = vfma(p, z, splat(-5.37397155531e-2f));
    p = vfma(p, z, splat(1.33314422036e-1f));
    p = vfma(p, z, splat(-3.33332819422e-1f));
    vf near = vfma(p * z, x, x);
    vf far = splat(1.0f) - splat(2.0f) / (vexp(x + x) + splat(1.0f));
    return vselect_less(z, splat(0.390625f), near, far);
}
// x times the share of a normal distribution below x: x / 2 * erfc(-x / sqrt 2), with a Chebyshev fit of erfc (Numerical
// Recipes 6.2) of relative error 1.2e-7
INLINE vf vgelu(vf x) {
    const vf y = x * splat(0.707106781186547524f), z = (vf)((vu)y & 0x7fffffffu),
             t = splat(1.0f) / vfma(splat(0.5f), z, splat(1.0f));
    vf p = splat(0.17087277f);
    p = vfma(p, t, splat(-0.82215223f));
    p = vfma(p, t, splat(1.48851587f));
    p = vfma(p, t, splat(-1.13520398f));
    p = vfma(p, t, splat(0.27886807f));
    p = vfma(p, t, splat(-0.18628806f));
    p = vfma(p, t, splat(0.09678418f));
    p = vfma(p, t, splat(0.37409196f));
    p = vfma(p, t, splat(1.00002368f));
    p = vfma(p, t, splat(-1.26551223f));
    const vf tail = t * vexp(vfma(-z, z, p)), below = vselect_less(y, splat(0.0f), tail, splat(2.0f) - tail);
    return splat(0.5f) * x * below;
}
// The approximation of it with tanh
INLINE vf vgelu_tanh(vf x) {
    const vf inner = splat(0.797884560802865356f) * vfma(splat(0.044715f) * x * x, x, x);
    return splat(0.5f) * x * (splat(1.0f) + vtanh(inner));
}
// x / (1 + exp(-x)), 0 below -87.3. For results that are rounded to bfloat16 within 1e-5, in half the time.
INLINE vf vsilu(vf x, int dtype) {
    vf y;
#if defined(__AVX512F__)
    if (dtype == BFLOAT16) {
        const vf sum = splat(1.0f) + vexp2(x * splat(-1.44269504088896341f));
        y = (vf)_mm512_rcp14_ps((__m512)sum);
        y = x * vfma(y, vfma(-sum, y, splat(1.0f)), y);  // one Newton step doubles the 14 correct bits
    } else
#endif
        y = x / (splat(1.0f) + vexp(-x));
    (void)dtype;
    return vselect_less(x, splat(-87.3f), splat(0.0f), y);
}

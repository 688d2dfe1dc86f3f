// Register tiles of products of quantised rows and packed weights (quant.h): a few rows times VW channels of a strip.
// Integers are summed exactly within a group, and what is rounded after that is rounded in one order: a row's result is the
// same whatever the number of rows, the tiling or the threads.
#pragma once
#include "dot.h"
#include "ops.h"

#if VW == 16
#define QMR 7  // rows of a tile: two sums each, of integers, for either group, and one over groups stay in registers
#elif defined(__aarch64__)
#define QMR 4
#else
#define QMR 2
#endif
// Pairs of groups that are added up in an int32: 20 * (8 * 127 * 32 * 2^11 + 2^11 * 127 * 32 * 2^2) is below 2^31, the largest
// scaled sums and leasts times the largest shares
#define EXACT 10

// How VW channels are brought together from the lanes of two code vectors (quant.h)
#if VW == 16
#define EVEN 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30
#define ODD 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31
#elif VW == 8
#define EVEN 0, 2, 8, 10, 4, 6, 12, 14
#define ODD 1, 3, 9, 11, 5, 7, 13, 15
#else
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#endif

INLINE vi load_int(const void *p) { return (vi)vload(p); }

// A block of a weight as a tile reads it.
struct block {
    const uint8_t *units, *pairs;      // of the first strip; units: of 4 bits only
    int64_t stride, count, next_strip;  // bytes of a pair of groups, pairs, bytes to the other strip
    const uint8_t *fetch;              // what is needed next, `lines` of 64 bytes with each pair of a strip
    int64_t lines;
};

// Rows of activations: pairs [rows][stored_terms][groups / 2], of which `terms` are multiplied.
struct activations {
    const struct row_pair *pairs;
    const void *meta;
    int64_t groups, stored_terms, terms;
};

// sums[BLOCK / VW][QMR] = mr rows times a block's channels, 4 bits. A group's sum fits 16 bits: it is multiplied by the
// channel's scale to 16 again, which rounds it to whole units of the channel and the row, then by the row's share in a dot
// product of two groups, to which leasts and the row's sums are another one.
INLINE void tile4(const struct block *b, const struct activations *x, int64_t row, vf (*sums)[QMR], const int affine,
                  const int mr) {
    const int64_t pairs = b->count, stride = x->stored_terms * pairs;
    const struct row_meta meta = meta_of(x->meta, row, x->groups);
    const uint8_t *fetch = b->fetch;
    for (int v = 0; v < BLOCK / VW; v++) {
        const int64_t skip = v * VW / STRIP * b->next_strip, lane = v * VW % STRIP * 4;
        vf total[QMR] = {0};
        for (int64_t term = 0; term < x->terms; term++) {
            const struct row_pair *rows = x->pairs + row * stride + term * pairs;
            for (int64_t p = 0; p < pairs;) {
                vi sum[QMR] = {0};
                for (int64_t end = MIN(p + EXACT, pairs); p < end; p++) {
                    const uint8_t *codes = b->pairs + skip + p * b->stride + lane, *scales = codes + CODES4;
                    const struct row_pair *at = rows + p;
                    if (term) {
                        int any = 0;
#pragma GCC unroll 8
                        for (int i = 0; i < mr; i++) {
                            const int32_t *rest = meta.has_rest + i * row_words(x->groups) + 2 * p;
                            any |= rest[0] | rest[1];
                        }
                        if (!any) continue;
                    } else if (lane == 0) {
                        for (int64_t n = b->lines; n > 0; n--, fetch += 64) __builtin_prefetch(fetch, 0, 3);
                    }
                    vi acc[QMR][2];
#pragma GCC unroll 8
                    for (int i = 0; i < mr; i++) acc[i][0] = acc[i][1] = splat_eight(at[i * stride].start);
#pragma GCC unroll 4
                    for (int step = 0; step < 4; step++) {
                        vbytes low[2], high[2];
#pragma GCC unroll 2
                        for (int n = 0; n < 2; n++) {
                            vbytes w = load_bytes(codes + (2 * step + n) * 64);
                            low[n] = w & 15;
                            high[n] = (vbytes)((vu)w >> 4) & 15;
                        }
#pragma GCC unroll 8
                        for (int i = 0; i < mr; i++) {
                            vi a = splat_eight(at[i * stride].values[step]), c = splat_eight(at[i * stride].values[step + 4]);
#pragma GCC unroll 2
                            for (int n = 0; n < 2; n++) acc[i][n] = dot4(dot4(acc[i][n], low[n], a, 4), high[n], c, 4);
                        }
                    }
                    const vi scale = load_int(scales), least = affine ? load_int(scales + SCALES) : (vi){0};
#pragma GCC unroll 8
                    for (int i = 0; i < mr; i++) {
                        vi scaled = multiply_int16(pack_int16(acc[i][0], acc[i][1]), scale);
                        sum[i] = dot2(sum[i], scaled, splat_two(at[i * stride].share));
                        if (affine) sum[i] = dot2(sum[i], least, splat_two(at[i * stride].shared_sum));
                    }
                }
#pragma GCC unroll 8
                for (int i = 0; i < mr; i++)
                    total[i] = vfma(__builtin_convertvector(sum[i], vf), splat(term ? 0x1p-8f : 1.0f), total[i]);
            }
        }
        const vf unit = vload((const float *)(b->units + skip + lane)) * splat(1.0f / (1 << SHARE_BITS));
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++) sums[v][i] = total[i] * (splat(meta.unit[i * row_words(x->groups)]) * unit);
    }
}

// acc[from .. to] += dot products of 8-bit codes
INLINE void dots8(vi (*acc)[2], const uint8_t *codes, const struct row_pair *x, int64_t stride, const int from, const int to) {
#pragma GCC unroll 8
    for (int step = 0; step < 8; step++) {
        vbytes w[2];
#pragma GCC unroll 2
        for (int n = 0; n < 2; n++) w[n] = load_bytes(codes + (2 * step + n) * 64);
#pragma GCC unroll 8
        for (int i = from; i < to; i++) {
            vi a = splat_eight(x[i * stride].values[step]);
#pragma GCC unroll 2
            for (int n = 0; n < 2; n++) acc[i][n] = dot4(acc[i][n], w[n], a, 8);
        }
    }
}

// The same for 8 bits: integer sums of groups become float32, lanes are (channel, group) until the end.
INLINE void tile8(const struct block *b, const struct activations *x, int64_t row, vf (*sums)[QMR], const int terms,
                  const int mr) {
    const int64_t pairs = b->count, stride = x->stored_terms * pairs, words = row_words(x->groups);
    const int zero = UNSIGNED_CODES8 ? ZERO8 / ZERO4 : 0, half = (mr + 1) / 2;
    const struct row_meta meta = meta_of(x->meta, row, x->groups);
    const uint8_t *fetch = b->fetch;
    for (int v = 0; v < BLOCK / VW; v++) {
        const int64_t skip = v * VW / STRIP * b->next_strip, lane = v * VW % STRIP * 4;
        vf sum[QMR][2] = {0};
        for (int64_t p = 0; p < pairs; p++) {
            const uint8_t *pair = b->pairs + skip + p * b->stride, *codes = pair + lane, *scales = pair + CODES8 + lane / 2;
            const struct row_pair *at = x->pairs + row * stride + p;
            if (lane == 0)
                for (int64_t n = b->lines; n > 0; n--, fetch += 64) __builtin_prefetch(fetch, 0, 3);
            vi acc[QMR][2];
#pragma GCC unroll 8
            for (int i = 0; i < mr; i++) acc[i][0] = acc[i][1] = zero * splat_eight(at[i * stride].start);
            dots8(acc, codes, at, stride, 0, mr);
            if (terms == 2) {
                int rest[2] = {0, 0};  // whether a row of either half has a second term here
#pragma GCC unroll 8
                for (int i = 0; i < mr; i++) {
                    const vi start = zero * splat_eight(at[i * stride + pairs].start);
                    rest[i >= half] |= meta.has_rest[i * words + 2 * p] | meta.has_rest[i * words + 2 * p + 1];
#pragma GCC unroll 2
                    for (int n = 0; n < 2; n++) acc[i][n] = (acc[i][n] << 8) + start;
                }
                if (rest[0]) dots8(acc, codes, at + pairs, stride, 0, half);
                if (rest[1]) dots8(acc, codes, at + pairs, stride, half, mr);
            }
#pragma GCC unroll 2
            for (int n = 0; n < 2; n++) {
                const vf scale = load_half(scales + n * STRIP * 2);
#pragma GCC unroll 8
                for (int i = 0; i < mr; i++) {
                    const vf row_scale = (vf)splat_eight(meta.scale + i * words + 2 * p);
                    sum[i][n] = vfma(__builtin_convertvector(acc[i][n], vf), scale * row_scale, sum[i][n]);
                }
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++) {
            vf even = __builtin_shufflevector(sum[i][0], sum[i][1], EVEN), odd = __builtin_shufflevector(sum[i][0], sum[i][1], ODD);
            sums[v][i] = (even + odd) * splat(terms == 2 ? 0x1p-8f : 1.0f);
        }
    }
}

// One function for each kind of codes, with one instance of the loop for each number of rows.
typedef void (*tile_fn)(const struct block *, const struct activations *, int64_t row, vf (*sums)[QMR], int64_t mr);
#define TILE(name, tile, kind)                                                                                             \
    static void __attribute__((noinline)) name(const struct block *b, const struct activations *x, int64_t row,            \
                                               vf (*sums)[QMR], int64_t mr) {                                              \
        switch (mr) { ROWS(tile, kind) }                                                                                   \
    }
#define CASE(tile, kind, mr) \
    case mr: tile(b, x, row, sums, kind, mr); break;
#define ROWS2(t, k) CASE(t, k, 1) CASE(t, k, 2)
#define ROWS4(t, k) ROWS2(t, k) CASE(t, k, 3) CASE(t, k, 4)
#define ROWS7(t, k) ROWS4(t, k) CASE(t, k, 5) CASE(t, k, 6) CASE(t, k, 7)
#if QMR == 7
#define ROWS ROWS7
#elif QMR == 4
#define ROWS ROWS4
#else
#define ROWS ROWS2
#endif
TILE(tile_4bit, tile4, 0)
TILE(tile_4bit_affine, tile4, 1)
TILE(tile_8bit, tile8, 1)
TILE(tile_8bit_two_terms, tile8, 2)

// Register tiles of products of quantised rows and packed weights (quant.h): a few rows times VW channels of a strip.
// Sums within a group are exact integers, and later roundings happen in one order: a row's result does not depend on the number
// of rows, the tiling or the threads.
#pragma once
#include "amx.h"
#include "dot.h"
#include "linear_ops.h"

#if VW == 16
#define QMR 7  // rows of a tile: for each, two integer sums (one per group) and a total stay in registers
#elif defined(__aarch64__)
#define QMR 4
#else
#define QMR 2
#endif
#define MAX_ROWS MAX(QMR, HAS_AMX ? AMX_ROWS : 12)  // of any kind
// Vectors of channels of a strip that a tile of one row takes at once
#define ACROSS MIN(STRIP / VW, QMR)
// Pairs of groups that are summed in an int32. With the largest scaled sums, offsets and relative scales,
// 20 * (8 * 127 * 32 * 2^11 + 2^11 * 127 * 32 * 2^2) is below 2^31, and so are, of halves, 32 * 8 * 127 * 32 * 2^11 and, with
// offsets, 32 * (8 * 127 * 16 * 2^11 + 2^11 * 127 * 16 * 2^2).
#define EXACT_PAIRS(kind) (kind_has(kind, HALVES) ? 8 : 10)

// Shuffles that collect the sums of VW channels from the lanes of two code vectors (quant.h)
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

// A block of a weight, as a tile reads it
struct weight_block {
    const uint8_t *head, *pairs;        // of the first strip
    int64_t stride, count, next_strip;  // bytes of a pair of groups, number of pairs, bytes to the second strip
    const uint8_t *prefetch;            // needed next: `lines` of 64 bytes are prefetched with each pair of a strip
    int64_t lines;
    const struct matrix_sums *products, *ready;  // of all tiles of rows, and of the tile whose turn it is: row_scaled_matrix.h
};

// Rows of activations: pairs [rows][stored_terms][groups / 2], of which `terms` are multiplied.
struct activations {
    const struct row_pair *pairs;
    const void *meta;
    int64_t groups, stored_terms, terms;
};

#include "row_scaled_tile.h"
#include "row_scaled_matrix.h"
#include "scaled_mmla.h"

// Codes of two steps, s (low) and s + 4 (high), for lane `n` of a pair of groups that starts at `codes`; of HALVES only one.
INLINE void load_codes(const uint8_t *codes, int step, int n, vbytes table, const int kind, vbytes *low, vbytes *high) {
    const uint8_t *planes = codes + STRIP * PAIR / 2;
    const vbytes w = load_bytes(codes + (2 * (kind_bits(kind) == 2 ? step % 2 : step) + n) * 64);
    if (kind_bits(kind) == 2) {
        *low = (vbytes)(step < 2 ? (vu)w << 2 : (vu)w) & 12, *high = (vbytes)((vu)w >> (step < 2 ? 2 : 4)) & 12;
        return;
    }
    *low = w & 15, *high = (vbytes)((vu)w >> 4) & 15;
    if (kind_bits(kind) == 5) {
        const vu plane = (vu)load_bytes(planes + n * 64);
        *low |= (vbytes)(plane << (4 - step)) & 16, *high |= (vbytes)(plane >> step) & 16;
    } else if (kind_bits(kind) == 6) {
        const vu first = (vu)load_bytes(planes + n * 64), second = (vu)load_bytes(planes + (2 + n) * 64);
        *low |= (vbytes)(step < 2 ? first << (4 - 2 * step) : first >> (2 * step - 4)) & 48;
        *high |= (vbytes)(step < 2 ? second << (4 - 2 * step) : second >> (2 * step - 4)) & 48;
    } else if (kind_has(kind, TABLE)) {
        *low = look_up(table, *low), *high = look_up(table, *high);
    }
}

#include "quantized_mmla.h"

// The factors of the offsets of a pair's first halves: as row_pair.scaled_sum, of which it is a part, but from integers alone.
// `first`: the row's sums of first halves
INLINE vi scaled_first_sums(const struct row_pair *x, const int32_t *first) {
    const vi sum = splat_eight(first) << 4, scale = splat_two(x->relative_scale) << (SCALE_BITS - OFFSET_BITS - 4);
    return multiply_int16(pack_int16(sum, sum), scale);
}

// acc[mr][2 * across] = sums of mr rows over a pair of groups, or over their halves `half`, times `across` vectors of channels.
// `first`: the rows' sums of first halves, HALVES only
INLINE void dots(vi (*acc)[2 * ACROSS], const uint8_t *codes, const struct row_pair *x, int64_t stride, const int32_t *first,
                 int64_t words, const int half, vbytes table, const int kind, const int mr, const int across) {
    const int halves = kind_has(kind, HALVES), wide = kind_has(kind, TABLE), shift = kind_shift(kind);
    const int zero = wide && !UNSIGNED_CODES8 ? 0 : kind_zero(kind);
    const int run = kind_bits(kind) <= 4 ? 4 : kind_bits(kind) == 5 ? 2 : 1;  // steps of two dots each in 16 bits
    vi part[QMR][2 * ACROSS] = {0};
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++) {
        vi start = splat_eight(x[i * stride].initial_sum) * (zero / INITIAL_ZERO);
        if (halves) {
            const vi before = splat_eight(first + i * words) * -zero;
            start = half ? start - before : before;
        }
#pragma GCC unroll 8
        for (int n = 0; n < 2 * across; n++) acc[i][n] = start + (shift ? 1 << (shift - 1) : 0);  // rounds
    }
#if HAS_INT8_MMLA
    if (mr > 1) {
        mmla_dots(acc, codes, x, stride, half, table, kind, mr);
        return;
    }
#endif
#pragma GCC unroll 4
    for (int step = 0; step < 4; step++) {
        vbytes low[2 * ACROSS], high[2 * ACROSS];
#pragma GCC unroll 8
        for (int n = 0; n < 2 * across; n++)
            load_codes(codes + n / 2 * VW * 4, step, n % 2, table, kind, low + n, high + n);
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++) {
            const vi a = splat_eight(x[i * stride].values[step]), c = splat_eight(x[i * stride].values[step + 4]);
#pragma GCC unroll 8
            for (int n = 0; n < 2 * across; n++) {
                if (wide) {
                    if (!halves || half == 0) acc[i][n] = dot4_wide(acc[i][n], low[n], a);
                    if (!halves || half == 1) acc[i][n] = dot4_wide(acc[i][n], high[n], c);
                } else {
                    if (!halves || half == 0) dot4_in_parts(&acc[i][n], &part[i][n], low[n], a);
                    if (!halves || half == 1) dot4_in_parts(&acc[i][n], &part[i][n], high[n], c);
                    if ((step + 1) % (run << halves) == 0 || step == 3) add_part(&acc[i][n], &part[i][n]);
                }
            }
        }
    }
}

// sums[BLOCK / VW][QMR] = mr rows times the channels of a block, of fewer than 8 bits. The sum of a group, or half of it, fits
// 16 bits once it is shifted. Multiplying it with the channel's 16-bit scale rounds it to whole units of the channel and the row.
// A dot product over two groups then applies the row's relative scales, and for affine kinds a second one adds offsets times
// scaled sums. A row alone is multiplied with several vectors of channels at once, so that their latencies overlap.
INLINE void tile(const struct weight_block *b, const struct activations *x, int64_t row, vf (*sums)[MAX_ROWS], const int kind,
                 const int mr) {
    const int affine = kind_has(kind, AFFINE), halves = kind_has(kind, HALVES), shift = kind_shift(kind);
    const int across = mr == 1 ? ACROSS : 1;
    const int64_t pairs = b->count, stride = x->stored_terms * pairs, words = row_words(x->groups);
    const struct row_meta meta = row_meta_at(x->meta, row, x->groups);
    const uint8_t *prefetch = b->prefetch;
    for (int v = 0; v < BLOCK / VW; v += across) {
        const int64_t skip = v * VW / STRIP * b->next_strip, lane = v * VW % STRIP * 4;
        const vbytes table = kind_has(kind, TABLE) ? to_signed(load_bytes(b->head + skip + UNIT_BYTES)) : (vbytes){0};
        vf total[QMR * ACROSS] = {0};  // [row][vector]
        for (int64_t term = 0; term < x->terms; term++) {
            const struct row_pair *rows = x->pairs + row * stride + term * pairs;
            for (int64_t p = 0; p < pairs;) {
                vi sum[QMR * ACROSS] = {0};
                for (int64_t end = MIN(p + EXACT_PAIRS(kind), pairs); p < end; p++) {
                    const uint8_t *codes = b->pairs + skip + p * b->stride + lane, *scales = codes + kind_code_bytes(kind);
                    const struct row_pair *at = rows + p;
                    if (term) {
                        int any = 0;
#pragma GCC unroll 8
                        for (int i = 0; i < mr; i++) {
                            const int32_t *rest = meta.has_second_term + i * words + 2 * p;
                            any |= rest[0] | rest[1];
                        }
                        if (!any) continue;
                    } else if (lane == 0) {
                        for (int64_t n = b->lines; n > 0; n--, prefetch += 64) __builtin_prefetch(prefetch, 0, 3);
                    }
#pragma GCC unroll 2
                    for (int half = 0; half <= halves; half++) {
                        vi acc[QMR][2 * ACROSS];
                        dots(acc, codes, at, stride, meta.half_sum[term] + 2 * p, words, half, table, kind, mr, across);
#pragma GCC unroll 8
                        for (int q = 0; q < mr * across; q++) {
                            const int i = q / across, u = q % across;
                            const vi scale = load_int(scales + u * VW * 4 + half * SCALE_BYTES);
                            vi scaled = multiply_int16(pack_int16(acc[i][2 * u] >> shift, acc[i][2 * u + 1] >> shift), scale);
                            sum[q] = dot2(sum[q], scaled, splat_two(at[i * stride].relative_scale));
                        }
                    }
                    if (affine) {
                        const uint8_t *offsets = scales + (1 + halves) * SCALE_BYTES;
#pragma GCC unroll 8
                        for (int q = 0; q < mr * across; q++) {
                            const struct row_pair *pair = at + q / across * stride;
                            // Of halves: the second one's times all sums, and what the first one's is more times the first one's.
                            const vi offset = load_int(offsets + q % across * VW * 4 + halves * SCALE_BYTES);
                            sum[q] = dot2(sum[q], offset, splat_two(pair->scaled_sum));
                            if (halves) {
                                const vi more = subtract_int16(load_int(offsets + q % across * VW * 4), offset);
                                const int32_t *first = meta.half_sum[term] + q / across * words + 2 * p;
                                sum[q] = dot2(sum[q], more, scaled_first_sums(pair, first));
                            }
                        }
                    }
                }
#pragma GCC unroll 8
                for (int q = 0; q < mr * across; q++)
                    total[q] = vfma(__builtin_convertvector(sum[q], vf), splat(term ? 0x1p-8f : 1.0f), total[q]);
            }
        }
#pragma GCC unroll 8
        for (int q = 0; q < mr * across; q++) {
            const vf unit = vload((const float *)(b->head + skip + lane) + q % across * VW) * splat(1.0f / (1 << RELATIVE_BITS));
            sums[v + q % across][q / across] = total[q] * (splat(meta.max_scale[q / across * words]) * unit);
        }
    }
}

// acc[from .. to] += dot products over a pair of groups, of a kind with float scales
INLINE void dots_float(vi (*acc)[2], const uint8_t *codes, const struct row_pair *x, int64_t stride, vbytes table,
                       const int kind, const int from, const int to) {
    const int packed = kind_bits(kind) == 4, steps = packed ? 4 : 8;  // two steps in a byte
#if HAS_INT8_MMLA
    if (to - from > 1) {
        mmla_dots_float(acc, codes, x, stride, table, kind, from, to);
        return;
    }
#endif
#pragma GCC unroll 8
    for (int step = 0; step < steps; step++) {
        vbytes low[2], high[2];
#pragma GCC unroll 2
        for (int n = 0; n < 2; n++) {
            if (packed) load_codes(codes, step, n, table, kind, low + n, high + n);
            else low[n] = to_signed(load_bytes(codes + (2 * step + n) * 64));
        }
#pragma GCC unroll 8
        for (int i = from; i < to; i++) {
            const vi a = splat_eight(x[i * stride].values[step]);
            const vi c = packed ? splat_eight(x[i * stride].values[step + 4]) : a;
#pragma GCC unroll 2
            for (int n = 0; n < 2; n++) {
                acc[i][n] = dot4_wide(acc[i][n], low[n], a);
                if (packed) acc[i][n] = dot4_wide(acc[i][n], high[n], c);
            }
        }
    }
}

// The same for 8 bits and for tables with one scale a group: the integer sums of groups become float32, and lanes are (channel,
// group) until the end.
INLINE void tile_float(const struct weight_block *b, const struct activations *x, int64_t row, vf (*sums)[MAX_ROWS], const int kind,
                       const int terms, const int mr) {
    const int64_t pairs = b->count, stride = x->stored_terms * pairs, words = row_words(x->groups);
    const int zero = UNSIGNED_CODES8 ? kind_zero(kind) / INITIAL_ZERO : 0, half = (mr + 1) / 2;
    const struct row_meta meta = row_meta_at(x->meta, row, x->groups);
    const uint8_t *prefetch = b->prefetch;
    for (int v = 0; v < BLOCK / VW; v++) {
        const int64_t skip = v * VW / STRIP * b->next_strip, lane = v * VW % STRIP * 4;
        const vbytes table = kind_has(kind, TABLE) ? to_signed(load_bytes(b->head + skip + UNIT_BYTES)) : (vbytes){0};
        vf sum[QMR][2] = {0};
        for (int64_t p = 0; p < pairs; p++) {
            const uint8_t *pair = b->pairs + skip + p * b->stride, *codes = pair + lane,
                          *scales = pair + kind_code_bytes(kind) + lane / 2;
            const struct row_pair *at = x->pairs + row * stride + p;
            if (lane == 0)
                for (int64_t n = b->lines; n > 0; n--, prefetch += 64) __builtin_prefetch(prefetch, 0, 3);
            vi acc[QMR][2];
#pragma GCC unroll 8
            for (int i = 0; i < mr; i++) acc[i][0] = acc[i][1] = zero * splat_eight(at[i * stride].initial_sum);
            dots_float(acc, codes, at, stride, table, kind, 0, mr);
            if (terms == 2) {
                int rest[2] = {0, 0};  // whether a row of either half has a second term here
#pragma GCC unroll 8
                for (int i = 0; i < mr; i++) {
                    const vi start = zero * splat_eight(at[i * stride + pairs].initial_sum);
                    rest[i >= half] |= meta.has_second_term[i * words + 2 * p] | meta.has_second_term[i * words + 2 * p + 1];
#pragma GCC unroll 2
                    for (int n = 0; n < 2; n++) acc[i][n] = (acc[i][n] << 8) + start;
                }
                if (rest[0]) dots_float(acc, codes, at + pairs, stride, table, kind, 0, half);
                if (rest[1]) dots_float(acc, codes, at + pairs, stride, table, kind, half, mr);
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
        const vf unit = kind_has(kind, TABLE) ? vload((const float *)(b->head + skip + lane)) : splat(1.0f);
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++) {
            vf even = __builtin_shufflevector(sum[i][0], sum[i][1], EVEN),
               odd = __builtin_shufflevector(sum[i][0], sum[i][1], ODD);
            sums[v][i] = (even + odd) * (unit * splat(terms == 2 ? 0x1p-8f : 1.0f));
        }
    }
}
INLINE void tile_one_term(const struct weight_block *b, const struct activations *x, int64_t row, vf (*sums)[MAX_ROWS],
                          const int kind, const int mr) {
    tile_float(b, x, row, sums, kind, 1, mr);
}
INLINE void tile_two_terms(const struct weight_block *b, const struct activations *x, int64_t row, vf (*sums)[MAX_ROWS],
                           const int kind, const int mr) {
    tile_float(b, x, row, sums, kind, 2, mr);
}

// One function for each kind of codes, with one instance of the loop for each number of rows
typedef void (*tile_fn)(const struct weight_block *, const struct activations *, int64_t row, vf (*sums)[MAX_ROWS], int64_t mr);
#define TILE(name, tile, kind)                                                                                         \
    static void __attribute__((noinline)) name(const struct weight_block *b, const struct activations *x, int64_t row, \
                                               vf(*sums)[MAX_ROWS], int64_t mr) {                                           \
        switch (mr) { ROWS(tile, kind) }                                                                               \
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
TILE(tile_2bit_affine, tile, KIND(2, AFFINE))
TILE(tile_2bit_affine_halves, tile, KIND(2, AFFINE | HALVES))
TILE(tile_4bit, tile, KIND(4, 0))
TILE(tile_4bit_affine, tile, KIND(4, AFFINE))
TILE(tile_4bit_halves, tile, KIND(4, HALVES))
TILE(tile_table_halves, tile, KIND(4, TABLE | HALVES))
TILE(tile_5bit, tile, KIND(5, 0))
TILE(tile_5bit_affine, tile, KIND(5, AFFINE))
TILE(tile_6bit_halves, tile, KIND(6, HALVES))
TILE(tile_table, tile_one_term, KIND(4, TABLE))
TILE(tile_table_two_terms, tile_two_terms, KIND(4, TABLE))
TILE(tile_8bit, tile_one_term, KIND(8, 0))
TILE(tile_8bit_two_terms, tile_two_terms, KIND(8, 0))
#undef ROWS
#if SCALED_ROWS == 12
#define ROWS(t, k) \
    ROWS7(t, k) CASE(t, k, 8) CASE(t, k, 9) CASE(t, k, 10) CASE(t, k, 11) CASE(t, k, 12)
#elif SCALED_ROWS == 8
#define ROWS(t, k) ROWS7(t, k) CASE(t, k, 8)
#elif SCALED_ROWS == 4
#define ROWS ROWS4
#elif SCALED_ROWS == 3
#define ROWS(t, k) ROWS2(t, k) CASE(t, k, 3)
#else
#define ROWS ROWS2
#endif
#if HAS_INT8_MATRIX
TILE(tile_of_few_rows, tile_by_row, KIND(8, BY_ROW))
static void tile_8bit_by_row(const struct weight_block *b, const struct activations *x, int64_t row, vf (*sums)[MAX_ROWS],
                             int64_t mr) {
    if (mr > FEW_ROWS) matrix_by_row(b, x, row, sums, mr);
    else tile_of_few_rows(b, x, row, sums, mr);
}
#elif HAS_INT8_MMLA
TILE(tile_8bit_by_row, mmla_by_row, KIND(8, BY_ROW))
#else
TILE(tile_8bit_by_row, tile_by_row, KIND(8, BY_ROW))
#endif

// Group-quantised matrices: the layout of packed weights and of quantised rows of activations.
//
// A weight [N, K] has a scale for each GROUP columns of a channel (a row), and for affine types a minimum:
//     8 bit: w = scale * (q - 128), scales float16, as files have them;
//     4 bit: w = unit * (scale / 2^15 * (q - 8) + least / 2^9), scale and least int16, of affine types alone the latter; a
//     file's minimum m is (m + 8 scale) there. A channel's unit is a power of two above its scales and a quarter of its leasts,
//     so that a file's float16 scale is exact from a 32nd of the unit on, and a least within 2^-10 of it.
// With integers, bringing a group's sums to scale costs 16 channels 1.5 multiplications (8 are the products), and 3 with
// float32. A sum times its scale is rounded to whole units: a group whose scale is a hundredth of another one's of its channel
// keeps little of its value, but adds as little to the result. Rows of which no scale is above 2^-100 count as zeros.
// K is padded with zeros to pairs of groups, N to blocks of BLOCK. A block is two strips of STRIP channels, a strip one
// contiguous stream, for 4 bits after its channels' units, float32 [STRIP]: pair by pair codes, scales, for affine types
// leasts. A 64-byte vector holds 4 consecutive columns of either group for 8 channels, what one vpdpbusd takes; there are two
// of a kind, n = 0 and 1, the first one with channels 0, 1, 4, 5, 8, 9, 12, 13, the second with those 2 after, so that packing
// their 32-bit sums to 16 bits brings the channels into order, on all instruction sets:
//     8 bit: codes [step: 8][n: 2][channel: 8][group: 2][column: 4], scales float16 [n: 2][channel: 8][group: 2];
//     4 bit: codes the same with steps s (low nibble) and s + 4 (high) in a byte; scales, leasts int16 [channel: 16][group: 2].
//
// Activations are quantised dynamically: each group of a row has its own scale, amax / 127, so that an outlier spoils 32
// values and not the row. With two terms a second int8 holds what the first left over (x = scale * (q1 + q2 / 256)). Where
// whole rows are at hand, only groups with a value of a third of the row's largest and more keep it: what 8 bits lose
// grows with a group's largest value, a few groups are far above the rest, and of the others nothing is multiplied twice.
#pragma once
#include <stdint.h>

#define GROUP 32
#define PAIR (2 * GROUP)
#define STRIP 16
#define BLOCK (2 * STRIP)
#define ZERO4 8
#define ZERO8 128
// bytes of a pair of groups of a strip
#define CODES8 (STRIP * PAIR)
#define CODES4 (STRIP * PAIR / 2)
#define SCALES (STRIP * 2 * 2)
#define UNITS (STRIP * 4)  // bytes before the pairs of a 4-bit strip
// bits after the point of scales and leasts beside their channel's unit, and of a row's scales beside its largest; the last
// also bounds the leasts, so that EXACT pairs' products fit an int32 (quantized_tile.h)
#define SCALE_BITS 15
#define LEAST_BITS 9
#define SHARE_BITS 11

// Rows of quantised activations: for each row and term groups / 2 of these; `groups` is even wherever it is named. A group's
// scale is, for 4-bit weights, unit * share / 2^SHARE_BITS.
struct row_pair {
    int32_t start[2];         // -ZERO4 times the sum of a group's integers: where its product with unsigned codes begins
    int16_t share[2];         // of its scale in the row's unit
    int16_t shared_sum[2];    // the sum times the share / 2^LEAST_BITS: what a least is multiplied with
    int8_t values[8][2][4];   // step, group, column
};
// And for each row as many 4-byte words as row_words(groups): its groups' scales, the sums of their integers and of those
// of second terms, whether they have any but zeros there, the unit, which is the largest scale, and room for a vector.
struct row_meta {
    float *scale;
    int32_t *sum[2], *has_rest;
    float *unit;
};
static inline int64_t row_words(int64_t groups) { return 4 * groups + 16; }
static inline struct row_meta meta_of(const void *meta, int64_t row, int64_t groups) {
    float *first = (float *)meta + row * row_words(groups);
    int32_t *sum = (int32_t *)first + groups;
    return (struct row_meta){first, {sum, sum + groups}, sum + 2 * groups, first + 4 * groups};
}

// Group-quantised matrices: the layout of packed weights and of quantised rows of activations.
//
// A weight [N, K] has one scale for each GROUP columns of a channel (a row) and, for affine types, an offset:
//     8 bit: w = scale * (q - 128), scales in float16, as files have them;
//     4 bit: w = unit * (scale / 2^15 * (q - 8) + offset / 2^9). scale and offset are int16; only affine types have an offset,
//     and a file's minimum m becomes m + 8 * scale. The unit of a channel is a power of two that is larger than its scales and
//     than a quarter of its offsets. So a file's float16 scale is exact from unit / 32 on, an offset within unit * 2^-10.
// Integer scales make the arithmetic cheaper: scaling the sums of a group takes 1.5 multiplications for 16 channels (the
// products take 8); in float32 it takes 3. The scaled sum is rounded to whole units: a group whose scale is a hundredth of
// another one's of its channel keeps little precision, but contributes as little. Rows without a scale above 2^-100 are zeros.
//
// K is padded with zeros to pairs of groups, N to blocks of BLOCK channels. A block is two strips of STRIP channels. A strip is
// contiguous: for 4 bits the units of its channels, float32 [STRIP], then for each pair of groups codes, scales and, for affine
// types, offsets. A 64-byte vector holds 4 consecutive columns of both groups for 8 channels, as vpdpbusd takes them. There are
// two such vectors, n = 0 with channels 0, 1, 4, 5, 8, 9, 12, 13 and n = 1 with channels 2, 3, 6, 7, 10, 11, 14, 15: packing
// their 32-bit sums to 16 bits then puts the channels in order on all instruction sets.
//     8 bit: codes [step: 8][n: 2][channel: 8][group: 2][column: 4], scales float16 [n: 2][channel: 8][group: 2];
//     4 bit: the same codes, steps s (low nibble) and s + 4 (high) in one byte; scales, offsets int16 [channel: 16][group: 2].
//
// Activations are quantised dynamically: each group of a row has its own scale, amax / 127, so that an outlier costs precision
// in 32 values and not in the row. With two terms, a second int8 holds the remainder: x = scale * (q1 + q2 / 256). The error of
// 8 bits grows with a group's largest value, and few groups are far above the rest. Operations that have the whole row
// therefore keep the second term only for groups with a value of at least a third of the row's largest; the others cost no
// arithmetic.
#pragma once
#include <stdint.h>

#define GROUP 32
#define PAIR (2 * GROUP)
#define STRIP 16
#define BLOCK (2 * STRIP)
#define ZERO4 8
#define ZERO8 128
// Bytes of a pair of groups in a strip
#define CODE_BYTES8 (STRIP * PAIR)
#define CODE_BYTES4 (STRIP * PAIR / 2)
#define SCALE_BYTES (STRIP * 2 * 2)
#define UNIT_BYTES (STRIP * 4)  // before the pairs of a 4-bit strip
// Fractional bits of scales and offsets relative to their channel's unit, and of a row's scales relative to its largest. The
// last one also bounds the offsets, so that the products of EXACT_PAIRS pairs fit an int32 (quantized_tile.h).
#define SCALE_BITS 15
#define OFFSET_BITS 9
#define RELATIVE_BITS 11

// Rows of quantised activations: groups / 2 of these for each row and term; `groups` is always even. For 4-bit weights, the
// scale of a group is max_scale * relative_scale / 2^RELATIVE_BITS.
struct row_pair {
    int32_t initial_sum[2];     // -ZERO4 * sum of the group's integers: products with unsigned codes start from it
    int16_t relative_scale[2];  // scale of the group relative to the row's largest
    int16_t scaled_sum[2];      // sum * relative_scale / 2^OFFSET_BITS: the factor of the weights' offsets
    int8_t values[8][2][4];     // [step][group][column]
};
// Beside them, row_words(groups) 4-byte words for each row: the scales of its groups, the sums of their integers for either
// term, whether they have a second term, the largest scale, and padding for a vector.
struct row_meta {
    float *scale;
    int32_t *sum[2], *has_second_term;
    float *max_scale;
};
static inline int64_t row_words(int64_t groups) { return 4 * groups + 16; }
static inline struct row_meta row_meta_at(const void *meta, int64_t row, int64_t groups) {
    float *first = (float *)meta + row * row_words(groups);
    int32_t *sum = (int32_t *)first + groups;
    return (struct row_meta){first, {sum, sum + groups}, sum + 2 * groups, first + 4 * groups};
}

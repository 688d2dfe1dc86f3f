// Group-quantised matrices: the layout of packed weights and of quantised rows of activations.
//
// A weight [N, K] has one scale for each GROUP columns of a channel (a row), or for each half of them, and, for affine kinds, an
// offset, or two:
//     8 bit: w = scale * (q - 128), scales in float16, as files have them;
//     2, 4, 5, 6 bit: w = unit * (scale / 2^(15 + shift) * (q - zero) + offset / 2^9), with a zero in the middle of the codes.
//     2-bit codes are unpacked times 4, with a quarter of their scales: sums then fill 16 bits as those of 4-bit codes do.
//     scale and offset are int16; only affine kinds have an offset, and a file's minimum m becomes m + zero * scale. The unit of
//     a channel is a power of two that is larger than its scales times 2^shift and than a quarter of its offsets. So a file's
//     float16 scale is exact from unit / 32 on, an offset within unit * 2^-10;
//     4 bit with a table: w = unit * scale * table[q], any 16 int8. Scales are float16, the unit a power of two that brings the
//     channel's largest scale between 2^14 and 2^15; so a scale of 11 significant bits is exact down to 2^-29 of that;
//     4 bit with a table and two scales a group: w = unit * scale / 2^(15 + shift) * table[q].
// Integer scales make the arithmetic cheaper: scaling the sums of a group takes 1.5 multiplications for 16 channels (the
// products take 8); in float32 it takes 3. Sums are rounded to 16 bits before: `shift` is by how many bits the largest exceed
// them. The scaled sum is rounded to whole units: a group whose scale is a hundredth of another one's of its channel keeps
// little precision, but contributes as little. Rows without a scale above 2^-100 are zeros.
//
// K is padded with zeros to pairs of groups, N to blocks of BLOCK channels. A block is two strips of STRIP channels. A strip is
// contiguous: first, but for 8 bits, the units of its channels, float32 [STRIP], and a table as uint8 [4][16], each value plus
// 128; then for each pair of groups codes, scales and, for affine kinds, offsets. A 64-byte vector holds 4 consecutive columns of
// both groups for 8 channels, as vpdpbusd takes them. There are two such vectors, n = 0 with channels 0, 1, 4, 5, 8, 9, 12, 13
// and n = 1 with channels 2, 3, 6, 7, 10, 11, 14, 15: packing their 32-bit sums to 16 bits then puts the channels in order on all
// instruction sets.
//     8 bit: codes [step: 8][n: 2][channel: 8][group: 2][column: 4], scales float16 [n: 2][channel: 8][group: 2];
//     4 bit: the same codes, steps s (low nibble) and s + 4 (high) in one byte; scales [half: 1 or 2], then offsets, int16
//     [channel: 16][group: 2]; with a table and one scale a group, scales as of 8 bits;
//     5 bit: as 4 bit; after the nibbles the fifth bits, [n: 2][channel: 8][group: 2][column: 4], step s in bit s of a byte;
//     6 bit: as 4 bit; after them two bits each, [half: 2][n: 2][channel: 8][group: 2][column: 4], step s in bits 2 * (s % 4);
//     2 bit: steps s, s + 2, s + 4, s + 6 in one byte, from the lowest bits on; scales [half: 1 or 2], then as many offsets.
//
// 8 bit with one scale a channel (BY_ROW): w = scale * (q - 128), scales in float32. Sums over all of K are exact integers. A
// block holds its scales [BLOCK], then codes [step][channel: BLOCK][column: 4].
//
// Activations are quantised dynamically: each group of a row has its own scale, amax / 127, so that an outlier costs precision
// in 32 values and not in the row. With two terms, a second int8 holds the remainder: x = scale * (q1 + q2 / 256). The error of
// 8 bits grows with a group's largest value, and few groups are far above the rest. Operations that have the whole row
// therefore keep the second term only for groups with a value of at least a third of the row's largest; the others cost no
// arithmetic.
//
// For weights with one scale a channel a row has one scale, too (scaled_row): OUTLIER times the mean size of its values, over 127,
// or less where none is so large. Larger values are sums of two integers, x = scale * (q1 + SECOND_UNIT * q2). They are few, and
// only the steps that hold one are multiplied with q2.
#pragma once
#include <stdint.h>

#define GROUP 32
#define PAIR (2 * GROUP)
#define STRIP 16
#define BLOCK (2 * STRIP)
#define HALF (GROUP / 2)
#define SCALE_BYTES (STRIP * 2 * 2)  // of a pair of groups in a strip
#define UNIT_BYTES (STRIP * 4)
#define TABLE_BYTES 64

// Kinds of codes: bits and flags. Functions that take a kind as a constant have an instance for each.
enum { AFFINE = 1, HALVES = 2, TABLE = 4, BY_ROW = 8 };
#define KIND(bits, flags) ((bits) | (flags) << 4)
static inline int kind_bits(int kind) { return kind & 15; }
static inline int kind_has(int kind, int flag) { return (kind >> 4 & flag) != 0; }
// What codes are multiplied by as they are unpacked
static inline int kind_step(int kind) { return kind_bits(kind) == 2 ? 4 : 1; }
// The code of 0, so multiplied; a table's values are stored plus 128
static inline int kind_zero(int kind) { return kind_has(kind, TABLE) ? 128 : kind_step(kind) << (kind_bits(kind) - 1); }
// Whether sums of groups become float32 and scales are float16. A table's integers may be small and its scales powers of two
// (MXFP4): sums that are rounded to 16 bits twice would be ties each time, and ties go upwards in every group.
static inline int kind_is_float(int kind) { return kind_bits(kind) == 8 || (kind_has(kind, TABLE) && !kind_has(kind, HALVES)); }
// Bits by which the largest sums of kind_zero() * 127 over a group, or half of it, exceed 16
static inline int kind_shift(int kind) {
    int shift = 0;
    if (kind_is_float(kind)) return 0;
    while (kind_zero(kind) * (kind_has(kind, HALVES) ? HALF : GROUP) >> shift > 256) shift++;
    return shift;
}
// Bytes of the codes, or of all, of a pair of groups in a strip; bytes before the pairs
static inline int64_t kind_code_bytes(int kind) { return STRIP * PAIR * kind_bits(kind) / 8; }
static inline int64_t kind_pair_bytes(int kind) {
    return kind_code_bytes(kind) + SCALE_BYTES * (1 + kind_has(kind, AFFINE)) * (1 + kind_has(kind, HALVES));
}
static inline int64_t kind_head_bytes(int kind) {
    return kind_bits(kind) == 8 ? 0 : UNIT_BYTES + (kind_has(kind, TABLE) ? TABLE_BYTES : 0);
}

// Fractional bits of scales and offsets relative to their channel's unit, and of a row's scales relative to its largest. The
// last one also bounds the offsets, so that the products of EXACT_PAIRS pairs fit an int32 (quantized_tile.h).
#define SCALE_BITS 15
#define OFFSET_BITS 9
#define RELATIVE_BITS 11

// Rows of quantised activations: groups / 2 of these for each row and term; `groups` is always even. For weights of fewer than 8
// bits, the scale of a group is max_scale * relative_scale / 2^RELATIVE_BITS.
#define INITIAL_ZERO 8
struct row_pair {
    int32_t initial_sum[2];     // -INITIAL_ZERO * sum of the group's integers: products with unsigned codes start from it
    int16_t relative_scale[2];  // scale of the group relative to the row's largest
    int16_t scaled_sum[2];      // sum * relative_scale / 2^OFFSET_BITS: the factor of the weights' offsets
    int8_t values[8][2][4];     // [step][group][column]
};
// Beside them, row_words(groups) 4-byte words for each row: the scales of its groups, the sums of their integers for either
// term, those of the first HALF of each group, whether they have a second term, the largest scale, and padding for a vector.
struct row_meta {
    float *scale;
    int32_t *sum[2], *half_sum[2], *has_second_term;
    float *max_scale;
};
static inline int64_t row_words(int64_t groups) { return 6 * groups + 16; }
static inline struct row_meta row_meta_at(const void *meta, int64_t row, int64_t groups) {
    float *first = (float *)meta + row * row_words(groups);
    int32_t *sum = (int32_t *)first + groups;
    return (struct row_meta){
        first, {sum, sum + groups}, {sum + 2 * groups, sum + 3 * groups}, sum + 4 * groups, first + 6 * groups};
}

// A row with one scale: this header, a byte for each group, padded to 64, whose bits say which of its 8 steps have a q2 that is
// not 0, then q1 and q2 [groups][GROUP]. `groups` is always even.
#define OUTLIER 6.0f
#define SECOND_UNIT 255  // and not 256, so that q1 is in -127 .. 127
#define ROW_TERMS -1     // in place of a number of terms: rows of this form
struct scaled_row {
    float scale;
    int32_t sum;  // of q1 + SECOND_UNIT * q2
    int32_t padding[14];
    uint8_t data[];
};
static inline int64_t scaled_row_steps(int64_t groups) { return (groups + 63) / 64 * 64; }
static inline int64_t scaled_row_bytes(int64_t groups) {
    return (int64_t)sizeof(struct scaled_row) + scaled_row_steps(groups) + 2 * groups * GROUP;
}
static inline struct scaled_row *scaled_row_at(const void *rows, int64_t row, int64_t groups) {
    return (struct scaled_row *)((uint8_t *)rows + row * scaled_row_bytes(groups));
}

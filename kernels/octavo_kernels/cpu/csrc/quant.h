// Group-quantised matrices: the layout of packed weights and of quantised rows of activations.
//
// A weight [N, K] is held in groups of GROUP columns with one scale (float16) each, and for affine types one minimum:
//     w = scale * (q - zero)       zero: 8 for 4-bit, 128 for 8-bit codes, or
//     w = scale * q + minimum      ("affine", 4-bit codes only).
// Channels (rows of the weight) come in blocks of BLOCK, padded with zeros; a block is one contiguous stream, group by
// group: codes, then BLOCK scales, then for affine types BLOCK minima. Codes of a group are ordered so that one 64-byte
// vector holds 16 channels x 4 consecutive columns, what one vpdpbusd takes:
//     8 bit: [half: 2][step: 8][channel: 16][column: 4]; 4 bit: the same with steps s (low nibble) and s + 4 (high) in a byte.
//
// Activations are quantised dynamically: each group of a row has its own scale, amax / 127, so that an outlier spoils 32
// values and not the row. With two terms a second int8 holds what the first left over (x = scale * (256 q1 + q2)). Where
// whole rows are at hand, only groups with a value of a third of the row's largest and more keep it: what 8 bits lose
// grows with a group's largest value, a few groups are far above the rest, and of the others nothing is multiplied twice.
#pragma once
#include <stdint.h>

#define GROUP 32
#define BLOCK 32
#define CODES8 (BLOCK * GROUP)
#define CODES4 (BLOCK * GROUP / 2)

struct group_meta {
    float scale;
    int32_t sum;      // of the group's integers
    float scale_sum;  // scale * sum: what a minimum is multiplied with
    int32_t has_rest;  // whether its second term is anything but zeros
};

// Rows of quantised activations: values [rows][terms][groups * GROUP] int8, meta [rows][groups].
struct quantized_rows {
    const int8_t *values;
    const struct group_meta *meta;
};

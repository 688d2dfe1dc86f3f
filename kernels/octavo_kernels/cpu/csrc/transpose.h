// Small transpositions, to pack rows as columns
#pragma once
#include "simd.h"

// Eight rows of eight numbers to eight columns: three perfect shuffles
typedef uint16_t eight16 __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint32_t eight32 __attribute__((vector_size(32), aligned(1), may_alias));
#define TRANSPOSE(rows, type)                                                                 \
    for (int round = 0; round < 3; round++) {                                                 \
        type next[8];                                                                         \
        for (int i = 0; i < 4; i++) {                                                         \
            next[2 * i] = INTERLEAVE(rows[i], rows[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);         \
            next[2 * i + 1] = INTERLEAVE(rows[i], rows[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);   \
        }                                                                                     \
        memcpy(rows, next, sizeof(next));                                                     \
    }

// Register tiles of products of rows and weights with one scale each (quant.h): integers are summed over all of K, exactly, and
// become float32 once. The few steps with large activations are multiplied a second time.
#pragma once
#include "dot.h"
#include "linear_ops.h"

#if VW == 16
#define SCALED_ROWS 12  // of a tile: ROWS * ACROSS sums stay in registers
#define SCALED_ACROSS 2
#elif HAS_INT8_MMLA  // scaled_mmla.h
#define SCALED_ROWS 8
#define SCALED_ACROSS 4
#elif defined(__aarch64__)
#define SCALED_ROWS 4
#define SCALED_ACROSS 4
#elif VW == 8
#define SCALED_ROWS 3
#define SCALED_ACROSS 4
#else
#define SCALED_ROWS 2
#define SCALED_ACROSS 4
#endif
#define STEP_BYTES (BLOCK * 4)  // of codes: 4 columns of a block
#define GROUP_STEPS (GROUP / 4)

// acc[i][n] += products of a step; `codes`: of the first of SCALED_ACROSS vectors, `x`: of the first row
INLINE void scaled_step(vi (*acc)[SCALED_ACROSS], const uint8_t *codes, const uint8_t *x, int64_t stride, const int mr) {
    vbytes w[SCALED_ACROSS];
#pragma GCC unroll 4
    for (int n = 0; n < SCALED_ACROSS; n++) w[n] = to_signed(load_bytes(codes + n * VW * 4));
#pragma GCC unroll 16
    for (int i = 0; i < mr; i++) {
        const vi a = splat_four((const int8_t *)x + i * stride);
#pragma GCC unroll 4
        for (int n = 0; n < SCALED_ACROSS; n++) acc[i][n] = dot4_wide(acc[i][n], w[n], a);
    }
}

// acc += SECOND_UNIT * products of second integers: of each row by itself, as hardly two rows have theirs in the same steps
INLINE void scaled_second(vi (*acc)[SCALED_ACROSS], const uint8_t *codes, const uint8_t *data, int64_t groups, int64_t stride,
                          const int mr) {
#pragma GCC unroll 16
    for (int i = 0; i < mr; i++) {
        const uint8_t *mine = data + i * stride, *second = mine + scaled_row_steps(groups) + groups * GROUP;
        vi sum[1][SCALED_ACROSS] = {0};
        for (int64_t at = 0; at < groups; at += 8) {
            uint64_t steps;
            memcpy(&steps, mine + at, 8);
            for (; steps; steps &= steps - 1) {
                const int64_t step = at * GROUP_STEPS + __builtin_ctzll(steps);
                scaled_step(sum, codes + step * STEP_BYTES, second + step * 4, stride, 1);
            }
        }
#pragma GCC unroll 4
        for (int n = 0; n < SCALED_ACROSS; n++) acc[i][n] += sum[0][n] * SECOND_UNIT;
    }
}

INLINE void tile_by_row(const struct weight_block *b, const struct activations *x, int64_t row, vf (*sums)[MAX_ROWS], const int kind,
                        const int mr) {
    // A few rows are multiplied with several steps at once, so that their latencies overlap.
    const int apart = mr == 1 ? 4 : mr < 4 && SCALED_ROWS > 4 ? 2 : 1;
    const int64_t groups = x->groups, stride = scaled_row_bytes(groups);
    const struct scaled_row *first = scaled_row_at(x->pairs, row, groups);
    const uint8_t *values = first->data + scaled_row_steps(groups), *prefetch = b->prefetch;
    (void)kind;
    for (int v = 0; v < BLOCK / VW; v += SCALED_ACROSS) {
        const uint8_t *codes = b->pairs + v * VW * 4;
        const int64_t lines = v == 0 ? b->lines / (2 * GROUP_STEPS) : 0;
        vi part[4 * SCALED_ROWS][SCALED_ACROSS];
#pragma GCC unroll 64
        for (int i = 0; i < mr * apart; i++)
            for (int n = 0; n < SCALED_ACROSS; n++) part[i][n] = (vi){0};
        for (int64_t step = 0; step < groups * GROUP_STEPS; step += 4) {
            for (int64_t line = 0; line < 4 * lines; line++, prefetch += 64) __builtin_prefetch(prefetch, 0, 3);
#pragma GCC unroll 4
            for (int s = 0; s < 4; s++)
                scaled_step(part + s % apart * mr, codes + (step + s) * STEP_BYTES, values + (step + s) * 4, stride, mr);
        }
#pragma GCC unroll 4
        for (int s = 1; s < apart; s++)
#pragma GCC unroll 16
            for (int i = 0; i < mr; i++)
                for (int n = 0; n < SCALED_ACROSS; n++) part[i][n] += part[s * mr + i][n];
        scaled_second(part, codes, first->data, groups, stride, mr);
#pragma GCC unroll 16
        for (int i = 0; i < mr; i++) {
            const struct scaled_row *at = (const struct scaled_row *)((const uint8_t *)first + i * stride);
            const vi zero = splat_int(UNSIGNED_CODES8 ? at->sum * 128 : 0);
            for (int n = 0; n < SCALED_ACROSS; n++) {
                const vf scale = splat(at->scale) * vload((const float *)b->head + (v + n) * VW);
                sums[v + n][i] = __builtin_convertvector(part[i][n] - zero, vf) * scale;
            }
        }
    }
}

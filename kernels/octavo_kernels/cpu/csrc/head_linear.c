// Products of each head's rows with a weight of its own (multi-head latent attention).
//
// A weight is [width, channels] of each head: vectors of channels, one term after the other in one register, so that the bits of
// a sum depend on its row alone.
#include "attention_ops.h"
#include "simd.h"
#include "head_mmla.h"
#include "head_tiles.h"

enum { ROW_TILE = 4, VECTORS = 4, CHANNELS = VECTORS * VW };

INLINE float value_at(const void *p, int64_t i, int dtype) {
    if (dtype == FLOAT32) return ((const float *)p)[i];
    const uint32_t bits = (uint32_t)((const uint16_t *)p)[i] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// Rows row .. row + rows of a head times channels first .. first + CHANNELS, of which there are `channels`
INLINE void head_tile(const struct head_linear_args *a, int64_t head, int64_t row, int64_t first, int64_t channels, int dtype,
                      int weight_dtype, const int rows, const int whole) {
    vf sum[ROW_TILE][VECTORS];
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sum[i][v] = splat(0.0f);
    for (int64_t k = 0; k < a->width; k++) {
        const int64_t at = (head * a->width + k) * a->channels + first;
        vf w[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            const int64_t n = MAX(0, MIN(VW, channels - v * VW));
            w[v] = whole || n == VW ? load_as(a->weight, at + v * VW, weight_dtype)
                                    : load_part(a->weight, at + v * VW, n, weight_dtype);
        }
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++) {
            const vf x = splat(value_at(a->x, (row + i) * a->x_row + head * a->x_head + k, dtype));
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sum[i][v] = vfma(x, w[v], sum[i][v]);
        }
    }
    for (int i = 0; i < rows; i++) {
        for (int v = 0; v < VECTORS; v++) {
            const int64_t n = MIN(VW, channels - v * VW), at = (row + i) * a->out_row + head * a->out_head + first + v * VW;
            if (n == VW) store_as(a->out, at, sum[i][v], dtype);
            else if (n > 0) store_part(a->out, at, n, sum[i][v], dtype);
        }
    }
}

INLINE void head_channels(const struct head_linear_args *a, int64_t head, int64_t first, int dtype, int weight_dtype) {
    const int64_t channels = MIN(CHANNELS, a->channels - first);
    int64_t row = 0;
    if (channels == CHANNELS) {
        for (; row + ROW_TILE <= a->rows; row += ROW_TILE)
            head_tile(a, head, row, first, channels, dtype, weight_dtype, ROW_TILE, 1);
        for (; row < a->rows; row++) head_tile(a, head, row, first, channels, dtype, weight_dtype, 1, 1);
    } else {
        for (; row < a->rows; row++) head_tile(a, head, row, first, channels, dtype, weight_dtype, 1, 0);
    }
}

void op_head_linear(const struct head_linear_args *a, struct team_member *m) {
    const int64_t blocks = CEIL_DIV(a->channels, CHANNELS), items = a->heads * blocks;
    for (int64_t n; (n = team_take_item(m, items)) >= 0; team_item_done(m)) {
        const int64_t head = n / blocks, first = n % blocks * CHANNELS;
#if HAS_AMX
        if (a->dtype == BFLOAT16 && a->weight_dtype == BFLOAT16) {
            for (int64_t c = first; c < MIN(first + CHANNELS, a->channels); c += HEAD_BLOCK)
                head_block(a, head, c, MIN(HEAD_BLOCK, MIN(first + CHANNELS, a->channels) - c));
            continue;
        }
#elif HAS_HEAD_MMLA
        if (a->dtype == BFLOAT16 && a->weight_dtype == BFLOAT16) {
            head_mmla(a, head, first, MIN(CHANNELS, a->channels - first));
            continue;
        }
#endif
        if (a->dtype == BFLOAT16 && a->weight_dtype == BFLOAT16) head_channels(a, head, first, BFLOAT16, BFLOAT16);
        else if (a->dtype == BFLOAT16) head_channels(a, head, first, BFLOAT16, FLOAT32);
        else if (a->weight_dtype == BFLOAT16) head_channels(a, head, first, FLOAT32, BFLOAT16);
        else head_channels(a, head, first, FLOAT32, FLOAT32);
    }
    team_finish_phase(m, items);
}

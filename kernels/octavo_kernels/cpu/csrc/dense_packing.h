// Rows of a checkpoint as the blocks of channels that dense_linear.c multiplies
#pragma once
// Where column k of a channel lies
INLINE const uint8_t *weight_at(const uint8_t *weight, int64_t width, int64_t channel, int64_t k, const int64_t dtype) {
    const uint8_t *step = weight + (channel / DENSE_BLOCK * CEIL_DIV(width, 2) + k / 2) * step_bytes(dtype);
    const int64_t c = channel % DENSE_BLOCK;
    if (dtype == BFLOAT16) return step + (c * 2 + k % 2) * 2;
    return step + (k % 2 * DENSE_BLOCK + c) * (dtype == FLOAT32 ? 4 : 2);
}

// Eight channels, as many columns as are whole eights of columns or pairs; returns the number of columns
INLINE int64_t pack_eight(const struct pack_dense_args *a, int64_t c, const int64_t dtype) {
    const int64_t bytes = dtype == FLOAT32 ? 4 : 2, unit = dtype == BFLOAT16 ? 2 : 1, units = a->width / unit / 8 * 8;
    const uint8_t *from = a->rows + c * a->width * bytes;
    uint8_t *to = (uint8_t *)weight_at(a->weight, a->width, a->channel + c, 0, dtype);
    for (int64_t u = 0; u < units; u += 8) {
        if (dtype == FLOAT16) {
            eight16 rows[8];
            for (int i = 0; i < 8; i++) rows[i] = *(const eight16 *)(from + i * a->width * bytes + u * 2);
            TRANSPOSE(rows, eight16)
            for (int i = 0; i < 8; i++) *(eight16 *)(to + (u + i) * DENSE_BLOCK * 2) = rows[i];
        } else {
            eight32 rows[8];
            for (int i = 0; i < 8; i++) rows[i] = *(const eight32 *)(from + i * a->width * bytes + u * 4);
            TRANSPOSE(rows, eight32)
            for (int i = 0; i < 8; i++) *(eight32 *)(to + (u + i) * DENSE_BLOCK * 4) = rows[i];
        }
    }
    return units * unit;
}

INLINE void pack_channels(const struct pack_dense_args *a, int64_t first, int64_t end, const int64_t dtype) {
    const int64_t bytes = dtype == FLOAT32 ? 4 : 2, padded = a->width + a->width % 2;
    for (int64_t c = first; c < end;) {
        const int64_t count = (a->channel + c) % 8 == 0 && c + 8 <= end ? 8 : 1, done = count == 8 ? pack_eight(a, c, dtype) : 0;
        for (int64_t stop = c + count; c < stop; c++) {
            for (int64_t k = done; k < padded; k++) {
                uint8_t *to = (uint8_t *)weight_at(a->weight, a->width, a->channel + c, k, dtype);
                if (k < a->width) memcpy(to, a->rows + (c * a->width + k) * bytes, (size_t)bytes);
                else memset(to, 0, (size_t)bytes);
            }
        }
    }
}

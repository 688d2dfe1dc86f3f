// Packs GGUF tensors into the layout of quant.h. The formats are those of ggml (ggml-common.h).
#include "ops.h"
#include "simd.h"

// The codes of one group of one channel. A nibble block holds column j in the low half of byte j and column j + 16 in the high
// half: these are steps j / 4 and j / 4 + 4, which share a byte in the packed layout too.
static void pack_codes(const uint8_t *raw, uint8_t *pair, int64_t lane, int64_t n, int nibbles) {
    for (int64_t step = 0; step < (nibbles ? 4 : 8); step++) {
        uint32_t four;
        memcpy(&four, raw + step * 4, 4);
        if (!nibbles) four ^= 0x80808080;
        memcpy(pair + (step * 2 + n) * 64 + lane * 4, &four, 4);
    }
}

// Scale and offset of a group. The offset includes the zero point in the middle of the codes.
INLINE void read_scale_and_offset(const uint8_t *raw, int affine, float *scale, float *offset) {
    *scale = half_to_float(raw);
    *offset = affine ? half_to_float(raw + 2) + (float)ZERO4 * *scale : 0.0f;
}

// The unit of a channel (quant.h); NaN if a scale or an offset is not finite
static float channel_unit(const uint8_t *raw, int64_t groups, int64_t raw_group, int affine) {
    int32_t top = 0;
    for (int64_t g = 0; g < groups; g++, raw += raw_group) {
        float x[2];
        int32_t bits[2];
        read_scale_and_offset(raw, affine, x, x + 1);
        x[1] *= 1.0f / (1 << (RELATIVE_BITS - OFFSET_BITS));
        memcpy(bits, x, 8);
        top = MAX(top, MAX(bits[0] & 0x7fffffff, bits[1] & 0x7fffffff));
    }
    const int32_t bits = top < 0x7f800000 ? (top & 0x7f800000) + 0x800000 : 0x7fc00000;
    float unit;
    memcpy(&unit, &bits, 4);
    return unit;
}

static void store_int16(uint8_t *to, float x, float highest) {
    const int16_t whole = x == x ? (int16_t)rintf(MAX(-highest, MIN(x, highest))) : 0;
    memcpy(to, &whole, 2);
}

static void pack_strip(const struct pack_gguf_args *a, int64_t strip) {
    const int nibbles = a->kind != 2, affine = a->kind == 1;
    const int64_t raw_group = 2 + 2 * affine + (nibbles ? GROUP / 2 : GROUP), pairs = (a->groups + 1) / 2;
    const int64_t units = nibbles ? UNIT_BYTES : 0,
                  stride = nibbles ? CODE_BYTES4 + SCALE_BYTES * (1 + affine) : CODE_BYTES8 + SCALE_BYTES;
    uint8_t *out = a->out + strip * (units + pairs * stride);
    memset(out, 0, (size_t)(units + pairs * stride));
    for (int64_t c = 0; c < STRIP && strip * STRIP + c < a->channels; c++) {
        const uint8_t *raw = a->raw + (strip * STRIP + c) * a->groups * raw_group;
        const float unit = nibbles ? channel_unit(raw, a->groups, raw_group, affine) : 0.0f;
        if (nibbles) memcpy(out + c * 4, &unit, 4);
        for (int64_t g = 0; g < a->groups; g++, raw += raw_group) {
            uint8_t *pair = out + units + g / 2 * stride;
            const int64_t n = c / 2 % 2, lane = (c / 4 * 2 + c % 2) * 2 + g % 2;
            pack_codes(raw + 2 + 2 * affine, pair, lane, n, nibbles);
            if (nibbles) {
                float scale, offset;
                read_scale_and_offset(raw, affine, &scale, &offset);
                uint8_t *to = pair + CODE_BYTES4 + (c * 2 + g % 2) * 2;
                store_int16(to, scale / unit * (1 << SCALE_BITS), 32767.0f);
                if (affine) store_int16(to + SCALE_BYTES, offset / unit * (1 << OFFSET_BITS), (1 << RELATIVE_BITS) - 1);
            } else {
                memcpy(pair + CODE_BYTES8 + (n * STRIP + lane) * 2, raw, 2);
            }
        }
    }
}

void op_pack_gguf(const struct pack_gguf_args *a, struct team_member *m) {
    const int64_t strips = (a->channels + BLOCK - 1) / BLOCK * (BLOCK / STRIP);
    for (int64_t n; (n = team_take_item(m, strips)) >= 0; team_item_done(m)) pack_strip(a, n);
    team_finish_phase(m, strips);
}

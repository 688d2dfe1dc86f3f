// Packs GGUF tensors into the layout of quant.h. The formats are those of ggml (ggml-common.h).
#include "linear_ops.h"
#include "simd.h"

// In the order of octavo_kernels/cpu/quant.py
enum gguf_type { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4 };
// Bytes of a block, and how many groups it has
static const struct gguf_block {
    int64_t bytes, groups;
} BLOCKS[] = {{18, 1},  {20, 1},  {22, 1},  {24, 1}, {34, 1},  {84, 8}, {110, 8},
              {144, 8}, {176, 8}, {210, 8}, {18, 1}, {136, 8}, {17, 1}};
static const int8_t IQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t E2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // times two

// Number n of those that fill bytes from the lowest `bits` on: of each `run` bytes first all lowest bits, then all next ones.
INLINE int plane(const uint8_t *bytes, int n, int bits, int run) {
    const int planes = 8 / bits, at = n / (run * planes) * run + n % run;
    return bytes[at] >> n / run % planes * bits & ((1 << bits) - 1);
}

// Scales of both halves of group g of a block, and offsets, which include the zero point in the middle of the codes
struct group_scales {
    float scale[2], offset[2];
};
INLINE struct group_scales read_scales(const uint8_t *raw, int g, const int type) {
    switch (type) {
    case Q4_1:
    case Q5_1: {
        const float scale = half_to_float(raw);
        return (struct group_scales){{scale}, {half_to_float(raw + 2) + (type == Q4_1 ? 8.0f : 16.0f) * scale}};
    }
    case Q4_K:
    case Q5_K: {  // eight scales and minima of 6 bits
        const uint8_t *six = raw + 4;
        const int low = g < 4 ? six[g] & 63 : (six[g + 4] & 15) | six[g - 4] >> 6 << 4;
        const int high = g < 4 ? six[g + 4] & 63 : six[g + 4] >> 4 | six[g] >> 6 << 4;
        const float scale = half_to_float(raw) * (float)low, minimum = half_to_float(raw + 2) * (float)high;
        return (struct group_scales){{scale}, {(type == Q4_K ? 8.0f : 16.0f) * scale - minimum}};
    }
    case Q2_K: {  // sixteen scales and minima of 4 bits; codes are unpacked times 4 (quant.h)
        struct group_scales s;
        for (int half = 0; half < 2; half++) {
            const int both = raw[2 * g + half];
            s.scale[half] = 0.25f * half_to_float(raw + 80) * (float)(both & 15);
            s.offset[half] = 8.0f * s.scale[half] - half_to_float(raw + 82) * (float)(both >> 4);
        }
        return s;
    }
    case Q3_K: {
        struct group_scales s = {{0.0f}, {0.0f}};
        for (int half = 0; half < 2; half++) {
            const int n = 2 * g + half, six = plane(raw + 96, n, 4, 8) | plane(raw + 104, n, 2, 4) << 4;
            s.scale[half] = half_to_float(raw + 108) * (float)(six - 32);
        }
        return s;
    }
    case Q6_K: {
        const int8_t *eight = (const int8_t *)raw + 192 + 2 * g;
        const float scale = half_to_float(raw + 208);
        return (struct group_scales){{scale * (float)eight[0], scale * (float)eight[1]}, {0.0f}};
    }
    case IQ4_XS: {
        const int six = plane(raw + 4, g, 4, 1) | plane(raw + 2, g, 2, 1) << 4;
        return (struct group_scales){{half_to_float(raw) * (float)(six - 32)}, {0.0f}};
    }
    case MXFP4: return (struct group_scales){{ldexpf(0.5f, raw[0] - 127)}, {0.0f}};  // of a table times two
    default: return (struct group_scales){{half_to_float(raw)}, {0.0f}};
    }
}

// Of 16 bytes first the low halves, then the high ones: by words, as store_codes puts them together again
INLINE void read_nibbles(const uint8_t *raw, uint8_t *codes) {
    for (int k = 0; k < 16; k += 4) {
        uint32_t both, low, high;
        memcpy(&both, raw + k, 4);
        low = both & 0x0f0f0f0f, high = both >> 4 & 0x0f0f0f0f;
        memcpy(codes + k, &low, 4), memcpy(codes + 16 + k, &high, 4);
    }
}

INLINE void read_codes(const uint8_t *raw, int g, const int type, uint8_t *codes) {
    switch (type) {
    case Q4_0:
    case IQ4_NL: read_nibbles(raw + 2, codes); break;
    case Q4_1: read_nibbles(raw + 4, codes); break;
    case Q5_0:
    case Q5_1: {
        uint32_t fifth;
        raw += type == Q5_0 ? 2 : 4;
        memcpy(&fifth, raw, 4);
        read_nibbles(raw + 4, codes);
        for (int k = 0; k < GROUP; k++) codes[k] |= (uint8_t)((fifth >> k & 1) << 4);
        break;
    }
    case Q8_0:
        for (int k = 0; k < GROUP; k++) codes[k] = raw[2 + k] ^ 0x80;
        break;
    case Q2_K:
        for (int k = 0; k < GROUP; k++) codes[k] = (uint8_t)(raw[16 + g / 4 * 32 + k] >> g % 4 * 2 & 3);
        break;
    case Q3_K:
        for (int k = 0; k < GROUP; k++)
            codes[k] = (uint8_t)((raw[32 + g / 4 * 32 + k] >> g % 4 * 2 & 3) + ((raw[k] >> g & 1) << 2) + 4);
        break;
    case Q4_K:
        for (int k = 0; k < GROUP; k++) codes[k] = (uint8_t)(raw[16 + g / 2 * 32 + k] >> g % 2 * 4 & 15);
        break;
    case Q5_K:
        for (int k = 0; k < GROUP; k++)
            codes[k] = (uint8_t)((raw[48 + g / 2 * 32 + k] >> g % 2 * 4 & 15) | (raw[16 + k] >> g & 1) << 4);
        break;
    case Q6_K:
        for (int k = 0; k < GROUP; k++)
            codes[k] = (uint8_t)((raw[g / 4 * 64 + g % 2 * 32 + k] >> g / 2 % 2 * 4 & 15) |
                                 (raw[128 + g / 4 * 32 + k] >> g % 4 * 2 & 3) << 4);
        break;
    case MXFP4: read_nibbles(raw + 1, codes); break;
    case IQ4_XS: read_nibbles(raw + 8 + g * 16, codes); break;
    default: break;
    }
}

// The unit of a channel (quant.h); NaN if a scale or an offset is not finite
static float channel_unit(const struct group_scales *s, int64_t groups, int kind) {
    int32_t top = 0;
    for (int64_t g = 0; g < groups; g++) {
        const float of_offsets = 1.0f / (1 << (RELATIVE_BITS - OFFSET_BITS));
        const float x[4] = {s[g].scale[0] * (float)(1 << kind_shift(kind)), s[g].scale[1] * (float)(1 << kind_shift(kind)),
                            s[g].offset[0] * of_offsets, s[g].offset[1] * of_offsets};
        int32_t bits[4];
        memcpy(bits, x, 16);
        for (int i = 0; i < 4; i++) top = MAX(top, bits[i] & 0x7fffffff);
    }
    int32_t bits = top < 0x7f800000 ? (top & 0x7f800000) + 0x800000 : 0x7fc00000;
    if (kind_is_float(kind) && top < 0x7f800000) bits = MAX(bits - (15 << 23), 0x800000);
    float unit;
    memcpy(&unit, &bits, 4);
    return unit;
}

static void store_int16(uint8_t *to, float x, float highest) {
    const int16_t whole = x == x ? (int16_t)rintf(MAX(-highest, MIN(x, highest))) : 0;
    memcpy(to, &whole, 2);
}

// x is below 2^15.
static void store_half(uint8_t *to, float x) {
    float y = fabsf(x) * 0x1p-112f;  // its exponent field has float16's offset
    uint32_t bits;
    memcpy(&bits, &y, 4);
    const uint16_t half = (uint16_t)((bits + 0xfff + (bits >> 13 & 1)) >> 13 | (x < 0.0f ? 0x8000 : 0));
    if (x == x) memcpy(to, &half, 2);
    else memset(to, 0, 2);
}

// The codes of one group of one channel; `to` is where its columns of step 0 lie.
INLINE void store_codes(const uint8_t *codes, uint8_t *to, const int kind) {
    uint32_t four[8], planes[2] = {0, 0};
    memcpy(four, codes, GROUP);
    if (kind_bits(kind) == 8) {
        for (int step = 0; step < 8; step++) memcpy(to + step * 128, four + step, 4);
        return;
    }
    if (kind_bits(kind) == 2) {
        for (int step = 0; step < 2; step++) {
            const uint32_t all = four[step] | four[step + 2] << 2 | four[step + 4] << 4 | four[step + 6] << 6;
            memcpy(to + step * 128, &all, 4);
        }
        return;
    }
    for (int step = 0; step < 4; step++) {
        const uint32_t both = (four[step] & 0x0f0f0f0f) | (four[step + 4] & 0x0f0f0f0f) << 4;
        memcpy(to + step * 128, &both, 4);
    }
    to += STRIP * PAIR / 2;
    if (kind_bits(kind) == 5) {
        for (int step = 0; step < 8; step++) planes[0] |= (four[step] >> 4 & 0x01010101) << step;
        memcpy(to, planes, 4);
    } else if (kind_bits(kind) == 6) {
        for (int step = 0; step < 8; step++) planes[step / 4] |= (four[step] >> 4 & 0x03030303) << step % 4 * 2;
        memcpy(to, planes, 4), memcpy(to + 128, planes + 1, 4);
    }
}

INLINE void pack_channel(const struct pack_gguf_args *a, const uint8_t *raw, int64_t c, uint8_t *strip,
                         struct group_scales *scales, const int type, const int kind) {
    const struct gguf_block block = BLOCKS[type];
    const int64_t stride = kind_pair_bytes(kind), n = c / 2 % 2;
    const int halves = kind_has(kind, HALVES), affine = kind_has(kind, AFFINE);
    float unit = 0.0f;
    if (kind_bits(kind) != 8) {
        for (int64_t g = 0; g < a->groups; g++)
            scales[g] = read_scales(raw + g / block.groups * block.bytes, (int)(g % block.groups), type);
        unit = channel_unit(scales, a->groups, kind);
        memcpy(strip + c * 4, &unit, 4);
    }
    const float fraction = (float)(1 << (SCALE_BITS + kind_shift(kind)));
    for (int64_t g = 0; g < a->groups; g++) {
        const uint8_t *at = raw + g / block.groups * block.bytes;
        const int64_t lane = (c / 4 * 2 + c % 2) * 2 + g % 2;
        uint8_t *pair = strip + kind_head_bytes(kind) + g / 2 * stride, codes[GROUP];
        read_codes(at, (int)(g % block.groups), type, codes);
        store_codes(codes, pair + n * 64 + lane * 4, kind);
        pair += kind_code_bytes(kind);
        if (kind_bits(kind) == 8) {
            memcpy(pair + (n * STRIP + lane) * 2, at, 2);
            continue;
        }
        if (kind_is_float(kind)) {
            store_half(pair + (n * STRIP + lane) * 2, scales[g].scale[0] / unit);
            continue;
        }
        pair += (c * 2 + g % 2) * 2;
        for (int half = 0; half <= halves; half++) {
            store_int16(pair + half * SCALE_BYTES, scales[g].scale[half] / unit * fraction, 32767.0f);
            if (affine)
                store_int16(pair + (1 + halves + half) * SCALE_BYTES, scales[g].offset[half] / unit * (1 << OFFSET_BITS),
                            (1 << RELATIVE_BITS) - 1);
        }
    }
}

static void pack_strip(const struct pack_gguf_args *a, int64_t strip, struct group_scales *scales) {
    const int kind = KIND((int)a->bits, (int)a->flags);
    const struct gguf_block block = BLOCKS[a->type];
    const int64_t size = kind_head_bytes(kind) + (a->groups + 1) / 2 * kind_pair_bytes(kind);
    uint8_t *out = a->out + strip * size;
    memset(out, 0, (size_t)size);
    if (kind_has(kind, TABLE)) {
        const int8_t *table = a->type == MXFP4 ? E2M1 : IQ4;
        for (int i = 0; i < TABLE_BYTES; i++) out[UNIT_BYTES + i] = (uint8_t)(table[i % 16] + 128);
    }
    for (int64_t c = 0; c < STRIP && strip * STRIP + c < a->channels; c++) {
        const uint8_t *raw = a->raw + (strip * STRIP + c) * (a->groups / block.groups) * block.bytes;
        switch (a->type) {
#define CASE(type, kind) \
    case type: pack_channel(a, raw, c, out, scales, type, kind); break;
            CASE(Q4_0, KIND(4, 0))
            CASE(Q4_1, KIND(4, AFFINE))
            CASE(Q5_0, KIND(5, 0))
            CASE(Q5_1, KIND(5, AFFINE))
            CASE(Q8_0, KIND(8, 0))
            CASE(Q2_K, KIND(2, AFFINE | HALVES))
            CASE(Q3_K, KIND(4, HALVES))
            CASE(Q4_K, KIND(4, AFFINE))
            CASE(Q5_K, KIND(5, AFFINE))
            CASE(Q6_K, KIND(6, HALVES))
            CASE(IQ4_NL, KIND(4, TABLE))
            CASE(IQ4_XS, KIND(4, TABLE))
            CASE(MXFP4, KIND(4, TABLE))
#undef CASE
        }
    }
}

void op_pack_gguf(const struct pack_gguf_args *a, struct team_member *m) {
    const int64_t strips = (a->channels + BLOCK - 1) / BLOCK * (BLOCK / STRIP);
    struct group_scales *scales = thread_scratch((size_t)a->groups * sizeof(struct group_scales));
    for (int64_t n; (n = team_take_item(m, strips)) >= 0; team_item_done(m)) pack_strip(a, n, scales);
    team_finish_phase(m, strips);
}

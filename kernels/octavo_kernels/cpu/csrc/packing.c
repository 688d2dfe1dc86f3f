// GGUF tensors into the layout of quant.h (the formats are those of ggml, ggml-common.h).
#include <string.h>

#include "ops.h"

// One group of one channel, whose place in the block's half is `channel`. A nibble block has column j in the low half of its
// byte j and column j + 16 in the high half: those are steps j / 4 and j / 4 + 4, which share a byte here too.
static void pack_group(const uint8_t *raw, uint8_t *codes, int64_t channel, int nibbles) {
    for (int64_t step = 0; step < (nibbles ? 4 : 8); step++) {
        uint32_t four;
        memcpy(&four, raw + step * 4, 4);
        if (!nibbles) four ^= 0x80808080;
        memcpy(codes + step * 64 + channel * 4, &four, 4);
    }
}

static void pack_block(const struct pack_gguf_args *a, int64_t block) {
    const int nibbles = a->kind != 2, halves = a->kind == 1 ? 2 : 1;  // float16 before the codes: scale, minimum
    const int64_t codes = nibbles ? CODES4 : CODES8, stride = codes + BLOCK * 2 * halves;
    const int64_t raw_group = 2 * halves + (nibbles ? GROUP / 2 : GROUP);
    uint8_t *out = a->out + block * a->groups * stride;
    if ((block + 1) * BLOCK > a->channels) memset(out, 0, (size_t)(a->groups * stride));
    for (int64_t c = 0; c < BLOCK && block * BLOCK + c < a->channels; c++) {
        const uint8_t *raw = a->raw + (block * BLOCK + c) * a->groups * raw_group;
        for (int64_t g = 0; g < a->groups; g++, raw += raw_group) {
            uint8_t *group = out + g * stride;
            pack_group(raw + 2 * halves, group + c / 16 * (codes / 2), c % 16, nibbles);
            for (int i = 0; i < halves; i++) memcpy(group + codes + i * BLOCK * 2 + c * 2, raw + 2 * i, 2);
        }
    }
}

void op_pack_gguf(const struct pack_gguf_args *a, struct member *m) {
    int64_t blocks = (a->channels + BLOCK - 1) / BLOCK;
    for (int64_t n; (n = team_take(m, blocks)) >= 0; team_done(m)) pack_block(a, n);
    team_wait(m, blocks);
}

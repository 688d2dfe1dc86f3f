// What this machine can do at most, for benchmarks to compare with: reading memory, and int8 products in registers.
#include "dot.h"
#include "ops.h"

void op_read_memory(const struct read_memory_args *a, struct member *m) {
    int64_t i, end;
    team_share(m, a->bytes / 64, &i, &end);
    const float *p = a->memory;
    vf sums[64 / (VW * 4) * 2] = {0};
    for (; i + 1 < end; i += 2) {
        __builtin_prefetch(p + i * 16 + 2048);
        __builtin_prefetch(p + i * 16 + 2064);
        for (int n = 0; n < 128 / (VW * 4); n++) sums[n] = (vf)((vi)sums[n] ^ (vi)vload(p + i * 16 + n * VW));
    }
    for (int n = 1; n < 128 / (VW * 4); n++) sums[0] = (vf)((vi)sums[0] ^ (vi)sums[n]);
    a->out[m->rank] = ((vi)sums[0])[0];
}

// `rounds` times 12 independent dot products of VW lanes x 4 int8 on every thread
void op_dot_products(const struct dot_products_args *a, struct member *m) {
    vi acc[12];
    for (int i = 0; i < 12; i++) acc[i] = splat_int(i);  // or one chain would do for all
    vbytes w = (vbytes)lane_index() & 15;
    vi x = splat_int((int32_t)a->rounds & 0x01010101);
    for (int64_t r = 0; r < a->rounds; r++) {
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++) acc[i] = dot4(acc[i], w, x, 8);
        x = (vi)((vu)x ^ (vu)w);  // so that no round can be left out
    }
    for (int i = 1; i < 12; i++) acc[0] += acc[i];
    a->out[m->rank] = acc[0][0];
}

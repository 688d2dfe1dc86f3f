// The limits of this machine, which benchmarks compare with: reading memory, and int8 products in registers
#include "dot.h"
#include "ops.h"

void op_read_memory(const struct read_memory_args *a, struct team_member *m) {
    int64_t parts = 16 * m->size;
    for (int64_t n; (n = team_take_item(m, parts)) >= 0; team_item_done(m)) {
        int64_t i = a->bytes / 128 * n / parts, end = a->bytes / 128 * (n + 1) / parts;
        vi sums[128 / (VW * 4)] = {0};
        for (const float *p = (const float *)a->memory + i * 32; i < end; i++, p += 32) {
            __builtin_prefetch(p + 2048);
            __builtin_prefetch(p + 2064);
            for (int v = 0; v < 128 / (VW * 4); v++) sums[v] ^= (vi)vload(p + v * VW);
        }
        for (int v = 1; v < 128 / (VW * 4); v++) sums[0] ^= sums[v];
        a->out[m->rank] = sums[0][0];
    }
    team_finish_phase(m, parts);
}

// `rounds` times 12 independent dot products of VW lanes x 4 int8, on every thread
void op_dot_products(const struct dot_products_args *a, struct team_member *m) {
    for (int64_t n; (n = team_take_item(m, m->size)) >= 0; team_item_done(m)) {
        vi acc[12], x = splat_int((int32_t)a->rounds & 0x01010101);
        vbytes w = (vbytes)lane_index() & 15;
        for (int i = 0; i < 12; i++) acc[i] = splat_int(i);  // different, so that the compiler cannot merge the chains
        for (int64_t r = 0; r < a->rounds; r++) {
#pragma GCC unroll 12
            for (int i = 0; i < 12; i++) acc[i] = dot4_wide(acc[i], to_signed(w), x);
            x = (vi)((vu)x ^ (vu)w);  // so that the compiler cannot drop a round
        }
        for (int i = 1; i < 12; i++) acc[0] += acc[i];
        a->out[n] = acc[0][0];
    }
    team_finish_phase(m, m->size);
}

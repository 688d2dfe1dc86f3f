// The operations and their arguments, in a header for each kind. Every field is 8 bytes wide, in the order in which
// octavo_kernels/cpu/library.py packs them; oct_run() refuses a call whose size differs from the struct's.
#pragma once
#include <stdint.h>

#include "attention_ops.h"
#include "collectives_ops.h"
#include "drawing_ops.h"
#include "elementwise_ops.h"
#include "linear_ops.h"
#include "lora_ops.h"
#include "moe_ops.h"
#include "recurrence_ops.h"
#include "thread_team.h"

// Benchmarks only. out int64 [threads]
struct read_memory_args {
    const void *memory;
    int64_t *out;
    int64_t bytes;
};
struct dot_products_args {
    int64_t *out;
    int64_t rounds;
};

void op_read_memory(const struct read_memory_args *a, struct team_member *m);
void op_dot_products(const struct dot_products_args *a, struct team_member *m);

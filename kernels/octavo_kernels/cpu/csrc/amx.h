// Matrix tiles: Intel's AMX, or an emulator of it in plain C (OCTAVO_AMX_EMULATED), with which the same sources run, bit for bit,
// on any machine.
//
// There are 8 tiles of up to 16 rows of 64 bytes. A product adds to each element of C (int32 or float32) the products of a row
// of A with a column of B: 64 int8, or 32 bfloat16. A row of B holds what one column takes at a step, 4 bytes, for 16 columns: a
// step of a packed weight has 32 channels, 128 bytes, so a B tile is 16 of these at a stride of 128. Here tiles 0 and 1 are A,
// 2 and 3 B, 4 to 7 C:
//     C4 = A0 x B2, C5 = A0 x B3, C6 = A1 x B2, C7 = A1 x B3.
//
// A thread configures its tiles for a number of rows. It gives them back before it sleeps and before it leaves the kernels: the
// system then saves nothing of them, and whoever uses the thread next finds none of our configuration, nor do we find theirs.
// The process asks for permission before it loads the library (compiler.py): without it the first use is an illegal instruction.
#pragma once
#include <stdint.h>

#if defined(OCTAVO_AMX_EMULATED) || (defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__))
#define HAS_AMX 1
#else
#define HAS_AMX 0
#endif

enum {
    HALF_ROWS = 16,             // of an A or C tile
    AMX_ROWS = 2 * HALF_ROWS,   // that are multiplied with a B tile while it is loaded
    TILE_ROW = 64,              // bytes
    TILE_WIDTH = TILE_ROW / 2,  // columns of bfloat16
    B_STEPS = 16,               // steps of a weight in a B tile
    B_STRIDE = 128,             // bytes of a step
};

#if HAS_AMX
// Set the tiles of this thread to `upper` rows (1 to 16) in A0, C4 and C5, `lower` in A1, C6 and C7 (0: as many as in A0), and
// `columns` of 4 bytes (1 to 16) in B and C
void amx_configure(int64_t upper, int64_t lower, int64_t columns);
void amx_release(void);
#else
static inline void amx_release(void) {}
#endif

#if defined(OCTAVO_AMX_EMULATED)
void amx_must_be_released(void);
void emulated_zero(int tile);
void emulated_load(int tile, const void *from, int64_t stride);
void emulated_store(int tile, void *to, int64_t stride);
void emulated_dot_bf16(int c, int a, int b);
void emulated_dot_int8(int c, int a, int b);
void emulated_dot_uint8(int c, int a, int b);
#define TILE_ZERO(tile) emulated_zero(tile)
#define TILE_LOAD(tile, from, stride) emulated_load(tile, from, stride)
#define TILE_STORE(tile, to, stride) emulated_store(tile, to, stride)
#define TILE_DOT_BF16(c, a, b) emulated_dot_bf16(c, a, b)
#define TILE_DOT_INT8(c, a, b) emulated_dot_int8(c, a, b)
#define TILE_DOT_UINT8(c, a, b) emulated_dot_uint8(c, a, b)
#else
static inline void amx_must_be_released(void) {}
#if HAS_AMX
#include <immintrin.h>
// GCC 12 does not know that tile loads read memory, nor that a configuration is more than its first 8 bytes: it drops or moves
// the stores before them.
#define AMX_MEMORY() __asm__ volatile("" ::: "memory")
#define TILE_ZERO(tile) _tile_zero(tile)
#define TILE_LOAD(tile, from, stride)     \
    do {                                  \
        AMX_MEMORY();                     \
        _tile_loadd(tile, from, stride);  \
    } while (0)
#define TILE_STORE(tile, to, stride)      \
    do {                                  \
        _tile_stored(tile, to, stride);   \
        AMX_MEMORY();                     \
    } while (0)
#define TILE_DOT_BF16(c, a, b) _tile_dpbf16ps(c, a, b)  // pairs of bfloat16
#define TILE_DOT_INT8(c, a, b) _tile_dpbsud(c, a, b)    // int8 of A times uint8 of B
#define TILE_DOT_UINT8(c, a, b) _tile_dpbusd(c, a, b)   // uint8 of A times int8 of B
#endif
#endif

// The configuration of matrix tiles, and their emulator (amx.h)
#include "amx.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#if HAS_AMX
struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

static _Thread_local struct {
    int64_t upper, lower, columns;  // as configured; upper 0: not
} mine;

static void load_config(const struct tile_config *config);
static void release(void);

void amx_configure(int64_t upper, int64_t lower, int64_t columns) {
    if (mine.upper == upper && mine.lower == lower && mine.columns == columns) return;
    mine.upper = upper, mine.lower = lower, mine.columns = columns;
    const uint8_t first = (uint8_t)upper, second = (uint8_t)(lower ? lower : upper);
    _Alignas(64) struct tile_config config = {
        .palette = 1, .rows = {first, second, B_STEPS, B_STEPS, first, first, second, second}};
    for (int i = 0; i < 8; i++) config.row_bytes[i] = i < 2 ? TILE_ROW : (uint16_t)(4 * columns);
    load_config(&config);
}

void amx_release(void) {
    if (!mine.upper) return;
    mine.upper = 0;
    release();
}

#if !defined(OCTAVO_AMX_EMULATED)
static void load_config(const struct tile_config *config) {
    AMX_MEMORY();
    _tile_loadconfig(config);
}
static void release(void) { _tile_release(); }
#else

#if defined(__SSE__)
#include <xmmintrin.h>
#endif
#define EXPORT __attribute__((visibility("default")))
#define COLUMNS (TILE_ROW / 4)

static _Thread_local struct tile_config now;
static _Thread_local uint8_t tiles[8][HALF_ROWS][TILE_ROW];
static atomic_int configured_threads;

// What the processor refuses as an illegal instruction
static void require(int condition) {
    if (!condition) abort();
}

static void load_config(const struct tile_config *config) {
    require(config->palette == 1 && config->start_row == 0);
    for (int i = 0; i < 8; i++) require(config->row_bytes[i] <= TILE_ROW && config->rows[i] <= HALF_ROWS);
    if (!now.palette) atomic_fetch_add(&configured_threads, 1);
    now = *config;
    memset(tiles, 0, sizeof(tiles));
}

static void release(void) {
    if (now.palette) atomic_fetch_sub(&configured_threads, 1);
    memset(&now, 0, sizeof(now));
    memset(tiles, 0, sizeof(tiles));
}

void amx_must_be_released(void) { require(!now.palette); }

// For tests: how many threads hold a configuration; and what another library in the process may do to this thread's
EXPORT int oct_amx_configured_threads(void) { return atomic_load(&configured_threads); }
EXPORT void oct_amx_disturb(void) {
    struct tile_config other = {.palette = 1, .row_bytes = {16, 16, 16}, .rows = {3, 3, 3}};
    load_config(&other);
    release();
}

void emulated_zero(int tile) {
    require(now.palette && now.rows[tile]);
    memset(tiles[tile], 0, sizeof(tiles[tile]));
}

void emulated_load(int tile, const void *from, int64_t stride) {
    emulated_zero(tile);
    for (int r = 0; r < now.rows[tile]; r++) memcpy(tiles[tile][r], (const uint8_t *)from + r * stride, now.row_bytes[tile]);
}

void emulated_store(int tile, void *to, int64_t stride) {
    require(now.palette && now.rows[tile]);
    for (int r = 0; r < now.rows[tile]; r++) memcpy((uint8_t *)to + r * stride, tiles[tile][r], now.row_bytes[tile]);
}

static void require_fitting(int c, int a, int b) {
    require(now.palette && now.rows[c] && now.rows[b] && now.rows[a] == now.rows[c]);
    require(now.row_bytes[a] == 4 * now.rows[b] && now.row_bytes[b] == now.row_bytes[c]);
}

static void widen_pairs(const uint8_t *row, float *even, float *odd) {
    uint32_t pairs[COLUMNS];
    memcpy(pairs, row, sizeof(pairs));
    for (int n = 0; n < COLUMNS; n++) {
        const uint32_t low = pairs[n] << 16, high = pairs[n] & 0xffff0000u;
        memcpy(even + n, &low, 4), memcpy(odd + n, &high, 4);
    }
}

// For a row and a column two chains of fused multiply-adds, of the even and of the odd numbers of each pair, both from zero;
// then their sum is added to C.
static void __attribute__((noinline)) multiply_bf16(int c, int a, int b) {
    float even[HALF_ROWS][COLUMNS], odd[HALF_ROWS][COLUMNS];
    for (int k = 0; k < now.rows[b]; k++) widen_pairs(tiles[b][k], even[k], odd[k]);
    for (int r = 0; r < now.rows[c]; r++) {
        float left[COLUMNS], right[COLUMNS], first[COLUMNS] = {0}, second[COLUMNS] = {0}, sum[COLUMNS];
        widen_pairs(tiles[a][r], left, right);
        for (int k = 0; k < now.rows[b]; k++) {
            for (int n = 0; n < COLUMNS; n++) first[n] = fmaf(left[k], even[k][n], first[n]);
            for (int n = 0; n < COLUMNS; n++) second[n] = fmaf(right[k], odd[k][n], second[n]);
        }
        memcpy(sum, tiles[c][r], TILE_ROW);
        for (int n = 0; n < COLUMNS; n++) sum[n] += first[n] + second[n];
        memcpy(tiles[c][r], sum, TILE_ROW);
    }
}

void emulated_dot_bf16(int c, int a, int b) {
    require_fitting(c, a, b);
#if defined(__SSE__)
    const unsigned before = _mm_getcsr();
    _mm_setcsr(0x1f80 | 0x8040);  // nearest even; denormal operands are zeros, and so are denormal results
#endif
    __asm__ volatile("" ::: "memory");
    multiply_bf16(c, a, b);
    __asm__ volatile("" ::: "memory");
#if defined(__SSE__)
    _mm_setcsr(before);
#endif
}

static void multiply_bytes(int c, int a, int b, int a_is_signed) {
    require_fitting(c, a, b);
    for (int r = 0; r < now.rows[c]; r++) {
        uint32_t sum[COLUMNS];
        memcpy(sum, tiles[c][r], TILE_ROW);
        for (int k = 0; k < now.rows[b]; k++)
            for (int n = 0; n < COLUMNS; n++)
                for (int i = 0; i < 4; i++) {
                    const uint8_t x = tiles[a][r][4 * k + i], y = tiles[b][k][4 * n + i];
                    sum[n] += (uint32_t)(a_is_signed ? (int8_t)x * y : x * (int8_t)y);
                }
        memcpy(tiles[c][r], sum, TILE_ROW);
    }
}
void emulated_dot_int8(int c, int a, int b) { multiply_bytes(c, a, b, 1); }
void emulated_dot_uint8(int c, int a, int b) { multiply_bytes(c, a, b, 0); }
#endif
#endif

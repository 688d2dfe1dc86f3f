// Runs the CPU kernels in another process than their caller's, as one of another architecture must be.
//
// A call comes on stdin: {words, flags of addresses, regions of the caller's memory}, then the program, a byte for each of
// its words (1: an address), and (start, length) of each region. Memory is fetched when the kernels first touch it, a
// chunk at a time: {address, length} on stdout, answered by its bytes. Once they have ended, what they have changed goes
// back as {address, -length}, bytes, and a byte for each of them (1: changed); {result of oct_run, 0} ends the call.

#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define CHUNK ((int64_t)65536)
#define MAX_CHUNKS 65536

int64_t oct_run(const int64_t *program, int64_t words, int threads);

struct region {
    int64_t start, length;  // in the caller
    char *here;
};

static struct region *regions;
static int64_t num_regions;
static struct {
    char *here, *before;  // as it was fetched
    int64_t start, length;
} chunks[MAX_CHUNKS];
static int64_t num_chunks;

static void take(void *data, int64_t bytes) {
    for (char *at = data; bytes;) {
        ssize_t got = read(0, at, (size_t)bytes);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) _exit(got < 0);
        at += got, bytes -= got;
    }
}

static void give(const void *data, int64_t bytes) {
    for (const char *at = data; bytes;) {
        ssize_t put = write(1, at, (size_t)bytes);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) _exit(1);
        at += put, bytes -= put;
    }
}

static void fetch(int number, siginfo_t *info, void *context) {
    (void)number, (void)context;
    char *address = info->si_addr;
    for (int64_t i = 0; i < num_regions; i++) {
        struct region *r = regions + i;
        int64_t offset = address - r->here;
        if (offset < 0 || offset >= r->length || num_chunks == MAX_CHUNKS) continue;
        offset = offset / CHUNK * CHUNK;
        int64_t length = r->length - offset < CHUNK ? r->length - offset : CHUNK;
        char *here = r->here + offset;
        char *before = mmap(0, (size_t)CHUNK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (before == MAP_FAILED || mprotect(here, (size_t)length, PROT_READ | PROT_WRITE)) _exit(2);
        give((int64_t[]){r->start + offset, length}, 16);
        take(before, length);
        memcpy(here, before, (size_t)length);
        chunks[num_chunks].here = here, chunks[num_chunks].before = before;
        chunks[num_chunks].start = r->start + offset, chunks[num_chunks++].length = length;
        return;
    }
    _exit(3);  // an address that is not the caller's
}

static int64_t translate(int64_t address) {
    if (!address) return 0;
    for (int64_t i = 0; i < num_regions; i++) {
        int64_t offset = address - regions[i].start;
        if (offset >= 0 && offset < regions[i].length) return (int64_t)(intptr_t)(regions[i].here + offset);
    }
    _exit(4);
}

static void give_changes(void) {
    for (int64_t i = 0; i < num_chunks; i++) {
        const char *now = chunks[i].here, *before = chunks[i].before;
        int64_t first = 0, last = chunks[i].length;
        while (first < last && now[first] == before[first]) first++;
        while (first < last && now[last - 1] == before[last - 1]) last--;
        if (first == last) continue;
        give((int64_t[]){chunks[i].start + first, first - last}, 16);
        give(now + first, last - first);
        char *changed = chunks[i].before;  // what lies between may have become something else meanwhile
        for (int64_t at = first; at < last; at++) changed[at] = now[at] != before[at];
        give(changed + first, last - first);
    }
}

int main(void) {
    struct sigaction action = {.sa_sigaction = fetch, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, 0);
    for (;;) {
        int64_t words;
        take(&words, 8);
        take(&num_regions, 8);
        int64_t *program = malloc((size_t)words * 8);
        char *is_address = malloc((size_t)words);
        regions = malloc((size_t)num_regions * sizeof *regions);
        take(program, words * 8);
        take(is_address, words);
        for (int64_t i = 0; i < num_regions; i++) {
            take(&regions[i].start, 16);
            int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
            regions[i].here = mmap(0, (size_t)regions[i].length, PROT_NONE, flags, -1, 0);
            if (regions[i].here == MAP_FAILED) _exit(5);
        }
        for (int64_t i = 0; i < words; i++)
            if (is_address[i]) program[i] = translate(program[i]);
        num_chunks = 0;
        int64_t result = oct_run(program, words, 1);
        give_changes();
        give((int64_t[]){result, 0}, 16);
        for (int64_t i = 0; i < num_chunks; i++) munmap(chunks[i].before, (size_t)CHUNK);
        for (int64_t i = 0; i < num_regions; i++) munmap(regions[i].here, (size_t)regions[i].length);
        free(program), free(is_address), free(regions);
    }
}

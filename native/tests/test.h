/* test.h: what every C test needs: checks that end the run, a seeded generator, zstd from a shared library. */
#ifndef H3_TEST_H
#define H3_TEST_H
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "h3store.h"

#define CHECK(condition)                                                                  \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      fprintf(stderr, "%s:%d: failed: %s (seed %llu)\n", __FILE__, __LINE__, #condition,  \
              (unsigned long long)test_seed);                                             \
      abort();                                                                            \
    }                                                                                     \
  } while (0)

extern uint64_t test_seed;
/* xorshift64*; the state is the caller's, so that threads do not share it. */
static inline uint64_t next(uint64_t *state) {
  *state ^= *state >> 12;
  *state ^= *state << 25;
  *state ^= *state >> 27;
  return *state * 0x2545F4914F6CDD1DULL;
}
static inline uint32_t below(uint64_t *state, uint32_t n) { return (uint32_t)(next(state) >> 33) % n; }

/* Starts the engine with the zstd of the library named by H3_TEST_ZSTD (the zstandard package's own), else of the
 * system's libzstd. Ends the run with status 2 when there is neither. Seed from H3_TEST_SEED, 1 by default. */
void test_start(void);
#endif

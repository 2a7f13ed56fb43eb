/* XXH3: known hashes, and the AVX2 loop against the plain one at every length around its blocks and stripes. The file is
 * compiled in under another name, to reach both. Every buffer is a heap block of exactly its size. */
#define h3_xxh3 tested_xxh3
#include "../xxh3.c"

#include "test.h"

static void compare(uint64_t *rng, size_t bytes) {
  uint8_t *data = calloc(1, bytes + !bytes);
  for (size_t i = 0; i < bytes; i++) data[i] = (uint8_t)next(rng);
  const uint64_t found = tested_xxh3(data, bytes);
  if (bytes > 240) CHECK(found == hash_long(stripes_plain, data, bytes));
  if (bytes) {
    data[below(rng, (uint32_t)bytes)] ^= 1;
    CHECK(found != tested_xxh3(data, bytes));
  }
  free(data);
}

int main(void) {
  test_start();
  uint64_t rng = test_seed * 0x9E3779B97F4A7C15ULL;
  CHECK(tested_xxh3("", 0) == 0x2D06800538D394C2ULL);
  CHECK(tested_xxh3("a", 1) == 0xE6C632B61E964E1FULL);
  for (size_t bytes = 0; bytes < 3 * BLOCK + 2 * STRIPE; bytes++) compare(&rng, bytes);
  compare(&rng, H3_MAX_CHUNK);
  compare(&rng, H3_MAX_CHUNK - 1);
  puts("test_xxh3: ok");
  return 0;
}

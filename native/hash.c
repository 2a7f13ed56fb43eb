/* hash.c: XXH64, and the checks of chunks by either hash. Source: the XXH64 section of the xxHash format specification.
 * Async-signal-safe. */
#include "hash.h"

H3_INLINE uint64_t mix(uint64_t acc, uint64_t lane) { return rotl(acc + lane * P2, 31) * P1; }

H3_INLINE uint64_t merge(uint64_t acc, uint64_t lane) { return (acc ^ mix(0, lane)) * P1 + P4; }

/* The 32-byte stripes: four independent lanes, so that the multiplier stays busy. */
static uint64_t stripes(const uint8_t *p, size_t n_stripes, uint64_t seed) {
  uint64_t a = seed + P1 + P2, b = seed + P2, c = seed, d = seed - P1;
  for (const uint8_t *end = p + 32 * n_stripes; p != end; p += 32) {
    a = mix(a, load64(p));
    b = mix(b, load64(p + 8));
    c = mix(c, load64(p + 16));
    d = mix(d, load64(p + 24));
  }
  uint64_t h = rotl(a, 1) + rotl(b, 7) + rotl(c, 12) + rotl(d, 18);
  return merge(merge(merge(merge(h, a), b), c), d);
}

static uint64_t finish(uint64_t h, const uint8_t *p, size_t left) {
  for (; left >= 8; left -= 8, p += 8) h = rotl(h ^ mix(0, load64(p)), 27) * P1 + P4;
  if (left >= 4) {
    h = rotl(h ^ (uint64_t)load32(p) * P1, 23) * P2 + P3;
    left -= 4;
    p += 4;
  }
  for (; left; left--, p++) h = rotl(h ^ *p * P5, 11) * P1;
  return avalanche64(h);
}

uint64_t h3_xxh64(const void *data, size_t bytes, uint64_t seed) {
  const uint8_t *p = data;
  size_t whole = bytes / 32;
  uint64_t h = (whole ? stripes(p, whole, seed) : seed + P5) + bytes;
  return finish(h, whole ? p + 32 * whole : p, bytes % 32);
}

h3_chunk h3_checked(const void *raw, size_t bytes) {
  return (h3_chunk){.check = h3_xxh3(raw, bytes), .check_kind = H3_CHECK_XXH3};
}

int h3_check_holds(const h3_chunk *chunk, const void *raw, size_t bytes) {
  switch (chunk->check_kind) {
    case H3_CHECK_XXH64: return h3_xxh64(raw, bytes, 0) == chunk->check;
    case H3_CHECK_XXH3: return h3_xxh3(raw, bytes) == chunk->check;
    default: return 0;
  }
}

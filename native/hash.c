/* hash.c: XXH64. Source: the XXH64 section of the xxHash format specification. Async-signal-safe. */
#include <string.h>

#include "internal.h"

#define P1 0x9E3779B185EBCA87ULL
#define P2 0xC2B2AE3D27D4EB4FULL
#define P3 0x165667B19E3779F9ULL
#define P4 0x85EBCA77C2B2AE63ULL
#define P5 0x27D4EB2F165667C5ULL

H3_INLINE uint64_t rotl(uint64_t x, int bits) { return (x << bits) | (x >> (64 - bits)); }

H3_INLINE uint64_t load64(const uint8_t *p) {
  uint64_t x;
  memcpy(&x, p, 8);
  return x;
}

H3_INLINE uint32_t load32(const uint8_t *p) {
  uint32_t x;
  memcpy(&x, p, 4);
  return x;
}

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
  h = (h ^ (h >> 33)) * P2;
  h = (h ^ (h >> 29)) * P3;
  return h ^ (h >> 32);
}

uint64_t h3_xxh64(const void *data, size_t bytes, uint64_t seed) {
  const uint8_t *p = data;
  size_t whole = bytes / 32;
  uint64_t h = (whole ? stripes(p, whole, seed) : seed + P5) + bytes;
  return finish(h, whole ? p + 32 * whole : p, bytes % 32);
}

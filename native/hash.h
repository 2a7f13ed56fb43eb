/* hash.h: what the two hashes share: their primes, and little-endian loads. */
#ifndef H3_HASH_H
#define H3_HASH_H
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

/* XXH64's last step; XXH3 ends its shortest inputs with it. */
H3_INLINE uint64_t avalanche64(uint64_t h) {
  h = (h ^ (h >> 33)) * P2;
  h = (h ^ (h >> 29)) * P3;
  return h ^ (h >> 32);
}
#endif

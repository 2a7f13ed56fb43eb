/* xxh3.c: XXH3, 64 bits, default secret, seed 0. Source: the XXH3 sections of the xxHash format specification.
 * Stripes, which are all of a chunk but its end, are taken in AVX2 or in plain C; both give the same bits.
 * Async-signal-safe.
 */
#include "hash.h"

#ifdef H3_AVX2
#include <immintrin.h>
#endif

#define Q1 0x9E3779B1ULL /* the specification's 32-bit primes */
#define Q2 0x85EBCA77ULL
#define Q3 0xC2B2AE3DULL
#define MX1 0x165667919E3779F9ULL
#define MX2 0x9FB21C651E98DF25ULL

enum {
  STRIPE = 64,                          /* bytes: eight lanes */
  SECRET = 192,                         /* bytes */
  PER_BLOCK = (SECRET - STRIPE) / 8,    /* stripes until the lanes are scrambled: each is 8 secret bytes further on */
  BLOCK = PER_BLOCK * STRIPE,           /* bytes */
  SCRAMBLE = SECRET - STRIPE,           /* where the secret's bytes for that begin */
  LAST = SECRET - STRIPE - 7,           /* and those for the last stripe */
  AHEAD = 1536                           /* bytes that data is asked for before its use */
};

static const uint8_t secret[SECRET] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

H3_INLINE uint64_t fold(uint64_t a, uint64_t b) {
  const unsigned __int128 product = (unsigned __int128)a * b;
  return (uint64_t)product ^ (uint64_t)(product >> 64);
}

H3_INLINE uint64_t avalanche(uint64_t h) {
  h = (h ^ (h >> 37)) * MX1;
  return h ^ (h >> 32);
}

/* ---- up to 240 bytes ---- */

static uint64_t hash_1_to_3(const uint8_t *p, size_t bytes) {
  const uint32_t all = (uint32_t)(p[bytes - 1] | bytes << 8) | (uint32_t)p[0] << 16 | (uint32_t)p[bytes / 2] << 24;
  return avalanche64((load32(secret) ^ load32(secret + 4)) ^ (uint64_t)all);
}

static uint64_t hash_4_to_8(const uint8_t *p, size_t bytes) {
  uint64_t h = load64(secret + 8) ^ load64(secret + 16) ^ (load32(p + bytes - 4) | (uint64_t)load32(p) << 32);
  h = (h ^ rotl(h, 49) ^ rotl(h, 24)) * MX2;
  h = (h ^ ((h >> 35) + bytes)) * MX2;
  return h ^ (h >> 28);
}

static uint64_t hash_9_to_16(const uint8_t *p, size_t bytes) {
  const uint64_t low = load64(secret + 24) ^ load64(secret + 32) ^ load64(p);
  const uint64_t high = load64(secret + 40) ^ load64(secret + 48) ^ load64(p + bytes - 8);
  return avalanche(bytes + __builtin_bswap64(low) + high + fold(low, high));
}

H3_INLINE uint64_t mix16(const uint8_t *p, size_t at) {
  return fold(load64(p) ^ load64(secret + at), load64(p + 8) ^ load64(secret + at + 8));
}

/* Pieces of 16 bytes from both ends inwards; they may overlap in the middle. */
static uint64_t hash_17_to_128(const uint8_t *p, size_t bytes) {
  uint64_t h = bytes * P1;
  for (size_t i = 0; i <= (bytes - 1) / 32; i++)
    h += mix16(p + 16 * i, 32 * i) + mix16(p + bytes - 16 * (i + 1), 32 * i + 16);
  return avalanche(h);
}

static uint64_t hash_129_to_240(const uint8_t *p, size_t bytes) {
  uint64_t h = bytes * P1;
  for (size_t i = 0; i < 8; i++) h += mix16(p + 16 * i, 16 * i);
  h = avalanche(h);
  for (size_t i = 8; i < bytes / 16; i++) h += mix16(p + 16 * i, 16 * (i - 8) + 3);
  return avalanche(h + mix16(p + bytes - 16, 119));
}

static uint64_t hash_short(const uint8_t *p, size_t bytes) {
  if (bytes > 128) return hash_129_to_240(p, bytes);
  if (bytes > 16) return hash_17_to_128(p, bytes);
  if (bytes > 8) return hash_9_to_16(p, bytes);
  if (bytes > 3) return hash_4_to_8(p, bytes);
  if (bytes > 0) return hash_1_to_3(p, bytes);
  return avalanche64(load64(secret + 56) ^ load64(secret + 64));
}

/* ---- above ---- */

/* Takes the lanes over all of the bytes, 241 at least: whole blocks, the whole stripes after them, the last 64 bytes. What
 * is left for the last two is 1 to BLOCK bytes. */
typedef void stripes_of(const uint8_t *p, size_t bytes, uint64_t lane[8]);

H3_INLINE void add_plain(uint64_t lane[8], const uint8_t *p, const uint8_t *key) {
  for (int i = 0; i < 8; i++) {
    const uint64_t word = load64(p + 8 * i), keyed = word ^ load64(key + 8 * i);
    lane[i ^ 1] += word;
    lane[i] += (keyed & 0xffffffff) * (keyed >> 32);
  }
}

static void stripes_plain(const uint8_t *p, size_t bytes, uint64_t lane[8]) {
  const uint8_t *end = p + bytes;
  for (; end - p > BLOCK; p += BLOCK) {
    for (size_t s = 0; s < PER_BLOCK; s++) add_plain(lane, p + STRIPE * s, secret + 8 * s);
    for (int i = 0; i < 8; i++) lane[i] = (lane[i] ^ (lane[i] >> 47) ^ load64(secret + SCRAMBLE + 8 * i)) * Q1;
  }
  for (const uint8_t *key = secret; end - p > STRIPE; p += STRIPE, key += 8) add_plain(lane, p, key);
  add_plain(lane, end - STRIPE, secret + LAST);
}

#ifdef H3_AVX2
typedef struct lanes {
  __m256i a, b;
} lanes;

H3_AVX2 H3_INLINE __m256i load_avx2(const uint8_t *p) { return _mm256_loadu_si256((const __m256i_u *)p); }

H3_AVX2 H3_INLINE __m256i add_half(__m256i lane, const uint8_t *p, const uint8_t *key) {
  const __m256i word = load_avx2(p), keyed = _mm256_xor_si256(word, load_avx2(key));
  const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
  /* The neighbour's word: the halves of each 16 bytes change places. */
  return _mm256_add_epi64(_mm256_add_epi64(lane, _mm256_shuffle_epi32(word, 0x4e)), product);
}

H3_AVX2 H3_INLINE lanes add_avx2(lanes l, const uint8_t *p, const uint8_t *key) {
  return (lanes){add_half(l.a, p, key), add_half(l.b, p + 32, key + 32)};
}

/* A product of 64 bits by 32 is made of two of 32 by 32. */
H3_AVX2 H3_INLINE __m256i scramble_half(__m256i lane, const uint8_t *key) {
  const __m256i prime = _mm256_set1_epi64x(Q1);
  lane = _mm256_xor_si256(_mm256_xor_si256(lane, _mm256_srli_epi64(lane, 47)), load_avx2(key));
  const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(lane, 32), prime);
  return _mm256_add_epi64(_mm256_mul_epu32(lane, prime), _mm256_slli_epi64(high, 32));
}

H3_AVX2 static void stripes_avx2(const uint8_t *p, size_t bytes, uint64_t lane[8]) {
  const uint8_t *end = p + bytes;
  lanes l = {load_avx2((const uint8_t *)lane), load_avx2((const uint8_t *)(lane + 4))};
  for (; end - p > BLOCK; p += BLOCK) {
    for (size_t s = 0; s < PER_BLOCK; s++) {
      __builtin_prefetch(p + STRIPE * s + AHEAD);
      l = add_avx2(l, p + STRIPE * s, secret + 8 * s);
    }
    l = (lanes){scramble_half(l.a, secret + SCRAMBLE), scramble_half(l.b, secret + SCRAMBLE + 32)};
  }
  for (const uint8_t *key = secret; end - p > STRIPE; p += STRIPE, key += 8) l = add_avx2(l, p, key);
  l = add_avx2(l, end - STRIPE, secret + LAST);
  _mm256_storeu_si256((__m256i_u *)lane, l.a);
  _mm256_storeu_si256((__m256i_u *)(lane + 4), l.b);
}
#endif

H3_INLINE uint64_t hash_long(stripes_of *stripes, const uint8_t *p, size_t bytes) {
  uint64_t lane[8] = {Q3, P1, P2, P3, P4, Q2, P5, Q1}, h = bytes * P1;
  stripes(p, bytes, lane);
  for (int i = 0; i < 8; i += 2) h += fold(lane[i] ^ load64(secret + 11 + 8 * i), lane[i + 1] ^ load64(secret + 19 + 8 * i));
  return avalanche(h);
}

uint64_t h3_xxh3(const void *data, size_t bytes) {
  if (bytes <= 240) return hash_short(data, bytes);
#ifdef H3_AVX2
  if (H3_HAS_AVX2) return hash_long(stripes_avx2, data, bytes);
#endif
  return hash_long(stripes_plain, data, bytes);
}

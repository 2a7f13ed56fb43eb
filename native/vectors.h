/* vectors.h: eight lanes of float32: loads that widen, stores that round, sums in a fixed order, transposes, e^x.
 *
 * Part of kernels_impl.h, and compiled with it once per instruction set: H3_HAVE_AVX2 says that AVX2 and F16C may be used.
 */
#include <stdint.h>
#include <string.h>
#include "compute.h"

typedef float v8 __attribute__((vector_size(32)));
typedef float v8u __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef uint32_t u8 __attribute__((vector_size(32)));
typedef uint16_t h8 __attribute__((vector_size(16)));
typedef uint16_t h8u __attribute__((vector_size(16), aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline))

INLINE v8 load8(const float *p) { return *(const v8u *)p; }
INLINE void store8(float *p, v8 x) { *(v8u *)p = x; }
INLINE v8 splat(float x) { return (v8){x, x, x, x, x, x, x, x}; }
INLINE v8 zero8(void) { return (v8){0}; }
INLINE u8 splat_u(uint32_t x) { return (u8){x, x, x, x, x, x, x, x}; }
INLINE v8 choose(i8 mask, v8 yes, v8 no) { return (v8)((mask & (i8)yes) | (~mask & (i8)no)); }
INLINE v8 max8(v8 a, v8 b) { return choose(a > b, a, b); }

#ifdef H3_HAVE_AVX2
/* gcc 12 widens a whole vector in two halves; the intrinsic is one instruction */
INLINE v8 bf16_load(const uint16_t *p) {
  return (v8)((u8)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)p)) << 16);
}
INLINE void ahead(const void *p) { __builtin_prefetch(p, 0, 3); }
INLINE v8 f16_load(const uint16_t *p) { return (v8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p)); }
INLINE void f16_store(uint16_t *p, v8 x) {
  _mm_storeu_si128((__m128i *)(void *)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
}
#else
INLINE v8 bf16_load(const uint16_t *p) { return (v8)(__builtin_convertvector(*(const h8u *)p, u8) << 16); }
INLINE void ahead(const void *p) { (void)p; }
INLINE v8 f16_load(const uint16_t *p) {
  u8 h = __builtin_convertvector(*(const h8u *)p, u8);
  u8 special = (u8)((h & 0x7c00u) == 0x7c00u) & 0x7f800000u;
  v8 magnitude = (v8)((h & 0x7fffu) << 13) * splat(0x1p112f); /* exact, subnormals too */
  return (v8)((u8)magnitude | special | ((h & 0x8000u) << 16));
}
static uint16_t f16_round(float x) {
  uint32_t u, rest, half;
  memcpy(&u, &x, 4);
  uint32_t sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
  if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
  if (a < 0x33000000u) return (uint16_t)sign;
  uint32_t exponent = a >> 23, mantissa = (a & 0x7fffffu) | 0x800000u;
  uint32_t shift = exponent < 113 ? 126 - exponent : 13;
  uint32_t kept = mantissa >> shift;
  if (exponent >= 113) kept = (kept & 0x3ffu) | ((exponent - 112) << 10);
  rest = mantissa & ((1u << shift) - 1), half = 1u << (shift - 1);
  kept += rest > half || (rest == half && (kept & 1u));
  return (uint16_t)(sign | kept);
}
INLINE void f16_store(uint16_t *p, v8 x) {
  for (int i = 0; i < 8; i++) p[i] = f16_round(x[i]);
}
#endif

INLINE void bf16_store(uint16_t *p, v8 x) {
  u8 u = (u8)x;
  u8 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  u8 nan = (u8)((i8)(u & 0x7fffffffu) > (i8)splat_u(0x7f800000u)); /* rounding could carry a NaN to infinity */
  u8 quiet = (u >> 16) | 0x40u;
  *(h8u *)p = __builtin_convertvector((rounded & ~nan) | (quiet & nan), h8);
}

INLINE v8 load_as(const void *p, int type, int64_t i) {
  if (type == H3_F32) return load8((const float *)p + i);
  return type == H3_BF16 ? bf16_load((const uint16_t *)p + i) : f16_load((const uint16_t *)p + i);
}

/* The first n < 8 lanes; the rest zero, or left alone in memory. */
INLINE v8 load_part(const void *p, int type, int64_t i, int64_t n) {
  v8 x = {0};
  uint16_t halves[8] = {0};
  if (type == H3_F32) {
    for (int64_t j = 0; j < n; j++) x[j] = ((const float *)p)[i + j];
    return x;
  }
  for (int64_t j = 0; j < n; j++) halves[j] = ((const uint16_t *)p)[i + j];
  return type == H3_BF16 ? bf16_load(halves) : f16_load(halves);
}
INLINE void store_part(float *p, v8 x, int64_t n) {
  for (int64_t j = 0; j < n; j++) p[j] = x[j];
}
INLINE v8 load_some(const float *p, int64_t n) { return n >= 8 ? load8(p) : load_part(p, H3_F32, 0, n); }
INLINE void store_some(float *p, v8 x, int64_t n) {
  if (n >= 8)
    store8(p, x);
  else
    store_part(p, x, n);
}

INLINE float sum8(v8 x) {
  float a = (x[0] + x[4]) + (x[2] + x[6]), b = (x[1] + x[5]) + (x[3] + x[7]);
  return a + b;
}

#define SHUFFLE __builtin_shufflevector

INLINE v8 add_pairs(v8 a, v8 b) {
  return SHUFFLE(a, b, 0, 2, 8, 10, 4, 6, 12, 14) + SHUFFLE(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
}

/* Lane i of the result is the sum of r[i]'s lanes, in an order that does not depend on i. */
INLINE v8 sums8(const v8 r[8]) {
  v8 low = add_pairs(add_pairs(r[0], r[1]), add_pairs(r[2], r[3]));
  v8 high = add_pairs(add_pairs(r[4], r[5]), add_pairs(r[6], r[7]));
  return SHUFFLE(low, high, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(low, high, 4, 5, 6, 7, 12, 13, 14, 15);
}

INLINE void transpose8(v8 r[8]) {
  v8 a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = SHUFFLE(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    a[i + 1] = SHUFFLE(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      b[i + 2 * j] = SHUFFLE(a[i + j], a[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      b[i + 2 * j + 1] = SHUFFLE(a[i + j], a[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int i = 0; i < 4; i++) {
    r[i] = SHUFFLE(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    r[i + 4] = SHUFFLE(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

/* e^x for x <= 88; 0 below -87.3, where float32 has no normal value. The Taylor series to the 7th power after
 * x = n ln 2 + r with |r| <= ln 2 / 2 leaves a relative error of 5e-9. */
INLINE v8 exp8(v8 x) {
  const float shifter = 12582912.0f; /* 1.5 2^23: adding it rounds to an integer held in the low bits */
  v8 t = x * splat(1.44269504f) + splat(shifter);
  v8 n = t - splat(shifter);
  v8 r = (x - n * splat(0.693359375f)) + n * splat(2.12194440e-4f);
  v8 p = splat(1.0f / 5040);
  p = p * r + splat(1.0f / 720);
  p = p * r + splat(1.0f / 120);
  p = p * r + splat(1.0f / 24);
  p = p * r + splat(1.0f / 6);
  p = p * r + splat(0.5f);
  p = p * r + splat(1.0f);
  p = p * r + splat(1.0f);
  i8 power = (i8)(((u8)t + splat_u(127 - 0x4b400000u)) << 23);
  return choose(x > splat(-87.3f), p * (v8)power, zero8());
}

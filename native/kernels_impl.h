/* kernels_impl.h: the vector primitives, written once in eight-lane vectors and compiled once per instruction set.
 *
 * The including file sets the target, and defines H3_KERNELS (name of the table), H3_ISA_NAME (a string) and, where they may
 * be used, H3_HAVE_AVX2 (F16C included). Accumulation order is part of the contract: a row's sum over k runs
 * from 0 to k - 1 whatever the row's neighbours are.
 */
#include <math.h>
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

/* ---- dots: few rows of x against many rows of w ---------------------------------------------------------------- */

/* Lane sums of one row of w times X <= 2 rows of x. One row after the other, so that memory is read in order: eight rows
 * at once read it at two thirds of the speed. */
INLINE void dot_row(const float *x, int64_t ldx, const char *w, int type, int64_t k, v8 *out, const int X) {
  const int64_t bytes = type == H3_F32 ? 4 : 2;
  v8 acc[2][4];
  int64_t i = 0;
  for (int a = 0; a < X; a++)
    for (int u = 0; u < 4; u++) acc[a][u] = zero8();
  for (; i + 32 <= k; i += 32) {
    ahead(w + i * bytes + 2048);
    if (type == H3_F32) ahead(w + i * bytes + 2112);
#pragma GCC unroll 4
    for (int u = 0; u < 4; u++) {
      v8 weight = load_as(w, type, i + 8 * u);
#pragma GCC unroll 2
      for (int a = 0; a < X; a++) acc[a][u] += load8(x + a * ldx + i + 8 * u) * weight;
    }
  }
#pragma GCC unroll 2
  for (int a = 0; a < X; a++) out[8 * a] = (acc[a][0] + acc[a][1]) + (acc[a][2] + acc[a][3]);
  for (; i < k; i += 8)
    for (int a = 0; a < X; a++) {
      const int64_t n = k - i;
      v8 weight = n >= 8 ? load_as(w, type, i) : load_part(w, type, i, n);
      out[8 * a] += load_some(x + a * ldx + i, n) * weight;
    }
}

INLINE void dots_of(const float *x, int64_t ldx, const char *w, int type, int64_t n, int64_t k, const float *bias,
                    int accumulate, float *y, int64_t ldy, const int X) {
  const int64_t row_bytes = k * (type == H3_F32 ? 4 : 2);
  for (int64_t j = 0; j < n; j += 8) {
    const int64_t count = h3_min64(8, n - j);
    v8 lanes[16] = {zero8()};
    for (int64_t b = 0; b < count; b++) dot_row(x, ldx, w + (j + b) * row_bytes, type, k, lanes + b, X);
    for (int a = 0; a < X; a++) {
      float *cells = y + a * ldy + j;
      v8 sums = sums8(lanes + 8 * a);
      if (bias) sums += load_some(bias + j, count);
      if (accumulate) sums += load_some(cells, count);
      store_some(cells, sums, count);
    }
  }
}

INLINE void dots_typed(const float *x, int64_t ldx, int rows, const void *w, int type, int64_t n, int64_t k,
                       const float *bias, int accumulate, float *y, int64_t ldy) {
  int row = 0;
  for (; row + 2 <= rows; row += 2)
    dots_of(x + row * ldx, ldx, w, type, n, k, bias, accumulate, y + row * ldy, ldy, 2);
  if (row < rows) dots_of(x + row * ldx, ldx, w, type, n, k, bias, accumulate, y + row * ldy, ldy, 1);
}

static void dots(const float *x, int64_t ldx, int rows, const void *w, int type, int64_t n, int64_t k,
                 const float *bias, int accumulate, float *y, int64_t ldy) {
  if (type == H3_F32)
    dots_typed(x, ldx, rows, w, H3_F32, n, k, bias, accumulate, y, ldy);
  else if (type == H3_BF16)
    dots_typed(x, ldx, rows, w, H3_BF16, n, k, bias, accumulate, y, ldy);
  else
    dots_typed(x, ldx, rows, w, H3_F16, n, k, bias, accumulate, y, ldy);
}

/* ---- tiles: many rows ------------------------------------------------------------------------------------------ */

INLINE void pack16_typed(const char *w, int type, int64_t row_bytes, int64_t rows, int64_t k, float *out) {
  for (int half = 0; half < 2; half++)
    for (int64_t i = 0; i < k; i += 8) {
      const int64_t n = h3_min64(8, k - i);
      v8 r[8];
      for (int j = 0; j < 8; j++) {
        const char *row = w + (half * 8 + j) * row_bytes;
        r[j] = half * 8 + j >= rows ? zero8() : n == 8 ? load_as(row, type, i) : load_part(row, type, i, n);
      }
      transpose8(r);
      for (int j = 0; j < n; j++) store8(out + (i + j) * H3_NR + half * 8, r[j]);
    }
}

static void pack16(const void *w, int type, int64_t rows, int64_t k, float *out) {
  if (type == H3_F32)
    pack16_typed(w, H3_F32, k * 4, rows, k, out);
  else if (type == H3_BF16)
    pack16_typed(w, H3_BF16, k * 2, rows, k, out);
  else
    pack16_typed(w, H3_F16, k * 2, rows, k, out);
}

INLINE void tile_rows(const float *a, int64_t lda, const float *b, int64_t ldb, int64_t k, const float *bias,
                      int accumulate, float *c, int64_t ldc, const int R) {
  v8 acc[H3_MR][2];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
    for (int j = 0; j < 2; j++) acc[r][j] = bias ? load8(bias + 8 * j) : zero8();
  for (int64_t i = 0; i < k; i++) {
    v8 b0 = load8(b + i * ldb), b1 = load8(b + i * ldb + 8);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      v8 x = splat(a[r * lda + i]);
      acc[r][0] += x * b0;
      acc[r][1] += x * b1;
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
    for (int j = 0; j < 2; j++) {
      float *cell = c + r * ldc + 8 * j;
      store8(cell, accumulate ? load8(cell) + acc[r][j] : acc[r][j]);
    }
}

INLINE void tile_any(const float *a, int64_t lda, int rows, const float *b, int64_t ldb, int64_t k, const float *bias,
                     int accumulate, float *c, int64_t ldc) {
  switch (rows) {
  case 6: tile_rows(a, lda, b, ldb, k, bias, accumulate, c, ldc, 6); break;
  case 5: tile_rows(a, lda, b, ldb, k, bias, accumulate, c, ldc, 5); break;
  case 4: tile_rows(a, lda, b, ldb, k, bias, accumulate, c, ldc, 4); break;
  case 3: tile_rows(a, lda, b, ldb, k, bias, accumulate, c, ldc, 3); break;
  case 2: tile_rows(a, lda, b, ldb, k, bias, accumulate, c, ldc, 2); break;
  default: tile_rows(a, lda, b, ldb, k, bias, accumulate, c, ldc, 1); break;
  }
}

static void tile(const float *a, int64_t lda, int rows, const float *b, int64_t ldb, int64_t k, int columns,
                 const float *bias, int accumulate, float *c, int64_t ldc) {
  if (columns == H3_NR) {
    tile_any(a, lda, rows, b, ldb, k, bias, accumulate, c, ldc);
    return;
  }
  float whole[H3_MR * H3_NR];
  for (int r = 0; r < rows; r++)
    for (int j = 0; j < H3_NR; j++) {
      float start = bias && j < columns ? bias[j] : 0.0f;
      whole[r * H3_NR + j] = accumulate && j < columns ? c[r * ldc + j] + start : start;
    }
  tile_any(a, lda, rows, b, ldb, k, NULL, 1, whole, H3_NR);
  for (int r = 0; r < rows; r++) memcpy(c + r * ldc, whole + r * H3_NR, (size_t)columns * sizeof(float));
}

/* ---- rows of numbers ------------------------------------------------------------------------------------------- */

INLINE void to_float_typed(const void *in, int type, int64_t n, float *out) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) store8(out + i, load_as(in, type, i));
  if (i < n) store_part(out + i, load_part(in, type, i, n - i), n - i);
}

static void to_float(const void *in, int type, int64_t n, float *out) {
  if (type == H3_F32)
    memcpy(out, in, (size_t)n * 4);
  else if (type == H3_BF16)
    to_float_typed(in, H3_BF16, n, out);
  else
    to_float_typed(in, H3_F16, n, out);
}

INLINE void from_float_typed(const float *in, int type, int64_t n, uint16_t *out) {
  for (int64_t i = 0; i < n; i += 8) {
    uint16_t halves[8], *to = n - i < 8 ? halves : out + i;
    if (type == H3_BF16)
      bf16_store(to, load_some(in + i, n - i));
    else
      f16_store(to, load_some(in + i, n - i));
    if (n - i < 8) memcpy(out + i, halves, (size_t)(n - i) * 2);
  }
}

static void from_float(const float *in, int type, int64_t n, void *out) {
  if (type == H3_F32)
    memcpy(out, in, (size_t)n * 4);
  else if (type == H3_BF16)
    from_float_typed(in, H3_BF16, n, out);
  else
    from_float_typed(in, H3_F16, n, out);
}

static float exp_sum(float *x, int64_t n, float shift) {
  v8 sum = zero8();
  for (int64_t i = 0; i < n; i += 8) {
    v8 e = exp8(load8(x + i) - splat(shift));
    store8(x + i, e);
    sum += e;
  }
  return sum8(sum);
}

static float maximum(const float *x, int64_t n) {
  v8 best = load8(x);
  for (int64_t i = 8; i < n; i += 8) best = max8(load8(x + i), best);
  float m = best[0];
  for (int i = 1; i < 8; i++) m = best[i] > m ? best[i] : m;
  return m;
}

static void scale(float *x, int64_t n, float factor) {
  for (int64_t i = 0; i < n; i += 8) store_some(x + i, load_some(x + i, n - i) * splat(factor), n - i);
}

static void rmsnorm(const float *x, int64_t k, const float *weight, float eps, float *y) {
  v8 squares = zero8();
  for (int64_t i = 0; i < k; i += 8) squares += load_some(x + i, k - i) * load_some(x + i, k - i);
  v8 factor = splat(1.0f / sqrtf(sum8(squares) / (float)k + eps));
  for (int64_t i = 0; i < k; i += 8)
    store_some(y + i, load_some(x + i, k - i) * factor * load_some(weight + i, k - i), k - i);
}

static void silu_mul(const float *gate, const float *up, int64_t n, float *y) {
  for (int64_t i = 0; i < n; i += 8) {
    v8 g = load_some(gate + i, n - i), limit = splat(87.0f);
    v8 minus = choose(g < -limit, limit, -g); /* below, e^-g would leave float32 */
    store_some(y + i, g / (splat(1.0f) + exp8(minus)) * load_some(up + i, n - i), n - i);
  }
}

/* ---- attention of few queries ---------------------------------------------------------------------------------- */

INLINE void scores_block(const float *q, const char *k, int type, int64_t dim, float *s, int64_t lds, const int G,
                         const int T) {
  v8 acc[16];
  const int64_t row_bytes = dim * (type == H3_F32 ? 4 : 2);
  for (int i = 0; i < 16; i++) acc[i] = zero8();
  for (int64_t i = 0; i < dim; i += 8) {
    v8 qs[4];
    for (int g = 0; g < G; g++) qs[g] = load8(q + g * dim + i);
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
      v8 kv = load_as(k + t * row_bytes, type, i);
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) acc[g * T + t] += qs[g] * kv;
    }
  }
  float sums[16];
  store8(sums, sums8(acc));
  if (G * T > 8) store8(sums + 8, sums8(acc + 8));
  for (int g = 0; g < G; g++)
    for (int t = 0; t < T; t++) s[g * lds + t] = sums[g * T + t];
}

/* Asks for `bytes` of what is read next, while this is worked on: rows of one head are too short a run for the processor
 * to see where memory goes on. A null next asks for nothing. */
INLINE void ask(const char *next, int64_t bytes) {
  for (int64_t i = 0; next && i < bytes; i += 64) ahead(next + i);
}

INLINE void scores_groups(const float *q, const char *k, int type, int64_t tokens, int64_t dim, const char *next, float *s,
                          int64_t lds, const int G, const int T) {
  const int64_t row_bytes = dim * (type == H3_F32 ? 4 : 2);
  int64_t t = 0;
  for (; t + T <= tokens; t += T) {
    ask(next ? next + t * row_bytes : next, T * row_bytes);
    scores_block(q, k + t * row_bytes, type, dim, s + t, lds, G, T);
  }
  for (; t < tokens; t++) scores_block(q, k + t * row_bytes, type, dim, s + t, lds, G, 1);
}

INLINE void scores_typed(const float *q, int groups, const char *k, int type, int64_t tokens, int64_t dim,
                         const char *next, float *s, int64_t lds) {
  for (; groups >= 4; groups -= 4, q += 4 * dim, s += 4 * lds, next = NULL)
    scores_groups(q, k, type, tokens, dim, next, s, lds, 4, 2);
  if (groups == 3) scores_groups(q, k, type, tokens, dim, next, s, lds, 3, 4);
  if (groups == 2) scores_groups(q, k, type, tokens, dim, next, s, lds, 2, 4);
  if (groups == 1) scores_groups(q, k, type, tokens, dim, next, s, lds, 1, 8);
}

static void scores(const float *q, int groups, const void *k, int type, int64_t tokens, int64_t dim, const void *next,
                   float *s, int64_t lds) {
  if (type == H3_F32)
    scores_typed(q, groups, k, H3_F32, tokens, dim, next, s, lds);
  else if (type == H3_BF16)
    scores_typed(q, groups, k, H3_BF16, tokens, dim, next, s, lds);
  else
    scores_typed(q, groups, k, H3_F16, tokens, dim, next, s, lds);
}

/* 8 W columns from i on */
INLINE void weigh_columns(const float *p, int64_t ldp, const char *v, int type, int64_t tokens, int64_t dim, int64_t i,
                          const char *next, float *o, const int G, const int W) {
  const int64_t row_bytes = dim * (type == H3_F32 ? 4 : 2);
  const int64_t first = i / 16 * tokens * 64, asked = next ? tokens * row_bytes - first : 0;
  v8 acc[4][2];
  for (int g = 0; g < G; g++)
    for (int j = 0; j < W; j++) acc[g][j] = load8(o + g * dim + i + 8 * j);
  for (int64_t t = 0; t < tokens; t++) {
    if (t * 64 < asked) ahead(next + first + t * 64);
    for (int j = 0; j < W; j++) {
      v8 x = load_as(v + t * row_bytes, type, i + 8 * j);
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) acc[g][j] += splat(p[g * ldp + t]) * x;
    }
  }
  for (int g = 0; g < G; g++)
    for (int j = 0; j < W; j++) store8(o + g * dim + i + 8 * j, acc[g][j]);
}

INLINE void weigh_groups(const float *p, int64_t ldp, const char *v, int type, int64_t tokens, int64_t dim,
                         const char *next, float *o, const int G) {
  int64_t i = 0;
  for (; i + 16 <= dim; i += 16) weigh_columns(p, ldp, v, type, tokens, dim, i, next, o, G, 2);
  if (i < dim) weigh_columns(p, ldp, v, type, tokens, dim, i, next, o, G, 1);
}

INLINE void weigh_typed(const float *p, int64_t ldp, int groups, const char *v, int type, int64_t tokens, int64_t dim,
                        const char *next, float *o) {
  for (; groups >= 4; groups -= 4, p += 4 * ldp, o += 4 * dim, next = NULL)
    weigh_groups(p, ldp, v, type, tokens, dim, next, o, 4);
  if (groups == 3) weigh_groups(p, ldp, v, type, tokens, dim, next, o, 3);
  if (groups == 2) weigh_groups(p, ldp, v, type, tokens, dim, next, o, 2);
  if (groups == 1) weigh_groups(p, ldp, v, type, tokens, dim, next, o, 1);
}

static void weigh(const float *p, int64_t ldp, int groups, const void *v, int type, int64_t tokens, int64_t dim,
                  const void *next, float *o) {
  if (type == H3_F32)
    weigh_typed(p, ldp, groups, v, H3_F32, tokens, dim, next, o);
  else if (type == H3_BF16)
    weigh_typed(p, ldp, groups, v, H3_BF16, tokens, dim, next, o);
  else
    weigh_typed(p, ldp, groups, v, H3_F16, tokens, dim, next, o);
}

const h3_kernels H3_KERNELS = {
  .name = H3_ISA_NAME, .dots = dots, .pack16 = pack16, .tile = tile, .to_float = to_float, .from_float = from_float,
  .exp_sum = exp_sum, .maximum = maximum, .scale = scale, .rmsnorm = rmsnorm, .silu_mul = silu_mul, .scores = scores,
  .weigh = weigh,
};

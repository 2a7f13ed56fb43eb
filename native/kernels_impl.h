/* kernels_impl.h: the vector primitives, written once in eight-lane vectors and compiled once per instruction set.
 *
 * The including file sets the target, and defines H3_KERNELS (name of the table), H3_ISA_NAME (a string) and, where they may
 * be used, H3_HAVE_AVX2 (F16C included). Accumulation order is part of the contract: a row's sum over k runs
 * from 0 to k - 1 whatever the row's neighbours are.
 */
#include <math.h>
#include "vectors.h"

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

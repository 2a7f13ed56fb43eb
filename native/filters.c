/* filters.c: pure transforms of element arrays, written so that the compiler vectorises each loop. */
#include "filters.h"

#include <string.h>

#include "internal.h"

/* Element types at any address: callers' buffers need no alignment. */
typedef uint16_t u16 __attribute__((aligned(1), may_alias));
typedef uint32_t u32 __attribute__((aligned(1), may_alias));
typedef uint64_t u64 __attribute__((aligned(1), may_alias));

int h3_all_zero(const uint8_t *data, size_t bytes) {
  size_t i = 0;
  for (; i + 64 <= bytes; i += 64) {
    const u64 *w = (const u64 *)(data + i);
    if ((w[0] | w[1] | w[2] | w[3]) | (w[4] | w[5] | w[6] | w[7])) return 0;
  }
  for (; i < bytes; i++) {
    if (data[i]) return 0;
  }
  return 1;
}

/* ---- delta ---- */
#define DELTA(T, W)                                                                                              \
  H3_CLONES static void sub_##T(const W *restrict x, const W *restrict y, W *restrict out, size_t n) {           \
    for (size_t i = 0; i < n; i++) out[i] = (T)(x[i] - y[i]);                                                    \
  }                                                                                                              \
  H3_CLONES static void add_##T(W *restrict x, const W *restrict y, size_t n) {                                  \
    for (size_t i = 0; i < n; i++) x[i] = (T)(x[i] + y[i]);                                                      \
  }                                                                                                              \
  /* Rows shorter than a vector: the loop's own order is the dependency. */                                      \
  static void short_rows_##T(W *x, size_t n, size_t row) {                                                       \
    for (size_t i = row; i < n; i++) x[i] = (T)(x[i] + x[i - row]);                                              \
  }
DELTA(uint8_t, uint8_t)
DELTA(uint16_t, u16)
DELTA(uint32_t, u32)
DELTA(uint64_t, u64)

void h3_delta_sub(const uint8_t *x, const uint8_t *y, uint8_t *out, size_t n, uint32_t elem) {
  switch (elem) {
    case 1: sub_uint8_t(x, y, out, n); break;
    case 2: sub_uint16_t((const u16 *)x, (const u16 *)y, (u16 *)out, n); break;
    case 4: sub_uint32_t((const u32 *)x, (const u32 *)y, (u32 *)out, n); break;
    default: sub_uint64_t((const u64 *)x, (const u64 *)y, (u64 *)out, n); break;
  }
}

void h3_delta_add(uint8_t *x, const uint8_t *y, size_t n, uint32_t elem) {
  switch (elem) {
    case 1: add_uint8_t(x, y, n); break;
    case 2: add_uint16_t((u16 *)x, (const u16 *)y, n); break;
    case 4: add_uint32_t((u32 *)x, (const u32 *)y, n); break;
    default: add_uint64_t((u64 *)x, (const u64 *)y, n); break;
  }
}

void h3_delta_row_sub(const uint8_t *x, uint8_t *out, size_t n, size_t row, uint32_t elem) {
  size_t first = row < n ? row : n;
  memcpy(out, x, first * elem);
  h3_delta_sub(x + first * elem, x, out + first * elem, n - first, elem);
}

void h3_delta_row_add(uint8_t *x, size_t n, size_t row, uint32_t elem) {
  if (row * elem < 64) {
    switch (elem) {
      case 1: short_rows_uint8_t(x, n, row); break;
      case 2: short_rows_uint16_t((u16 *)x, n, row); break;
      case 4: short_rows_uint32_t((u32 *)x, n, row); break;
      default: short_rows_uint64_t((u64 *)x, n, row); break;
    }
    return;
  }
  for (size_t at = row; at < n; at += row) {
    size_t count = n - at < row ? n - at : row;
    h3_delta_add(x + at * elem, x + (at - row) * elem, count, elem);
  }
}

/* ---- byte planes ---- */
#define MAPS(T, BITS)                                                               \
  H3_INLINE T map_##T(T x, int mode) {                                              \
    if (mode == H3_MAP_ROTATE) return (T)((T)(x << 1) | (T)(x >> (BITS - 1)));      \
    if (mode == H3_MAP_ZIGZAG) return (T)((T)(x << 1) ^ (T)(0 - (x >> (BITS - 1)))); \
    return x;                                                                       \
  }                                                                                 \
  H3_INLINE T unmap_##T(T x, int mode) {                                            \
    if (mode == H3_MAP_ROTATE) return (T)((T)(x >> 1) | (T)(x << (BITS - 1)));      \
    if (mode == H3_MAP_ZIGZAG) return (T)((T)(x >> 1) ^ (T)(0 - (x & 1)));          \
    return x;                                                                       \
  }
MAPS(uint16_t, 16)
MAPS(uint32_t, 32)
MAPS(uint64_t, 64)

/* One loop per mode, so that the mode is constant inside. */
#define BY_MODE(CALL)                                   \
  switch (mode) {                                       \
    case H3_MAP_ROTATE: CALL(H3_MAP_ROTATE); break;     \
    case H3_MAP_ZIGZAG: CALL(H3_MAP_ZIGZAG); break;     \
    default: CALL(H3_MAP_NONE); break;                  \
  }

H3_INLINE void split16_mode(const u16 *restrict in, size_t n, uint8_t *restrict p0, uint8_t *restrict p1, int mode) {
  for (size_t i = 0; i < n; i++) {
    uint16_t v = map_uint16_t(in[i], mode);
    p0[i] = (uint8_t)v;
    p1[i] = (uint8_t)(v >> 8);
  }
}

H3_CLONES static void split16(const u16 *in, size_t n, uint8_t *out, int mode) {
#define CALL(m) split16_mode(in, n, out, out + n, m)
  BY_MODE(CALL)
#undef CALL
}

H3_INLINE void join16_mode(const uint8_t *restrict p0, const uint8_t *restrict p1, size_t n, u16 *restrict out, int mode) {
  for (size_t i = 0; i < n; i++) out[i] = unmap_uint16_t((uint16_t)(p0[i] | p1[i] << 8), mode);
}

H3_CLONES static void join16(const uint8_t *const p[8], size_t n, u16 *out, int mode) {
#define CALL(m) join16_mode(p[0], p[1], n, out, m)
  BY_MODE(CALL)
#undef CALL
}

H3_INLINE void split32_mode(const u32 *restrict in, size_t n, uint8_t *restrict p0, uint8_t *restrict p1,
                            uint8_t *restrict p2, uint8_t *restrict p3, int mode) {
  for (size_t i = 0; i < n; i++) {
    uint32_t v = map_uint32_t(in[i], mode);
    p0[i] = (uint8_t)v;
    p1[i] = (uint8_t)(v >> 8);
    p2[i] = (uint8_t)(v >> 16);
    p3[i] = (uint8_t)(v >> 24);
  }
}

H3_CLONES static void split32(const u32 *in, size_t n, uint8_t *out, int mode) {
#define CALL(m) split32_mode(in, n, out, out + n, out + 2 * n, out + 3 * n, m)
  BY_MODE(CALL)
#undef CALL
}

H3_INLINE void join32_mode(const uint8_t *restrict p0, const uint8_t *restrict p1, const uint8_t *restrict p2,
                           const uint8_t *restrict p3, size_t n, u32 *restrict out, int mode) {
  for (size_t i = 0; i < n; i++) {
    uint32_t v = (uint32_t)p0[i] | (uint32_t)p1[i] << 8 | (uint32_t)p2[i] << 16 | (uint32_t)p3[i] << 24;
    out[i] = unmap_uint32_t(v, mode);
  }
}

H3_CLONES static void join32(const uint8_t *const p[8], size_t n, u32 *out, int mode) {
#define CALL(m) join32_mode(p[0], p[1], p[2], p[3], n, out, m)
  BY_MODE(CALL)
#undef CALL
}

static void split64(const u64 *in, size_t n, uint8_t *out, int mode) {
  for (size_t i = 0; i < n; i++) {
    uint64_t v = map_uint64_t(in[i], mode);
    for (unsigned p = 0; p < 8; p++) out[p * n + i] = (uint8_t)(v >> (8 * p));
  }
}

static void join64(const uint8_t *const p[8], size_t n, u64 *out, int mode) {
  for (size_t i = 0; i < n; i++) {
    uint64_t v = 0;
    for (unsigned k = 0; k < 8; k++) v |= (uint64_t)p[k][i] << (8 * k);
    out[i] = unmap_uint64_t(v, mode);
  }
}

void h3_planes_split(const uint8_t *in, size_t n, uint32_t elem, int mode, uint8_t *planes) {
  if (elem == 2) split16((const u16 *)in, n, planes, mode);
  if (elem == 4) split32((const u32 *)in, n, planes, mode);
  if (elem == 8) split64((const u64 *)in, n, planes, mode);
}

void h3_planes_join(const uint8_t *const planes[8], size_t n, uint32_t elem, int mode, uint8_t *out) {
  if (elem == 2) join16(planes, n, (u16 *)out, mode);
  if (elem == 4) join32(planes, n, (u32 *)out, mode);
  if (elem == 8) join64(planes, n, (u64 *)out, mode);
}

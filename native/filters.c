/* filters.c: pure transforms of element arrays, written so that the compiler vectorises each loop. */
#include "filters.h"

#include <string.h>

#include "internal.h"

/* Element types at any address: callers' buffers need no alignment. */
typedef uint16_t u16 __attribute__((aligned(1), may_alias));
typedef uint32_t u32 __attribute__((aligned(1), may_alias));
typedef uint64_t u64 __attribute__((aligned(1), may_alias));
typedef uint64_t v4u64 __attribute__((vector_size(32), aligned(1), may_alias));

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

/* ---- halves: 32-bit elements as their top and low 16 bits ---- */
H3_CLONES static void split_halves(const u32 *restrict in, size_t n, u16 *restrict top, u16 *restrict low) {
  for (size_t i = 0; i < n; i++) {
    top[i] = (uint16_t)(in[i] >> 16);
    low[i] = (uint16_t)in[i];
  }
}

H3_CLONES static void join_halves(const u16 *restrict top, const u16 *restrict low, size_t n, u32 *restrict out) {
  for (size_t i = 0; i < n; i++) out[i] = (uint32_t)top[i] << 16 | low[i];
}

/* ---- exponent nibbles ---- */
/* Elements worked on at once where they need a buffer of their top halves: small against the first-level cache. */
enum { EXP_BLOCK = 1024 };

H3_INLINE size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

/* The top 16 bits of element i. */
H3_INLINE const u16 *word_at(const uint8_t *in, size_t i, uint32_t elem) {
  return (const u16 *)(in + i * elem + elem - 2);
}

H3_INLINE unsigned exponent(uint16_t word) { return (word >> 7) & 0xffu; }

H3_CLONES static unsigned max_exponent16(const u16 *words, size_t n) {
  uint16_t top = 0;
  for (size_t i = 0; i < n; i++) {
    uint16_t bits = words[i] & 0x7f80;
    top = bits > top ? bits : top;
  }
  return exponent(top);
}

H3_CLONES static unsigned max_exponent32(const u32 *in, size_t n) {
  uint32_t top = 0;
  for (size_t i = 0; i < n; i++) {
    uint32_t bits = in[i] & 0x7f800000;
    top = bits > top ? bits : top;
  }
  return top >> 23;
}

unsigned h3_exp_max(const uint8_t *in, size_t n, uint32_t elem) {
  return elem == 4 ? max_exponent32((const u32 *)in, n) : max_exponent16((const u16 *)in, n);
}

unsigned h3_exp_best_ref(const uint8_t *in, size_t n, uint32_t elem) {
  uint32_t counts[256] = {0};
  for (size_t i = 0; i < n; i++) counts[exponent(*word_at(in, i, elem))]++;
  uint32_t inside = 0, most = 0;
  unsigned best = 14;
  for (unsigned top = 0; top < 256; top++) { /* inside = elements with exponent in [top - 14, top] */
    inside += counts[top];
    if (top >= 15) inside -= counts[top - 15];
    if (inside > most) {
      most = inside;
      best = top;
    }
  }
  return best;
}

/* In 16-bit lanes; exponents above ref wrap to large numbers and so escape too. */
H3_INLINE uint16_t nibble(uint16_t word, uint16_t ref) {
  uint16_t below = (uint16_t)(ref - ((word >> 7) & 0xff));
  return below < 15 ? below : 15;
}

H3_CLONES static void pack_pairs(const u16 *restrict low, const u16 *restrict high, size_t n, uint16_t ref,
                                 uint8_t *restrict nib) {
  for (size_t i = 0; i < n; i++) nib[i] = (uint8_t)(nibble(low[i], ref) | nibble(high[i], ref) << 4);
}

H3_CLONES static void pack_rest(const u16 *restrict words, size_t n, uint8_t *restrict rest) {
  for (size_t i = 0; i < n; i++) rest[i] = (uint8_t)((words[i] >> 8 & 0x80) | (words[i] & 0x7f));
}

static void pack_words(const u16 *low, const u16 *high, size_t n_low, size_t n_high, unsigned ref, uint8_t *nib,
                       uint8_t *rest_low, uint8_t *rest_high) {
  pack_pairs(low, high, n_high, (uint16_t)ref, nib);
  if (n_low > n_high) nib[n_high] = (uint8_t)nibble(low[n_high], (uint16_t)ref);
  pack_rest(low, n_low, rest_low);
  pack_rest(high, n_high, rest_high);
}

void h3_exp_pack(const uint8_t *in, size_t n, uint32_t elem, unsigned ref, uint8_t *nib, uint8_t *rest, uint8_t *low) {
  size_t half = (n + 1) / 2;
  if (elem == 2) {
    const u16 *words = (const u16 *)in;
    pack_words(words, words + half, half, n - half, ref, nib, rest, rest + half);
    return;
  }
  uint16_t first[EXP_BLOCK], second[EXP_BLOCK];
  for (size_t at = 0; at < half; at += EXP_BLOCK) {
    size_t n_low = smaller(half - at, EXP_BLOCK), n_high = smaller(n - half - at, EXP_BLOCK);
    split_halves((const u32 *)in + at, n_low, first, (u16 *)low + at);
    split_halves((const u32 *)in + half + at, n_high, second, (u16 *)low + half + at);
    pack_words(first, second, n_low, n_high, ref, nib + at, rest + at, rest + half + at);
  }
}

/* In bytes, which fill four times the lanes that the words would: the low byte of a word is the exponent's last bit over
 * the mantissa, the high byte the sign over its first seven. */
#define UNPACK(NAME, NIBBLE)                                                                                          \
  H3_CLONES static void NAME(const uint8_t *restrict nib, const uint8_t *restrict rest, size_t n, uint8_t ref,        \
                             uint8_t *restrict words) {                                                               \
    for (size_t i = 0; i < n; i++) {                                                                                  \
      uint8_t e = (uint8_t)(ref - (NIBBLE));                                                                          \
      words[2 * i] = (uint8_t)((rest[i] & 0x7f) | (e << 7));                                                          \
      words[2 * i + 1] = (uint8_t)((rest[i] & 0x80) | (e >> 1));                                                      \
    }                                                                                                                 \
  }
UNPACK(unpack_low, nib[i] & 15)
UNPACK(unpack_high, nib[i] >> 4)

void h3_exp_unpack(const uint8_t *nib, const uint8_t *rest, const uint8_t *low, size_t n, uint32_t elem, unsigned ref,
                   uint8_t *out) {
  size_t half = (n + 1) / 2;
  if (elem == 2) {
    unpack_low(nib, rest, half, (uint8_t)ref, out);
    unpack_high(nib, rest + half, n - half, (uint8_t)ref, out + 2 * half);
    return;
  }
  uint16_t words[EXP_BLOCK];
  for (size_t at = 0; at < n;) {
    size_t end = at < half ? half : n, count = smaller(end - at, EXP_BLOCK);
    if (at < half)
      unpack_low(nib + at, rest + at, count, (uint8_t)ref, (uint8_t *)words);
    else
      unpack_high(nib + at - half, rest + at, count, (uint8_t)ref, (uint8_t *)words);
    join_halves(words, (const u16 *)low + at, count, (u32 *)out + at);
    at += count;
  }
}

/* Bit 0 of each nibble of the result is set where the nibble of x is 15. */
#define FIFTEENS(x) ((x) & (x) >> 1 & (x) >> 2 & (x) >> 3 & 0x1111111111111111ULL)

enum { SCAN_BLOCK = 64 };

/* Where the next block of SCAN_BLOCK bytes with a nibble of 15 begins, from at on; the last, shorter one always counts. */
H3_CLONES static size_t next_escapes(const uint8_t *nib, size_t at, size_t bytes) {
  for (; at + SCAN_BLOCK <= bytes; at += SCAN_BLOCK) {
    v4u64 a = *(const v4u64 *)(nib + at), b = *(const v4u64 *)(nib + at + 32);
    v4u64 hits = FIFTEENS(a) | FIFTEENS(b);
    if ((hits[0] | hits[1]) | (hits[2] | hits[3])) break;
  }
  return at;
}

/* The up to 16 nibbles of bytes [at, at + 8), those past the last byte as 0. */
H3_INLINE uint64_t nibbles_at(const uint8_t *nib, size_t at, size_t bytes) {
  if (H3_LIKELY(bytes - at >= 8)) return *(const u64 *)(nib + at);
  uint64_t x = 0;
  for (size_t i = at; i < bytes; i++) x |= (uint64_t)nib[i] << (8 * (i - at));
  return x;
}

/* Runs body with i = each escaped element, in the order of nib: bytes, low nibble first. i may be n when n is odd. */
#define EACH_ESCAPE(nib, half, i, body)                                                       \
  for (size_t at = 0; (at = next_escapes(nib, at, half)) < half; at += SCAN_BLOCK) {          \
    for (size_t group = at; group < smaller(at + SCAN_BLOCK, half); group += 8) {             \
      uint64_t x = nibbles_at(nib, group, half);                                              \
      for (uint64_t hits = FIFTEENS(x); hits; hits &= hits - 1) {                             \
        unsigned bit = (unsigned)__builtin_ctzll(hits);                                       \
        size_t i = group + bit / 8 + (bit % 8 ? half : 0);                                    \
        body                                                                                  \
      }                                                                                       \
    }                                                                                         \
  }

size_t h3_exp_escapes(const uint8_t *in, size_t n, uint32_t elem, const uint8_t *nib, uint8_t *escapes) {
  size_t half = (n + 1) / 2, count = 0;
  EACH_ESCAPE(nib, half, i, {
    if (i < n) escapes[count++] = (uint8_t)exponent(*word_at(in, i, elem));
  })
  return count;
}

int h3_exp_restore(uint8_t *out, size_t n, uint32_t elem, const uint8_t *nib, const uint8_t *escapes, size_t n_escapes) {
  size_t half = (n + 1) / 2, count = 0;
  EACH_ESCAPE(nib, half, i, {
    if (i >= n || count == n_escapes) return -1;
    u16 *word = (u16 *)(out + i * elem + elem - 2);
    *word = (uint16_t)((*word & 0x807f) | escapes[count++] << 7);
  })
  return count == n_escapes ? 0 : -1;
}

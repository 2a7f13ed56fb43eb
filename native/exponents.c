/* exponents.c: exponents of bf16 and fp32 as nibbles below a reference, and back; what does not fit escapes. The loops that
 * dominate decoding exist twice, in plain C and in AVX2; both give the same bytes. */
#include <string.h>

#include "filters.h"
#include "internal.h"

#ifdef H3_AVX2
#include <immintrin.h>
#endif

/* Element types at any address: callers' buffers need no alignment. */
typedef uint16_t u16 __attribute__((aligned(1), may_alias));
typedef uint32_t u32 __attribute__((aligned(1), may_alias));
typedef uint64_t u64 __attribute__((aligned(1), may_alias));

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

/* ---- where escapes are ---- */
enum {
  SCAN_BYTES = 32,
  SEGMENT_BYTES = 512,               /* their list stays in the first-level cache, and is short on a handler's stack */
  MAX_LISTED = 2 * SEGMENT_BYTES + 2 /* two are noted past the last */
};

/* Of SCAN_BYTES bytes, two bits each from bit 0 on: its low nibble is 15, its high nibble is 15. */
H3_INLINE uint64_t find_plain(const uint8_t *nib) {
  uint64_t found = 0;
  for (unsigned i = 0; i < SCAN_BYTES; i += 8) {
    uint64_t x = *(const u64 *)(nib + i), hits = x & x >> 1 & x >> 2 & x >> 3 & 0x1111111111111111ULL;
    hits = (hits | hits >> 3) & 0x0303030303030303ULL;
    hits = (hits | hits >> 6) & 0x000f000f000f000fULL;
    hits = (hits | hits >> 12) & 0x000000ff000000ffULL;
    found |= ((hits | hits >> 24) & 0xffff) << (2 * i);
  }
  return found;
}

#ifdef H3_AVX2
H3_AVX2 H3_INLINE uint64_t find_avx2(const uint8_t *nib) {
  const __m256i low = _mm256_set1_epi8(15), high = _mm256_set1_epi8((char)0xf0);
  __m256i x = _mm256_loadu_si256((const __m256i_u *)nib);
  __m256i l = _mm256_cmpeq_epi8(_mm256_and_si256(x, low), low), h = _mm256_cmpeq_epi8(_mm256_and_si256(x, high), high);
  /* Interleaved within each half of 16 bytes: bytes 0 to 7 and 16 to 23, then 8 to 15 and 24 to 31. */
  uint64_t a = (uint32_t)_mm256_movemask_epi8(_mm256_unpacklo_epi8(l, h));
  uint64_t b = (uint32_t)_mm256_movemask_epi8(_mm256_unpackhi_epi8(l, h));
  return (a & 0xffff) | (b & 0xffff) << 16 | (a >> 16) << 32 | (b >> 16) << 48;
}
#endif

/* The last, shorter stretch; what is past the end holds no escape. */
static uint64_t find_part(const uint8_t *nib, size_t bytes) {
  uint8_t stretch[SCAN_BYTES] = {0};
  memcpy(stretch, nib, bytes);
  return find_plain(stretch);
}

H3_INLINE uint16_t first_bit(uint64_t x) { return (uint16_t)__builtin_ctzll(x | 1ULL << 63); }

/* Where the escapes of a segment are, in the order of nib, low nibble first: 2 * byte + 1 for a high nibble. Two are
 * noted without asking: a branch on whether a stretch has one would be guessed wrong half of the time. */
H3_INLINE unsigned list(uint64_t (*find)(const uint8_t *), const uint8_t *nib, size_t bytes, uint16_t *where) {
  unsigned count = 0;
  for (size_t at = 0; at < bytes; at += SCAN_BYTES) {
    uint64_t found = bytes - at >= SCAN_BYTES ? find(nib + at) : find_part(nib + at, bytes - at);
    unsigned hits = (unsigned)__builtin_popcountll(found);
    for (unsigned i = 0; i < 2 || i < hits; i++, found &= found - 1)
      where[count + i] = (uint16_t)(2 * at + first_bit(found));
    count += hits;
  }
  return count;
}

static unsigned list_plain(const uint8_t *nib, size_t bytes, uint16_t *where) {
  return list(find_plain, nib, bytes, where);
}

#ifdef H3_AVX2
H3_AVX2 static unsigned list_avx2(const uint8_t *nib, size_t bytes, uint16_t *where) {
  return list(find_avx2, nib, bytes, where);
}
#endif

static unsigned list_segment(const uint8_t *nib, size_t bytes, uint16_t *where) {
#ifdef H3_AVX2
  if (H3_HAS_AVX2) return list_avx2(nib, bytes, where);
#endif
  return list_plain(nib, bytes, where);
}

/* ---- words to nibbles, rest and escapes ---- */
/* In 16-bit lanes; exponents above ref wrap to large numbers and so escape too. */
H3_INLINE uint16_t nibble(uint16_t word, uint16_t ref) {
  uint16_t below = (uint16_t)(ref - ((word >> 7) & 0xff));
  return below < 15 ? below : 15;
}

/* Elements `low` pair with elements `high`, of which there may be one less: where each of their parts goes. */
typedef struct packed {
  uint8_t *nib, *rest_low, *rest_high;
  uint8_t *escapes; /* the next one's place */
} packed;

H3_INLINE void pack_rest(const u16 *restrict words, size_t n, uint8_t *restrict rest) {
  for (size_t i = 0; i < n; i++) rest[i] = (uint8_t)((words[i] >> 8 & 0x80) | (words[i] & 0x7f));
}

H3_INLINE void pack_pairs(const u16 *restrict low, const u16 *restrict high, size_t n, uint16_t ref,
                          uint8_t *restrict nib) {
  for (size_t i = 0; i < n; i++) nib[i] = (uint8_t)(nibble(low[i], ref) | nibble(high[i], ref) << 4);
}

static void pack_plain(const u16 *low, const u16 *high, size_t n_low, size_t n_high, unsigned ref, packed *to) {
  uint16_t where[MAX_LISTED];
  pack_rest(low, n_low, to->rest_low);
  pack_rest(high, n_high, to->rest_high);
  pack_pairs(low, high, n_high, (uint16_t)ref, to->nib);
  if (n_low > n_high) to->nib[n_high] = (uint8_t)nibble(low[n_high], (uint16_t)ref);
  for (size_t at = 0; at < n_low; at += SEGMENT_BYTES) {
    unsigned found = list_plain(to->nib + at, smaller(n_low - at, SEGMENT_BYTES), where);
    for (unsigned k = 0; k < found; k++) {
      const u16 *words = where[k] % 2 ? high : low;
      *to->escapes++ = (uint8_t)exponent(words[at + where[k] / 2]);
    }
  }
}

#ifdef H3_AVX2
H3_AVX2 H3_INLINE __m256i load32(const void *at) { return _mm256_loadu_si256((const __m256i_u *)at); }

/* Sign and mantissa of 32 words. */
H3_AVX2 H3_INLINE void rest_avx2(__m256i a, __m256i b, uint8_t *rest) {
  const __m256i sign = _mm256_set1_epi16(0x80), mantissa = _mm256_set1_epi16(0x7f);
  a = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(a, 8), sign), _mm256_and_si256(a, mantissa));
  b = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(b, 8), sign), _mm256_and_si256(b, mantissa));
  /* Packing works within halves of 16 bytes; the permutation puts their quarters in order. */
  _mm256_storeu_si256((__m256i_u *)rest, _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xd8));
}

/* Exponents of 16 words each: those of low in the even bytes, of high in the odd ones. */
H3_AVX2 H3_INLINE __m256i exponents_avx2(__m256i low, __m256i high) {
  const __m256i even = _mm256_set1_epi16(0xff);
  return _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(low, 7), even),
                         _mm256_andnot_si256(even, _mm256_slli_epi16(high, 1)));
}

/* A nibble in each byte. An exponent above ref wraps to any number: it is asked for apart. */
H3_AVX2 H3_INLINE __m256i nibbles_avx2(__m256i e, __m256i ref, __m256i fifteen) {
  __m256i inside = _mm256_cmpeq_epi8(_mm256_max_epu8(e, ref), ref);
  return _mm256_or_si256(_mm256_min_epu8(_mm256_sub_epi8(ref, e), fifteen), _mm256_andnot_si256(inside, fifteen));
}

/* The pairs in whole vectors; returns how many. */
H3_AVX2 static size_t pack_avx2(const u16 *low, const u16 *high, size_t n, unsigned ref, packed *to) {
  const __m256i from = _mm256_set1_epi8((char)ref), fifteen = _mm256_set1_epi8(15), pair = _mm256_set1_epi16(0x1001);
  uint8_t e[64], *escapes = to->escapes;
  size_t i = 0;
  for (; i + 32 <= n; i += 32) {
    __m256i la = load32(low + i), lb = load32(low + i + 16), ha = load32(high + i), hb = load32(high + i + 16);
    rest_avx2(la, lb, to->rest_low + i);
    rest_avx2(ha, hb, to->rest_high + i);
    __m256i ea = exponents_avx2(la, ha), eb = exponents_avx2(lb, hb);
    __m256i a = nibbles_avx2(ea, from, fifteen), b = nibbles_avx2(eb, from, fifteen);
    __m256i nib = _mm256_packus_epi16(_mm256_maddubs_epi16(a, pair), _mm256_maddubs_epi16(b, pair));
    _mm256_storeu_si256((__m256i_u *)(to->nib + i), _mm256_permute4x64_epi64(nib, 0xd8));
    _mm256_storeu_si256((__m256i_u *)e, ea);
    _mm256_storeu_si256((__m256i_u *)(e + 32), eb);
    uint64_t found = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(a, fifteen)) |
                     (uint64_t)(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(b, fifteen)) << 32;
    unsigned hits = (unsigned)__builtin_popcountll(found);
    /* Two are taken without asking, as in list. */
    for (unsigned k = 0; k < 2 || k < hits; k++, found &= found - 1) escapes[k] = e[first_bit(found)];
    escapes += hits;
  }
  to->escapes = escapes;
  return i;
}
#endif

static void pack(const u16 *low, const u16 *high, size_t n_low, size_t n_high, unsigned ref, packed *to) {
  size_t done = 0;
#ifdef H3_AVX2
  if (H3_HAS_AVX2) done = pack_avx2(low, high, n_high, ref, to);
#endif
  packed left = {to->nib + done, to->rest_low + done, to->rest_high + done, to->escapes};
  pack_plain(low + done, high + done, n_low - done, n_high - done, ref, &left);
  to->escapes = left.escapes;
}

size_t h3_exp_pack(const uint8_t *in, size_t n, uint32_t elem, unsigned ref, uint8_t *nib, uint8_t *rest, uint8_t *low,
                   uint8_t *escapes) {
  size_t half = (n + 1) / 2;
  packed to = {nib, rest, rest + half, escapes};
  if (elem == 2) {
    const u16 *words = (const u16 *)in;
    pack(words, words + half, half, n - half, ref, &to);
    return (size_t)(to.escapes - escapes);
  }
  uint16_t first[EXP_BLOCK], second[EXP_BLOCK];
  for (size_t at = 0; at < half; at += EXP_BLOCK) {
    size_t n_low = smaller(half - at, EXP_BLOCK), n_high = smaller(n - half - at, EXP_BLOCK);
    split_halves((const u32 *)in + at, n_low, first, (u16 *)low + at);
    split_halves((const u32 *)in + half + at, n_high, second, (u16 *)low + half + at);
    packed block = {nib + at, rest + at, rest + half + at, to.escapes};
    pack(first, second, n_low, n_high, ref, &block);
    to.escapes = block.escapes;
  }
  return (size_t)(to.escapes - escapes);
}

/* ---- nibbles and rest to words ---- */
/* In bytes, which fill four times the lanes that the words would: the low byte of a word is the exponent's last bit over
 * the mantissa, the high byte the sign over its first seven. shift: 0 takes the low nibbles, 4 the high ones. */
static void unpack_plain(const uint8_t *restrict nib, const uint8_t *restrict rest, size_t n, unsigned shift, uint8_t ref,
                         uint8_t *restrict words) {
  for (size_t i = 0; i < n; i++) {
    uint8_t e = (uint8_t)(ref - (nib[i] >> shift & 15));
    words[2 * i] = (uint8_t)((rest[i] & 0x7f) | (e << 7));
    words[2 * i + 1] = (uint8_t)((rest[i] & 0x80) | (e >> 1));
  }
}

#ifdef H3_AVX2
/* The elements in whole vectors; returns how many. */
H3_AVX2 static size_t unpack_avx2(const uint8_t *nib, const uint8_t *rest, size_t n, unsigned shift, uint8_t ref,
                               uint8_t *words) {
  const __m256i fifteen = _mm256_set1_epi8(15), top = _mm256_set1_epi8((char)0x80), from = _mm256_set1_epi8((char)ref);
  const __m128i by = _mm_cvtsi32_si128((int)shift);
  size_t i = 0;
  for (; i + 32 <= n; i += 32) {
    __m256i x = _mm256_loadu_si256((const __m256i_u *)(nib + i)), r = _mm256_loadu_si256((const __m256i_u *)(rest + i));
    __m256i e = _mm256_sub_epi8(from, _mm256_and_si256(_mm256_srl_epi16(x, by), fifteen));
    /* The shifts cross bytes; the masks take what crossed away. */
    __m256i low = _mm256_or_si256(_mm256_andnot_si256(top, r), _mm256_and_si256(_mm256_slli_epi16(e, 7), top));
    __m256i high = _mm256_or_si256(_mm256_and_si256(r, top), _mm256_andnot_si256(top, _mm256_srli_epi16(e, 1)));
    __m256i a = _mm256_unpacklo_epi8(low, high), b = _mm256_unpackhi_epi8(low, high);
    _mm256_storeu_si256((__m256i_u *)(words + 2 * i), _mm256_permute2x128_si256(a, b, 0x20));
    _mm256_storeu_si256((__m256i_u *)(words + 2 * i + 32), _mm256_permute2x128_si256(a, b, 0x31));
  }
  return i;
}
#endif

static void unpack(const uint8_t *nib, const uint8_t *rest, size_t n, unsigned shift, unsigned ref, uint8_t *words) {
  size_t done = 0;
#ifdef H3_AVX2
  if (H3_HAS_AVX2) done = unpack_avx2(nib, rest, n, shift, (uint8_t)ref, words);
#endif
  unpack_plain(nib + done, rest + done, n - done, shift, (uint8_t)ref, words + 2 * done);
}

void h3_exp_unpack(const uint8_t *nib, const uint8_t *rest, const uint8_t *low, size_t n, uint32_t elem, unsigned ref,
                   uint8_t *out) {
  size_t half = (n + 1) / 2;
  if (elem == 2) {
    unpack(nib, rest, half, 0, ref, out);
    unpack(nib, rest + half, n - half, 4, ref, out + 2 * half);
    return;
  }
  uint16_t words[EXP_BLOCK];
  for (size_t at = 0; at < n;) {
    size_t end = at < half ? half : n, count = smaller(end - at, EXP_BLOCK);
    unpack(nib + (at < half ? at : at - half), rest + at, count, at < half ? 0 : 4, ref, (uint8_t *)words);
    join_halves(words, (const u16 *)low + at, count, (u32 *)out + at);
    at += count;
  }
}

/* ---- escapes to words ---- */
/* The element of a segment that begins at byte `at`; n when n is odd and the nibble beyond the last is 15. */
H3_INLINE size_t element(size_t at, unsigned where, size_t half) { return at + where / 2 + (where % 2) * half; }

int h3_exp_restore(uint8_t *out, size_t n, uint32_t elem, const uint8_t *nib, const uint8_t *escapes, size_t n_escapes) {
  uint16_t where[MAX_LISTED];
  size_t half = (n + 1) / 2, count = 0;
  for (size_t at = 0; at < half; at += SEGMENT_BYTES) {
    unsigned found = list_segment(nib + at, smaller(half - at, SEGMENT_BYTES), where);
    if (found > n_escapes - count) return -1;
    for (unsigned k = 0; k < found; k++) {
      size_t i = element(at, where[k], half);
      if (H3_UNLIKELY(i >= n)) return -1;
      u16 *word = (u16 *)(out + i * elem + elem - 2);
      *word = (uint16_t)((*word & 0x807f) | escapes[count++] << 7);
    }
  }
  return count == n_escapes ? 0 : -1;
}

/* The AVX2 loops of exponents.c against the plain ones: the same bytes and the same lists, at every length and rate of
 * escapes. The file is compiled in under other names, to reach both. */
#define h3_exp_max tested_max
#define h3_exp_best_ref tested_best_ref
#define h3_exp_pack tested_pack
#define h3_exp_unpack tested_unpack
#define h3_exp_restore tested_restore
#include "../exponents.c"

#include "test.h"

#ifdef H3_AVX2
/* One nibble in `every` is 15. */
static void fill(uint64_t *rng, uint8_t *nib, size_t bytes, uint32_t every) {
  for (size_t i = 0; i < bytes; i++) {
    uint32_t low = below(rng, every) ? below(rng, 15) : 15, high = below(rng, every) ? below(rng, 15) : 15;
    nib[i] = (uint8_t)(low | high << 4);
  }
}

static void compare(uint64_t *rng, size_t bytes, uint32_t every) {
  uint8_t *nib = malloc(bytes), *rest = malloc(bytes), *a = malloc(2 * bytes), *b = malloc(2 * bytes);
  uint16_t plain[MAX_LISTED], vector[MAX_LISTED];
  fill(rng, nib, bytes, every);
  for (size_t i = 0; i < bytes; i++) rest[i] = (uint8_t)next(rng);
  for (unsigned shift = 0; shift <= 4; shift += 4) {
    uint8_t ref = (uint8_t)next(rng);
    unpack_plain(nib, rest, bytes, shift, ref, a);
    unpack(nib, rest, bytes, shift, ref, b);
    CHECK(!memcmp(a, b, 2 * bytes));
  }
  size_t listed = bytes < SEGMENT_BYTES ? bytes : SEGMENT_BYTES;
  unsigned count = list_plain(nib, listed, plain);
  CHECK(count == list_avx2(nib, listed, vector) && !memcmp(plain, vector, count * sizeof *plain));
  unsigned k = 0;
  for (size_t i = 0; i < 2 * listed; i++)
    if ((nib[i / 2] >> (i % 2 ? 4 : 0) & 15) == 15) CHECK(k < count && plain[k++] == i);
  CHECK(k == count);
  free(b);
  free(a);
  free(rest);
  free(nib);
}

/* Exponents near ref, one in `every` anywhere. */
static void fill_words(uint64_t *rng, uint16_t *words, size_t n, unsigned ref, uint32_t every) {
  for (size_t i = 0; i < n; i++) {
    unsigned e = below(rng, every) ? ref - below(rng, 16) : below(rng, 256);
    words[i] = (uint16_t)((next(rng) & 0x807f) | (e & 0xff) << 7);
  }
}

typedef struct parts {
  uint8_t nib[1100], low[1100], high[1100], escapes[2200 + 2];
  size_t n_escapes;
} parts;

static packed places(parts *of) { return (packed){of->nib, of->low, of->high, of->escapes}; }

static void compare_packing(uint64_t *rng, size_t n_low, size_t n_high, uint32_t every) {
  static parts plain, vector;
  uint16_t low[1100], high[1100];
  unsigned ref = below(rng, 256);
  fill_words(rng, low, n_low, ref, every);
  fill_words(rng, high, n_high, ref, every);
  memset(&plain, 0, sizeof plain);
  memset(&vector, 0, sizeof vector);
  packed to = places(&plain);
  pack_plain(low, high, n_low, n_high, ref, &to);
  plain.n_escapes = (size_t)(to.escapes - plain.escapes);
  to = places(&vector);
  pack(low, high, n_low, n_high, ref, &to);
  vector.n_escapes = (size_t)(to.escapes - vector.escapes);
  CHECK(plain.n_escapes == vector.n_escapes && !memcmp(plain.escapes, vector.escapes, plain.n_escapes));
  CHECK(!memcmp(plain.nib, vector.nib, sizeof plain.nib));
  CHECK(!memcmp(plain.low, vector.low, sizeof plain.low) && !memcmp(plain.high, vector.high, sizeof plain.high));
  /* By the definition, so that both cannot be wrong together. */
  const uint8_t *escape = vector.escapes;
  for (size_t i = 0; i < n_low + n_high; i++) {
    size_t at = i / 2;
    if (i % 2 && at >= n_high) continue;
    uint16_t word = i % 2 ? high[at] : low[at];
    unsigned e = exponent(word), nib = vector.nib[at] >> (i % 2 ? 4 : 0) & 15;
    CHECK((i % 2 ? vector.high : vector.low)[at] == (uint8_t)((word >> 8 & 0x80) | (word & 0x7f)));
    CHECK(nib == (e <= ref && ref - e < 15 ? ref - e : 15));
    if (nib == 15) CHECK(*escape++ == e);
  }
  CHECK(escape == vector.escapes + vector.n_escapes);
}

int main(void) {
  uint64_t rng = 20240229;
  const uint32_t rates[] = {1, 2, 17, 100, 100000};
  if (!H3_HAS_AVX2) {
    puts("test_exponents: no AVX2 here, nothing to compare");
    return 0;
  }
  for (size_t r = 0; r < sizeof rates / sizeof *rates; r++)
    for (size_t bytes = 1; bytes < 1100; bytes += bytes < 140 ? 1 : 61) {
      compare(&rng, bytes, rates[r]);
      compare_packing(&rng, bytes, bytes, rates[r]);
      compare_packing(&rng, bytes, bytes - 1, rates[r]);
    }
  puts("test_exponents: ok");
  return 0;
}
#else
int main(void) {
  puts("test_exponents: no AVX2 in this build");
  return 0;
}
#endif

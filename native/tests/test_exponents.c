/* The AVX2 loops of exponents.c against the plain ones: the same bytes and the same lists, at every length and rate of
 * escapes. The file is compiled in under other names, to reach both. */
#define h3_exp_max tested_max
#define h3_exp_best_ref tested_best_ref
#define h3_exp_pack tested_pack
#define h3_exp_unpack tested_unpack
#define h3_exp_escapes tested_escapes
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

int main(void) {
  uint64_t rng = 20240229;
  const uint32_t rates[] = {1, 2, 17, 100, 100000};
  if (!H3_HAS_AVX2) {
    puts("test_exponents: no AVX2 here, nothing to compare");
    return 0;
  }
  for (size_t r = 0; r < sizeof rates / sizeof *rates; r++)
    for (size_t bytes = 1; bytes < 1100; bytes += bytes < 140 ? 1 : 61) compare(&rng, bytes, rates[r]);
  puts("test_exponents: ok");
  return 0;
}
#else
int main(void) {
  puts("test_exponents: no AVX2 in this build");
  return 0;
}
#endif

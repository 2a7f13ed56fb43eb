/* The codec: known hashes, random round trips, and mutated chunks, which must fail or decode to the very same bytes.
 * Every buffer is a heap block of exactly its size, so that a sanitizer sees one byte too far. */
#include <string.h>

#include "test.h"

static const uint8_t elems[] = {1, 2, 4, 8};
static const uint8_t exponents[] = {0, 8, 8, 11};

static void fill(uint64_t *rng, uint8_t *raw, uint32_t bytes, uint32_t kind) {
  for (uint32_t i = 0; i < bytes; i++) {
    uint64_t r = next(rng);
    switch (kind) {
      case 0: raw[i] = (uint8_t)r; break;                            /* noise */
      case 1: raw[i] = (uint8_t)(r % 3); break;                      /* few values */
      case 2: raw[i] = (uint8_t)(i % 7 ? 0 : r % 50 == 0); break;    /* nearly zero */
      case 3: raw[i] = (uint8_t)(i & 1 ? 0x3c + r % 4 : r); break;   /* like bf16 */
      default: raw[i] = (uint8_t)(i & 3 ? r : 0x3f - r % 2); break;  /* like fp32, big end first: many escapes */
    }
  }
  if (kind == 5) memset(raw, 0, bytes);
}

static void mutate(uint64_t *rng, uint8_t *stored, h3_chunk *chunk) {
  uint32_t size = chunk->stored_bytes;
  switch (below(rng, 7)) {
    case 0:
      if (size) stored[below(rng, size)] ^= (uint8_t)(1u << below(rng, 8));
      break;
    case 1: /* headers decide most */
      if (size) stored[below(rng, size < 40 ? size : 40)] = (uint8_t)next(rng);
      break;
    case 2: chunk->stored_bytes = below(rng, size + 1); break;
    case 3: chunk->filter = (uint8_t)below(rng, H3_FILTER_COUNT + 1); break;
    case 4: chunk->delta = (uint8_t)below(rng, H3_DELTA_COUNT + 1); break;
    case 5: chunk->check_kind = (uint8_t)below(rng, H3_CHECK_COUNT + 1); break;
    default: chunk->check ^= 1ULL << below(rng, 64); break;
  }
}

static void check_mutations(uint64_t *rng, h3_codec *codec, const h3_spec *spec, const h3_chunk *chunk,
                            const uint8_t *stored, const uint8_t *base, const uint8_t *raw, uint32_t bytes) {
  uint8_t *out = malloc(bytes);
  for (int round = 0; round < 40; round++) {
    h3_chunk bad = *chunk;
    uint8_t *copy = malloc(chunk->stored_bytes + !chunk->stored_bytes);
    memcpy(copy, stored, chunk->stored_bytes);
    for (uint32_t n = 1 + below(rng, 3); n; n--) mutate(rng, copy, &bad);
    uint8_t *exact = malloc(bad.stored_bytes + !bad.stored_bytes); /* shrunk copies end where they say */
    memcpy(exact, copy, bad.stored_bytes);
    int status = h3_chunk_decode(codec, spec, &bad, exact, base, out, bytes);
    CHECK(status == H3_OK ? bad.check == chunk->check && bad.check_kind == chunk->check_kind && !memcmp(out, raw, bytes) : status == H3_E_CORRUPT);
    free(exact);
    free(copy);
  }
  free(out);
}

static void round_trip(uint64_t *rng, h3_codec *codec) {
  uint32_t type = below(rng, 4), bytes = 1 + below(rng, below(rng, 4) ? 300 : 30000), skew = below(rng, 2);
  h3_spec spec = {.elem_bytes = elems[type],
                  .row_bytes = elems[type] * (1 + below(rng, 200)),
                  .filter = (uint8_t)below(rng, H3_FILTER_COUNT),
                  .delta = (uint8_t)below(rng, H3_DELTA_COUNT),
                  .exp_bits = exponents[type],
                  .level = (uint8_t)below(rng, 4)};
  uint8_t *block = malloc(bytes + skew), *raw = block + skew, *out = malloc(bytes), *back = malloc(bytes);
  uint8_t *base = below(rng, 2) ? malloc(bytes) : NULL;
  h3_chunk chunk;
  fill(rng, raw, bytes, below(rng, 6));
  if (base) fill(rng, base, bytes, below(rng, 6));
  CHECK(h3_chunk_encode(codec, &spec, raw, bytes, base, out, bytes, &chunk) == H3_OK);
  CHECK(chunk.stored_bytes <= bytes && chunk.filter < H3_FILTER_COUNT && !chunk.reserved);
  uint8_t *stored = malloc(chunk.stored_bytes + !chunk.stored_bytes);
  memcpy(stored, out, chunk.stored_bytes);
  CHECK(h3_chunk_decode(codec, &spec, &chunk, stored, base, back, bytes) == H3_OK);
  CHECK(!memcmp(raw, back, bytes));
  check_mutations(rng, codec, &spec, &chunk, stored, base, raw, bytes);
  free(stored);
  free(base);
  free(back);
  free(out);
  free(block);
}

static void check_hash(void) {
  const char *text = "Nobody inspects the spammish repetition";
  CHECK(h3_xxh64("", 0, 0) == 0xEF46DB3751D8E999ULL);
  CHECK(h3_xxh64("a", 1, 0) == 0xD24EC4F1A98C6E5BULL);
  CHECK(h3_xxh64(text, strlen(text), 0) == 0xFBCEA83C8A378BF1ULL);
}

static void check_arguments(h3_codec *codec) {
  uint8_t raw[8] = {1}, out[8];
  h3_chunk chunk = {0};
  h3_spec good = {.elem_bytes = 2, .filter = H3_FILTER_ZSTD};
  const h3_spec bad[] = {{.elem_bytes = 3}, {.elem_bytes = 2, .filter = H3_FILTER_COUNT}, {.elem_bytes = 2, .level = 4},
                         {.elem_bytes = 2, .delta = H3_DELTA_ROW}, {.elem_bytes = 2, .row_bytes = 3},
                         {.elem_bytes = 1, .exp_bits = 8}};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    CHECK(h3_chunk_encode(codec, &bad[i], raw, 8, NULL, out, 8, &chunk) == H3_E_INVALID);
    CHECK(h3_chunk_decode(codec, &bad[i], &chunk, out, NULL, raw, 8) == H3_E_INVALID);
  }
  CHECK(h3_chunk_encode(codec, &good, raw, 0, NULL, out, 8, &chunk) == H3_E_INVALID);
  CHECK(h3_chunk_encode(codec, &good, raw, 8, NULL, out, 7, &chunk) == H3_E_INVALID);
  CHECK(h3_chunk_encode(codec, &good, raw, H3_MAX_CHUNK + 1, NULL, out, H3_MAX_CHUNK + 1, &chunk) == H3_E_INVALID);
}

int main(void) {
  h3_codec *codec = NULL;
  test_start();
  check_hash();
  CHECK(h3_codec_create(&codec) == H3_OK);
  check_arguments(codec);
  uint64_t rng = test_seed * 0x9E3779B97F4A7C15ULL;
  for (int i = 0; i < 4000; i++) round_trip(&rng, codec);
  h3_codec_destroy(codec);
  h3_fault_arm(H3_FAULT_ALLOC, 1, 1, 12);
  CHECK(h3_codec_create(&codec) == H3_E_NOMEM && h3_last_errno() == 12 && h3_fault_fired(H3_FAULT_ALLOC) == 1);
  h3_fault_arm(H3_FAULT_ALLOC, 0, 0, 0);
  puts("test_codec: ok");
  return 0;
}

/* init.c: takes zstd's functions, and runs each once before any fault handler can. */
#include <string.h>

#include "internal.h"
#include "stage.h"

h3_zstd_calls h3_zstd_fn;

/* A first call may enter the dynamic linker; made here, it never happens inside a fault handler. */
static int round_trip(void) {
  enum { BYTES = 8192 };
  static uint8_t raw[BYTES], stored[BYTES], back[BYTES];
  const h3_spec spec = {.elem_bytes = 2, .filter = H3_FILTER_BYTEPLANE, .exp_bits = 8, .level = 1};
  h3_chunk chunk;
  h3_codec *codec = NULL;
  int status = h3_codec_create(&codec);
  if (status) return status;
  for (int i = 0; i < BYTES; i++) raw[i] = (uint8_t)(i * i >> 5);
  status = h3_chunk_encode(codec, &spec, raw, BYTES, NULL, stored, BYTES, &chunk);
  if (!status) status = h3_chunk_decode(codec, &spec, &chunk, stored, NULL, back, BYTES);
  if (!status && memcmp(raw, back, BYTES)) status = H3_E_CORRUPT;
  h3_codec_destroy(codec);
  return status;
}

int h3_init(const h3_zstd *zstd) {
  const uintptr_t *address = (const uintptr_t *)zstd;
  for (size_t i = 0; i < sizeof *zstd / sizeof *address; i++) {
    if (!address[i]) return H3_E_INVALID;
  }
  if (((unsigned (*)(void))zstd->version_number)() < 10500) return H3_E_INVALID;
  h3_zstd_fn = (h3_zstd_calls){
      .estimate_dctx_size = (size_t(*)(void))zstd->estimate_dctx_size,
      .init_static_dctx = (void *(*)(void *, size_t))zstd->init_static_dctx,
      .decompress_dctx = (size_t(*)(void *, void *, size_t, const void *, size_t))zstd->decompress_dctx,
      .estimate_cctx_size = (size_t(*)(int))zstd->estimate_cctx_size,
      .init_static_cctx = (void *(*)(void *, size_t))zstd->init_static_cctx,
      .compress_cctx = (size_t(*)(void *, void *, size_t, const void *, size_t, int))zstd->compress_cctx,
      .is_error = (unsigned (*)(size_t))zstd->is_error,
      .compress_bound = (size_t(*)(size_t))zstd->compress_bound,
  };
  const int status = round_trip();
  return status < 0 ? status : h3_stage_init();
}

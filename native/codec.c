/* codec.c: one chunk to stored bytes and back, in memory that was all mapped at create.
 *
 * Stored layouts (archive/FORMAT.md has them byte by byte): a fixed header of part sizes, parts stored raw, then parts
 * that are raw or one zstd frame each. Decode believes nothing: each part is cut from what is left of the stored
 * bytes, sizes must add up exactly, and the raw bytes must have their check.
 */
#include <errno.h>
#include <string.h>

#include "filters.h"
#include "internal.h"

_Static_assert(sizeof(h3_chunk) == 24, "h3_chunk is a file structure");

struct h3_codec {
  void *cctx, *dctx;
  uint8_t *planes; /* H3_MAX_CHUNK bytes and slack: parts before compression, after decompression */
  uint8_t *diff;   /* H3_MAX_CHUNK bytes: the chunk after delta */
  size_t mapped_bytes;
};

enum {
  SLACK = 4096,
  MIN_FILTERED = 64,  /* bytes; smaller chunks are stored raw */
  MIN_ZSTD_PART = 32, /* bytes; a frame header costs about 12 */
  EXP_HEADER = 16     /* ref u8, flags u8, 0 u16, nibble bytes u32, escapes u32, escape bytes u32 */
};
#define PART_ZSTD 0x80000000u

static size_t page_up(size_t bytes) { return (bytes + 4095) & ~(size_t)4095; }

int h3_codec_create(h3_codec **out) {
  if (!h3_zstd_fn.init_static_cctx) return H3_E_INVALID;
  size_t c_bytes = page_up(h3_zstd_fn.estimate_cctx_size(H3_MAX_LEVEL));
  size_t d_bytes = page_up(h3_zstd_fn.estimate_dctx_size());
  size_t total = 4096 + c_bytes + d_bytes + 2 * (size_t)(H3_MAX_CHUNK + SLACK);
  uint8_t *memory = h3_map(total);
  if (!memory) return H3_E_NOMEM;
  h3_codec *codec = (h3_codec *)memory;
  codec->mapped_bytes = total;
  memory += 4096;
  codec->cctx = h3_zstd_fn.init_static_cctx(memory, c_bytes);
  codec->dctx = h3_zstd_fn.init_static_dctx(memory + c_bytes, d_bytes);
  codec->planes = memory + c_bytes + d_bytes;
  codec->diff = codec->planes + H3_MAX_CHUNK + SLACK;
  if (!codec->cctx || !codec->dctx) {
    h3_unmap(codec, total);
    return h3_set_errno(H3_E_NOMEM, ENOMEM);
  }
  *out = codec;
  return H3_OK;
}

void h3_codec_destroy(h3_codec *codec) {
  if (codec) h3_unmap(codec, codec->mapped_bytes);
}

int h3_spec_check(const h3_spec *spec) {
  uint32_t elem = spec->elem_bytes;
  if (elem != 1 && elem != 2 && elem != 4 && elem != 8) return H3_E_INVALID;
  if (spec->filter >= H3_FILTER_COUNT || spec->delta >= H3_DELTA_COUNT || spec->level > H3_MAX_LEVEL)
    return H3_E_INVALID;
  if (spec->row_bytes % elem || (spec->delta == H3_DELTA_ROW && !spec->row_bytes)) return H3_E_INVALID;
  if (spec->exp_bits >= 8 * elem) return H3_E_INVALID;
  return H3_OK;
}

/* ---- encode ---- */
typedef struct sink {
  uint8_t *at, *end;
} sink;

static size_t room(const sink *to) { return (size_t)(to->end - to->at); }

/* Appends a part, as a zstd frame when that saves at least 1/64 of it; *entry gets its size and PART_ZSTD. -1: no room. */
static int put_part(h3_codec *codec, int level, sink *to, const uint8_t *part, size_t bytes, uint32_t *entry) {
  if (bytes >= MIN_ZSTD_PART) {
    size_t most = bytes - bytes / 64 - 1;
    size_t cap = most < room(to) ? most : room(to);
    size_t got = h3_zstd_fn.compress_cctx(codec->cctx, to->at, cap, part, bytes, level);
    if (!h3_zstd_fn.is_error(got)) {
      to->at += got;
      *entry = (uint32_t)got | PART_ZSTD;
      return 0;
    }
  }
  if (bytes > room(to)) return -1;
  memcpy(to->at, part, bytes);
  to->at += bytes;
  *entry = (uint32_t)bytes;
  return 0;
}

static int put_raw(sink *to, const void *part, size_t bytes) {
  if (bytes > room(to)) return -1;
  memcpy(to->at, part, bytes);
  to->at += bytes;
  return 0;
}

/* Each filter returns the stored size, or 0 when the result would not be smaller than raw. */
static uint32_t encode_zstd(h3_codec *codec, int level, const uint8_t *raw, uint32_t bytes, uint8_t *out) {
  size_t got = h3_zstd_fn.compress_cctx(codec->cctx, out, bytes - 1, raw, bytes, level);
  return h3_zstd_fn.is_error(got) ? 0 : (uint32_t)got;
}

static uint32_t encode_planes(h3_codec *codec, const h3_spec *spec, int mode, const uint8_t *raw, uint32_t bytes,
                              uint8_t *out) {
  uint32_t elem = spec->elem_bytes, entries[8] = {0};
  size_t n = bytes / elem;
  sink to = {out + 4 * elem, out + bytes - 1};
  h3_planes_split(raw, n, elem, mode, codec->planes);
  if (put_raw(&to, raw + n * elem, bytes % elem)) return 0;
  for (uint32_t p = 0; p < elem; p++) {
    if (put_part(codec, spec->level, &to, codec->planes + p * n, n, &entries[p])) return 0;
  }
  memcpy(out, entries, 4 * elem);
  return (uint32_t)(to.at - out);
}

/* Packs elements, with another reference when the largest exponent leaves many escapes; returns the escape count. */
static size_t pack_exponents(const uint8_t *raw, size_t n, uint32_t elem, uint8_t *nib, uint8_t *rest, uint8_t *low,
                             uint8_t *escapes, unsigned *ref) {
  *ref = h3_exp_max(raw, n, elem);
  size_t count = h3_exp_pack(raw, n, elem, *ref, nib, rest, low, escapes);
  if (count <= n / 64) return count;
  unsigned better = h3_exp_best_ref(raw, n, elem);
  if (better == *ref) return count;
  *ref = better;
  return h3_exp_pack(raw, n, elem, better, nib, rest, low, escapes);
}

static uint32_t encode_exponents(h3_codec *codec, const h3_spec *spec, const uint8_t *raw, uint32_t bytes,
                                 uint8_t *out) {
  uint32_t elem = spec->elem_bytes, nib_entry, escape_entry = 0;
  size_t n = bytes / elem, half = (n + 1) / 2, low_bytes = elem == 4 ? 2 * n : 0;
  uint8_t *nib = codec->planes, *escapes = nib + half;
  sink to = {out + EXP_HEADER, out + bytes - 1};
  uint8_t *rest = to.at, *low = rest + n;
  /* Written in place below, so their room is checked here. */
  if (n + low_bytes > room(&to)) return 0;
  to.at += n + low_bytes;
  if (put_raw(&to, raw + n * elem, bytes % elem)) return 0;
  unsigned ref;
  size_t count = pack_exponents(raw, n, elem, nib, rest, low, escapes, &ref);
  if (put_part(codec, spec->level, &to, nib, half, &nib_entry)) return 0;
  if (put_part(codec, spec->level, &to, escapes, count, &escape_entry)) return 0;
  uint32_t header[4] = {ref, nib_entry, (uint32_t)count, escape_entry};
  memcpy(out, header, sizeof header);
  return (uint32_t)(to.at - out);
}

/* The filter that is tried for this spec: what has no gain or no meaning for the type becomes its next best. */
static uint8_t filter_for(const h3_spec *spec, uint32_t bytes) {
  uint8_t filter = spec->filter;
  if (bytes < MIN_FILTERED) return H3_FILTER_RAW;
  if (filter == H3_FILTER_EXPNIBBLE && (spec->exp_bits != 8 || (spec->elem_bytes != 2 && spec->elem_bytes != 4)))
    filter = H3_FILTER_BYTEPLANE;
  if (filter == H3_FILTER_BYTEPLANE && spec->elem_bytes == 1) filter = H3_FILTER_ZSTD;
  return filter;
}

static int map_mode(const h3_spec *spec, uint8_t delta) {
  if (delta != H3_DELTA_NONE) return H3_MAP_ZIGZAG;
  return spec->exp_bits ? H3_MAP_ROTATE : H3_MAP_NONE;
}

static const uint8_t *apply_delta(h3_codec *codec, const h3_spec *spec, uint8_t delta, const uint8_t *raw,
                                  uint32_t bytes, const uint8_t *base) {
  uint32_t elem = spec->elem_bytes, tail = bytes % elem;
  size_t n = bytes / elem;
  if (delta == H3_DELTA_NONE) return raw;
  if (delta == H3_DELTA_ROW)
    h3_delta_row_sub(raw, codec->diff, n, spec->row_bytes / elem, elem);
  else
    h3_delta_sub(raw, base, codec->diff, n, elem);
  memcpy(codec->diff + n * elem, raw + n * elem, tail);
  return codec->diff;
}

static uint32_t encode_filter(h3_codec *codec, const h3_spec *spec, uint8_t filter, int mode, const uint8_t *data,
                              uint32_t bytes, uint8_t *out) {
  switch (filter) {
    case H3_FILTER_ZSTD: return encode_zstd(codec, spec->level, data, bytes, out);
    case H3_FILTER_BYTEPLANE: return encode_planes(codec, spec, mode, data, bytes, out);
    case H3_FILTER_EXPNIBBLE: return encode_exponents(codec, spec, data, bytes, out);
    default: return 0;
  }
}

int h3_chunk_encode(h3_codec *codec, const h3_spec *spec, const void *raw, uint32_t raw_bytes, const void *base,
                    void *out, uint32_t out_cap, h3_chunk *chunk) {
  if (!raw_bytes || raw_bytes > H3_MAX_CHUNK || out_cap < raw_bytes || h3_spec_check(spec)) return H3_E_INVALID;
  h3_chunk made = h3_checked(raw, raw_bytes);
  if (h3_all_zero(raw, raw_bytes)) {
    made.filter = H3_FILTER_ZERO;
    *chunk = made;
    return H3_OK;
  }
  h3_spec with = *spec;
  if (!with.level) with.level = 1;
  uint8_t filter = filter_for(spec, raw_bytes);
  uint8_t delta = filter == H3_FILTER_RAW || filter == H3_FILTER_ZERO ? H3_DELTA_NONE : spec->delta;
  if (delta == H3_DELTA_BASE && !base) delta = H3_DELTA_NONE;
  const uint8_t *data = apply_delta(codec, spec, delta, raw, raw_bytes, base);
  made.stored_bytes = encode_filter(codec, &with, filter, map_mode(spec, delta), data, raw_bytes, out);
  made.filter = filter;
  made.delta = delta;
  if (!made.stored_bytes) {
    memcpy(out, raw, raw_bytes);
    made.stored_bytes = raw_bytes;
    made.filter = H3_FILTER_RAW;
    made.delta = H3_DELTA_NONE;
  }
  *chunk = made;
  return H3_OK;
}

/* ---- decode ---- */
typedef struct source {
  const uint8_t *at, *end;
} source;

static const uint8_t *take(source *from, size_t bytes) {
  if (bytes > (size_t)(from->end - from->at)) return NULL;
  const uint8_t *part = from->at;
  from->at += bytes;
  return part;
}

/* The next part as `bytes` plain bytes: in place when stored raw, else decompressed into scratch. NULL: it is not. */
static const uint8_t *take_part(h3_codec *codec, source *from, uint32_t entry, size_t bytes, uint8_t *scratch) {
  size_t stored = entry & ~PART_ZSTD;
  const uint8_t *part = take(from, stored);
  if (!part) return NULL;
  if (!(entry & PART_ZSTD)) return stored == bytes ? part : NULL;
  return h3_zstd_fn.decompress_dctx(codec->dctx, scratch, bytes, part, stored) == bytes ? scratch : NULL;
}

static int decode_planes(h3_codec *codec, const h3_spec *spec, int mode, source from, uint8_t *raw, uint32_t bytes) {
  uint32_t elem = spec->elem_bytes, entries[8];
  size_t n = bytes / elem;
  const uint8_t *planes[8] = {0};
  const uint8_t *header = elem == 1 ? NULL : take(&from, 4 * elem);
  const uint8_t *tail = header ? take(&from, bytes % elem) : NULL;
  if (!tail) return H3_E_CORRUPT;
  memcpy(entries, header, 4 * elem);
  for (uint32_t p = 0; p < elem; p++) {
    planes[p] = take_part(codec, &from, entries[p], n, codec->planes + p * n);
    if (!planes[p]) return H3_E_CORRUPT;
  }
  if (from.at != from.end) return H3_E_CORRUPT;
  h3_planes_join(planes, n, elem, mode, raw);
  memcpy(raw + n * elem, tail, bytes % elem);
  return H3_OK;
}

static int decode_exponents(h3_codec *codec, const h3_spec *spec, source from, uint8_t *raw, uint32_t bytes) {
  uint32_t elem = spec->elem_bytes, header[4];
  if (spec->exp_bits != 8 || (elem != 2 && elem != 4)) return H3_E_CORRUPT;
  size_t n = bytes / elem, half = (n + 1) / 2;
  const uint8_t *head = take(&from, EXP_HEADER);
  const uint8_t *rest = head ? take(&from, n) : NULL;
  const uint8_t *low = rest ? take(&from, elem == 4 ? 2 * n : 0) : NULL;
  const uint8_t *tail = low ? take(&from, bytes % elem) : NULL;
  if (!tail) return H3_E_CORRUPT;
  memcpy(header, head, sizeof header);
  if (header[0] > 255 || header[2] > n) return H3_E_CORRUPT;
  const uint8_t *nib = take_part(codec, &from, header[1], half, codec->planes);
  const uint8_t *escapes = nib ? take_part(codec, &from, header[3], header[2], codec->planes + half) : NULL;
  if (!escapes || from.at != from.end) return H3_E_CORRUPT;
  h3_exp_unpack(nib, rest, low, n, elem, header[0], raw);
  if (h3_exp_restore(raw, n, elem, nib, escapes, header[2])) return H3_E_CORRUPT;
  memcpy(raw + n * elem, tail, bytes % elem);
  return H3_OK;
}

static int decode_filter(h3_codec *codec, const h3_spec *spec, const h3_chunk *chunk, const uint8_t *stored,
                         uint8_t *raw, uint32_t bytes) {
  source from = {stored, stored + chunk->stored_bytes};
  switch (chunk->filter) {
    case H3_FILTER_RAW:
      if (chunk->stored_bytes != bytes || chunk->delta) return H3_E_CORRUPT;
      if (raw != stored) memcpy(raw, stored, bytes);
      return H3_OK;
    case H3_FILTER_ZSTD:
      return h3_zstd_fn.decompress_dctx(codec->dctx, raw, bytes, stored, chunk->stored_bytes) == bytes ? H3_OK
                                                                                                       : H3_E_CORRUPT;
    case H3_FILTER_BYTEPLANE: return decode_planes(codec, spec, map_mode(spec, chunk->delta), from, raw, bytes);
    case H3_FILTER_EXPNIBBLE: return decode_exponents(codec, spec, from, raw, bytes);
    default: return H3_E_CORRUPT;
  }
}

static int undo_delta(const h3_spec *spec, uint8_t delta, const void *base, uint8_t *raw, uint32_t bytes) {
  uint32_t elem = spec->elem_bytes;
  if (delta == H3_DELTA_ROW) {
    if (!spec->row_bytes) return H3_E_CORRUPT;
    h3_delta_row_add(raw, bytes / elem, spec->row_bytes / elem, elem);
  } else if (delta == H3_DELTA_BASE) {
    if (!base) return H3_E_CORRUPT;
    h3_delta_add(raw, base, bytes / elem, elem);
  }
  return H3_OK;
}

int h3_chunk_decode(h3_codec *codec, const h3_spec *spec, const h3_chunk *chunk, const void *stored, const void *base,
                    void *raw, uint32_t raw_bytes) {
  if (!raw_bytes || raw_bytes > H3_MAX_CHUNK || h3_spec_check(spec)) return H3_E_INVALID;
  if (chunk->stored_bytes > raw_bytes || chunk->delta >= H3_DELTA_COUNT || chunk->reserved) return H3_E_CORRUPT;
  if (chunk->filter == H3_FILTER_ZERO) {
    if (chunk->stored_bytes || chunk->delta) return H3_E_CORRUPT;
    memset(raw, 0, raw_bytes);
  } else {
    int status = decode_filter(codec, spec, chunk, stored, raw, raw_bytes);
    if (!status) status = undo_delta(spec, chunk->delta, base, raw, raw_bytes);
    if (status) return status;
  }
  return h3_check_holds(chunk, raw, raw_bytes) ? H3_OK : H3_E_CORRUPT;
}

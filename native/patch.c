/* patch.c: a block that differs in few pages from a chunk stored whole, as a record of those pages (filter PATCH).
 *
 * While a block of a writable range is resident its slot remembers that chunk, the base, and a hash of each of its pages;
 * saving compares pages. A record always leans on a chunk that is none itself, so records never chain. Async-signal-safe.
 */
#include <string.h>

#include "internal.h"
#include "pager.h"

enum { WORDS = H3_MAX_CHUNK / H3_PAGE / 64, ENTRIES = 2 * sizeof(h3_chunk), PATCHED_SHARE = 4 };

typedef struct patch_head {
  h3_chunk base;  /* the whole chunk that it leans on */
  h3_chunk pages; /* how the changed pages, one after another, are stored behind the head; offset 0 */
  uint64_t changed[WORDS]; /* bit set of page numbers; as many words as the block's pages need */
} patch_head;

static uint32_t pages_of(uint32_t raw_bytes) { return (raw_bytes + H3_PAGE - 1) / H3_PAGE; }
static uint32_t head_bytes(uint32_t raw_bytes) { return ENTRIES + (pages_of(raw_bytes) + 63) / 64 * 8; }

static uint32_t page_bytes(uint32_t raw_bytes, uint32_t page) {
  const uint32_t left = raw_bytes - page * H3_PAGE;
  return left < H3_PAGE ? left : H3_PAGE;
}

static int is_changed(const patch_head *head, uint32_t page) { return head->changed[page / 64] >> (page % 64) & 1; }

static uint64_t *hashes_of(h3_pager *pager, const h3_slot *slot) {
  return pager->page_hashes + (uint64_t)(slot->address - pager->arena) / H3_PAGE;
}

void h3_base_remember(h3_pager *pager, uint32_t index, const h3_chunk *base, const char *raw, uint32_t raw_bytes) {
  h3_slot *slot = &pager->slots[index];
  uint64_t *hashes = hashes_of(pager, slot);
  for (uint32_t page = 0; page < pages_of(raw_bytes); page++)
    hashes[page] = h3_xxh3(raw + page * H3_PAGE, page_bytes(raw_bytes, page));
  slot->base = *base;
  slot->has_base = 1;
}

/* ---- saving ---- */

/* Marks the pages of raw that are not the base's; returns how many, at most limit + 1. */
static uint32_t compare(const uint64_t *hashes, const char *raw, uint32_t raw_bytes, uint32_t limit, patch_head *head) {
  uint32_t count = 0;
  memset(head->changed, 0, sizeof head->changed);
  for (uint32_t page = 0; page < pages_of(raw_bytes) && count <= limit; page++) {
    if (h3_xxh3(raw + page * H3_PAGE, page_bytes(raw_bytes, page)) == hashes[page]) continue;
    head->changed[page / 64] |= 1ull << (page % 64);
    count++;
  }
  return count;
}

static uint32_t gather(const patch_head *head, const char *raw, uint32_t raw_bytes, char *out) {
  uint32_t used = 0;
  for (uint32_t page = 0; page < pages_of(raw_bytes); page++) {
    if (!is_changed(head, page)) continue;
    memcpy(out + used, raw + page * H3_PAGE, page_bytes(raw_bytes, page));
    used += page_bytes(raw_bytes, page);
  }
  return used;
}

/* A block that never was written has no chunk to name: zeros of its length stand for it. */
static h3_chunk named_base(const h3_chunk *base, h3_context *context, uint32_t raw_bytes) {
  if (base->stored_bytes || base->filter != H3_FILTER_RAW) return *base;
  memset(context->pages, 0, raw_bytes);
  h3_chunk zeros = h3_checked(context->pages, raw_bytes);
  zeros.filter = H3_FILTER_ZERO;
  return zeros;
}

int h3_patch_save(h3_range *range, uint64_t index, const char *raw, const h3_spec *spec, h3_context *context,
                  h3_chunk *chunk) {
  h3_pager *pager = range->pager;
  const uint32_t slot = range->blocks[index].slot, raw_bytes = h3_raw_bytes(range, index);
  const uint32_t limit = pages_of(raw_bytes) / PATCHED_SHARE;
  if (slot == H3_NO_SLOT || !pager->slots[slot].has_base || !limit) return H3_NOT_PATCHED;
  patch_head head;
  if (compare(hashes_of(pager, &pager->slots[slot]), raw, raw_bytes, limit, &head) > limit) return H3_NOT_PATCHED;
  head.base = named_base(&pager->slots[slot].base, context, raw_bytes);
  const uint32_t bytes = gather(&head, raw, raw_bytes, context->pages), start = head_bytes(raw_bytes);
  if (!bytes) return H3_NOT_PATCHED; /* back to the base's bytes: rare, and a whole chunk says it */
  h3_spec inner = *spec;
  if (inner.delta == H3_DELTA_BASE) inner.delta = H3_DELTA_NONE;
  int status = h3_chunk_encode(context->codec, &inner, context->pages, bytes, NULL, context->stored + start,
                               H3_MAX_CHUNK + H3_PAGE - start, &head.pages);
  if (status < 0) return status;
  head.pages.offset = 0;
  memcpy(context->stored, &head, start);
  *chunk = h3_checked(raw, raw_bytes);
  chunk->stored_bytes = start + head.pages.stored_bytes;
  chunk->filter = H3_FILTER_PATCH;
  if (chunk->stored_bytes >= raw_bytes) return H3_NOT_PATCHED;
  return h3_block_append(range, range->file, context, bytes, chunk);
}

/* ---- loading ---- */

/* Reads and checks the head; *bytes gets the length of the changed pages. */
static int open_head(h3_range *range, const h3_chunk *chunk, uint32_t raw_bytes, patch_head *head, uint32_t *bytes) {
  const uint32_t start = head_bytes(raw_bytes), n_pages = pages_of(raw_bytes);
  if (chunk->delta || chunk->stored_bytes < start || chunk->stored_bytes > raw_bytes) return H3_E_CORRUPT;
  memset(head, 0, sizeof *head);
  const int status = h3_file_read(range->file, chunk->offset, head, start);
  if (status < 0) return status;
  const h3_chunk *base = &head->base, *pages = &head->pages;
  if (base->filter >= H3_FILTER_PATCH || (base->stored_bytes == 0) != (base->filter == H3_FILTER_ZERO)) return H3_E_CORRUPT;
  if (pages->filter >= H3_FILTER_PATCH || pages->delta == H3_DELTA_BASE || pages->offset) return H3_E_CORRUPT;
  if (pages->stored_bytes != chunk->stored_bytes - start) return H3_E_CORRUPT;
  if (n_pages % 64 && head->changed[n_pages / 64] >> (n_pages % 64)) return H3_E_CORRUPT;
  *bytes = 0;
  for (uint32_t page = 0; page < n_pages; page++)
    if (is_changed(head, page)) *bytes += page_bytes(raw_bytes, page);
  return *bytes ? H3_OK : H3_E_CORRUPT;
}

int h3_patch_load(h3_context *context, h3_range *range, uint64_t block, const h3_chunk *chunk, char *raw, int depth) {
  const uint32_t raw_bytes = h3_raw_bytes(range, block);
  patch_head head;
  uint32_t bytes = 0;
  int status = open_head(range, chunk, raw_bytes, &head, &bytes);
  if (status == H3_OK) status = h3_chunk_load(context, range, block, &head.base, raw, depth);
  if (status == H3_OK)
    status = h3_file_read(range->file, chunk->offset + head_bytes(raw_bytes), context->stored, head.pages.stored_bytes);
  if (status == H3_OK)
    status = h3_chunk_decode(context->codec, &range->layout, &head.pages, context->stored, NULL, context->pages, bytes);
  if (status < 0) return status;
  atomic_fetch_add_explicit(&range->pager->bytes_read, chunk->stored_bytes, memory_order_relaxed);
  const char *from = context->pages;
  for (uint32_t page = 0; page < pages_of(raw_bytes); page++) {
    if (!is_changed(&head, page)) continue;
    memcpy(raw + page * H3_PAGE, from, page_bytes(raw_bytes, page));
    from += page_bytes(raw_bytes, page);
  }
  return h3_check_holds(chunk, raw, raw_bytes) ? H3_OK : H3_E_CORRUPT;
}

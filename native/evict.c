/* Sending blocks out: take the pages, compare with what the file holds, append if changed, mark absent.
 * Owns the block (EVICTING) while it works. Nothing is ever dropped before its bytes are safe. */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>

#include "internal.h"
#include "pager.h"

static int all_zero(const char *raw, uint32_t bytes) {
  static const char zeros[H3_PAGE]; /* stays in the first cache: one stream from memory, not two */
  for (uint32_t at = 0; at < bytes; at += H3_PAGE)
    if (memcmp(raw + at, zeros, bytes - at < H3_PAGE ? bytes - at : H3_PAGE)) return 0;
  return 1;
}

int h3_is_dirty(const h3_block *block, const char *raw, uint32_t raw_bytes) {
  if (atomic_load(&block->word) & H3_FORCE_DIRTY) return 1;
  if (block->chunk.stored_bytes == 0) return !all_zero(raw, raw_bytes);
  return !h3_check_holds(&block->chunk, raw, raw_bytes);
}

int h3_block_append(h3_range *range, h3_file *file, h3_context *context, uint32_t raw_bytes, h3_chunk *chunk) {
  uint64_t offset = 0;
  if (chunk->stored_bytes) {
    const int status = h3_file_append(file, context->stored, chunk->stored_bytes, &offset);
    if (status < 0) return status;
  }
  chunk->offset = offset;
  atomic_fetch_add_explicit(&range->pager->bytes_written, chunk->stored_bytes, memory_order_relaxed);
  atomic_fetch_add_explicit(&range->pager->bytes_encoded, raw_bytes, memory_order_relaxed);
  return H3_OK;
}

int h3_block_save(h3_range *range, uint64_t index, const char *raw, const h3_spec *spec, h3_file *file,
                  h3_context *context, h3_chunk *chunk) {
  const uint32_t raw_bytes = h3_raw_bytes(range, index);
  const char *base = NULL;
  if (range->pager->forked) return H3_E_READONLY; /* the file's tail belongs to the parent */
  if (spec->delta == H3_DELTA_BASE && range->base) {
    const int status =
        h3_chunk_load(context, range->base, index, &range->base->blocks[index].chunk, context->base[0], 1);
    if (status < 0) return status;
    base = context->base[0];
  }
  int status = h3_chunk_encode(context->codec, spec, raw, raw_bytes, base, context->stored, H3_MAX_CHUNK, chunk);
  if (status < 0) return status;
  return h3_block_append(range, file, context, raw_bytes, chunk);
}

int h3_block_save_change(h3_range *range, uint64_t index, const char *raw, h3_context *context, h3_chunk *chunk) {
  const h3_spec spec = h3_range_spec(range);
  if (range->pager->forked) return H3_E_READONLY;
  const int status = h3_patch_save(range, index, raw, &spec, context, chunk);
  return status == H3_NOT_PATCHED ? h3_block_save(range, index, raw, &spec, range->file, context, chunk) : status;
}

static int save_if_dirty(h3_range *range, uint64_t index, const char *raw) {
  h3_pager *pager = range->pager;
  h3_block *block = &range->blocks[index];
  if (!range->writable || (atomic_load(&block->word) & (H3_QUARANTINE | H3_DISCARD))) return H3_OK;
  if (!h3_is_dirty(block, raw, h3_raw_bytes(range, index))) return H3_OK;
  h3_chunk chunk;
  h3_context *context = h3_context_acquire(pager);
  const int status = h3_block_save_change(range, index, raw, context, &chunk);
  h3_context_release(pager, context);
  if (status < 0) return status;
  h3_entry_set(range, index, &chunk);
  atomic_fetch_and(&block->word, ~(uint32_t)H3_FORCE_DIRTY);
  atomic_fetch_add(&pager->write_backs, 1);
  return H3_OK;
}

int h3_evict(h3_pager *pager, uint32_t index) {
  h3_slot *slot = &pager->slots[index];
  h3_range *range = slot->range;
  h3_block *block = &range->blocks[slot->block];
  char *data = NULL;
  if (range->writable) h3_unproven_set(range, slot->block); /* it may come back, and without its protection */
  int status = h3_block_take(range, slot->block, slot->address, &data);
  if (status == H3_OK) {
    status = save_if_dirty(range, slot->block, data);
    if (status == H3_OK) {
      h3_block_taken(range, slot->block);
      atomic_fetch_sub(&range->resident, (uint64_t)slot->pages * H3_PAGE);
      atomic_store_explicit(&block->slot, h3_left_stamp(pager), memory_order_relaxed);
      h3_block_settle(block, H3_ABSENT, 0);
      return H3_OK;
    }
    /* The file would not take it: the bytes go back to where their owner can see them. */
    while (h3_block_untake(range, slot->block, slot->address) < 0) usleep(1000);
  }
  h3_lock_acquire(&pager->lock);
  h3_readmit(pager, index);
  pager->in_flight--;
  h3_block_settle(block, H3_RESIDENT, 0);
  h3_lock_release(&pager->lock);
  atomic_fetch_add(&pager->event, 1);
  h3_futex_wake(&pager->event, INT32_MAX);
  return status;
}

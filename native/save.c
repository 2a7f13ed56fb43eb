/* Saving what is resident: flush, export, resize. Ordinary context, signals masked as in pager.c; flush and resize of a
 * range exclude each other by its flush_lock. */
#define _GNU_SOURCE
#include <string.h>

#include "internal.h"
#include "pager.h"

/* Holds a resident block; 0 if it is absent. */
static int hold_if_resident(h3_block *block) {
  uint32_t seen = atomic_load(&block->word);
  for (;;) {
    const uint32_t state = seen & H3_STATE_MASK;
    if (state == H3_ABSENT) return 0;
    if (state == H3_RESIDENT) {
      if (atomic_compare_exchange_weak(&block->word, &seen, seen + H3_ONE_PIN)) return 1;
    } else {
      seen = h3_block_await(block, seen);
    }
  }
}

/* A held block: copy, compare the copy, append the copy. What is written to the block meanwhile differs from the copy's
 * checksum and is found by the next flush or eviction. */
static int save_held(h3_range *range, uint64_t index) {
  h3_pager *pager = range->pager;
  h3_block *block = &range->blocks[index];
  const uint32_t raw_bytes = h3_raw_bytes(range, index);
  h3_context *context = h3_context_acquire(pager);
  memcpy(context->copy, range->address + index * range->block_bytes, raw_bytes);
  int status = H3_OK;
  if (h3_is_dirty(block, context->copy, raw_bytes)) {
    h3_chunk chunk;
    status = h3_block_save_change(range, index, context->copy, context, &chunk);
    if (status == H3_OK) {
      if (chunk.filter != H3_FILTER_PATCH && block->slot != H3_NO_SLOT)
        h3_base_remember(pager, block->slot, &chunk, context->copy, raw_bytes);
      h3_lock_acquire(&pager->lock);
      block->chunk = chunk;
      h3_lock_release(&pager->lock);
      atomic_fetch_and(&block->word, ~(uint32_t)H3_FORCE_DIRTY);
      atomic_fetch_add(&pager->write_backs, 1);
    }
  }
  h3_context_release(pager, context);
  return status;
}

/* The entry of a block that never was written: zeros of its length. */
static void zero_entry(h3_range *range, uint64_t index, h3_chunk *chunk) {
  h3_context *context = h3_context_acquire(range->pager);
  const uint32_t raw_bytes = h3_raw_bytes(range, index);
  memset(context->copy, 0, raw_bytes);
  *chunk = h3_checked(context->copy, raw_bytes);
  chunk->filter = H3_FILTER_ZERO;
  h3_context_release(range->pager, context);
}

/* Saves what has changed among blocks [first, first + count). */
static int save_resident(h3_range *range, uint64_t first, uint64_t count) {
  int status = H3_OK;
  for (uint64_t i = first; range->writable && status == H3_OK && i < first + count; i++) {
    if (!hold_if_resident(&range->blocks[i])) continue;
    atomic_fetch_add(&range->pager->kernel_pins, 1); /* a hold that ends soon: who finds no room waits for it */
    if (!(atomic_load(&range->blocks[i].word) & H3_QUARANTINE)) status = save_held(range, i);
    h3_block_unpin(range, i);
    atomic_fetch_sub(&range->pager->kernel_pins, 1);
  }
  return status;
}

/* Entries of at most BATCH blocks, copied under the lock: they may be on their way out again, with newer entries. zero:
 * what stands for blocks that never were written, whole or the tensor's last; made when needed. */
enum { BATCH = 256 };
static void copy_entries(h3_range *range, uint64_t first, uint64_t count, h3_chunk *out, h3_chunk zero[2]) {
  h3_lock_acquire(&range->pager->lock);
  for (uint64_t i = 0; i < count; i++) out[i] = range->blocks[first + i].chunk;
  h3_lock_release(&range->pager->lock);
  for (uint64_t i = 0; i < count; i++) {
    if (out[i].stored_bytes || out[i].filter) continue;
    const int tail = first + i + 1 == h3_block_count(range);
    if (!zero[tail].filter) zero_entry(range, first + i, &zero[tail]);
    out[i] = zero[tail];
  }
}

int h3_range_flush(h3_range *range, uint64_t first, uint64_t count, h3_chunk *chunks, uint64_t *changed, uint64_t *n_changed) {
  if (n_changed) *n_changed = 0;
  if (first > h3_block_count(range) || count > h3_block_count(range) - first) return H3_E_INVALID;
  h3_sigmask saved;
  h3_signals_block(&saved);
  h3_lock_acquire(&range->flush_lock);
  const int status = save_resident(range, first, count);
  h3_chunk zero[2] = {{0}, {0}}, batch[BATCH];
  for (uint64_t done = 0; chunks && status == H3_OK && done < count;) {
    const uint64_t part = count - done < BATCH ? count - done : BATCH;
    copy_entries(range, first + done, part, batch, zero);
    for (uint64_t i = 0; i < part; i++, done++) {
      if (memcmp(&chunks[done], &batch[i], sizeof batch[i]) == 0) continue;
      chunks[done] = batch[i];
      if (changed) changed[(*n_changed)++] = first + done;
    }
  }
  h3_lock_release(&range->flush_lock);
  h3_signals_restore(&saved);
  return status;
}

int h3_range_export(h3_range *range, uint64_t first, uint64_t count, const h3_spec *spec, h3_file *file, h3_chunk *chunks) {
  if (first > h3_block_count(range) || count > h3_block_count(range) - first) return H3_E_INVALID;
  if (spec->delta == H3_DELTA_BASE) return H3_E_INVALID;
  int status = H3_OK;
  h3_sigmask saved;
  h3_signals_block(&saved);
  for (uint64_t i = first; status == H3_OK && i < first + count; i++) {
    status = h3_block_acquire(range, i, 1, H3_WHY_PREFETCH);
    if (status < 0) break;
    atomic_fetch_add(&range->pager->kernel_pins, 1);
    h3_context *context = h3_context_acquire(range->pager);
    const uint32_t raw_bytes = h3_raw_bytes(range, i);
    memcpy(context->copy, range->address + i * range->block_bytes, raw_bytes);
    status = h3_block_save(range, i, context->copy, spec, file, context, &chunks[i - first]);
    h3_context_release(range->pager, context);
    h3_block_unpin(range, i);
    atomic_fetch_sub(&range->pager->kernel_pins, 1);
  }
  h3_signals_restore(&saved);
  return status;
}

/* ---- length ---- */

static void set_chunk(h3_range *range, uint64_t index, h3_chunk chunk) {
  h3_lock_acquire(&range->pager->lock);
  range->blocks[index].chunk = chunk;
  h3_lock_release(&range->pager->lock);
}

/* Makes the caller the owner of a block that is saved and absent (FILLING): who touches it waits. H3_E_BUSY: pinned. */
static int own_absent(h3_range *range, uint64_t index) {
  h3_block *block = &range->blocks[index];
  for (;;) {
    const int status = h3_block_leave(range, index, 1);
    if (status < 0) return status;
    uint32_t seen = atomic_load(&block->word);
    if (seen >= H3_ONE_PIN) return H3_E_BUSY;
    if ((seen & H3_STATE_MASK) == H3_ABSENT &&
        atomic_compare_exchange_strong(&block->word, &seen, (seen & H3_FORCE_DIRTY) | H3_FILLING))
      return H3_OK;
  }
}

/* Sets the data length while nobody can fill or evict the block that it ends or ended in: slot sizes and decoded bytes
 * follow the length. Its new tail is zero. */
static int resize_edge(h3_range *range, uint64_t edge, uint64_t inside, uint64_t bytes) {
  const uint64_t old = range->bytes;
  int status = own_absent(range, edge);
  if (status < 0) return status;
  h3_context *context = h3_context_acquire(range->pager);
  status = h3_chunk_load(context, range, edge, &range->blocks[edge].chunk, context->copy, 0);
  if (status == H3_OK) {
    memset(context->copy + inside, 0, range->block_bytes - inside);
    range->bytes = bytes;
    h3_chunk chunk;
    const h3_spec spec = h3_range_spec(range);
    status = h3_block_save(range, edge, context->copy, &spec, range->file, context, &chunk);
    if (status == H3_OK) set_chunk(range, edge, chunk);
    else range->bytes = old;
  }
  h3_context_release(range->pager, context);
  h3_block_settle(&range->blocks[edge], H3_ABSENT, 0);
  return status;
}

int h3_range_resize(h3_range *range, uint64_t bytes) {
  if (!range->writable) return H3_E_READONLY;
  if (bytes > range->capacity) return H3_E_INVALID;
  int status = H3_OK;
  h3_sigmask saved;
  h3_signals_block(&saved);
  h3_lock_acquire(&range->flush_lock);
  h3_ahead_stop(range); /* blocks past the new end must not come back */
  const uint64_t old = range->bytes, smaller = bytes < old ? bytes : old;
  for (uint64_t i = (bytes + range->block_bytes - 1) / range->block_bytes, n = h3_block_count(range); i < n; i++) {
    status = h3_block_leave(range, i, 0);
    if (status == H3_OK && (atomic_load(&range->blocks[i].word) & H3_STATE_MASK) != H3_ABSENT) status = H3_E_BUSY;
    if (status < 0) goto out;
    set_chunk(range, i, (h3_chunk){0});
  }
  const uint64_t inside = smaller % range->block_bytes;
  if (inside)
    status = resize_edge(range, smaller / range->block_bytes, inside, bytes);
  else
    range->bytes = bytes;
out:
  h3_ahead_resume(range);
  h3_lock_release(&range->flush_lock);
  h3_signals_restore(&saved);
  return status;
}

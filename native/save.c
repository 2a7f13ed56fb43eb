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
      h3_entry_set(range, index, &chunk);
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

static int save_block(h3_range *range, uint64_t index) {
  h3_block *block = &range->blocks[index];
  int status = H3_OK;
  if (!hold_if_resident(block)) return H3_OK;
  atomic_fetch_add(&range->pager->kernel_pins, 1); /* a hold that ends soon: who finds no room waits for it */
  if (!(atomic_load(&block->word) & H3_QUARANTINE)) status = save_held(range, index);
  h3_block_unpin(range, index);
  atomic_fetch_sub(&range->pager->kernel_pins, 1);
  return status;
}

/* Of a word of unproven, or unreported, the bits of blocks [first, end). */
static uint64_t bits_within(uint64_t word, uint64_t first, uint64_t end) {
  uint64_t mask = UINT64_MAX;
  if (first > word * 64) mask &= UINT64_MAX << (first - word * 64);
  if (end < word * 64 + 64) mask &= ~(UINT64_MAX << (end - word * 64));
  return mask;
}

/* Saves what has changed among blocks [first, end), which lie in one word of unproven. */
static int save_word(h3_range *range, uint64_t first, uint64_t end) {
  const uint64_t word = first / 64;
  if (!range->writable || !atomic_load(&range->unproven[word])) return H3_OK;
  const uint64_t found = h3_guard_begin(range, word, bits_within(word, first, end));
  int status = H3_OK;
  for (uint64_t left = found; left && status == H3_OK; left &= left - 1)
    status = save_block(range, word * 64 + (uint64_t)__builtin_ctzll(left));
  if (status < 0) h3_guard_failed(range, word, found);
  return status;
}

/* Saves what has changed among blocks [first, end). */
static int save_resident(h3_range *range, uint64_t first, uint64_t end) {
  int status = H3_OK;
  for (uint64_t at = first; status == H3_OK && at < end; at = (at / 64 + 1) * 64)
    status = save_word(range, at, end < (at / 64 + 1) * 64 ? end : (at / 64 + 1) * 64);
  return status;
}

/* zero: what stands for blocks that never were written, whole or the tensor's last; made when needed. */
static void never_written(h3_range *range, uint64_t block, h3_chunk *entry, h3_chunk zero[2]) {
  if (entry->stored_bytes || entry->filter) return;
  const int tail = block + 1 == h3_block_count(range);
  if (!zero[tail].filter) zero_entry(range, block, &zero[tail]);
  *entry = zero[tail];
}

/* Entries of at most BATCH blocks, copied under the lock: they may be on their way out again, with newer entries. */
enum { BATCH = 256, FLUSH_AT_ONCE = 64 << 20 };
static void copy_entries(h3_range *range, uint64_t first, uint64_t count, h3_chunk *out, h3_chunk zero[2]) {
  h3_lock_acquire(&range->pager->lock);
  for (uint64_t i = 0; i < count; i++) out[i] = range->blocks[first + i].chunk;
  h3_lock_release(&range->pager->lock);
  for (uint64_t i = 0; i < count; i++) never_written(range, first + i, &out[i], zero);
}

int h3_range_flush(h3_range *range, uint64_t first, uint64_t count, h3_chunk *chunks, uint64_t *changed, uint64_t *n_changed) {
  if (n_changed) *n_changed = 0;
  if (first > h3_block_count(range) || count > h3_block_count(range) - first) return H3_E_INVALID;
  h3_sigmask saved;
  h3_signals_block(&saved);
  h3_lock_acquire(&range->flush_lock);
  const int status = save_resident(range, first, first + count);
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

/* Brings the entries of a word's blocks up to date that have changed since the last time. */
static void report_word(h3_range *range, uint64_t word, h3_chunk *chunks, uint64_t *changed, uint64_t *n_changed, h3_chunk zero[2]) {
  if (!atomic_load(&range->unreported[word])) return; /* set since: for the next flush */
  h3_chunk entries[64];
  h3_lock_acquire(&range->pager->lock);
  const uint64_t found = atomic_exchange(&range->unreported[word], 0) & bits_within(word, 0, h3_block_count(range));
  for (uint64_t left = found; left; left &= left - 1) {
    const int i = __builtin_ctzll(left);
    entries[i] = range->blocks[word * 64 + (uint64_t)i].chunk;
  }
  h3_lock_release(&range->pager->lock);
  for (uint64_t left = found; left; left &= left - 1) {
    const int i = __builtin_ctzll(left);
    const uint64_t block = word * 64 + (uint64_t)i;
    never_written(range, block, &entries[i], zero);
    if (memcmp(&chunks[block], &entries[i], sizeof entries[i]) == 0) continue;
    chunks[block] = entries[i];
    changed[(*n_changed)++] = block;
  }
}

int h3_range_flush_changes(h3_range *range, uint64_t *next, h3_chunk *chunks, uint64_t count, uint64_t *changed,
                           uint64_t limit, uint64_t *n_changed) {
  *n_changed = 0;
  if (limit < 64 || *next % 64 || *next >= count || count != h3_block_count(range)) return H3_E_INVALID;
  int status = H3_OK;
  h3_sigmask saved;
  h3_signals_block(&saved);
  h3_lock_acquire(&range->flush_lock);
  h3_chunk zero[2] = {{0}, {0}};
  uint64_t work = 0;
  for (; *next < count && *n_changed + 64 <= limit && work < FLUSH_AT_ONCE; *next += 64) {
    work += (uint64_t)__builtin_popcountll(atomic_load(&range->unproven[*next / 64])) * range->block_bytes;
    status = save_word(range, *next, count - *next < 64 ? count : *next + 64);
    if (status < 0) break;
    report_word(range, *next / 64, chunks, changed, n_changed, zero);
  }
  if (*next > count) *next = count;
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
    if (status == H3_OK) h3_entry_set(range, edge, &chunk);
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
    h3_entry_set(range, i, &(h3_chunk){0});
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

/* Bringing blocks in: read, decode into a slot, place whole. Runs in fault handlers: async-signal-safe throughout.
 * Owns the block (FILLING) while it works; takes pager->lock only for lists and counters. */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>

#include "internal.h"
#include "pager.h"

h3_context *h3_context_acquire(h3_pager *pager) {
  for (;;) {
    uint32_t mask = atomic_load(&pager->free_contexts);
    while (mask) {
      const int index = __builtin_ctz(mask);
      if (atomic_compare_exchange_weak(&pager->free_contexts, &mask, mask & ~(1u << index))) return &pager->contexts[index];
    }
    atomic_fetch_add(&pager->context_waiters, 1);
    h3_futex_wait(&pager->free_contexts, 0);
    atomic_fetch_sub(&pager->context_waiters, 1);
  }
}

void h3_context_release(h3_pager *pager, h3_context *context) {
  context->window = NULL;
  h3_stage_release(&context->stage);
  const uint32_t bit = 1u << (context - pager->contexts);
  atomic_fetch_or(&pager->free_contexts, bit);
  /* One wake for each release, also when another context is free: the thread that its release woke may not be up yet. */
  if (atomic_load(&pager->context_waiters)) h3_futex_wake(&pager->free_contexts, 1);
}

/* A block that may change remembers the chunk that it came from whole. */
static int watched(h3_context *context, h3_range *range, const h3_chunk *chunk, const char *raw, uint32_t raw_bytes, int depth,
                   int status) {
  if (status == H3_OK && depth == 0 && context->watch != H3_NO_SLOT)
    h3_base_remember(range->pager, context->watch, chunk, raw, raw_bytes);
  return status;
}

/* A chunk's encoded bytes: from what was read ahead, else from the file. Raw ones may come right into raw. */
static int stored_bytes(h3_context *context, h3_range *range, const h3_chunk *chunk, char *raw, char **out) {
  h3_file *file = range->file;
  const h3_window *window = context->window;
  if (window && window->file == file && chunk->offset >= window->offset &&
      chunk->offset - window->offset <= window->bytes &&
      chunk->stored_bytes <= window->bytes - (chunk->offset - window->offset)) {
    *out = window->data + (chunk->offset - window->offset);
    return H3_OK;
  }
  h3_stage_release(&context->stage);
  char *buffer = h3_stage_acquire(chunk->stored_bytes, &context->stage) ? context->stage.data : context->stored;
  return h3_file_read_direct(file, chunk->offset, chunk->stored_bytes, buffer,
                             chunk->filter == H3_FILTER_RAW ? raw : buffer, out);
}

/* Raw bytes of the chunk that block `block` of `range` holds in its file. depth counts bases leaning on bases. */
int h3_chunk_load(h3_context *context, h3_range *range, uint64_t block, const h3_chunk *chunk, char *raw, int depth) {
  const uint32_t raw_bytes = h3_raw_bytes(range, block);
  if (chunk->filter == H3_FILTER_PATCH) return h3_patch_load(context, range, block, chunk, raw, depth);
  if (chunk->stored_bytes == 0 && chunk->filter == H3_FILTER_RAW) { /* never written */
    memset(raw, 0, raw_bytes);
    return watched(context, range, chunk, raw, raw_bytes, depth, H3_OK);
  }
  const char *base = NULL;
  if (chunk->delta == H3_DELTA_BASE) {
    if (!range->base || depth >= H3_MAX_BASE_DEPTH) return H3_E_INVALID;
    if (h3_raw_bytes(range->base, block) != raw_bytes) return H3_E_CORRUPT;
    const int status =
        h3_chunk_load(context, range->base, block, &range->base->blocks[block].chunk, context->base[depth], depth + 1);
    if (status < 0) return status;
    base = context->base[depth];
  }
  if (chunk->stored_bytes > raw_bytes) return H3_E_CORRUPT;
  char *stored = context->stored;
  if (chunk->stored_bytes) {
    const int status = stored_bytes(context, range, chunk, raw, &stored);
    if (status < 0) return status;
  }
  atomic_fetch_add_explicit(&range->pager->bytes_read, chunk->stored_bytes, memory_order_relaxed);
  atomic_fetch_add_explicit(&range->pager->bytes_decoded, raw_bytes, memory_order_relaxed);
  const int status = h3_chunk_decode(context->codec, &range->layout, chunk, stored, base, raw, raw_bytes);
  return watched(context, range, chunk, raw, raw_bytes, depth, status);
}

/* Leaves FILLING or EVICTING: the new state, with flags set or cleared, wakes who waits. */
void h3_block_settle(h3_block *block, uint32_t state, uint32_t set) {
  uint32_t seen = atomic_load(&block->word);
  const uint32_t keep = H3_FORCE_DIRTY | (state == H3_ABSENT ? 0 : H3_QUARANTINE | H3_GUARDED);
  while (!atomic_compare_exchange_weak(&block->word, &seen, (seen & keep) | state | set)) {
  }
  if (seen & H3_WAITERS) h3_futex_wake(&block->word, INT32_MAX);
}

uint32_t h3_block_await(h3_block *block, uint32_t seen) {
  if ((seen & H3_WAITERS) || atomic_compare_exchange_strong(&block->word, &seen, seen | H3_WAITERS))
    h3_futex_wait(&block->word, seen | H3_WAITERS);
  return atomic_load(&block->word);
}

static int fill(h3_range *range, uint64_t index, int pin, int scan, const h3_fill_with *with) {
  h3_pager *pager = range->pager;
  h3_block *block = &range->blocks[index];
  const uint64_t span = (uint64_t)h3_pages_of(range, index) * H3_PAGE;
  const uint32_t raw_bytes = h3_raw_bytes(range, index);
  uint32_t slot = H3_NO_SLOT;
  const uint32_t pages = h3_class_of(range, index);
  int status = with ? h3_slot_acquire_idle(pager, pages, &slot) : h3_slot_acquire(pager, pages, &slot);
  if (status < 0) return status;
  h3_context *context = h3_context_acquire(pager);
  context->window = with ? with->window : NULL;
  char *raw = pager->mode == H3_MODE_COPY ? context->copy : pager->slots[slot].address;
  pager->slots[slot].has_base = 0;
  context->watch = range->writable ? slot : H3_NO_SLOT;
  status = h3_chunk_load(context, range, index, &block->chunk, raw, 0);
  context->watch = H3_NO_SLOT;
  if (status == H3_OK) {
    if (with && with->visit) with->visit(with->argument, index, raw);
    memset(raw + raw_bytes, 0, span - raw_bytes);
    if (range->writable) h3_unproven_set(range, index);
    status = h3_block_place(range, index, raw);
  }
  h3_context_release(pager, context);
  if (status < 0) {
    h3_slot_release(pager, slot, pager->mode != H3_MODE_COPY);
    return status;
  }
  h3_lock_acquire(&pager->lock);
  pager->slots[slot].range = range;
  pager->slots[slot].block = index;
  h3_admit(pager, slot, scan);
  pager->in_flight--;
  atomic_fetch_add(&range->resident, (uint64_t)pages * H3_PAGE); /* before anybody can evict it */
  h3_block_settle(block, H3_RESIDENT, pin ? H3_ONE_PIN : 0);
  h3_lock_release(&pager->lock);
  atomic_fetch_add(&pager->fills, 1);
  atomic_fetch_add(&pager->event, 1);
  h3_futex_wake(&pager->event, INT32_MAX);
  return H3_OK;
}

int h3_block_claim(h3_range *range, uint64_t index) {
  uint32_t seen = atomic_load(&range->blocks[index].word);
  while ((seen & H3_STATE_MASK) == H3_ABSENT)
    if (atomic_compare_exchange_weak(&range->blocks[index].word, &seen, (seen & H3_FORCE_DIRTY) | H3_FILLING)) return 1;
  return 0;
}

static int fill_claimed(h3_range *range, uint64_t index, int pin, int scan, const h3_fill_with *with) {
  const int status = fill(range, index, pin, scan, with);
  if (status < 0) {
    atomic_fetch_add(&range->pager->errors, 1);
    h3_block_settle(&range->blocks[index], H3_ABSENT, 0);
  }
  return status;
}

int h3_block_fill(h3_range *range, uint64_t index, const h3_fill_with *with) {
  atomic_fetch_add(&range->pager->prefetches, 1);
  return fill_claimed(range, index, 0, with->scan, with);
}

int h3_block_acquire(h3_range *range, uint64_t index, int pin, int why) {
  h3_block *block = &range->blocks[index];
  uint32_t seen = atomic_load(&block->word);
  for (;;) {
    const uint32_t state = seen & H3_STATE_MASK;
    if (state == H3_RESIDENT) {
      if ((seen & H3_QUARANTINE) && why == H3_WHY_PREFETCH) return range->error < 0 ? range->error : H3_E_CORRUPT;
      if (!pin || atomic_compare_exchange_weak(&block->word, &seen, seen + H3_ONE_PIN)) return H3_OK;
    } else if (state == H3_ABSENT) {
      if (!atomic_compare_exchange_weak(&block->word, &seen, (seen & H3_FORCE_DIRTY) | H3_FILLING)) continue;
      if (why == H3_WHY_PREFETCH) atomic_fetch_add(&range->pager->prefetches, 1);
      return fill_claimed(range, index, pin, why == H3_WHY_SCAN, NULL);
    } else {
      atomic_fetch_add(&range->pager->waits, 1);
      seen = h3_block_await(block, seen);
    }
  }
}

int h3_block_hold(h3_range *range, uint64_t index) {
  h3_block *block = &range->blocks[index];
  uint32_t seen = atomic_load(&block->word);
  for (;;) {
    const uint32_t state = seen & H3_STATE_MASK;
    if (state == H3_ABSENT) return 0;
    if (state == H3_RESIDENT) {
      if (seen & H3_QUARANTINE) return range->error < 0 ? range->error : H3_E_CORRUPT;
      if (atomic_compare_exchange_weak(&block->word, &seen, seen + H3_ONE_PIN)) return 1;
    } else {
      atomic_fetch_add(&range->pager->waits, 1);
      seen = h3_block_await(block, seen);
    }
  }
}

void h3_block_unpin(h3_range *range, uint64_t index) {
  atomic_fetch_sub(&range->blocks[index].word, (uint32_t)H3_ONE_PIN);
}

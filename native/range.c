/* Ranges: create and destroy, prefetch, hold, drop. Ordinary context, signals masked as in pager.c. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "internal.h"
#include "pager.h"

static uint64_t bit_words(const h3_range *range) { return (range->n_blocks_capacity + 63) / 64; }

static uint64_t table_bytes(const h3_range *range) {
  return range->n_blocks_capacity * sizeof(h3_block) + 2 * bit_words(range) * sizeof(uint64_t);
}

static int config_check(const h3_pager *pager, const h3_range_config *config) {
  const uint32_t block = config->block_bytes;
  if (block < H3_MIN_CHUNK || block > H3_MAX_CHUNK || block % H3_PAGE) return H3_E_INVALID;
  if (config->capacity_bytes < config->bytes || config->capacity_bytes >> 46) return H3_E_INVALID;
  if ((config->writable || config->chunks) && !config->file) return H3_E_INVALID;
  if (config->base && (config->base->pager != pager || config->base->block_bytes != block)) return H3_E_INVALID;
  return block > pager->budget ? H3_E_BUDGET : H3_OK;
}

int h3_range_create(h3_pager *pager, const h3_range_config *config, h3_range **out) {
  *out = NULL;
  int status = config_check(pager, config);
  if (status < 0) return status;
  h3_range *range = h3_fault_hit(H3_FAULT_ALLOC) ? NULL : calloc(1, sizeof *range);
  if (!range) return H3_E_NOMEM;
  const uint64_t granule = 1ull << H3_GRANULE_SHIFT;
  range->pager = pager;
  range->references = 1;
  range->capacity = (config->capacity_bytes + granule) & ~(granule - 1);
  range->bytes = config->bytes;
  range->block_bytes = config->block_bytes;
  range->writable = config->writable;
  range->cyclic = config->cyclic;
  range->spec = range->layout = config->spec;
  range->file = config->file;
  range->base = config->base;
  if (config->label) strncpy(range->label, config->label, sizeof range->label - 1);
  range->n_blocks_capacity = range->capacity / range->block_bytes + 1;
  range->blocks = mmap(NULL, table_bytes(range), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range->blocks == MAP_FAILED) {
    free(range);
    return h3_set_errno(H3_E_NOMEM, errno);
  }
  range->unproven = (_Atomic uint64_t *)(range->blocks + range->n_blocks_capacity);
  range->unreported = range->unproven + bit_words(range);
  if (config->chunks)
    for (uint64_t i = 0, n = h3_block_count(range); i < n; i++) range->blocks[i].chunk = config->chunks[i];
  status = h3_map_reserve(range->capacity, &range->address);
  if (status < 0) goto out;
  status = h3_deliver_register(pager, range->address, range->capacity, pager->mode != H3_MODE_PROTECT);
  if (status < 0) goto out;
  h3_map_set(range->address, range->capacity, range);
  h3_lock_acquire(&h3_registry_lock);
  range->next = pager->ranges;
  pager->ranges = range;
  if (range->block_bytes > pager->largest_block) pager->largest_block = range->block_bytes;
  h3_lock_release(&h3_registry_lock);
  atomic_fetch_add(&pager->references, 1);
  if (range->file) h3_file_retain(range->file);
  if (range->base) atomic_fetch_add(&range->base->references, 1);
  if (!range->cyclic && h3_block_count(range) > 1) h3_pool_start();
  *out = range;
out:
  if (status < 0) {
    if (range->address) munmap(range->address, range->capacity);
    munmap(range->blocks, table_bytes(range));
    free(range);
  }
  return status;
}

/* Takes a resident block out of the list as its owner (EVICTING). 0 if it is not resident, or pinned. Waits for others
 * that fill or evict it. */
static int own(h3_range *range, uint64_t index) {
  h3_pager *pager = range->pager;
  h3_block *block = &range->blocks[index];
  uint32_t seen = atomic_load(&block->word);
  for (;;) {
    const uint32_t state = seen & H3_STATE_MASK;
    if (state == H3_ABSENT || seen >= H3_ONE_PIN) return 0;
    if (state == H3_RESIDENT && !(seen & H3_GUARDING)) {
      h3_lock_acquire(&pager->lock);
      const int won = atomic_compare_exchange_strong(&block->word, &seen, (seen & ~(uint32_t)H3_STATE_MASK) | H3_EVICTING);
      if (won) {
        if (block->slot != H3_NO_SLOT) h3_retire(pager, block->slot);
        pager->in_flight++;
      }
      h3_lock_release(&pager->lock);
      if (won) return 1;
    } else {
      seen = h3_block_await(block, seen);
    }
  }
}

/* A quarantined block has no slot: its zeros are the kernel's. */
static void quarantine_drop(h3_range *range, uint64_t index) {
  h3_block_discard(range, index);
  h3_error_mark(range); /* the epoch moves before the count does: who leaves in between sees one or the other */
  h3_zeros_gone(range);
  atomic_fetch_and(&range->blocks[index].word, ~(uint32_t)H3_QUARANTINE);
  h3_lock_acquire(&range->pager->lock);
  range->pager->in_flight--;
  h3_lock_release(&range->pager->lock);
  h3_block_settle(&range->blocks[index], H3_ABSENT, 0);
}

int h3_block_leave(h3_range *range, uint64_t index, int save) {
  h3_pager *pager = range->pager;
  if (!own(range, index)) return H3_OK;
  if (atomic_load(&range->blocks[index].word) & H3_QUARANTINE) {
    quarantine_drop(range, index);
    return H3_OK;
  }
  const uint32_t slot = range->blocks[index].slot;
  if (!save) atomic_fetch_or(&range->blocks[index].word, (uint32_t)H3_DISCARD);
  const int status = h3_evict(pager, slot);
  if (status == H3_OK) h3_slot_release(pager, slot, pager->mode != H3_MODE_COPY);
  return status;
}

/* Off the lists first: a fork that saves ranges must not meet one that goes. */
static void unlink_range(h3_range *range) {
  h3_lock_acquire(&h3_registry_lock);
  for (h3_range **link = &range->pager->ranges; *link; link = &(*link)->next)
    if (*link == range) {
      *link = range->next;
      break;
    }
  h3_lock_release(&h3_registry_lock);
}

void h3_range_destroy(h3_range *range) {
  if (atomic_fetch_sub(&range->references, 1) > 1) return;
  h3_pager *pager = range->pager;
  h3_range *base = range->base;
  h3_sigmask saved;
  h3_signals_block(&saved);
  unlink_range(range);
  h3_ahead_stop(range);
  range->writable = 0;
  for (uint64_t i = 0; i < range->n_blocks_capacity; i++) {
    uint32_t word = atomic_load(&range->blocks[i].word);
    if (word == 0) continue;
    while (word >= H3_ONE_PIN && !atomic_compare_exchange_weak(&range->blocks[i].word, &word, word & (H3_ONE_PIN - 1))) {
    }
    while (h3_block_leave(range, i, 0) < 0) usleep(1000);
  }
  h3_lock_acquire(&pager->lock);
  pager->pinned -= range->pinned;
  h3_lock_release(&pager->lock);
  h3_map_set(range->address, range->capacity, NULL);
  munmap(range->address, range->capacity);
  munmap(range->blocks, table_bytes(range));
  if (range->file) h3_file_destroy(range->file);
  free(range);
  h3_signals_restore(&saved);
  h3_pager_release(pager);
  if (base) h3_range_destroy(base);
}

void *h3_range_address(const h3_range *range) { return range->address; }
uint64_t h3_range_resident_bytes(h3_range *range) { return atomic_load(&range->resident); }

/* First and one-past-last block of a byte span; H3_E_INVALID when it leaves the data. */
static int span(const h3_range *range, uint64_t offset, uint64_t bytes, uint64_t *first, uint64_t *end) {
  if (offset > range->bytes || bytes > range->bytes - offset) return H3_E_INVALID;
  *first = offset / range->block_bytes;
  *end = bytes ? (offset + bytes - 1) / range->block_bytes + 1 : *first;
  return H3_OK;
}

int h3_range_prefetch(h3_range *range, uint64_t offset, uint64_t bytes, uint64_t *done) {
  uint64_t first = 0, end = 0;
  *done = 0;
  int status = span(range, offset, bytes, &first, &end);
  h3_pager *pager = range->pager;
  h3_sigmask saved;
  h3_signals_block(&saved);
  h3_lock_acquire(&pager->lock);
  const uint64_t room = pager->budget > pager->pinned ? pager->budget - pager->pinned : 0;
  h3_lock_release(&pager->lock);
  uint64_t last = first, failed = 0;
  for (; status == H3_OK && last < end; last++) {
    const uint64_t block = (uint64_t)h3_class_of(range, last) * H3_PAGE;
    if (*done + block > room) break;
    *done += block;
  }
  if (status == H3_OK) status = h3_fetch_span(range, first, last, &failed);
  if (status < 0) *done = failed > first ? (failed - first) * range->block_bytes : 0;
  h3_signals_restore(&saved);
  if (*done > bytes) *done = bytes;
  return status;
}

static void unpin_blocks(h3_range *range, uint64_t first, uint64_t end) {
  uint64_t freed = 0;
  for (uint64_t i = first; i < end; i++) {
    freed += (uint64_t)h3_class_of(range, i) * H3_PAGE;
    h3_block_unpin(range, i);
  }
  h3_lock_acquire(&range->pager->lock);
  range->pager->pinned -= freed;
  range->pinned -= freed;
  h3_lock_release(&range->pager->lock);
}

int h3_range_pin(h3_range *range, uint64_t offset, uint64_t bytes) {
  h3_pager *pager = range->pager;
  uint64_t first, end, want = 0;
  int status = span(range, offset, bytes, &first, &end);
  if (status < 0) return status;
  for (uint64_t i = first; i < end; i++) want += (uint64_t)h3_class_of(range, i) * H3_PAGE;
  /* Room stays for everybody else's faults: one instruction may straddle two blocks, a copy touches four. */
  const uint64_t largest = pager->largest_block;
  const uint64_t four = 4 * largest < pager->budget / 2 ? 4 * largest : pager->budget / 2;
  const uint64_t room = four > 2 * largest ? four : 2 * largest, reserve = room < pager->budget ? room : pager->budget;
  h3_sigmask saved;
  h3_signals_block(&saved);
  h3_lock_acquire(&pager->lock);
  if (pager->pinned + want > pager->budget - reserve) {
    status = H3_E_BUDGET;
  } else {
    pager->pinned += want;
    range->pinned += want;
  }
  h3_lock_release(&pager->lock);
  uint64_t failed; /* tells nothing: what could not be read is met again below */
  if (status == H3_OK && end - first > 1) h3_fetch_span(range, first, end, &failed);
  for (uint64_t i = first; status == H3_OK && i < end; i++) {
    status = h3_block_acquire(range, i, 1, H3_WHY_PREFETCH);
    if (status == H3_OK) { /* what a flush has protected a system call could not write to */
      status = h3_unguard(range, i, 0);
      if (status == H3_OK) continue;
      h3_block_unpin(range, i);
    }
    uint64_t rest = 0;
    for (uint64_t j = i; j < end; j++) rest += (uint64_t)h3_class_of(range, j) * H3_PAGE;
    unpin_blocks(range, first, i);
    h3_lock_acquire(&pager->lock);
    pager->pinned -= rest;
    range->pinned -= rest;
    h3_lock_release(&pager->lock);
  }
  h3_signals_restore(&saved);
  return status;
}

void h3_range_unpin(h3_range *range, uint64_t offset, uint64_t bytes) {
  uint64_t first, end;
  if (span(range, offset, bytes, &first, &end) < 0) return;
  h3_sigmask saved;
  h3_signals_block(&saved);
  unpin_blocks(range, first, end);
  h3_signals_restore(&saved);
}

int h3_is_tiered(uintptr_t address) { return h3_map_find((const void *)address) != NULL; }

uintptr_t h3_range_start(uintptr_t address) {
  const h3_range *range = h3_map_find((const void *)address);
  return range ? (uintptr_t)range->address : 0;
}

/* Called for every panel that a kernel reads: signals are masked only where there is work to do. */
static int pin_for_kernel(h3_range *range, uint64_t index) {
  h3_block *block = &range->blocks[index];
  uint32_t seen = atomic_load(&block->word);
  while ((seen & (H3_STATE_MASK | H3_QUARANTINE)) == H3_RESIDENT)
    if (atomic_compare_exchange_weak(&block->word, &seen, seen + H3_ONE_PIN)) return H3_OK;
  h3_sigmask saved;
  h3_signals_block(&saved);
  const int status = h3_block_acquire(range, index, 1, H3_WHY_PREFETCH);
  h3_signals_restore(&saved);
  return status;
}

int h3_pin_address(const void *address, uint64_t bytes) {
  h3_range *range = h3_map_find(address);
  if (!range || !bytes) return H3_OK;
  uint64_t first, end;
  int status = span(range, (uint64_t)((const char *)address - range->address), bytes, &first, &end);
  for (uint64_t i = first; status == H3_OK && i < end; i++) {
    status = pin_for_kernel(range, i);
    if (status == H3_OK) atomic_fetch_add(&range->pager->kernel_pins, 1);
    else
      for (uint64_t j = first; j < i; j++) {
        h3_block_unpin(range, j);
        atomic_fetch_sub(&range->pager->kernel_pins, 1);
      }
  }
  return status;
}

void h3_unpin_address(const void *address, uint64_t bytes) {
  h3_range *range = h3_map_find(address);
  if (!range || !bytes) return;
  uint64_t first, end;
  if (span(range, (uint64_t)((const char *)address - range->address), bytes, &first, &end) < 0) return;
  for (uint64_t i = first; i < end; i++) {
    h3_block_unpin(range, i);
    atomic_fetch_sub(&range->pager->kernel_pins, 1);
  }
}

int h3_range_drop(h3_range *range, uint64_t offset, uint64_t bytes) {
  uint64_t first, end;
  int status = span(range, offset, bytes, &first, &end);
  h3_sigmask saved;
  h3_signals_block(&saved);
  for (uint64_t i = first; status == H3_OK && i < end; i++) status = h3_block_leave(range, i, 1);
  h3_signals_restore(&saved);
  return status;
}

int h3_range_set_spec(h3_range *range, const h3_spec *spec) {
  const h3_spec *now = &range->layout;
  if (spec->elem_bytes != now->elem_bytes || spec->row_bytes != now->row_bytes || spec->exp_bits != now->exp_bits)
    return H3_E_INVALID;
  h3_sigmask saved;
  h3_signals_block(&saved);
  h3_lock_acquire(&range->pager->lock);
  range->spec = *spec;
  h3_lock_release(&range->pager->lock);
  h3_signals_restore(&saved);
  return H3_OK;
}

int h3_range_detach(h3_range *range, h3_file *file) {
  h3_pager *pager = range->pager;
  h3_sigmask saved;
  int status = H3_E_BUSY;
  h3_signals_block(&saved);
  h3_lock_acquire(&range->flush_lock);
  h3_file *before = range->file;
  h3_file_retain(file);
  range->file = file;
  range->writable = 0;
  /* Whoever read the old handle holds a slot until it is done with it. */
  for (int tries = 0; status < 0 && tries < 5000; tries++) {
    h3_lock_acquire(&pager->lock);
    if (pager->in_flight == 0 && atomic_load(&range->readers) == 0) status = H3_OK;
    h3_lock_release(&pager->lock);
    if (status < 0) usleep(1000);
  }
  if (status == H3_OK && before) h3_file_destroy(before);
  h3_lock_release(&range->flush_lock);
  h3_signals_restore(&saved);
  return status;
}

/* Zeros that an operation may have seen were there while it ran: they came after it entered, or went after it entered, or
 * are there still. Whoever finds them takes them away, and whoever enters later meets the failure again. */
int h3_range_take_error(h3_range *range, uint64_t entered, uint64_t *block) {
  if (atomic_load(&range->quarantined) == 0 && atomic_load(&range->error_epoch) <= entered) return H3_OK;
  *block = range->error_block;
  h3_sigmask saved;
  h3_signals_block(&saved);
  for (uint64_t i = 0, n = h3_block_count(range); atomic_load(&range->quarantined) && i < n; i++)
    if (atomic_load(&range->blocks[i].word) & H3_QUARANTINE) h3_block_leave(range, i, 0);
  h3_signals_restore(&saved);
  return range->error;
}

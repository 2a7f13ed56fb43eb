/* guard.c: which blocks a flush has to look at, so that a commit costs what was changed and not what is resident.
 *
 * A bit of range->unproven is set while a block may hold bytes that its entry does not name: from before its pages are
 * placed until a flush has write-protected them. The first write after that faults, and the writer's own thread sets the bit,
 * then takes the protection away, then writes. A flush clears the bit, protects, compares and saves, in this order, so a write
 * falls before the comparison or sets the bit again. GUARDING in a block's word makes the two steps on either side one:
 * without it a late handler could unprotect a block that a flush has just protected, with its bit clear.
 *
 * Only flushes rely on it. Whoever evicts compares hashes whatever the bit says, and so does a flush after h3_range_recheck:
 * a device that got hold of a page before it was protected writes past the protection, and its bytes must not be lost.
 * The kernel does not write past it: a system call that is given a protected block fails, as with an absent one. So blocks
 * held by h3_range_pin are not protected. Async-signal-safe. No locks. */
#include "internal.h"
#include "pager.h"

static uint64_t bit_of(uint64_t block) { return 1ull << (block % 64); }

void h3_unproven_set(h3_range *range, uint64_t block) { atomic_fetch_or(&range->unproven[block / 64], bit_of(block)); }

static void end(h3_block *block, uint32_t set) {
  uint32_t seen = atomic_load(&block->word);
  while (!atomic_compare_exchange_weak(&block->word, &seen, (seen & ~(uint32_t)(H3_GUARDING | H3_WAITERS)) | set)) {
  }
  if (seen & H3_WAITERS) h3_futex_wake(&block->word, INT32_MAX);
}

/* Enters GUARDING on a block that is resident and that nobody holds; 0 for any other. Does not wait. */
static int begin_to_guard(h3_block *block) {
  uint32_t seen = atomic_load(&block->word);
  while ((seen & ~(uint32_t)H3_GUARDED) == H3_RESIDENT)
    if (atomic_compare_exchange_weak(&block->word, &seen, H3_RESIDENT | H3_GUARDED | H3_GUARDING)) return 1;
  return 0;
}

static void guard_run(h3_range *range, uint64_t first, uint64_t count) {
  atomic_store(&range->guarded, 1);
  const int status = h3_blocks_protect(range, first, count, 1);
  for (uint64_t i = first; i < first + count; i++) {
    if (status < 0) h3_unproven_set(range, i); /* GUARDED stays: some of its pages may be protected */
    end(&range->blocks[i], 0);
  }
}

uint64_t h3_guard_begin(h3_range *range, uint64_t word, uint64_t mask) {
  const uint64_t found = atomic_fetch_and(&range->unproven[word], ~mask) & mask;
  uint64_t run = 0;
  atomic_fetch_add(&range->pager->kernel_pins, 1);
  for (uint64_t left = found; left; left &= left - 1) {
    const uint64_t block = word * 64 + (uint64_t)__builtin_ctzll(left);
    const int guardable = range->pager->guards && begin_to_guard(&range->blocks[block]);
    if (!guardable && (atomic_load(&range->blocks[block].word) & H3_STATE_MASK) != H3_ABSENT) h3_unproven_set(range, block);
    run += (uint64_t)guardable;
    if (guardable && (left & (bit_of(block) << 1))) continue; /* the next may join */
    if (!run) continue;
    guard_run(range, block + (uint64_t)guardable - run, run);
    run = 0;
  }
  atomic_fetch_sub(&range->pager->kernel_pins, 1);
  return found;
}

void h3_guard_failed(h3_range *range, uint64_t word, uint64_t found) { atomic_fetch_or(&range->unproven[word], found); }

/* Enters GUARDING on a block that is or may be protected; 0 if there is no need, or no longer. */
static int begin_to_unguard(h3_range *range, h3_block *block, int faulted) {
  atomic_fetch_add(&range->pager->kernel_pins, 1); /* it can't be evicted for a moment: who finds no room waits */
  uint32_t seen = atomic_load(&block->word);
  while ((seen & (H3_STATE_MASK | H3_QUARANTINE)) == H3_RESIDENT) {
    if (seen & H3_GUARDING) {
      if (!(seen & H3_WAITERS) && !atomic_compare_exchange_weak(&block->word, &seen, seen | H3_WAITERS)) continue;
      h3_futex_wait(&block->word, seen | H3_WAITERS);
      seen = atomic_load(&block->word);
      faulted = 0; /* whoever that was may have done it */
    } else if (!faulted && !(seen & H3_GUARDED)) {
      break;
    } else if (atomic_compare_exchange_weak(&block->word, &seen, (seen & ~(uint32_t)H3_GUARDED) | H3_GUARDING)) {
      return 1;
    }
  }
  atomic_fetch_sub(&range->pager->kernel_pins, 1);
  return 0;
}

int h3_unguard(h3_range *range, uint64_t index, int faulted) {
  h3_block *block = &range->blocks[index];
  if (!begin_to_unguard(range, block, faulted)) return H3_OK;
  h3_unproven_set(range, index); /* before the first write can happen */
  const int status = h3_blocks_protect(range, index, 1, 0);
  end(block, status < 0 ? H3_GUARDED : 0);
  atomic_fetch_sub(&range->pager->kernel_pins, 1);
  return status;
}

void h3_entry_set(h3_range *range, uint64_t block, const h3_chunk *chunk) {
  h3_lock_acquire(&range->pager->lock); /* fork copies entries under this lock */
  range->blocks[block].chunk = *chunk;
  atomic_fetch_or(&range->unreported[block / 64], bit_of(block));
  h3_lock_release(&range->pager->lock);
}

void h3_range_recheck(h3_range *range) {
  for (uint64_t i = 0, n = (h3_block_count(range) + 63) / 64; i < n; i++) atomic_store(&range->unproven[i], UINT64_MAX);
}

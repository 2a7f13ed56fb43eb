/* Fork: ranges and arena are not inherited. Before a fork changed blocks are saved, so that a child reads what its parent
 * saw; the child closes the inherited descriptor before any ioctl (they would edit the parent's memory) and maps the same
 * addresses again under its own. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>

#include "internal.h"
#include "pager.h"

enum { CHILD_BUDGET = 64 << 20 };

static h3_sigmask saved_mask; /* by the forking thread, which holds the registry lock meanwhile */
static _Atomic long repairs;

long h3_fork_repairs(void) { return atomic_load(&repairs); }

static void prepare(void) {
  h3_sigmask mask;
  h3_signals_block(&mask);
  h3_lock_acquire(&h3_registry_lock);
  saved_mask = mask;
  for (h3_pager *pager = h3_registry; pager; pager = pager->next) {
    if (!pager->forked)
      for (h3_range *range = pager->ranges; range; range = range->next)
        range->unsaved = h3_range_flush(range, 0, h3_block_count(range), NULL, NULL, NULL) < 0;
    h3_lock_acquire(&pager->lock);
  }
}

static void in_parent(void) {
  for (h3_pager *pager = h3_registry; pager; pager = pager->next) h3_lock_release(&pager->lock);
  const h3_sigmask mask = saved_mask;
  h3_lock_release(&h3_registry_lock);
  h3_signals_restore(&mask);
}

static int remap(h3_pager *pager, char *address, uint64_t bytes, int accessible) {
  void *fresh = mmap(address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  if (fresh == MAP_FAILED) return h3_set_errno(H3_E_NOMEM, errno);
  munlock(address, bytes);
  return h3_deliver_register(pager, address, bytes, accessible);
}

static void range_reset(h3_range *range) {
  const uint64_t blocks = h3_block_count(range);
  for (uint64_t i = 0; i < blocks; i++)
    if (range->blocks[i].word) range->blocks[i].word = range->blocks[i].slot = 0;
  range->resident = 0;
  range->readers = range->still = 0;
  range->guarded = 0;
  range->ahead_lock.word = 0;
  while (range->quarantined) h3_zeros_gone(range);
  range->flush_lock.word = range->quarantine_lock.word = 0;
}

static int rebuild(h3_pager *pager) {
  if (pager->uffd >= 0) close(pager->uffd);
  pager->forked = 1;
  pager->lock.word = 0;
  if (pager->budget > CHILD_BUDGET) pager->budget = CHILD_BUDGET;
  h3_slots_reset(pager);
  pager->peak = 0;
  pager->kernel_pins = pager->context_waiters = 0;
  for (int i = 0; i < pager->n_contexts; i++) pager->contexts[i].stage = (h3_stage){0};
  pager->free_contexts = pager->n_contexts == 32 ? UINT32_MAX : (1u << pager->n_contexts) - 1;
  int status = h3_pager_attach(pager);
  if (status == H3_OK) status = remap(pager, pager->arena, pager->arena_bytes, 1);
  for (h3_range *range = pager->ranges; status == H3_OK && range; range = range->next) {
    range_reset(range);
    if (range->unsaved) { /* the parent could not save its changes: better no memory than old bytes */
      h3_map_set(range->address, range->capacity, NULL);
      continue;
    }
    status = remap(pager, range->address, range->capacity, pager->mode != H3_MODE_PROTECT);
  }
  return status;
}

static void in_child(void) {
  static const char failed[] = "h3store: tiered memory could not be set up again after fork; touching it will end this process\n";
  h3_registry_lock.word = 0;
  h3_signals_after_fork();
  h3_pool_after_fork();
  h3_stage_after_fork();
  for (h3_pager *pager = h3_registry; pager; pager = pager->next) {
    if (rebuild(pager) == H3_OK) atomic_fetch_add(&repairs, 1);
    else if (write(STDERR_FILENO, failed, sizeof failed - 1) < 0) errno = 0;
  }
  const h3_sigmask mask = saved_mask;
  h3_signals_restore(&mask);
}

static void install(void) { pthread_atfork(prepare, in_parent, in_child); }

int h3_fork_install(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  return pthread_once(&once, install) ? H3_E_NOMEM : H3_OK;
}

/* The pager's public functions: pagers and ranges come and go, blocks are asked for, held, saved. Ordinary context:
 * asynchronous signals are masked while pager->lock may be held, so that a handler that touches a range cannot wait for
 * the thread it interrupted. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/userfaultfd.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "internal.h"
#include "pager.h"

h3_lock h3_registry_lock;
h3_pager *h3_registry;

void h3_signals_block(h3_sigmask *saved) {
  sigset_t block;
  sigfillset(&block);
  sigdelset(&block, SIGBUS);
  sigdelset(&block, SIGSEGV);
  sigdelset(&block, SIGFPE);
  sigdelset(&block, SIGILL);
  pthread_sigmask(SIG_BLOCK, &block, (sigset_t *)saved);
}

void h3_signals_restore(const h3_sigmask *saved) { pthread_sigmask(SIG_SETMASK, (const sigset_t *)saved, NULL); }

/* ---- create, destroy ---- */

static void contexts_destroy(h3_pager *pager) {
  const size_t bytes = (size_t)(3 + H3_MAX_BASE_DEPTH) * (H3_MAX_CHUNK + H3_READ_SLACK);
  for (int i = 0; i < pager->n_contexts; i++) {
    if (pager->contexts[i].codec) h3_codec_destroy(pager->contexts[i].codec);
    if (pager->contexts[i].stored) munmap(pager->contexts[i].stored, bytes);
  }
}

/* One mapping per context; pages materialise as blocks of that size are worked on. */
static int contexts_create(h3_pager *pager, int count) {
  const size_t part = H3_MAX_CHUNK + H3_READ_SLACK, bytes = (size_t)(3 + H3_MAX_BASE_DEPTH) * part;
  for (pager->n_contexts = 0; pager->n_contexts < count;) {
    h3_context *context = &pager->contexts[pager->n_contexts++];
    const int injected = h3_fault_hit(H3_FAULT_ALLOC);
    char *memory = injected ? MAP_FAILED
                            : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return h3_set_errno(H3_E_NOMEM, injected ? injected : errno);
    context->stored = memory;
    context->copy = memory + part;
    context->pages = memory + 2 * part;
    context->watch = H3_NO_SLOT;
    for (int depth = 0; depth < H3_MAX_BASE_DEPTH; depth++) context->base[depth] = memory + (size_t)(3 + depth) * part;
    const int status = h3_codec_create(&context->codec);
    if (status < 0) return status;
  }
  atomic_store(&pager->free_contexts, count == 32 ? UINT32_MAX : (1u << count) - 1);
  return H3_OK;
}

/* Each resident block of the page protection form can cost three mappings, and the kernel bounds their count. */
static uint32_t mapping_limit(void) {
  char text[32] = {0};
  FILE *file = fopen("/proc/sys/vm/max_map_count", "re");
  if (file) {
    if (!fgets(text, sizeof text, file)) text[0] = 0;
    fclose(file);
  }
  const long limit = strtol(text, NULL, 10);
  return (uint32_t)((limit > 8000 ? limit - 5000 : 3000) / 4);
}

int h3_pager_attach(h3_pager *pager) {
  pager->uffd = -1;
  pager->live_limit = UINT32_MAX;
  pager->guards = 1;
  if (pager->delivery == H3_DELIVERY_DISPATCH) {
    pager->mode = H3_MODE_PROTECT;
    pager->live_limit = mapping_limit();
    return H3_OK;
  }
  uint64_t features = 0;
  int error = 0;
  pager->uffd = h3_uffd_open(1, &features, &error);
  if (pager->uffd < 0 || !(features & (1 << 7))) return h3_set_errno(H3_E_UNSUPPORTED, error);
  pager->guards = (features & UFFD_FEATURE_PAGEFAULT_FLAG_WP) != 0;
  pager->mode = (features & (1 << 16)) && pager->delivery != H3_DELIVERY_SIGNAL_COPY ? H3_MODE_MOVE : H3_MODE_COPY;
  return H3_OK;
}

/* Address space for slots: several times the budget, since slots of one size are not reused for another. */
static int arena_create(h3_pager *pager) {
  for (uint64_t factor = 16;; factor /= 4) {
    pager->arena_bytes = (pager->budget * factor + (64u << 20)) & ~((1ull << H3_GRANULE_SHIFT) - 1);
    const int status = h3_map_reserve(pager->arena_bytes, &pager->arena);
    if (status == H3_OK) break;
    if (factor <= 1) return status;
  }
  pager->max_slots = (uint32_t)(pager->arena_bytes / H3_PAGE < UINT32_MAX - 1 ? pager->arena_bytes / H3_PAGE : UINT32_MAX - 1);
  void *slots = mmap(NULL, (uint64_t)pager->max_slots * sizeof(h3_slot), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (slots == MAP_FAILED) return h3_set_errno(H3_E_NOMEM, errno);
  pager->slots = slots;
  void *hashes = mmap(NULL, (uint64_t)pager->max_slots * sizeof(uint64_t), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (hashes == MAP_FAILED) return h3_set_errno(H3_E_NOMEM, errno);
  pager->page_hashes = hashes;
  return h3_deliver_register(pager, pager->arena, pager->arena_bytes, 1);
}

void h3_slots_reset(h3_pager *pager) {
  pager->arena_used = pager->charged = pager->pinned = 0;
  pager->n_slots = pager->live_slots = pager->in_flight = 0;
  for (int i = 0; i < H3_CLASSES; i++) pager->warm[i] = pager->cold[i] = H3_NO_SLOT;
  for (int i = 0; i < H3_LISTS; i++) pager->lists[i] = (h3_list){H3_NO_SLOT, H3_NO_SLOT, 0, 0};
}

static void pager_free(h3_pager *pager) {
  contexts_destroy(pager);
  if (pager->arena) munmap(pager->arena, pager->arena_bytes);
  if (pager->slots) munmap(pager->slots, (uint64_t)pager->max_slots * sizeof(h3_slot));
  if (pager->page_hashes) munmap(pager->page_hashes, (uint64_t)pager->max_slots * sizeof(uint64_t));
  if (pager->uffd >= 0) close(pager->uffd);
  free(pager);
}

int h3_pager_create(const h3_pager_config *config, h3_pager **out) {
  *out = NULL;
  if (config->budget_bytes < H3_PAGE) return H3_E_BUDGET;
  if (config->budget_bytes >> 46) return H3_E_INVALID;
  h3_pager *pager = h3_fault_hit(H3_FAULT_ALLOC) ? NULL : calloc(1, sizeof *pager);
  if (!pager) return H3_E_NOMEM;
  pager->uffd = -1;
  pager->references = 1;
  pager->budget = config->budget_bytes & ~(uint64_t)(H3_PAGE - 1);
  pager->delivery = config->delivery == H3_DELIVERY_AUTO ? H3_DELIVERY_SIGNAL : config->delivery;
  h3_slots_reset(pager);
  int status = h3_map_init();
  if (status < 0) goto out;
  status = h3_pager_attach(pager);
  if (status < 0 && config->delivery == H3_DELIVERY_AUTO) {
    if (pager->uffd >= 0) close(pager->uffd);
    pager->delivery = H3_DELIVERY_DISPATCH;
    status = h3_pager_attach(pager);
  }
  if (status < 0) goto out;
  long processors = config->contexts > 0 ? config->contexts : sysconf(_SC_NPROCESSORS_ONLN) + 2;
  status = contexts_create(pager, (int)(processors > 16 ? 16 : processors < 2 ? 2 : processors));
  if (status < 0) goto out;
  status = arena_create(pager);
  if (status < 0) goto out;
  status = h3_signals_needed(pager->mode == H3_MODE_PROTECT ? SIGSEGV : SIGBUS);
  if (status < 0) goto out;
  status = h3_fork_install();
  if (status < 0) goto out;
  h3_lock_acquire(&h3_registry_lock);
  pager->next = h3_registry;
  h3_registry = pager;
  h3_lock_release(&h3_registry_lock);
  *out = pager;
out:
  if (status < 0) pager_free(pager);
  return status;
}

void h3_pager_release(h3_pager *pager) {
  if (atomic_fetch_sub(&pager->references, 1) > 1) return;
  h3_lock_acquire(&h3_registry_lock);
  for (h3_pager **link = &h3_registry; *link; link = &(*link)->next)
    if (*link == pager) {
      *link = pager->next;
      break;
    }
  h3_lock_release(&h3_registry_lock);
  pager_free(pager);
}

void h3_pager_destroy(h3_pager *pager) { h3_pager_release(pager); }

void h3_pager_get_stats(h3_pager *pager, h3_pager_stats *out) {
  h3_sigmask saved;
  h3_signals_block(&saved);
  h3_lock_acquire(&pager->lock);
  *out = (h3_pager_stats){.budget_bytes = pager->budget, .resident_bytes = pager->charged, .peak_resident_bytes = pager->peak,
                          .pinned_bytes = pager->pinned};
  h3_lock_release(&pager->lock);
  h3_signals_restore(&saved);
  out->faults = pager->faults;
  out->write_faults = pager->write_faults;
  out->fills = pager->fills;
  out->prefetches = pager->prefetches;
  out->evictions = pager->evictions;
  out->write_backs = pager->write_backs;
  out->waits = pager->waits;
  out->bytes_read = pager->bytes_read;
  out->bytes_written = pager->bytes_written;
  out->bytes_decoded = pager->bytes_decoded;
  out->bytes_encoded = pager->bytes_encoded;
  out->errors = pager->errors;
  out->delivery = pager->mode == H3_MODE_COPY ? H3_DELIVERY_SIGNAL_COPY : pager->delivery;
  out->move_supported = pager->mode == H3_MODE_MOVE;
}

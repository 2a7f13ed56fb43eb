/* Address space: ranges, the map from addresses to ranges, the arena's slots.
 * Slots and accounting are guarded by pager->lock; the map is read without a lock, inside fault handlers. */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "internal.h"
#include "pager.h"

/* One pointer per 2 MiB of the 47-bit user address space: 512 MiB of address space, of which a page is touched per GiB
 * of ranges. Lookup in a handler is one load. */
typedef _Atomic(h3_range *) map_entry;
static map_entry *_Atomic address_map;

int h3_map_reserve(uint64_t bytes, char **out) {
  const uint64_t granule = 1ull << H3_GRANULE_SHIFT;
  if (h3_fault_hit(H3_FAULT_ALLOC)) return H3_E_NOMEM;
  char *raw = mmap(NULL, bytes + granule, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return h3_set_errno(H3_E_NOMEM, errno);
  char *aligned = (char *)(((uintptr_t)raw + granule - 1) & ~(uintptr_t)(granule - 1));
  if (aligned > raw) munmap(raw, (size_t)(aligned - raw));
  const size_t tail = (size_t)(raw + granule - aligned);
  if (tail) munmap(aligned + bytes, tail);
  munlock(aligned, bytes); /* a process under mlockall would have the kernel fill all of it */
  *out = aligned;
  return H3_OK;
}

int h3_map_init(void) {
  if (address_map) return H3_OK;
  const size_t bytes = sizeof(map_entry) << (47 - H3_GRANULE_SHIFT);
  map_entry *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0), *none = NULL;
  if (map == MAP_FAILED) return h3_set_errno(H3_E_NOMEM, errno);
  if (!atomic_compare_exchange_strong(&address_map, &none, map)) munmap(map, bytes); /* another thread was first */
  return H3_OK;
}

void h3_map_set(char *address, uint64_t bytes, h3_range *range) {
  const uint64_t first = (uintptr_t)address >> H3_GRANULE_SHIFT;
  const uint64_t last = ((uintptr_t)address + bytes - 1) >> H3_GRANULE_SHIFT;
  map_entry *map = atomic_load(&address_map);
  for (uint64_t i = first; i <= last; i++) atomic_store_explicit(&map[i], range, memory_order_release);
}

h3_range *h3_map_find(const void *address) {
  const uint64_t index = (uintptr_t)address >> H3_GRANULE_SHIFT;
  map_entry *map = atomic_load_explicit(&address_map, memory_order_acquire);
  if (!map || index >> (47 - H3_GRANULE_SHIFT)) return NULL;
  return atomic_load_explicit(&map[index], memory_order_acquire);
}

h3_spec h3_range_spec(h3_range *range) {
  h3_lock_acquire(&range->pager->lock);
  const h3_spec spec = range->spec;
  h3_lock_release(&range->pager->lock);
  return spec;
}

uint64_t h3_block_count(const h3_range *range) {
  return (range->bytes + range->block_bytes - 1) / range->block_bytes;
}

uint32_t h3_raw_bytes(const h3_range *range, uint64_t block) {
  const uint64_t start = block * range->block_bytes, bytes = range->bytes;
  if (start >= bytes) return 0;
  return bytes - start < range->block_bytes ? (uint32_t)(bytes - start) : range->block_bytes;
}

uint32_t h3_pages_of(const h3_range *range, uint64_t block) {
  const uint32_t pages = (h3_raw_bytes(range, block) + H3_PAGE - 1) / H3_PAGE;
  return pages ? pages : 1;
}

/* Slot size for a block: two sizes per power of two, so that tails of many tensors share few classes. */
uint32_t h3_class_of(const h3_range *range, uint64_t block) {
  const uint32_t pages = h3_pages_of(range, block), most = range->block_bytes / H3_PAGE;
  if (pages == most || pages <= 2) return pages;
  uint32_t size = 2;
  while (size < pages) size = (size & (size - 1)) ? size / 3 * 4 : size + size / 2;
  return size < most ? size : most;
}

/* ---- slots ---- */

static uint32_t pop(h3_pager *pager, uint32_t *head) {
  const uint32_t index = *head;
  if (index != H3_NO_SLOT) *head = pager->slots[index].next;
  return index;
}

static void push(h3_pager *pager, uint32_t *head, uint32_t index) {
  pager->slots[index].next = *head;
  *head = index;
}

/* A slot without pages whose bytes are charged, or H3_NO_SLOT when the budget or the address space is used up. */
static uint32_t take_cold(h3_pager *pager, uint32_t pages) {
  const uint64_t bytes = (uint64_t)pages * H3_PAGE;
  if (pager->charged + bytes > pager->budget || pager->live_slots >= pager->live_limit) return H3_NO_SLOT;
  uint32_t index = pop(pager, &pager->cold[pages]);
  if (index == H3_NO_SLOT) {
    if (pager->n_slots >= pager->max_slots || pager->arena_used + bytes > pager->arena_bytes) return H3_NO_SLOT;
    index = pager->n_slots++;
    pager->slots[index] = (h3_slot){.address = pager->arena + pager->arena_used, .pages = pages};
    pager->arena_used += bytes;
  }
  pager->charged += bytes;
  pager->live_slots++;
  if (pager->charged > pager->peak) pager->peak = pager->charged;
  return index;
}

/* Gives up one free slot that holds pages of another size; 0 if there is none. Enters and leaves locked. */
static int drop_warm(h3_pager *pager) {
  for (uint32_t size = 1; size < H3_CLASSES; size++) {
    const uint32_t index = pop(pager, &pager->warm[size]);
    if (index == H3_NO_SLOT) continue;
    pager->in_flight++;
    h3_lock_release(&pager->lock);
    h3_slot_release(pager, index, 0);
    h3_lock_acquire(&pager->lock);
    return 1;
  }
  return 0;
}

static void signal_event(h3_pager *pager) {
  atomic_fetch_add(&pager->event, 1);
  h3_futex_wake(&pager->event, INT32_MAX);
}

void h3_slot_release(h3_pager *pager, uint32_t index, int keep_pages) {
  h3_slot *slot = &pager->slots[index];
  const uint64_t bytes = (uint64_t)slot->pages * H3_PAGE;
  if (!keep_pages) h3_slot_discard(pager, slot->address, bytes);
  h3_lock_acquire(&pager->lock);
  slot->range = NULL;
  push(pager, keep_pages ? &pager->warm[slot->pages] : &pager->cold[slot->pages], index);
  if (!keep_pages) {
    pager->charged -= bytes;
    pager->live_slots--;
  }
  pager->in_flight--;
  h3_lock_release(&pager->lock);
  signal_event(pager);
}

/* Evicts one block and frees its slot. H3_OK, or why not; H3_E_BUDGET when everything is pinned. Enters locked. */
static int make_room(h3_pager *pager, uint32_t pages) {
  const uint32_t index = h3_victim(pager);
  if (index == H3_NO_SLOT) {
    const uint32_t event = atomic_load(&pager->event);
    const int others = pager->in_flight > 0;
    h3_lock_release(&pager->lock);
    if (!others) return H3_E_BUDGET;
    h3_futex_wait(&pager->event, event); /* a slot under way will come free or become evictable */
    return H3_OK;
  }
  pager->in_flight++;
  h3_lock_release(&pager->lock);
  const int status = h3_evict(pager, index);
  if (status == H3_OK) h3_slot_release(pager, index, pager->slots[index].pages == pages);
  return status;
}

static int acquire(h3_pager *pager, uint32_t pages, int patience_ms, uint32_t *out) {
  for (int failures = 0, waits = 0;;) {
    h3_lock_acquire(&pager->lock);
    uint32_t index = pop(pager, &pager->warm[pages]);
    const int warm = index != H3_NO_SLOT;
    if (!warm) index = take_cold(pager, pages);
    if (index != H3_NO_SLOT) {
      pager->in_flight++;
      h3_lock_release(&pager->lock);
      h3_slot *slot = &pager->slots[index];
      const int status = warm ? H3_OK : h3_slot_materialise(pager, slot->address, (uint64_t)pages * H3_PAGE);
      if (status < 0) {
        h3_slot_release(pager, index, 0);
        return status;
      }
      *out = index;
      return H3_OK;
    }
    if (drop_warm(pager)) {
      h3_lock_release(&pager->lock);
      continue;
    }
    const int status = make_room(pager, pages);
    const int passing = atomic_load(&pager->kernel_pins) || waits < 2; /* the last one may just have let go */
    if (status == H3_E_BUDGET && passing && ++waits < patience_ms) {
      usleep(1000); /* kernels let go of their blocks soon; bounded, since two of them may wait for each other */
      continue;
    }
    /* A block that can't be saved now (disk full) may have clean neighbours: try a few others before giving up. */
    if (status < 0 && (status == H3_E_BUDGET || ++failures >= 8)) return status;
  }
}

int h3_slot_acquire(h3_pager *pager, uint32_t pages, uint32_t *out) { return acquire(pager, pages, 2000, out); }

int h3_slot_acquire_idle(h3_pager *pager, uint32_t pages, uint32_t *out) { return acquire(pager, pages, 0, out); }

/* Which block leaves when another must come. Policy over lists of slots; everything here runs under pager->lock.
 *
 * A hit costs nothing and so is never seen: only faults tell what is wanted. Four lists:
 *   SCAN    blocks that came right after their neighbours: most are read once
 *   NEW     other blocks that come for the first time in a while
 *   KEPT    blocks that were wanted again soon after they had left
 *   CYCLIC  blocks of ranges that are walked in the same order over and over
 * SCAN and NEW give up their oldest block while they hold more than their share; else KEPT does. So a scan displaces a
 * tenth of the budget, and a block earns its place by coming back. Over traces of 4,096 blocks under a budget of 512, misses
 * a touch (first in, first out | least recently used, which would have to see hits | this): Zipf 1.0 with scans between
 * 0.626 | 0.602 | 0.550; a hot set with an interleaved scan 0.730 | 0.673 | 0.512; Zipf 0.9 0.484 | 0.435 | 0.400; a loop
 * of 600 1.000 | 1.000 | 0.913; a window of 400 that moves on 0.083 | 0.056 | 0.100, the one that got worse. */
#include "internal.h"
#include "pager.h"

/* RECENT: one instruction may need several blocks at once, on several threads, and must not lose one to another. */
enum { SHARE = 10, RECENT = 16, LATELY = 32, RUN = 2 };

static void push(h3_pager *pager, uint32_t index, uint8_t id) {
  h3_slot *slot = &pager->slots[index];
  h3_list *list = &pager->lists[id];
  slot->list = id;
  slot->prev = list->tail;
  slot->next = H3_NO_SLOT;
  if (list->tail == H3_NO_SLOT)
    list->head = index;
  else
    pager->slots[list->tail].next = index;
  list->tail = index;
  list->bytes += (uint64_t)slot->pages * H3_PAGE;
  list->count++;
}

void h3_retire(h3_pager *pager, uint32_t index) {
  h3_slot *slot = &pager->slots[index];
  h3_list *list = &pager->lists[slot->list];
  if (slot->prev == H3_NO_SLOT)
    list->head = slot->next;
  else
    pager->slots[slot->prev].next = slot->next;
  if (slot->next == H3_NO_SLOT)
    list->tail = slot->prev;
  else
    pager->slots[slot->next].prev = slot->prev;
  list->bytes -= (uint64_t)slot->pages * H3_PAGE;
  list->count--;
}

static int admitted_lately(const h3_pager *pager, const h3_range *range, uint64_t block) {
  const h3_block *entry = &range->blocks[block];
  if ((atomic_load(&entry->word) & H3_STATE_MASK) != H3_RESIDENT) return 0;
  const uint32_t index = atomic_load_explicit(&entry->slot, memory_order_relaxed);
  if (index >= pager->n_slots) return 0;
  const h3_slot *slot = &pager->slots[index];
  return slot->range == range && slot->block == block && pager->admissions - slot->admitted <= LATELY;
}

static int ends_a_run(const h3_pager *pager, const h3_range *range, uint64_t block) {
  if (block < RUN) return 0;
  for (uint64_t i = 1; i <= RUN; i++)
    if (!admitted_lately(pager, range, block - i)) return 0;
  return 1;
}

/* An absent block's slot field says when it left, or was read in passing: the count of evictions then, 0 for never. */
static int left_lately(const h3_pager *pager, uint32_t stamp) {
  return stamp && (uint32_t)atomic_load(&pager->evictions) - stamp <= pager->live_slots / 2;
}

void h3_admit(h3_pager *pager, uint32_t index, int scan) {
  h3_slot *slot = &pager->slots[index];
  h3_range *range = slot->range;
  h3_block *block = &range->blocks[slot->block];
  const uint32_t stamp = atomic_load_explicit(&block->slot, memory_order_relaxed);
  uint8_t list = H3_LIST_NEW;
  if (range->cyclic) list = H3_LIST_CYCLIC;
  else if (left_lately(pager, stamp)) list = H3_LIST_KEPT;
  else if (scan || ends_a_run(pager, range, slot->block)) list = H3_LIST_SCAN;
  atomic_store_explicit(&block->slot, index, memory_order_relaxed);
  slot->admitted = ++pager->admissions;
  push(pager, index, list);
}

void h3_readmit(h3_pager *pager, uint32_t index) { push(pager, index, pager->slots[index].list); }

uint32_t h3_left_stamp(h3_pager *pager) {
  const uint32_t stamp = (uint32_t)(atomic_fetch_add(&pager->evictions, 1) + 1);
  return stamp ? stamp : 1;
}

void h3_passed_by(h3_pager *pager, h3_block *block) {
  const uint32_t now = (uint32_t)atomic_load(&pager->evictions);
  if (!h3_was_here(block)) atomic_store_explicit(&block->slot, now ? now : 1, memory_order_relaxed);
}

int h3_was_here(const h3_block *block) { return atomic_load_explicit(&block->slot, memory_order_relaxed) != 0; }

/* Takes the block from RESIDENT with no pins to EVICTING. */
static int claim(h3_pager *pager, uint32_t index) {
  h3_slot *slot = &pager->slots[index];
  _Atomic uint32_t *word = &slot->range->blocks[slot->block].word;
  uint32_t seen = atomic_load(word);
  while ((seen & (H3_STATE_MASK | H3_GUARDING)) == H3_RESIDENT && seen < H3_ONE_PIN)
    if (atomic_compare_exchange_weak(word, &seen, (seen & ~(uint32_t)H3_STATE_MASK) | H3_EVICTING)) return 1;
  return 0;
}

/* Of those that came at least `recent` admissions ago. */
static uint32_t claim_oldest(h3_pager *pager, const h3_list *list, uint32_t recent) {
  for (uint32_t i = list->head; i != H3_NO_SLOT; i = pager->slots[i].next)
    if (pager->admissions - pager->slots[i].admitted >= recent && claim(pager, i)) return i;
  return H3_NO_SLOT;
}

/* Newest first, so that repeated scans keep a fixed part; but not the very newest, which other threads are using. */
static uint32_t claim_newest(h3_pager *pager, const h3_list *list) {
  uint64_t spare = list->count / 2 < 8 ? list->count / 2 : 8;
  uint32_t i = list->tail;
  for (; spare && i != H3_NO_SLOT; spare--) i = pager->slots[i].prev;
  for (; i != H3_NO_SLOT; i = pager->slots[i].prev)
    if (claim(pager, i)) return i;
  return claim_oldest(pager, list, 0);
}

/* The block of the ordinary lists that came first, when nearly all are pinned or new. */
static uint32_t claim_first_come(h3_pager *pager) {
  uint32_t at[H3_LIST_CYCLIC], ages[H3_LIST_CYCLIC];
  for (int i = 0; i < H3_LIST_CYCLIC; i++) at[i] = pager->lists[i].head;
  for (;;) {
    int oldest = -1;
    for (int i = 0; i < H3_LIST_CYCLIC; i++) {
      if (at[i] == H3_NO_SLOT) continue;
      ages[i] = pager->admissions - pager->slots[at[i]].admitted;
      if (oldest < 0 || ages[i] > ages[oldest]) oldest = i;
    }
    if (oldest < 0) return H3_NO_SLOT;
    const uint32_t index = at[oldest];
    at[oldest] = pager->slots[index].next;
    if (claim(pager, index)) return index;
  }
}

static uint32_t claim_ordinary(h3_pager *pager) {
  const h3_list *scan = &pager->lists[H3_LIST_SCAN], *fresh = &pager->lists[H3_LIST_NEW], *kept = &pager->lists[H3_LIST_KEPT];
  const h3_list *order[3] = {kept, fresh, scan};
  const uint64_t share = pager->budget / SHARE;
  if (fresh->bytes > share) order[0] = fresh, order[1] = kept;
  if (scan->bytes > share) order[2] = order[1], order[1] = order[0], order[0] = scan;
  for (int i = 0; i < 3; i++) {
    const uint32_t found = claim_oldest(pager, order[i], RECENT);
    if (found != H3_NO_SLOT) return found;
  }
  return claim_first_come(pager);
}

uint32_t h3_victim(h3_pager *pager) {
  const h3_list *lists = pager->lists, *cyclic = &lists[H3_LIST_CYCLIC];
  const int cyclic_first = cyclic->bytes > lists[H3_LIST_SCAN].bytes + lists[H3_LIST_NEW].bytes + lists[H3_LIST_KEPT].bytes;
  uint32_t found = cyclic_first ? claim_newest(pager, cyclic) : claim_ordinary(pager);
  if (found == H3_NO_SLOT) found = cyclic_first ? claim_ordinary(pager) : claim_newest(pager, cyclic);
  if (found != H3_NO_SLOT) h3_retire(pager, found);
  return found;
}

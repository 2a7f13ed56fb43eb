/* stage.c: memory that files are read into, on huge pages, shared by all pagers of the process.
 *
 * A direct read costs the kernel and the device one segment for each stretch of physical memory. In a virtual machine a
 * segment cost 7 us: measured, reads into scattered 4 KiB pages ran at 590 MB/s, into huge pages at 2,500 MB/s; 44 KiB at
 * random took 95 us and 31 us. Where no huge pages are to be had, reads are only slower.
 *
 * The area is small, and what is free lowest goes first, so that few pages are touched and they stay in the caches.
 * No locks; async-signal-safe but for h3_stage_init. */
#define _GNU_SOURCE
#include <stdint.h>
#include <sys/mman.h>

#include "internal.h"
#include "lock.h"
#include "stage.h"

enum { UNIT = 128 * 1024, UNITS = 64, HUGE = 2 << 20 };

static char *area;
static _Atomic uint64_t used;      /* a bit per unit */
static _Atomic uint32_t released;  /* futex word: units came free */
static _Atomic uint32_t waiting;

int h3_stage_init(void) {
  if (area) return H3_OK;
  char *memory = h3_map((size_t)UNIT * UNITS + HUGE);
  if (!memory) return H3_E_NOMEM;
  area = memory + (-(uintptr_t)memory & (HUGE - 1));
  madvise(area, (size_t)UNIT * UNITS, MADV_HUGEPAGE);
  madvise(area, (size_t)UNIT * UNITS, MADV_WIPEONFORK); /* a child shares nothing of it that it would have to copy */
  return H3_OK;
}

void h3_stage_after_fork(void) {
  atomic_store(&used, 0);
  atomic_store(&waiting, 0);
}

static uint64_t mask_of(unsigned units) { return units == UNITS ? UINT64_MAX : (1ull << units) - 1; }

/* The lowest place of that many free units in a row, or UNITS. */
static unsigned find(uint64_t taken, unsigned units) {
  for (unsigned at = 0; at + units <= UNITS; at++) {
    if (!(taken >> at & mask_of(units))) return at;
  }
  return UNITS;
}

int h3_stage_acquire(uint64_t bytes, h3_stage *stage) {
  *stage = (h3_stage){0};
  if (!area || bytes > H3_STAGE_MOST) return 0;
  const unsigned units = (unsigned)((bytes + H3_READ_SLACK + UNIT - 1) / UNIT);
  uint64_t taken = atomic_load(&used);
  for (;;) {
    const unsigned at = find(taken, units);
    if (at == UNITS) return 0;
    if (!atomic_compare_exchange_weak(&used, &taken, taken | mask_of(units) << at)) continue;
    *stage = (h3_stage){area + (size_t)at * UNIT, mask_of(units) << at};
    return 1;
  }
}

int h3_stage_wait(uint64_t bytes, h3_stage *stage) {
  for (;;) {
    const uint32_t seen = atomic_load(&released);
    if (h3_stage_acquire(bytes, stage)) return 1;
    if (!area || bytes > H3_STAGE_MOST) return 0;
    atomic_fetch_add(&waiting, 1);
    h3_futex_wait(&released, seen);
    atomic_fetch_sub(&waiting, 1);
  }
}

void h3_stage_release(h3_stage *stage) {
  if (!stage->units) return;
  atomic_fetch_and(&used, ~stage->units);
  *stage = (h3_stage){0};
  atomic_fetch_add(&released, 1); /* before waiting is read: who waits later sees that it has changed */
  if (atomic_load(&waiting)) h3_futex_wake(&released, INT32_MAX);
}

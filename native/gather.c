/* Rows that are resident: whether they are, and their way to the result. What is absent goes through fetch.c.
 *
 * The result is fresh memory, and its first touch costs more than the rows: in pages of 4 KiB the kernel takes 1.5 to 6 us
 * for each, in huge pages of 2 MiB it clears them at the speed of memory. So memory for results is asked for in huge pages,
 * and touched first by the thread that copies into it.
 *
 * No lock and no pin: what is evicted meanwhile is faulted in by the thread that copies, as in any torch kernel. The caller
 * is in an operation (h3_op_enter), which reports a fill that fails. */
#define _GNU_SOURCE
#include <string.h>
#include <sys/mman.h>

#include "compute.h"
#include "internal.h"
#include "pager.h"

enum {
  HUGE_BYTES = 1 << 21,
  PIECE_BYTES = HUGE_BYTES, /* what a thread copies at a time */
  THREAD_BYTES = 512 << 10, /* less than this is copied sooner than another thread wakes */
  ASK_BYTES = 512           /* of the next row but one, asked for early: the processor fetches the rest unasked */
};

int h3_rows_state(h3_range *range, const h3_row_set *set, const int64_t *index, uint64_t n) {
  const uint64_t bytes = range->bytes;
  int state = H3_ROWS_RESIDENT;
  if (set->row_bytes == 0 || set->base > bytes) return H3_E_INVALID;
  for (uint64_t i = 0; i < n; i++) {
    const int64_t row = index[i] < 0 && set->wrap ? index[i] + set->rows : index[i];
    if (row < 0 || row >= set->rows) return H3_E_INVALID;
    if (state == H3_ROWS_ABSENT) continue; /* the rest is only checked */
    const uint64_t from = set->base + (uint64_t)row * set->stride;
    if (from > bytes || set->row_bytes > bytes - from) return H3_E_INVALID;
    for (uint64_t b = from / range->block_bytes; b <= (from + set->row_bytes - 1) / range->block_bytes; b++)
      if ((atomic_load_explicit(&range->blocks[b].word, memory_order_relaxed) & H3_STATE_MASK) != H3_RESIDENT)
        state = H3_ROWS_ABSENT;
  }
  return state;
}

typedef struct h3_copy {
  const char *from; /* row 0 */
  const h3_row_set *set;
  const int64_t *index;
  uint64_t n, piece; /* rows */
  char *out;
  _Atomic uint64_t next; /* row that nobody has taken */
} h3_copy;

/* NULL: the index is no longer what was checked, because somebody writes to it meanwhile. */
static const char *row_of(const h3_copy *copy, uint64_t i) {
  const int64_t number = copy->index[i], row = number < 0 && copy->set->wrap ? number + copy->set->rows : number;
  return row < 0 || row >= copy->set->rows ? NULL : copy->from + (uint64_t)row * copy->set->stride;
}

static void ask(const char *row, uint64_t row_bytes) {
  for (uint64_t at = 0; row && at < row_bytes && at < ASK_BYTES; at += 64) __builtin_prefetch(row + at);
}

static int copy_piece(const h3_copy *copy, uint64_t first, uint64_t end) {
  const uint64_t row_bytes = copy->set->row_bytes;
  for (uint64_t i = first; i < end; i++) {
    if (i + 2 < end) ask(row_of(copy, i + 2), row_bytes);
    const char *row = row_of(copy, i);
    if (!row) return H3_E_INVALID;
    memcpy(copy->out + i * row_bytes, row, row_bytes);
  }
  return H3_OK;
}

/* Takes pieces until none is left: units are as many as threads may work. */
static int copy_pieces(void *context, int64_t unit, int worker) {
  h3_copy *copy = context;
  int status = H3_OK;
  (void)unit, (void)worker;
  while (status == H3_OK) {
    const uint64_t first = atomic_fetch_add(&copy->next, copy->piece);
    if (first >= copy->n) break;
    status = copy_piece(copy, first, copy->n - first < copy->piece ? copy->n : first + copy->piece);
  }
  return status;
}

int h3_rows_copy(h3_range *range, const h3_row_set *set, const int64_t *index, uint64_t n, void *out, int threads) {
  const int state = h3_rows_state(range, set, index, n);
  if (state != H3_ROWS_RESIDENT) return state;
  const int64_t units = h3_max64(1, h3_min64(threads, (int64_t)(n * set->row_bytes / THREAD_BYTES)));
  const int64_t piece = h3_min64(PIECE_BYTES / (int64_t)set->row_bytes, (int64_t)n / units);
  h3_copy copy = {.from = range->address + set->base, .set = set, .index = index, .n = n, .out = out};
  copy.piece = (uint64_t)h3_max64(1, piece);
  const int status = h3_parallel(copy_pieces, &copy, units);
  return status < 0 ? status : state;
}

void h3_huge_pages(uintptr_t address, uint64_t bytes) {
  const uintptr_t start = (address + HUGE_BYTES - 1) & ~(uintptr_t)(HUGE_BYTES - 1);
  const uintptr_t end = (address + bytes) & ~(uintptr_t)(HUGE_BYTES - 1);
  if (end > start) madvise((void *)start, end - start, MADV_HUGEPAGE); /* refused where the kernel has none: as well */
}

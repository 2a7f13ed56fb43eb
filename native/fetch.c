/* Many blocks at once: a pool of threads that read at queue depth, past the page cache, and decode in parallel, either to
 * place blocks (fetch) or to copy rows out of them without placing (gather). Ordinary context, but for what fill.c says of
 * the parts it shares.
 *
 * Threads that each wait in pread reach the disk's depth as well as io_uring does (measured: 12 to 45 KiB at random, depth
 * 8 to 32, equal or better), need no privilege that containers refuse, and decode what they have read.
 *
 * Locks: pool.lock guards the jobs' list, who is inside, and what is asked ahead (also from fault handlers); job->lock guards how far a job has been handed out, and is
 * taken before pager->lock. Neither is held over I/O, an ioctl, a touch of a range or a wait.
 * Rule: a worker claims the blocks of a run together, so while it owns one it waits for nothing but a context, room, and
 * its own reads; blocks that others own come last, when it owns none. Room comes from blocks that nobody owns.
 * Fork: a child has no workers; the next job there starts its own. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "internal.h"
#include "pager.h"

enum {
  WORKERS = 32,
  RUN_BLOCKS = 64,         /* of one read */
  RUN_BYTES = 512 * 1024 - H3_READ_SLACK, /* of one read, unless one chunk is longer */
  RUN_GAP = 4096,          /* bytes between two chunks that are read over */
  GLANCE = 4,              /* rows that take less than one in so many bytes of a block leave it where it is, at first */
  ASKS = 32,               /* asked ahead and not begun */
  ASK_WORKERS = 4,         /* that read ahead at once: more of them take turns on the processors that the scan needs */
  ASK_BYTES = 256 * 1024   /* raw, of one read ahead: who scans waits for the first, and several are under way */
};

typedef struct h3_rows {
  const int64_t *offsets, *positions; /* in the range, ascending; in out, counted in rows */
  uint64_t n, row_bytes;
  char *out;
} h3_rows;

typedef struct h3_job {
  struct h3_job *next;
  h3_range *range;
  const uint64_t *blocks; /* ascending; NULL: n blocks from first on */
  uint64_t first, n;
  const h3_rows *rows; /* NULL: blocks are placed */
  uint32_t run_blocks;
  const h3_stream *scan; /* asked ahead of it; or NULL */
  int in_order;          /* neighbours: they leave in the order they came, whichever worker was first */
  int inside; /* workers; guarded by pool.lock */
  h3_lock lock;     /* guards the rest */
  uint64_t at, failed;
  int status;
} h3_job;

typedef struct h3_run {
  uint64_t blocks[RUN_BLOCKS], offset, bytes;
  uint32_t n;
  unsigned char claimed[RUN_BLOCKS];
} h3_run;

typedef struct h3_ask {
  h3_range *range;
  const h3_stream *stream;
  uint64_t from, to;
} h3_ask;

_Atomic uint32_t h3_pool_wanted;
static struct {
  h3_lock lock;
  h3_job *jobs;
  h3_ask asks[ASKS]; /* oldest first */
  uint32_t n_asks, asking; /* asking: workers that read ahead now */
  int started;
  _Atomic uint32_t published, left; /* futex words: a job came; a worker left one */
} pool;

/* ---- runs ---- */

static uint64_t block_at(const h3_job *job, uint64_t i) { return job->blocks ? job->blocks[i] : job->first + i; }

/* Whether the run can take one more block that is read from there. */
static int extends(const h3_run *run, const h3_chunk *chunk) {
  if (!run->bytes) return 1;
  const uint64_t end = run->offset + run->bytes;
  return chunk->offset >= end && chunk->offset - end <= RUN_GAP && chunk->offset + chunk->stored_bytes - run->offset <= RUN_BYTES;
}

/* The next blocks of the job, as far as one read brings them. */
static int take_run(h3_job *job, h3_run *run) {
  h3_range *range = job->range;
  run->n = 0;
  run->offset = run->bytes = 0;
  h3_lock_acquire(&job->lock);
  h3_lock_acquire(&range->pager->lock); /* entries change under it */
  for (; job->at < job->n && run->n < job->run_blocks; job->at++) {
    const uint64_t block = block_at(job, job->at);
    const h3_chunk chunk = range->blocks[block].chunk;
    if (chunk.stored_bytes && chunk.stored_bytes <= H3_MAX_CHUNK &&
        (atomic_load(&range->blocks[block].word) & H3_STATE_MASK) == H3_ABSENT) {
      if (!extends(run, &chunk)) break;
      if (!run->bytes) run->offset = chunk.offset;
      run->bytes = chunk.offset + chunk.stored_bytes - run->offset;
    }
    run->blocks[run->n++] = block;
  }
  h3_lock_release(&range->pager->lock);
  h3_lock_release(&job->lock);
  return run->n > 0;
}

static void note_failure(h3_job *job, uint64_t block, int status) {
  h3_lock_acquire(&job->lock);
  if (job->status == H3_OK || block < job->failed) {
    job->status = status;
    job->failed = block;
  }
  h3_lock_release(&job->lock);
}

/* ---- rows ---- */

static uint64_t first_row_after(const h3_rows *rows, int64_t offset) {
  uint64_t low = 0, high = rows->n;
  while (low < high) {
    const uint64_t middle = low + (high - low) / 2;
    if (rows->offsets[middle] > offset) high = middle;
    else low = middle + 1;
  }
  return low;
}

/* What rows hold of a block goes out. */
static void copy_rows(const h3_rows *rows, const h3_range *range, uint64_t block, const char *data) {
  const int64_t start = (int64_t)(block * range->block_bytes), end = start + (int64_t)range->block_bytes;
  const int64_t row_bytes = (int64_t)rows->row_bytes;
  for (uint64_t i = first_row_after(rows, start - row_bytes); i < rows->n && rows->offsets[i] < end; i++) {
    const int64_t row = rows->offsets[i], from = row > start ? row : start, to = row + row_bytes < end ? row + row_bytes : end;
    memcpy(rows->out + rows->positions[i] * row_bytes + (from - row), data + (from - start), (size_t)(to - from));
  }
}

/* A claimed block: decoded aside, its rows copied out, absent again. */
static int pass_by(h3_job *job, uint64_t block, const h3_window *window) {
  h3_range *range = job->range;
  h3_context *context = h3_context_acquire(range->pager);
  context->window = window;
  const int status = h3_chunk_load(context, range, block, &range->blocks[block].chunk, context->copy, 0);
  h3_passed_by(range->pager, &range->blocks[block]);
  h3_block_settle(&range->blocks[block], H3_ABSENT, 0);
  if (status == H3_OK) copy_rows(job->rows, range, block, context->copy);
  else atomic_fetch_add(&range->pager->errors, 1);
  h3_context_release(range->pager, context);
  return status;
}

/* Whether the budget has room that was never used: a block that stays costs nobody anything then. */
static int has_room(h3_range *range, uint64_t block) {
  h3_pager *pager = range->pager;
  const uint64_t bytes = (uint64_t)h3_class_of(range, block) * H3_PAGE;
  h3_lock_acquire(&pager->lock);
  const int room = pager->charged + bytes * WORKERS <= pager->budget;
  h3_lock_release(&pager->lock);
  return room;
}

/* Rows take little of a block that nobody wanted before: bringing it in would cost more than they do, and memory that may
 * never be looked at. If it is wanted again it comes. */
static int is_glance(const h3_job *job, uint64_t block) {
  const h3_rows *rows = job->rows;
  const int64_t start = (int64_t)(block * job->range->block_bytes), end = start + (int64_t)job->range->block_bytes;
  const uint64_t most = job->range->block_bytes / GLANCE / rows->row_bytes;
  if (h3_was_here(&job->range->blocks[block])) return 0;
  const uint64_t first = first_row_after(rows, start - (int64_t)rows->row_bytes);
  return first + most >= rows->n || rows->offsets[first + most] >= end;
}

typedef struct h3_visited {
  h3_job *job;
  int done;
} h3_visited;

static void visit_rows(void *argument, uint64_t block, const char *raw) {
  h3_visited *visited = argument;
  copy_rows(visited->job->rows, visited->job->range, block, raw);
  visited->done = 1;
}

/* The scan that this was read for has gone by: bringing it in now would push out what the scan is at. */
static int too_late(const h3_job *job, uint64_t block) { return job->scan && block < atomic_load(&job->scan->last); }

/* Serves a claimed block. 1: it found no room and is nobody's again. */
static int serve_claimed(h3_job *job, uint64_t block, const h3_window *window) {
  h3_visited visited = {job, 0};
  h3_fill_with with = {.window = window, .scan = job->scan || job->in_order};
  if (!job->rows) return h3_block_fill(job->range, block, &with);
  if (is_glance(job, block) || !has_room(job->range, block)) return pass_by(job, block, window);
  with.visit = visit_rows;
  with.argument = &visited;
  const int status = h3_block_fill(job->range, block, &with);
  return visited.done ? H3_OK : status == H3_E_BUDGET ? 1 : status;
}

/* Rows of a block that is resident, or that others were moving when its turn came. Owns no block while it waits. */
static int serve_other(h3_job *job, uint64_t block, const h3_window *window) {
  h3_range *range = job->range;
  for (;;) {
    const int held = h3_block_hold(range, block);
    if (held < 0) return held;
    if (held) {
      atomic_fetch_add(&range->pager->kernel_pins, 1);
      copy_rows(job->rows, range, block, range->address + block * range->block_bytes);
      h3_block_unpin(range, block);
      atomic_fetch_sub(&range->pager->kernel_pins, 1);
      return H3_OK;
    }
    if (h3_block_claim(range, block)) return pass_by(job, block, window);
  }
}

static void serve_run(h3_job *job, h3_run *run) {
  h3_range *range = job->range;
  h3_window window = {0};
  h3_stage stage = {0};
  char *data = NULL;
  if (run->bytes) h3_stage_wait(run->bytes, &stage); /* no block is owned yet */
  for (uint32_t i = 0; i < run->n; i++)
    run->claimed[i] = (unsigned char)(!too_late(job, run->blocks[i]) && h3_block_claim(range, run->blocks[i]));
  atomic_fetch_add(&range->readers, 1); /* before the file is looked at: see h3_range_detach */
  h3_file *file = range->file;
  /* A read that fails is repeated chunk by chunk, so that one bad sector fails one block. */
  if (stage.units && h3_file_read_direct(file, run->offset, run->bytes, stage.data, stage.data, &data) == H3_OK)
    window = (h3_window){file, run->offset, run->bytes, data};
  for (uint32_t i = 0; i < run->n; i++) {
    if (!run->claimed[i]) continue;
    if (too_late(job, run->blocks[i])) {
      h3_block_settle(&range->blocks[run->blocks[i]], H3_ABSENT, 0);
      continue;
    }
    const int status = serve_claimed(job, run->blocks[i], &window);
    if (status < 0) note_failure(job, run->blocks[i], status);
    run->claimed[i] = status != 1;
  }
  for (uint32_t i = 0; job->rows && i < run->n; i++) {
    const int status = run->claimed[i] ? H3_OK : serve_other(job, run->blocks[i], &window);
    if (status < 0) note_failure(job, run->blocks[i], status);
  }
  atomic_fetch_sub(&range->readers, 1);
  h3_stage_release(&stage);
}

static void serve(h3_job *job) {
  h3_run run;
  while (take_run(job, &run)) serve_run(job, &run);
}

/* ---- the pool ---- */

/* A job with work left, entered; or NULL. */
static h3_job *enter(void) {
  h3_job *job;
  h3_lock_acquire(&pool.lock);
  job = pool.jobs;
  if (job) job->inside++;
  h3_lock_release(&pool.lock);
  return job;
}

/* Nothing is left to hand out, or nobody comes: no worker enters any more. */
static void unlink_job(h3_job *job) {
  for (h3_job **link = &pool.jobs; *link; link = &(*link)->next)
    if (*link == job) {
      *link = job->next;
      return;
    }
}

static void leave(h3_job *job) {
  h3_lock_acquire(&pool.lock);
  unlink_job(job);
  const int last = --job->inside == 0;
  h3_lock_release(&pool.lock); /* the job may be gone from here on */
  if (!last) return;
  atomic_fetch_add(&pool.left, 1);
  h3_futex_wake(&pool.left, INT32_MAX);
}

/* ---- what is asked ahead ---- */

static void drop_ask(uint32_t i) {
  pool.n_asks--;
  memmove(&pool.asks[i], &pool.asks[i + 1], (pool.n_asks - i) * sizeof *pool.asks);
}

static uint64_t ask_blocks(const h3_range *range) {
  return range->block_bytes < ASK_BYTES ? ASK_BYTES / range->block_bytes : 1;
}

int h3_pool_ask(h3_range *range, const h3_stream *stream, uint64_t from, uint64_t to) {
  h3_lock_acquire(&pool.lock);
  const int taken = pool.started && pool.n_asks < ASKS && !atomic_load(&range->still);
  if (taken) pool.asks[pool.n_asks++] = (h3_ask){range, stream, from, to};
  if (!pool.started) atomic_store(&h3_pool_wanted, 1);
  h3_lock_release(&pool.lock);
  if (!taken) return 0;
  atomic_fetch_add(&pool.published, 1);
  const uint64_t pieces = (to - from + ask_blocks(range) - 1) / ask_blocks(range);
  h3_futex_wake(&pool.published, (int)(pieces < ASK_WORKERS ? pieces : ASK_WORKERS));
  return 1;
}

/* The next piece, as a job of this worker's own; its range stays while it counts as a reader. */
static int take_ask(h3_job *job) {
  h3_lock_acquire(&pool.lock);
  const int found = pool.n_asks > 0 && pool.asking < ASK_WORKERS;
  if (found) {
    h3_ask *ask = &pool.asks[0];
    const uint64_t left = ask->to - ask->from, most = ask_blocks(ask->range), n = left < most ? left : most;
    *job = (h3_job){.range = ask->range, .first = ask->from, .n = n, .run_blocks = (uint32_t)n, .scan = ask->stream};
    atomic_fetch_add(&ask->range->readers, 1);
    pool.asking++;
    ask->from += n;
    if (ask->from == ask->to) drop_ask(0);
  }
  h3_lock_release(&pool.lock);
  return found;
}

static void end_ask(h3_job *job) {
  atomic_fetch_sub(&job->range->readers, 1);
  h3_lock_acquire(&pool.lock);
  pool.asking--; /* this worker looks for the next piece itself */
  h3_lock_release(&pool.lock);
}

void h3_ahead_stop(h3_range *range) {
  atomic_fetch_add(&range->still, 1);
  h3_lock_acquire(&pool.lock);
  for (uint32_t i = pool.n_asks; i-- > 0;)
    if (pool.asks[i].range == range) drop_ask(i);
  h3_lock_release(&pool.lock);
  while (atomic_load(&range->readers)) usleep(50);
}

void h3_ahead_resume(h3_range *range) { atomic_fetch_sub(&range->still, 1); }

static void *work(void *unused) {
  (void)unused;
  for (;;) {
    const uint32_t seen = atomic_load(&pool.published);
    h3_job *job = enter(), asked;
    if (job) {
      serve(job);
      leave(job);
    } else if (take_ask(&asked)) {
      serve(&asked);
      end_ask(&asked);
    } else {
      h3_futex_wait(&pool.published, seen);
    }
  }
  return NULL;
}

/* Fewer workers than wanted, when the system refuses more, only make jobs slower. */
static void start_workers(int wanted) {
  pthread_attr_t attributes;
  if (pool.started >= wanted || pthread_attr_init(&attributes)) return;
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  for (pthread_t thread; pool.started < wanted; pool.started++)
    if (pthread_create(&thread, &attributes, work, NULL)) break;
  pthread_attr_destroy(&attributes);
}

void h3_pool_start(void) {
  h3_sigmask saved;
  h3_signals_block(&saved);
  h3_lock_acquire(&pool.lock);
  start_workers(ASK_WORKERS);
  h3_lock_release(&pool.lock);
  h3_signals_restore(&saved);
  atomic_store(&h3_pool_wanted, 0);
}

void h3_pool_after_fork(void) {
  pool.lock.word = 0;
  pool.jobs = NULL;
  pool.n_asks = pool.asking = 0;
  pool.started = 0;
}

/* Publishes a job, works on it, and returns when it is done. Signals are masked, which new workers inherit. */
static void run_job(h3_job *job) {
  const int threads = h3_get_threads();
  const uint64_t share = job->n / (2 * (uint64_t)(threads > 0 ? threads : 1));
  const uint64_t blocks = RUN_BYTES / job->range->block_bytes * 2;
  job->run_blocks = (uint32_t)(share < 1 ? 1 : share);
  if (job->run_blocks > RUN_BLOCKS) job->run_blocks = RUN_BLOCKS;
  if (blocks && job->run_blocks > blocks) job->run_blocks = (uint32_t)blocks;
  const uint64_t runs = (job->n + job->run_blocks - 1) / job->run_blocks;
  if (runs > 1) {
    h3_lock_acquire(&pool.lock);
    start_workers(WORKERS);
    job->next = pool.jobs;
    pool.jobs = job;
    h3_lock_release(&pool.lock);
    atomic_fetch_add(&pool.published, 1);
    h3_futex_wake(&pool.published, (int)(runs - 1 < WORKERS ? runs - 1 : WORKERS));
  }
  serve(job);
  for (;;) {
    const uint32_t seen = atomic_load(&pool.left);
    h3_lock_acquire(&pool.lock);
    unlink_job(job);
    const int inside = job->inside;
    h3_lock_release(&pool.lock);
    if (!inside) return;
    h3_futex_wait(&pool.left, seen);
  }
}

/* ---- the contract's functions ---- */

int h3_fetch_span(h3_range *range, uint64_t first, uint64_t end, uint64_t *failed) {
  h3_job job = {.range = range, .first = first, .n = end > first ? end - first : 0, .in_order = end - first > 2};
  if (job.n) run_job(&job);
  *failed = job.failed;
  return job.status;
}

int h3_range_fetch(h3_range *range, const uint64_t *blocks, uint64_t n, uint64_t *failed) {
  *failed = 0;
  for (uint64_t i = 0; i < n; i++)
    if (blocks[i] >= h3_block_count(range) || (i && blocks[i] <= blocks[i - 1])) return H3_E_INVALID;
  h3_job job = {.range = range, .blocks = blocks, .n = n};
  h3_sigmask saved;
  h3_signals_block(&saved);
  if (n) run_job(&job);
  h3_signals_restore(&saved);
  *failed = job.failed;
  return job.status;
}

/* Distinct blocks of the rows, ascending, into blocks (NULL: only counted). */
static uint64_t blocks_of(const h3_rows *rows, uint64_t block_bytes, uint64_t *blocks) {
  uint64_t n = 0, next = 0;
  for (uint64_t i = 0; i < rows->n; i++) {
    const uint64_t first = (uint64_t)rows->offsets[i] / block_bytes;
    const uint64_t last = ((uint64_t)rows->offsets[i] + rows->row_bytes - 1) / block_bytes;
    for (uint64_t b = first > next ? first : next; b <= last; b++, n++)
      if (blocks) blocks[n] = b;
    if (last + 1 > next) next = last + 1;
  }
  return n;
}

static int rows_check(const h3_range *range, const h3_rows *rows) {
  if (rows->row_bytes == 0 || rows->row_bytes > range->bytes) return H3_E_INVALID;
  for (uint64_t i = 0; i < rows->n; i++) {
    if (rows->offsets[i] < 0 || (uint64_t)rows->offsets[i] > range->bytes - rows->row_bytes) return H3_E_INVALID;
    if (rows->positions[i] < 0 || (i && rows->offsets[i] < rows->offsets[i - 1])) return H3_E_INVALID;
  }
  return H3_OK;
}

int h3_rows_gather(h3_range *range, const int64_t *offsets, const int64_t *positions, uint64_t n, uint64_t row_bytes,
                   void *out, uint64_t *failed) {
  const h3_rows rows = {offsets, positions, n, row_bytes, out};
  *failed = 0;
  const int status = rows_check(range, &rows);
  if (status < 0 || !n) return status;
  h3_job job = {.range = range, .rows = &rows, .n = blocks_of(&rows, range->block_bytes, NULL)};
  uint64_t *blocks = h3_fault_hit(H3_FAULT_ALLOC) ? NULL : malloc(job.n * sizeof *blocks);
  if (!blocks) return h3_set_errno(H3_E_NOMEM, ENOMEM);
  blocks_of(&rows, range->block_bytes, blocks);
  job.blocks = blocks;
  h3_sigmask saved;
  h3_signals_block(&saved);
  run_job(&job);
  h3_signals_restore(&saved);
  free(blocks);
  *failed = job.failed;
  return job.status;
}

/* The pager: threads that read, write, prefetch, pin, flush, export and drop at once under a small budget, growth and
 * detach under readers, forks, failures; in each fault delivery that this kernel offers. What is read must be what was
 * written, and so must what the file holds in the end.
 *
 * TSan defers signals, so its build touches pinned memory only: no block is filled by a fault, none is unprotected by one.
 * Tensor bytes are written while flush copies them, by design: functions that touch them are hidden from TSan. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "test.h"

#if defined(__SANITIZE_THREAD__)
#define UNDER_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define UNDER_TSAN 1
#endif
#endif
#ifndef UNDER_TSAN
#define UNDER_TSAN 0
#endif
#define TOUCHES __attribute__((no_sanitize("thread"), noinline))

enum {
  BUDGET = 1 << 20, WORKERS = 4, ROUNDS = 400,
  STILL_BYTES = (3 << 20) + 5000, STILL_BLOCK = 65536, STILL_BLOCKS = STILL_BYTES / STILL_BLOCK + 1,
  LIVE_CELLS = 400 * 1000 + 3, LIVE_BYTES = 4 * LIVE_CELLS, LIVE_BLOCK = 16384, LIVE_BLOCKS = LIVE_BYTES / LIVE_BLOCK + 1,
  LOG_CELLS = 60 * 1000, LOG_BLOCK = 8192
};
static const h3_spec bf16 = {.elem_bytes = 2, .filter = H3_FILTER_EXPNIBBLE, .exp_bits = 8, .level = 1};
static const h3_spec cells32 = {.elem_bytes = 4, .filter = H3_FILTER_ZSTD, .level = 1};

typedef struct world {
  h3_pager *pager;
  int fd;
  h3_file *file;
  uint8_t *raw; /* what still holds */
  h3_range *still, *live;
} world;

static int open_temporary(void) {
  FILE *file = tmpfile(); /* without a name, and open until the end */
  CHECK(file);
  return fileno(file);
}

/* ---- tensor bytes ---- */
static char *address(h3_range *range, uint64_t offset) { return (char *)h3_range_address(range) + offset; }

TOUCHES static int same(const char *a, const uint8_t *b, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes; i++)
    if ((uint8_t)a[i] != b[i]) return 0;
  return 1;
}
TOUCHES static uint32_t load(const char *at) { return *(const volatile uint32_t *)(const void *)at; }
TOUCHES static void store(char *at, uint32_t value) { *(volatile uint32_t *)(void *)at = value; }

/* Faults fill what is absent, or a pin does first. */
static int hold(uint64_t *rng, const char *at, uint64_t bytes) {
  if (!UNDER_TSAN && below(rng, 2)) return 0;
  CHECK(h3_pin_address(at, bytes) == H3_OK);
  return 1;
}
static void release(int held, const char *at, uint64_t bytes) {
  if (held) h3_unpin_address(at, bytes);
}

static uint32_t get(uint64_t *rng, h3_range *range, uint64_t cell) {
  const char *at = address(range, 4 * cell);
  int held = hold(rng, at, 4);
  uint32_t value = load(at);
  release(held, at, 4);
  return value;
}

static void put(uint64_t *rng, h3_range *range, uint64_t cell, uint32_t value) {
  char *at = address(range, 4 * cell);
  if (UNDER_TSAN) { /* what kernels hold a flush may protect, and a write to it faults */
    int status;
    while ((status = h3_range_pin(range, 4 * cell, 4)) == H3_E_BUDGET) usleep(100);
    CHECK(status == H3_OK);
    store(at, value);
    h3_range_unpin(range, 4 * cell, 4);
    return;
  }
  int held = hold(rng, at, 4);
  store(at, value);
  release(held, at, 4);
}

static void check_still(uint64_t *rng, const world *w) {
  uint32_t at = below(rng, STILL_BYTES), bytes = 1 + below(rng, 3000);
  if (bytes > STILL_BYTES - at) bytes = STILL_BYTES - at;
  const char *here = address(w->still, at);
  int held = hold(rng, here, bytes);
  CHECK(same(here, w->raw + at, bytes));
  release(held, here, bytes);
}

/* ---- worlds ---- */
static h3_range *new_range(const world *w, h3_range_config config) {
  h3_range *range = NULL;
  config.file = w->file;
  config.label = "test";
  if (!config.capacity_bytes) config.capacity_bytes = config.bytes;
  CHECK(h3_range_create(w->pager, &config, &range) == H3_OK);
  return range;
}

static int open_world(world *w, int delivery) {
  uint64_t rng = test_seed * 0x9E3779B97F4A7C15ULL;
  const h3_pager_config config = {.budget_bytes = BUDGET, .delivery = delivery, .contexts = 2};
  int status = h3_pager_create(&config, &w->pager);
  if (status == H3_E_UNSUPPORTED) return status;
  CHECK(status == H3_OK);
  w->fd = open_temporary();
  CHECK(h3_file_create(w->fd, 4096, 1, &w->file) == H3_OK);
  w->raw = malloc(STILL_BYTES);
  for (uint32_t i = 0; i < STILL_BYTES; i++) w->raw[i] = (uint8_t)(i & 1 ? 0x3c + below(&rng, 4) : next(&rng));
  h3_chunk chunks[STILL_BLOCKS];
  CHECK(h3_encode_append(w->file, &bf16, w->raw, STILL_BYTES, STILL_BLOCK, NULL, 2, chunks) == H3_OK);
  w->still = new_range(w, (h3_range_config){.bytes = STILL_BYTES, .block_bytes = STILL_BLOCK, .spec = bf16, .chunks = chunks,
                                            .cyclic = 1});
  w->live = new_range(w, (h3_range_config){.bytes = LIVE_BYTES, .block_bytes = LIVE_BLOCK, .spec = cells32, .writable = 1});
  return H3_OK;
}

static void close_world(world *w) {
  h3_pager_stats stats;
  h3_pager_get_stats(w->pager, &stats);
  CHECK(stats.peak_resident_bytes <= BUDGET && stats.pinned_bytes == 0);
  h3_range_destroy(w->live);
  h3_range_destroy(w->still);
  h3_pager_get_stats(w->pager, &stats);
  CHECK(stats.resident_bytes <= BUDGET);
  h3_pager_destroy(w->pager);
  h3_file_destroy(w->file);
  close(w->fd);
  free(w->raw);
}

/* What the file holds for a range's chunk table, read as whoever opens it would. */
static void check_file(const world *w, const h3_spec *spec, const h3_chunk *chunks, const uint8_t *expected, uint32_t bytes,
                       uint32_t block) {
  h3_range *reader = new_range(w, (h3_range_config){.bytes = bytes, .block_bytes = block, .spec = *spec, .chunks = chunks});
  for (uint32_t at = 0; at < bytes; at += block) {
    uint32_t size = bytes - at < block ? bytes - at : block;
    CHECK(h3_pin_address(address(reader, at), size) == H3_OK);
    CHECK(same(address(reader, at), expected + at, size));
    h3_unpin_address(address(reader, at), size);
  }
  h3_range_destroy(reader);
}

/* ---- everything at once ---- */
typedef struct worker {
  world *w;
  uint64_t rng;
  uint32_t number;
  uint32_t *wrote; /* of all cells; a worker's own are those with cell % WORKERS == number */
  pthread_t thread;
} worker;

static uint32_t own_cell(worker *me) {
  return below(&me->rng, LIVE_CELLS / WORKERS) * WORKERS + me->number;
}

static void pin_some(worker *me) {
  uint32_t offset = below(&me->rng, LIVE_BYTES - 2 * LIVE_BLOCK), bytes = 1 + below(&me->rng, LIVE_BLOCK);
  int status = h3_range_pin(me->w->live, offset, bytes);
  CHECK(status == H3_OK || status == H3_E_BUDGET);
  if (status) return;
  uint32_t cell = (offset + 3) / 4;
  cell += (WORKERS + me->number - cell % WORKERS) % WORKERS;
  if (4 * cell + 4 <= offset + bytes) CHECK(load(address(me->w->live, 4 * cell)) == me->wrote[cell]);
  h3_range_unpin(me->w->live, offset, bytes);
}

static void export_some(worker *me) {
  int fd = open_temporary();
  h3_file *file = NULL;
  uint32_t block = below(&me->rng, STILL_BLOCKS - 1);
  h3_chunk chunk;
  CHECK(h3_file_create(fd, 0, 1, &file) == H3_OK);
  CHECK(h3_range_export(me->w->still, block, 1, &bf16, file, &chunk) == H3_OK);
  world other = {.pager = me->w->pager, .file = file};
  check_file(&other, &bf16, &chunk, me->w->raw + block * STILL_BLOCK, STILL_BLOCK, STILL_BLOCK);
  h3_file_destroy(file);
  close(fd);
}

static void act(worker *me) {
  h3_chunk chunks[4];
  h3_pager_stats stats;
  uint64_t done;
  h3_range *range = below(&me->rng, 2) ? me->w->still : me->w->live;
  uint32_t bytes = range == me->w->still ? STILL_BYTES : LIVE_BYTES, at = below(&me->rng, bytes), cell;
  uint32_t length = 1 + below(&me->rng, bytes - at < 200000 ? bytes - at : 200000);
  switch (below(&me->rng, 16)) {
    case 0: CHECK(h3_range_prefetch(range, at, length, &done) == H3_OK && done <= length); break;
    case 1: CHECK(h3_range_drop(range, at, length) == H3_OK); break;
    case 2: CHECK(h3_range_flush(me->w->live, below(&me->rng, LIVE_BLOCKS - 4), 4, chunks, NULL, NULL) == H3_OK); break;
    case 3: pin_some(me); break;
    case 4: export_some(me); break;
    case 5:
      h3_pager_get_stats(me->w->pager, &stats);
      CHECK(stats.resident_bytes <= BUDGET && stats.peak_resident_bytes <= BUDGET);
      break;
    case 6: {
      h3_spec spec = cells32;
      spec.filter = below(&me->rng, 2) ? H3_FILTER_ZSTD : H3_FILTER_BYTEPLANE;
      CHECK(h3_range_set_spec(me->w->live, &spec) == H3_OK);
      break;
    }
    case 7: case 8: case 9:
      for (int i = 0; i < 8; i++) {
        cell = own_cell(me);
        put(&me->rng, me->w->live, cell, me->wrote[cell] = (uint32_t)next(&me->rng));
      }
      break;
    case 10: case 11: case 12:
      for (int i = 0; i < 8; i++) {
        cell = own_cell(me);
        CHECK(get(&me->rng, me->w->live, cell) == me->wrote[cell]);
      }
      break;
    default: check_still(&me->rng, me->w); break;
  }
}

static void *work(void *argument) {
  worker *me = argument;
  for (int i = 0; i < ROUNDS; i++) act(me);
  return NULL;
}

/* A child reads what its parent committed, through faults, whatever the parent's threads were doing. */
static void check_fork(world *w) {
  pid_t child = fork();
  CHECK(child >= 0);
  if (!child) {
    uint64_t rng = test_seed + 77;
    alarm(60);
    for (int i = 0; i < 30; i++) check_still(&rng, w);
    for (int i = 0; i < 30; i++) (void)get(&rng, w->live, below(&rng, LIVE_CELLS));
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void check_threads(world *w) {
  worker workers[WORKERS];
  uint32_t *wrote = calloc(LIVE_CELLS, sizeof *wrote);
  for (uint32_t t = 0; t < WORKERS; t++) {
    workers[t] = (worker){.w = w, .rng = test_seed * 0x9E3779B97F4A7C15ULL + t, .number = t, .wrote = wrote};
    CHECK(!pthread_create(&workers[t].thread, NULL, work, &workers[t]));
  }
  for (int i = 0; !UNDER_TSAN && i < 3; i++) check_fork(w);
  for (uint32_t t = 0; t < WORKERS; t++) pthread_join(workers[t].thread, NULL);
  h3_chunk *chunks = calloc(LIVE_BLOCKS, sizeof *chunks);
  CHECK(h3_range_flush(w->live, 0, LIVE_BLOCKS, chunks, NULL, NULL) == H3_OK);
  check_file(w, &cells32, chunks, (const uint8_t *)wrote, LIVE_BYTES, LIVE_BLOCK);
  CHECK(h3_range_drop(w->live, 0, LIVE_BYTES) == H3_OK && h3_range_resident_bytes(w->live) == 0);
  uint64_t rng = test_seed;
  for (uint64_t cell = 0; cell < LIVE_CELLS; cell += 1 + below(&rng, 200)) CHECK(get(&rng, w->live, cell) == wrote[cell]);
  h3_pager_stats stats;
  h3_pager_get_stats(w->pager, &stats);
  CHECK(stats.fills > 100 && stats.evictions > 100 && stats.write_backs > 10 && stats.errors == 0);
  CHECK(UNDER_TSAN || stats.faults > 100);
  free(chunks);
  free(wrote);
}

/* ---- growth and detach under readers ---- */
typedef struct tail_readers {
  h3_range *log;
  _Atomic uint32_t cells; /* written so far */
  atomic_int stop;
} tail_readers;

static void *read_tail(void *argument) {
  tail_readers *shared = argument;
  uint64_t rng = test_seed + (uintptr_t)&rng;
  while (!atomic_load(&shared->stop)) {
    uint32_t cells = atomic_load(&shared->cells), back = below(&rng, 3) ? below(&rng, 3000) : below(&rng, LOG_CELLS);
    uint32_t cell = back < cells ? cells - 1 - back : 0;
    CHECK(get(&rng, shared->log, cell) == cell * 2654435761u);
    if (!below(&rng, 8)) CHECK(h3_range_drop(shared->log, 4ull * cell, 4) == H3_OK);
  }
  return NULL;
}

static void check_growth(world *w) {
  enum { READERS = 3 };
  uint64_t rng = test_seed + 5;
  tail_readers shared = {.log = new_range(w, (h3_range_config){.bytes = 4, .capacity_bytes = 4 * LOG_CELLS, .block_bytes = LOG_BLOCK,
                                                                .spec = cells32, .writable = 1})};
  pthread_t readers[READERS];
  atomic_store(&shared.cells, 1);
  for (int i = 0; i < READERS; i++) CHECK(!pthread_create(&readers[i], NULL, read_tail, &shared));
  for (uint32_t cells = 1; cells < LOG_CELLS;) {
    uint32_t more = 1 + below(&rng, below(&rng, 4) ? 60 : 6000);
    if (more > LOG_CELLS - cells) more = LOG_CELLS - cells;
    int status;
    while ((status = h3_range_resize(shared.log, 4ull * (cells + more))) == H3_E_BUSY) usleep(100); /* a reader's pin */
    CHECK(status == H3_OK);
    for (uint32_t end = cells + more; cells < end; cells++) {
      CHECK(get(&rng, shared.log, cells) == 0);
      put(&rng, shared.log, cells, cells * 2654435761u);
    }
    atomic_store(&shared.cells, cells);
  }
  h3_chunk chunks[4 * LOG_CELLS / LOG_BLOCK + 1];
  uint32_t *expected = malloc(4 * LOG_CELLS);
  for (uint32_t i = 0; i < LOG_CELLS; i++) expected[i] = i * 2654435761u;
  CHECK(h3_range_flush(shared.log, 0, 4 * LOG_CELLS / LOG_BLOCK + 1, chunks, NULL, NULL) == H3_OK);
  check_file(w, &cells32, chunks, (const uint8_t *)expected, 4 * LOG_CELLS, LOG_BLOCK);
  h3_file *other = NULL;
  CHECK(h3_file_create(w->fd, 0, 0, &other) == H3_OK);
  CHECK(h3_range_detach(shared.log, other) == H3_OK);
  usleep(20000);
  atomic_store(&shared.stop, 1);
  for (int i = 0; i < READERS; i++) pthread_join(readers[i], NULL);
  h3_range_destroy(shared.log);
  h3_file_destroy(other);
  free(expected);
}

/* ---- failures ---- */
static void check_failures(world *w) {
  uint64_t rng = test_seed, done, block;
  CHECK(h3_range_drop(w->still, 0, STILL_BYTES) == H3_OK);
  h3_fault_arm(H3_FAULT_READ, 1, -1, EIO);
  CHECK(h3_range_prefetch(w->still, 0, 3 * STILL_BLOCK, &done) == H3_E_IO && done == 0);
  h3_fault_arm(H3_FAULT_READ, 0, 0, 0);
  put(&rng, w->live, 5, 55);
  h3_fault_arm(H3_FAULT_WRITE, 1, -1, ENOSPC); /* what cannot be saved stays */
  CHECK(h3_range_drop(w->live, 0, 4) == H3_E_NOSPACE && h3_range_flush(w->live, 0, 1, NULL, NULL, NULL) == H3_E_NOSPACE);
  CHECK(get(&rng, w->live, 5) == 55 && h3_range_resident_bytes(w->live) > 0);
  h3_fault_arm(H3_FAULT_WRITE, 0, 0, 0);
  CHECK(h3_range_drop(w->live, 0, 4) == H3_OK && get(&rng, w->live, 5) == 55);
  for (long n = 1, fired = 1; fired; n++) { /* each ioctl of a fill and an eviction fails once */
    h3_fault_arm(H3_FAULT_IOCTL, n, 1, ENOMEM);
    int status = h3_range_drop(w->still, 0, STILL_BLOCK);
    if (!status) status = h3_range_prefetch(w->still, 0, STILL_BLOCK, &done);
    h3_fault_arm(H3_FAULT_IOCTL, 0, 0, 0);
    fired = h3_fault_fired(H3_FAULT_IOCTL);
    CHECK(fired || status == H3_OK);
    CHECK(h3_range_prefetch(w->still, 0, STILL_BLOCK, &done) == H3_OK);
    CHECK(same(address(w->still, 0), w->raw, STILL_BLOCK));
  }
  h3_chunk bad[1] = {{.offset = 4096, .check = 1, .stored_bytes = 100, .filter = H3_FILTER_ZSTD}};
  h3_range *broken = new_range(w, (h3_range_config){.bytes = 4096, .block_bytes = 4096, .spec = bf16, .chunks = bad});
  CHECK(h3_range_prefetch(broken, 0, 1, &done) == H3_E_CORRUPT && done == 0);
  CHECK(h3_pin_address(address(broken, 0), 1) == H3_E_CORRUPT);
  if (!UNDER_TSAN) { /* an op in flight reads zeros and learns of it afterwards */
    uint64_t entered = h3_op_enter();
    CHECK(load(address(broken, 0)) == 0);
    CHECK(h3_op_leave(entered));
    CHECK(h3_range_take_error(broken, entered, &block) == H3_E_CORRUPT && block == 0);
    entered = h3_op_enter();
    CHECK(!h3_op_leave(entered) && h3_range_take_error(broken, entered, &block) == H3_OK);
  }
  h3_range_destroy(broken);
}

static void check_delivery(int delivery, const char *name) {
  world w;
  if (open_world(&w, delivery)) {
    printf("test_pager: %s: not on this machine\n", name);
    return;
  }
  check_threads(&w);
  check_growth(&w);
  check_failures(&w);
  close_world(&w);
  printf("test_pager: %s: ok\n", name);
  fflush(stdout);
}

/* ---- first use from several threads at once ---- */
static void *open_and_close(void *unused) {
  (void)unused;
  world w;
  if (open_world(&w, H3_DELIVERY_AUTO)) abort();
  uint64_t rng = test_seed;
  for (int i = 0; i < 20; i++) check_still(&rng, &w);
  close_world(&w);
  return NULL;
}

int main(void) {
  pthread_t threads[3];
  test_start();
  for (int i = 0; i < 3; i++) CHECK(!pthread_create(&threads[i], NULL, open_and_close, NULL));
  for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
  check_delivery(H3_DELIVERY_SIGNAL, "signal");
  check_delivery(H3_DELIVERY_SIGNAL_COPY, "signal, copying");
  check_delivery(H3_DELIVERY_DISPATCH, "dispatch");
  return 0;
}

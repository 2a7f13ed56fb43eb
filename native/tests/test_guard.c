/* The gate of commits: several threads write by pointer, one through the kernel into what it has pinned, one evicts, one
 * forks, while flushes of changes run. After each flush the file must hold, for every cell, a value at least as new as the
 * one that its writer had finished before the flush began: nothing lost, in any fault delivery, with and without evictions.
 * Others flush right after each write, into blocks that all of them write to: whose fault it is that unprotects a block, and
 * who writes then, must not matter.
 * Then: what a device could write past the protection is found by evictions, and what is pinned can be given to the kernel. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "test.h"

enum { CELLS = 400 * 1000 + 3, BYTES = 4 * CELLS, BLOCK = 16384, BLOCKS = BYTES / BLOCK + 1, WRITERS = 3, PARTS = WRITERS + 1,
       FLUSHES = 40, OWN_FLUSHES = 150, SHARED_BLOCKS = 2 };
static const h3_spec cells32 = {.elem_bytes = 4, .filter = H3_FILTER_ZSTD, .level = 1};

typedef struct gate {
  h3_pager *pager;
  h3_range *range;
  h3_file *file;
  int fd, values; /* values: a file that the kernel's writer reads cells from */
  _Atomic uint32_t *wrote; /* of each cell, the last value that is in memory; a writer's cells are those with cell % PARTS */
  atomic_int stop;
  pthread_mutex_t lock; /* guards chunks where several threads flush */
  h3_chunk chunks[BLOCKS];
} gate;

typedef struct writer {
  gate *g;
  uint32_t number;
  pthread_t thread;
} writer;

static int open_temporary(void) {
  char path[] = "/tmp/h3-test-XXXXXX";
  int fd = mkstemp(path);
  CHECK(fd >= 0 && unlink(path) == 0);
  return fd;
}

static volatile uint32_t *at(const gate *g, uint32_t cell) { return (volatile uint32_t *)h3_range_address(g->range) + cell; }

static void *write_cells(void *argument) {
  writer *me = argument;
  uint64_t rng = test_seed * 0x9E3779B97F4A7C15ULL + me->number;
  while (!atomic_load(&me->g->stop)) {
    uint32_t cell = below(&rng, CELLS / PARTS) * PARTS + me->number, value = atomic_load(&me->g->wrote[cell]) + 1;
    CHECK(*at(me->g, cell) == value - 1);
    *at(me->g, cell) = value;
    atomic_store(&me->g->wrote[cell], value);
  }
  return NULL;
}

/* read() into pinned memory always has all of its bytes, whatever flushes do meanwhile. */
static void *write_by_kernel(void *argument) {
  writer *me = argument;
  uint64_t rng = test_seed * 0x9E3779B97F4A7C15ULL + me->number;
  while (!atomic_load(&me->g->stop)) {
    uint32_t cell = below(&rng, CELLS / PARTS) * PARTS + me->number, value = atomic_load(&me->g->wrote[cell]) + 1;
    int status = h3_range_pin(me->g->range, 4ull * cell, 4);
    CHECK(status == H3_OK || status == H3_E_BUDGET);
    if (status) continue;
    CHECK(pwrite(me->g->values, &value, 4, 0) == 4);
    CHECK(pread(me->g->values, (void *)(uintptr_t)at(me->g, cell), 4, 0) == 4);
    atomic_store(&me->g->wrote[cell], value);
    h3_range_unpin(me->g->range, 4ull * cell, 4);
  }
  return NULL;
}

static void *disturb(void *argument) {
  writer *me = argument;
  uint64_t rng = test_seed + 99;
  for (int i = 0; !atomic_load(&me->g->stop); i++) {
    CHECK(h3_range_drop(me->g->range, below(&rng, BYTES - 50000), 50000) == H3_OK);
    if (i % 50 == 0) { /* a fork flushes too */
      pid_t child = fork();
      if (!child) _exit(0);
      CHECK(waitpid(child, NULL, 0) == child);
    }
    usleep(500);
  }
  return NULL;
}

static void flush(gate *g) {
  uint64_t next = 0, changed[128], n;
  while (next < BLOCKS) {
    CHECK(h3_range_flush_changes(g->range, &next, g->chunks, BLOCKS, changed, 128, &n) == H3_OK && n <= 128);
    for (uint64_t i = 0; i < n; i++) CHECK(changed[i] < BLOCKS);
  }
}

/* Reads a block from the file as whoever opens it would: through a range of its own. */
static h3_range *reader_of(gate *g) {
  h3_range *range = NULL;
  const h3_range_config config = {.bytes = BYTES, .capacity_bytes = BYTES, .block_bytes = BLOCK, .spec = cells32, .file = g->file,
                                  .chunks = g->chunks, .label = "reader"};
  CHECK(h3_range_create(g->pager, &config, &range) == H3_OK);
  return range;
}

static void check_flush(gate *g, uint32_t *before) {
  for (uint32_t i = 0; i < CELLS; i++) before[i] = atomic_load(&g->wrote[i]);
  flush(g);
  h3_range *reader = reader_of(g);
  const volatile uint32_t *found = h3_range_address(reader);
  for (uint32_t i = 0; i < CELLS; i++) {
    const uint32_t value = found[i], newest = atomic_load(&g->wrote[i]) + 1; /* one may be on its way */
    if (value < before[i] || value > newest)
      fprintf(stderr, "cell %u: the file holds %u, %u was written before the flush\n", i, value, before[i]);
    CHECK(value >= before[i] && value <= newest);
  }
  h3_range_destroy(reader);
}

static void *write_and_flush(void *argument) {
  writer *me = argument;
  uint64_t rng = test_seed * 0x9E3779B97F4A7C15ULL + me->number;
  for (int i = 0; i < OWN_FLUSHES; i++) {
    uint32_t cell = below(&rng, SHARED_BLOCKS * BLOCK / 4 / PARTS) * PARTS + me->number, value = (uint32_t)next(&rng);
    *at(me->g, cell) = value;
    pthread_mutex_lock(&me->g->lock);
    flush(me->g);
    h3_range *reader = reader_of(me->g);
    CHECK(((const volatile uint32_t *)h3_range_address(reader))[cell] == value);
    h3_range_destroy(reader);
    pthread_mutex_unlock(&me->g->lock);
    atomic_store(&me->g->wrote[cell], value);
  }
  return NULL;
}

static void run(gate *g, writer *writers, void *(*own)(void *), void *(*last)(void *)) {
  for (uint32_t i = 0; i < PARTS; i++) {
    writers[i] = (writer){.g = g, .number = i};
    CHECK(!pthread_create(&writers[i].thread, NULL, i < WRITERS ? own : last, &writers[i]));
  }
}

static int open_gate(gate *g, int delivery, uint64_t budget) {
  const h3_pager_config config = {.budget_bytes = budget, .delivery = delivery, .contexts = 2};
  memset(g, 0, sizeof *g);
  pthread_mutex_init(&g->lock, NULL);
  int status = h3_pager_create(&config, &g->pager);
  if (status == H3_E_UNSUPPORTED) return status;
  CHECK(status == H3_OK);
  g->fd = open_temporary();
  g->values = open_temporary();
  g->wrote = calloc(CELLS, sizeof *g->wrote);
  CHECK(h3_file_create(g->fd, 4096, 1, &g->file) == H3_OK);
  const h3_range_config live = {.bytes = BYTES, .capacity_bytes = BYTES, .block_bytes = BLOCK, .writable = 1, .spec = cells32,
                                .file = g->file, .label = "live"};
  CHECK(h3_range_create(g->pager, &live, &g->range) == H3_OK);
  CHECK(h3_range_flush(g->range, 0, BLOCKS, g->chunks, NULL, NULL) == H3_OK);
  return H3_OK;
}

static void close_gate(gate *g) {
  h3_range_destroy(g->range);
  h3_pager_destroy(g->pager);
  h3_file_destroy(g->file);
  close(g->fd);
  close(g->values);
  free(g->wrote);
}

static uint64_t write_faults(gate *g) {
  h3_pager_stats stats;
  h3_pager_get_stats(g->pager, &stats);
  return stats.write_faults;
}

static void check_writers(gate *g, int evictions) {
  writer writers[PARTS], disturber = {.g = g};
  uint32_t *before = calloc(CELLS, sizeof *before);
  run(g, writers, write_and_flush, write_and_flush);
  for (uint32_t i = 0; i < PARTS; i++) pthread_join(writers[i].thread, NULL);
  run(g, writers, write_cells, write_by_kernel);
  if (evictions) CHECK(!pthread_create(&disturber.thread, NULL, disturb, &disturber));
  for (int i = 0; i < FLUSHES; i++) check_flush(g, before);
  atomic_store(&g->stop, 1);
  for (uint32_t i = 0; i < PARTS; i++) pthread_join(writers[i].thread, NULL);
  if (evictions) pthread_join(disturber.thread, NULL);
  check_flush(g, before);
  for (uint32_t i = 0; i < CELLS; i++) CHECK(*at(g, i) == before[i]);
  CHECK(write_faults(g) > 100);
  free(before);
}

/* One write fault for each block that was flushed, none for a second write; a pin takes the protection away. */
static void check_protection(gate *g) {
  uint64_t done;
  CHECK(h3_range_prefetch(g->range, 0, 4 * BLOCK, &done) == H3_OK && done == 4 * BLOCK);
  flush(g);
  const uint64_t faults = write_faults(g);
  for (uint32_t i = 0; i < 3; i++) *at(g, i) = 7 + i;
  CHECK(write_faults(g) == faults + 1);
  uint32_t value = 99;
  CHECK(pwrite(g->values, &value, 4, 0) == 4);
  volatile uint32_t *other = at(g, BLOCK / 4);
  CHECK(pread(g->values, (void *)(uintptr_t)other, 4, 0) == -1 && errno == EFAULT); /* as an absent block */
  CHECK(h3_range_pin(g->range, BLOCK, BLOCK) == H3_OK);
  CHECK(pread(g->values, (void *)(uintptr_t)other, 4, 0) == 4);
  flush(g); /* what is pinned stays writable */
  CHECK(pread(g->values, (void *)(uintptr_t)other, 4, 0) == 4 && *other == 99);
  h3_range_unpin(g->range, BLOCK, BLOCK);
  CHECK(write_faults(g) == faults + 1);
  flush(g);
  *other = 100;
  CHECK(write_faults(g) == faults + 2);
}

/* A write that the processor's protection did not see is missed by a flush and found by an eviction, and by a flush that was
 * told to look at everything. Page protection lets a test make one. */
static void check_written_past(gate *g) {
  for (int recheck = 0; recheck < 2; recheck++) {
    *at(g, 0) = 1;
    flush(g);
    const h3_chunk committed = g->chunks[0];
    CHECK(mprotect(h3_range_address(g->range), BLOCK, PROT_READ | PROT_WRITE) == 0);
    *at(g, 0) = 12345;
    flush(g);
    CHECK(memcmp(&committed, &g->chunks[0], sizeof committed) == 0);
    if (recheck) h3_range_recheck(g->range);
    else CHECK(h3_range_drop(g->range, 0, BLOCK) == H3_OK);
    flush(g);
    CHECK(memcmp(&committed, &g->chunks[0], sizeof committed) != 0 && *at(g, 0) == 12345);
  }
}

/* A flush that fails, or that can't protect, leaves nothing behind that a later one would pass over. */
static void check_failures(gate *g) {
  uint64_t done, next, changed[128], n;
  CHECK(h3_range_prefetch(g->range, 0, 4 * BLOCK, &done) == H3_OK);
  for (int kind = H3_FAULT_WRITE; kind <= H3_FAULT_IOCTL; kind += H3_FAULT_IOCTL - H3_FAULT_WRITE)
    for (long nth = 1, fired = 1; fired; nth++) {
      for (uint32_t i = 0; i < 4; i++) *at(g, i * (BLOCK / 4)) += 1 + (uint32_t)nth;
      h3_fault_arm(kind, nth, 1, kind == H3_FAULT_WRITE ? ENOSPC : ENOMEM);
      next = 0;
      const int status = h3_range_flush_changes(g->range, &next, g->chunks, BLOCKS, changed, 128, &n);
      h3_fault_arm(kind, 0, 0, 0);
      fired = h3_fault_fired(kind);
      CHECK(status == H3_OK || (fired && kind == H3_FAULT_WRITE && status == H3_E_NOSPACE));
      if (kind == H3_FAULT_IOCTL) { /* a writer's own ioctl fails too */
        h3_fault_arm(kind, nth, 1, ENOMEM);
        for (uint32_t i = 0; i < 4; i++) *at(g, i * (BLOCK / 4)) += 1;
        h3_fault_arm(kind, 0, 0, 0);
        fired |= h3_fault_fired(kind);
      }
      flush(g);
      h3_range *reader = reader_of(g);
      for (uint32_t i = 0; i < 4; i++)
        CHECK(((const volatile uint32_t *)h3_range_address(reader))[i * (BLOCK / 4)] == *at(g, i * (BLOCK / 4)));
      h3_range_destroy(reader);
    }
}

static void check_delivery(int delivery, const char *name) {
  static gate g;
  for (int evictions = 0; evictions < 2; evictions++) {
    if (open_gate(&g, delivery, evictions ? BYTES / 2 : 4 * BYTES)) {
      printf("test_guard: %s: not on this machine\n", name);
      return;
    }
    check_writers(&g, evictions);
    check_protection(&g);
    if (delivery == H3_DELIVERY_DISPATCH) check_written_past(&g);
    check_failures(&g);
    close_gate(&g);
  }
  printf("test_guard: %s: ok\n", name);
  fflush(stdout);
}

int main(void) {
  test_start();
  check_delivery(H3_DELIVERY_SIGNAL, "signal");
  check_delivery(H3_DELIVERY_SIGNAL_COPY, "signal, copying");
  check_delivery(H3_DELIVERY_DISPATCH, "dispatch");
  return 0;
}

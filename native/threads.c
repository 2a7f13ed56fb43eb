/* threads.c: the pool that kernels run on, and per-thread scratch.
 *
 * Locks: `owner` is held by the thread whose job runs, for the whole job; a second caller that finds it taken does its
 * units itself. Nothing else is locked: a job is published by bumping `generation`, workers sleep on that word, and enter
 * the job through `gate` while it is open. The owner closes the gate when no unit is left and waits for those inside
 * alone, so a worker that the system has not scheduled yet costs nothing.
 * Units may fault pages in, so workers keep the fault signals open and block every other one.
 * Fork: the child has no workers; the atfork hook forgets them, and the next job starts new ones.
 */
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "compute.h"

#define GATE_OPEN 0x80000000u
enum { SPINS = 4000 }; /* pauses before sleeping, about 40 us: a decode step's next kernel comes sooner than that */

static struct {
  pthread_mutex_t owner;
  atomic_int wanted;             /* threads per job, the caller included; 0: not set yet */
  int started;                   /* workers alive; guarded by owner */
  _Atomic uint32_t generation;   /* futex word: one more per job */
  _Atomic uint32_t sleepers;     /* workers in a futex wait */
  _Atomic uint32_t gate;         /* futex word: GATE_OPEN while units are left, plus the workers inside */
  uint32_t birth[H3_MAX_THREADS]; /* generation at which each worker was started */
  int joining;                   /* threads of this job; a worker at or above it sits the job out */
  h3_unit_fn fn;
  void *context;
  int64_t n_units;
  atomic_llong next;
  atomic_int status;
  atomic_int n_retry;
  int64_t retry[H3_MAX_THREADS]; /* units that met a full budget; a worker leaves after its first */
} pool = {.owner = PTHREAD_MUTEX_INITIALIZER};

typedef struct h3_buffer {
  void *data;
  size_t bytes;
} h3_buffer;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t scratch_key;
static int scratch_ok;

static void wait_word(_Atomic uint32_t *word, uint32_t value) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake_word(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, H3_MAX_THREADS, NULL, NULL, 0); }

static void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

static void run_units(int worker) {
  while (atomic_load(&pool.status) == H3_OK) {
    int64_t unit = atomic_fetch_add(&pool.next, 1);
    if (unit >= pool.n_units) return;
    int status = pool.fn(pool.context, unit, worker);
    if (status == H3_E_BUDGET) {
      pool.retry[atomic_fetch_add(&pool.n_retry, 1)] = unit;
      return;
    }
    int none = H3_OK;
    if (status != H3_OK) atomic_compare_exchange_strong(&pool.status, &none, status);
  }
}

static uint32_t next_generation(uint32_t seen) {
  for (int i = 0; i < SPINS; i++) {
    if (atomic_load(&pool.generation) != seen) return atomic_load(&pool.generation);
    relax();
  }
  atomic_fetch_add(&pool.sleepers, 1);
  while (atomic_load(&pool.generation) == seen) wait_word(&pool.generation, seen);
  atomic_fetch_sub(&pool.sleepers, 1);
  return atomic_load(&pool.generation);
}

static int enter(void) {
  uint32_t gate = atomic_load(&pool.gate);
  while (gate & GATE_OPEN)
    if (atomic_compare_exchange_weak(&pool.gate, &gate, gate + 1)) return 1;
  return 0;
}

static void *work(void *argument) {
  int worker = (int)(intptr_t)argument;
  uint32_t seen = pool.birth[worker];
  for (;;) {
    seen = next_generation(seen);
    if (!enter()) continue;
    if (worker < pool.joining) run_units(worker);
    if (atomic_fetch_sub(&pool.gate, 1) == 1) wake_word(&pool.gate);
  }
  return NULL;
}

static void forget_workers(void) {
  pthread_mutex_init(&pool.owner, NULL);
  pool.started = 0;
  atomic_store(&pool.generation, 0);
  atomic_store(&pool.sleepers, 0);
  atomic_store(&pool.gate, 0);
}

static void free_scratch(void *slots) {
  h3_buffer *buffer = slots;
  for (int i = 0; i < H3_SCRATCH_SLOTS; i++) free(buffer[i].data);
  free(slots);
}

static void prepare(void) {
  pthread_atfork(NULL, NULL, forget_workers);
  scratch_ok = pthread_key_create(&scratch_key, free_scratch) == 0;
}

static int start_worker(int worker) {
  pthread_attr_t attributes;
  pthread_t thread;
  sigset_t block, before;
  sigfillset(&block);
  const int open[] = {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS};
  for (size_t i = 0; i < sizeof open / sizeof *open; i++) sigdelset(&block, open[i]);
  if (pthread_attr_init(&attributes)) return H3_E_NOMEM;
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pool.birth[worker] = atomic_load(&pool.generation);
  pthread_sigmask(SIG_SETMASK, &block, &before);
  int failed = pthread_create(&thread, &attributes, work, (void *)(intptr_t)worker);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  pthread_attr_destroy(&attributes);
  return failed ? H3_E_NOMEM : H3_OK;
}

static void join_workers(void) {
  uint32_t left;
  atomic_fetch_and(&pool.gate, ~GATE_OPEN);
  for (int i = 0; i < SPINS && atomic_load(&pool.gate); i++) relax();
  while ((left = atomic_load(&pool.gate))) wait_word(&pool.gate, left);
}

static int alone(h3_unit_fn fn, void *context, int64_t from, int64_t n_units) {
  int status = H3_OK;
  for (int64_t unit = from; unit < n_units && status == H3_OK; unit++) status = fn(context, unit, 0);
  return status;
}

int h3_parallel(h3_unit_fn fn, void *context, int64_t n_units) {
  pthread_once(&once, prepare);
  int threads = (int)h3_min64(h3_get_threads(), n_units);
  if (threads <= 1 || pthread_mutex_trylock(&pool.owner)) return alone(fn, context, 0, n_units);
  /* fewer workers than asked, when the system refuses more, only make the job slower */
  while (pool.started < threads - 1 && start_worker(pool.started + 1) == H3_OK) pool.started++;
  pool.fn = fn, pool.context = context, pool.n_units = n_units, pool.joining = threads;
  atomic_store(&pool.next, 0);
  atomic_store(&pool.status, H3_OK);
  atomic_store(&pool.n_retry, 0);
  atomic_store(&pool.gate, GATE_OPEN);
  atomic_fetch_add(&pool.generation, 1);
  if (atomic_load(&pool.sleepers)) wake_word(&pool.generation);
  run_units(0);
  join_workers();
  int status = atomic_load(&pool.status);
  for (int i = 0; i < atomic_load(&pool.n_retry) && status == H3_OK; i++) status = fn(context, pool.retry[i], 0);
  if (status == H3_OK) status = alone(fn, context, atomic_load(&pool.next), n_units);
  pthread_mutex_unlock(&pool.owner);
  return status;
}

int h3_set_threads(int n) {
  if (n < 1 || n > H3_MAX_THREADS) return H3_E_INVALID;
  atomic_store(&pool.wanted, n);
  return H3_OK;
}

int h3_get_threads(void) {
  int n = atomic_load(&pool.wanted);
  if (n) return n;
  long online = sysconf(_SC_NPROCESSORS_ONLN);
  return (int)(online < 1 ? 1 : h3_min64(online, H3_MAX_THREADS));
}

int h3_scratch(int slot, size_t bytes, void **out) {
  pthread_once(&once, prepare);
  h3_buffer *buffers = scratch_ok ? pthread_getspecific(scratch_key) : NULL;
  if (!buffers) {
    buffers = calloc(H3_SCRATCH_SLOTS, sizeof *buffers);
    if (!buffers || !scratch_ok || pthread_setspecific(scratch_key, buffers)) {
      free(buffers);
      return H3_E_NOMEM;
    }
  }
  h3_buffer *buffer = &buffers[slot];
  if (buffer->bytes < bytes) {
    free(buffer->data);
    buffer->bytes = 0;
    buffer->data = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
    if (!buffer->data) return H3_E_NOMEM;
    buffer->bytes = bytes;
  }
  *out = buffer->data;
  return H3_OK;
}

/* encode.c: many chunks encoded by short-lived threads and appended to a file.
 *
 * No locks: workers draw batches from one atomic counter and each writes its own entries of the chunk table; the first
 * error stops the rest. Each worker maps its own codec and buffer.
 */
#include <pthread.h>
#include <signal.h>

#include "internal.h"

enum { BATCH_BYTES = 1 << 20, MAX_THREADS = 64 };

typedef struct job {
  h3_file *file;
  const h3_spec *spec;
  const uint8_t *raw, *base;
  uint64_t bytes, n_chunks, batch_chunks;
  uint32_t chunk_bytes;
  h3_chunk *chunks;
  atomic_uint_fast64_t next_batch;
  atomic_int status, error_no;
} job;

static void fail(job *j, int status) {
  int none = H3_OK;
  if (atomic_compare_exchange_strong(&j->status, &none, status)) atomic_store(&j->error_no, h3_last_errno());
}

/* Encodes chunks [first, last) into buffer and appends it with one write. */
static int encode_batch(job *j, h3_codec *codec, uint8_t *buffer, uint64_t first, uint64_t last) {
  uint32_t used = 0;
  for (uint64_t i = first; i < last; i++) {
    uint64_t at = i * j->chunk_bytes, left = j->bytes - at;
    uint32_t size = left < j->chunk_bytes ? (uint32_t)left : j->chunk_bytes;
    const uint8_t *base = j->base ? j->base + at : NULL;
    int status = h3_chunk_encode(codec, j->spec, j->raw + at, size, base, buffer + used, size, &j->chunks[i]);
    if (status) return status;
    j->chunks[i].offset = used;
    used += j->chunks[i].stored_bytes;
  }
  uint64_t start = 0;
  int status = used ? h3_file_append(j->file, buffer, used, &start) : H3_OK;
  for (uint64_t i = first; i < last; i++) j->chunks[i].offset = j->chunks[i].stored_bytes ? j->chunks[i].offset + start : 0;
  return status;
}

static void *work(void *argument) {
  job *j = argument;
  h3_codec *codec = NULL;
  size_t buffer_bytes = (size_t)(j->batch_chunks * j->chunk_bytes);
  uint8_t *buffer = NULL;
  int status = h3_codec_create(&codec);
  if (!status && !(buffer = h3_map(buffer_bytes))) status = H3_E_NOMEM;
  while (!status && !atomic_load(&j->status)) {
    uint64_t first = atomic_fetch_add(&j->next_batch, 1) * j->batch_chunks;
    if (first >= j->n_chunks) break;
    uint64_t left = j->n_chunks - first;
    status = encode_batch(j, codec, buffer, first, first + (left < j->batch_chunks ? left : j->batch_chunks));
  }
  if (status) fail(j, status);
  h3_unmap(buffer, buffer_bytes);
  h3_codec_destroy(codec);
  return NULL;
}

/* Starts up to n threads; those that the system refuses are not missed, the caller works too. */
static int start_workers(job *j, int n, pthread_t *threads) {
  sigset_t block, before;
  int started = 0;
  /* Asynchronous signals belong to the process's own threads; faults must reach the thread that made them. */
  sigfillset(&block);
  sigdelset(&block, SIGBUS);
  sigdelset(&block, SIGSEGV);
  sigdelset(&block, SIGFPE);
  sigdelset(&block, SIGILL);
  pthread_sigmask(SIG_BLOCK, &block, &before);
  while (started < n && pthread_create(&threads[started], NULL, work, j) == 0) started++;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return started;
}

int h3_encode_append(h3_file *file, const h3_spec *spec, const void *raw, uint64_t bytes, uint32_t chunk_bytes,
                     const void *base, int n_threads, h3_chunk *chunks) {
  if (!chunk_bytes || chunk_bytes > H3_MAX_CHUNK || chunk_bytes % H3_MIN_CHUNK || n_threads < 1) return H3_E_INVALID;
  if (h3_spec_check(spec)) return H3_E_INVALID;
  if (!bytes) return H3_OK;
  job j = {.file = file, .spec = spec, .raw = raw, .base = base, .bytes = bytes, .chunk_bytes = chunk_bytes,
           .chunks = chunks, .n_chunks = (bytes - 1) / chunk_bytes + 1,
           .batch_chunks = chunk_bytes < BATCH_BYTES ? BATCH_BYTES / chunk_bytes : 1};
  uint64_t batches = (j.n_chunks - 1) / j.batch_chunks + 1;
  uint64_t wanted = batches < (uint64_t)n_threads ? batches : (uint64_t)n_threads;
  if (wanted > MAX_THREADS) wanted = MAX_THREADS;
  pthread_t threads[MAX_THREADS];
  int started = start_workers(&j, (int)wanted - 1, threads);
  work(&j);
  for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
  int status = atomic_load(&j.status);
  return status ? h3_set_errno(status, atomic_load(&j.error_no)) : H3_OK;
}

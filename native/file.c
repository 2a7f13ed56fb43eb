/* file.c: whole reads and writes at positions of an append-only file.
 *
 * No locks: concurrent appenders reserve their place by one atomic add, then write without touching one another. A
 * failed append leaves its reserved gap in the offsets; nothing refers to it. Async-signal-safe.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include "internal.h"

struct h3_file {
  int fd;
  int writable;
  pid_t owner; /* the process that may write: a forked child's tail is not the file's */
  atomic_long references;
  atomic_uint_fast64_t tail;
};

int h3_file_create(int fd, uint64_t tail, int writable, h3_file **out) {
  if (fd < 0 || tail > INT64_MAX || !out) return H3_E_INVALID;
  int err = h3_fault_hit(H3_FAULT_ALLOC);
  h3_file *file = err ? NULL : malloc(sizeof *file);
  if (!file) return h3_set_errno(H3_E_NOMEM, err ? err : ENOMEM);
  file->fd = fd;
  file->writable = writable;
  file->owner = getpid();
  atomic_init(&file->references, 1);
  atomic_init(&file->tail, tail);
  *out = file;
  return H3_OK;
}

void h3_file_retain(h3_file *file) { atomic_fetch_add(&file->references, 1); }

void h3_file_destroy(h3_file *file) {
  if (atomic_fetch_sub(&file->references, 1) == 1) free(file);
}

uint64_t h3_file_tail(const h3_file *file) { return atomic_load(&file->tail); }

void h3_file_set_tail(h3_file *file, uint64_t tail) { atomic_store(&file->tail, tail); }

int h3_file_read(h3_file *file, uint64_t offset, void *out, size_t bytes) {
  uint8_t *p = out;
  if (offset > INT64_MAX || bytes > INT64_MAX - offset) return H3_E_TRUNCATED;
  while (bytes) {
    int err = h3_fault_hit(H3_FAULT_READ);
    ssize_t got = err ? -1 : pread(file->fd, p, bytes, (off_t)offset);
    if (got == 0) return H3_E_TRUNCATED;
    if (got < 0) {
      if (!err) err = errno;
      if (err == EINTR) continue;
      return h3_set_errno(H3_E_IO, err);
    }
    p += got;
    offset += (uint64_t)got;
    bytes -= (size_t)got;
  }
  return H3_OK;
}

static int may_write(const h3_file *file) { return file->writable && file->owner == getpid(); }

static int write_at(h3_file *file, uint64_t offset, const uint8_t *p, size_t bytes) {
  while (bytes) {
    int err = h3_fault_hit(H3_FAULT_WRITE);
    ssize_t put = err ? -1 : pwrite(file->fd, p, bytes, (off_t)offset);
    if (put < 0) {
      if (!err) err = errno;
      if (err == EINTR) continue;
      return h3_set_errno(h3_write_status(err), err);
    }
    if (put == 0) return h3_set_errno(H3_E_IO, EIO);
    p += put;
    offset += (uint64_t)put;
    bytes -= (size_t)put;
  }
  return H3_OK;
}

int h3_file_append(h3_file *file, const void *data, size_t bytes, uint64_t *offset) {
  if (!may_write(file)) return H3_E_READONLY;
  uint64_t at = atomic_fetch_add(&file->tail, bytes);
  if (at > INT64_MAX || bytes > INT64_MAX - at) {
    atomic_fetch_sub(&file->tail, bytes);
    return h3_set_errno(H3_E_NOSPACE, EFBIG);
  }
  *offset = at;
  int status = write_at(file, at, data, bytes);
  if (status) h3_file_discard(file, at, bytes);
  return status;
}

int h3_file_overwrite(h3_file *file, uint64_t offset, const void *data, size_t bytes) {
  return may_write(file) ? write_at(file, offset, data, bytes) : H3_E_READONLY;
}

int h3_file_sync(h3_file *file) {
  int err = h3_fault_hit(H3_FAULT_WRITE);
  while (!err && fdatasync(file->fd)) {
    if (errno != EINTR) err = errno;
  }
  return err ? h3_set_errno(h3_write_status(err), err) : H3_OK;
}

void h3_file_discard(h3_file *file, uint64_t offset, uint64_t bytes) {
  if (!may_write(file) || !bytes || offset > INT64_MAX || bytes > INT64_MAX - offset) return;
  /* Best effort: where holes are not supported the space stays taken until the file is opened for writing again. */
  (void)!fallocate(file->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)bytes);
}

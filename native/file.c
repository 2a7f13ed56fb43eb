/* file.c: whole reads and writes at positions of an append-only file.
 *
 * No locks: concurrent appenders reserve their place by one atomic add, then write without touching one another. A
 * failed append leaves its reserved gap in the offsets; nothing refers to it. Async-signal-safe.
 *
 * Chunks are read past the page cache: what a budget holds decoded should not fill memory a second time encoded, and a
 * buffered read of one chunk at a random place reads several times as much ahead.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "internal.h"

#ifndef SYS_cachestat /* Linux 6.5; the number is the same everywhere */
#define SYS_cachestat 451
#endif
enum { DIRECT_ALIGN = 4096 };

struct h3_file {
  int fd;
  int direct_fd;         /* the same file past the page cache, -1 where that is refused */
  atomic_int use_direct; /* 0 once the file system has refused a direct read */
  int writable;
  pid_t owner; /* the process that may write: a forked child's tail is not the file's */
  atomic_long references;
  atomic_uint_fast64_t tail;
};

/* A descriptor of its own: O_DIRECT on the caller's would change how the caller's other reads must look. */
static int open_direct(int fd) {
  char path[40];
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  return open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
}

int h3_file_create(int fd, uint64_t tail, int writable, h3_file **out) {
  if (fd < 0 || tail > INT64_MAX || !out) return H3_E_INVALID;
  int err = h3_fault_hit(H3_FAULT_ALLOC);
  h3_file *file = err ? NULL : malloc(sizeof *file);
  if (!file) return h3_set_errno(H3_E_NOMEM, err ? err : ENOMEM);
  file->fd = fd;
  file->direct_fd = open_direct(fd);
  atomic_init(&file->use_direct, file->direct_fd >= 0);
  if (file->direct_fd < 0) posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
  file->writable = writable;
  file->owner = getpid();
  atomic_init(&file->references, 1);
  atomic_init(&file->tail, tail);
  *out = file;
  return H3_OK;
}

void h3_file_retain(h3_file *file) { atomic_fetch_add(&file->references, 1); }

void h3_file_destroy(h3_file *file) {
  if (atomic_fetch_sub(&file->references, 1) > 1) return;
  if (file->direct_fd >= 0) close(file->direct_fd);
  free(file);
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

/* Whether the page cache holds all of a span: then a read from it is a copy. */
static int cached(const h3_file *file, uint64_t offset, uint64_t bytes) {
  struct {
    uint64_t offset, bytes;
  } where = {offset, bytes};
  struct {
    uint64_t cached, dirty, writeback, evicted, recently_evicted;
  } found = {0};
  return syscall(SYS_cachestat, file->fd, &where, &found, 0) == 0 && found.cached * DIRECT_ALIGN >= bytes;
}

/* H3_E_UNSUPPORTED: the file system wants another alignment, or no direct reads at all. */
static int read_aligned(h3_file *file, uint64_t offset, uint64_t least, uint64_t bytes, char *buffer) {
  for (uint64_t got = 0; got < least;) {
    const int injected = h3_fault_hit(H3_FAULT_READ);
    const ssize_t part = injected ? -1 : pread(file->direct_fd, buffer + got, bytes - got, (off_t)(offset + got));
    if (part == 0) return H3_E_TRUNCATED;
    if (part < 0) {
      const int err = injected ? injected : errno;
      if (err == EINTR) continue;
      return err == EINVAL ? H3_E_UNSUPPORTED : h3_set_errno(H3_E_IO, err);
    }
    got += (uint64_t)part;
    if (got < least && got % DIRECT_ALIGN) return H3_E_TRUNCATED; /* only the end of the file is not aligned */
  }
  return H3_OK;
}

int h3_file_read_direct(h3_file *file, uint64_t offset, size_t bytes, char *buffer, char *plain, char **at) {
  if (offset > INT64_MAX - H3_READ_SLACK || bytes > INT64_MAX - H3_READ_SLACK - offset) return H3_E_TRUNCATED;
  const uint64_t mask = DIRECT_ALIGN - 1, from = offset & ~mask, span = ((offset + bytes + mask) & ~mask) - from;
  const int is_cached = cached(file, from, span);
  if (!is_cached && atomic_load(&file->use_direct)) {
    const int status = read_aligned(file, from, offset - from + bytes, span, buffer);
    *at = buffer + (offset - from);
    if (status != H3_E_UNSUPPORTED) return status;
    atomic_store(&file->use_direct, 0);
  }
  *at = plain;
  const int status = h3_file_read(file, offset, plain, bytes);
  if (!is_cached) posix_fadvise(file->fd, (off_t)from, (off_t)span, POSIX_FADV_DONTNEED);
  return status;
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

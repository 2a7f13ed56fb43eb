/* status.c: texts of statuses, errno of the last failure per thread, fault injection, and mapped memory. */
#include <errno.h>
#include <sys/mman.h>

#include "internal.h"

H3_TLS int last_errno;

static const char *const texts[] = {
    "host memory or address space was refused",
    "a read or write failed",
    "no space left on the file system, or a quota or file size limit was reached",
    "stored bytes do not decode to what their checksum promises",
    "the byte budget cannot hold the request",
    "an argument breaks its rule",
    "the kernel or the processor does not offer this",
    "written to a read-only range or file",
    "already closed, or belongs to a parent process",
    "pages are shared with a forked child or pinned by a device",
    "the file ends before the bytes its index promises",
};

const char *h3_strerror(int status) {
  if (status == H3_OK) return "ok";
  int at = H3_E_NOMEM - status;
  if (at < 0 || at >= (int)(sizeof texts / sizeof texts[0])) return "unknown status";
  return texts[at];
}

int h3_last_errno(void) { return last_errno; }

int h3_set_errno(int status, int err) {
  last_errno = err;
  return status;
}

int h3_write_status(int err) {
  return err == ENOSPC || err == EDQUOT || err == EFBIG ? H3_E_NOSPACE : H3_E_IO;
}

/* Fault injection. Counters move only while a kind is armed; arming is for one controlling thread. */
atomic_int h3_fault_armed[H3_FAULT_KINDS];
static struct {
  atomic_long first, count, calls, fired;
  atomic_int error_no;
} faults[H3_FAULT_KINDS];

void h3_fault_arm(int kind, long n, long count, int error_no) {
  if (kind < 0 || kind >= H3_FAULT_KINDS) return;
  atomic_store(&h3_fault_armed[kind], 0);
  if (n <= 0) return;
  atomic_store(&faults[kind].first, n);
  atomic_store(&faults[kind].count, count);
  atomic_store(&faults[kind].calls, 0);
  atomic_store(&faults[kind].fired, 0);
  atomic_store(&faults[kind].error_no, error_no);
  atomic_store(&h3_fault_armed[kind], 1);
}

long h3_fault_fired(int kind) {
  return kind < 0 || kind >= H3_FAULT_KINDS ? 0 : atomic_load(&faults[kind].fired);
}

int h3_fault_slow(int kind) {
  long call = atomic_fetch_add(&faults[kind].calls, 1) + 1;
  long first = atomic_load(&faults[kind].first), count = atomic_load(&faults[kind].count);
  if (call < first || (count >= 0 && call - first >= count)) return 0;
  atomic_fetch_add(&faults[kind].fired, 1);
  return atomic_load(&faults[kind].error_no);
}

void *h3_map(size_t bytes) {
  int err = h3_fault_hit(H3_FAULT_ALLOC);
  void *memory = MAP_FAILED;
  if (!err) {
    memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) err = errno;
  }
  if (err) {
    h3_set_errno(0, err);
    return NULL;
  }
  return memory;
}

void h3_unmap(void *memory, size_t bytes) {
  if (memory) munmap(memory, bytes);
}

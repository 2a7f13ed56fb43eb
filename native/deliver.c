/* How pages enter and leave a range, and who hears of a fault: userfaultfd with SIGBUS (pages moved, or copied where the
 * kernel cannot move), or page protection with SIGSEGV where userfaultfd is refused. No locks. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "internal.h"
#include "pager.h"

/* Old kernel headers lack what newer kernels offer; the numbers are the kernel's ABI. */
#ifndef UFFD_USER_MODE_ONLY
#define UFFD_USER_MODE_ONLY 1
#endif
#ifndef USERFAULTFD_IOC_NEW
#define USERFAULTFD_IOC_NEW _IO(0xAA, 0x00)
#endif
#ifndef UFFD_FEATURE_SIGBUS
#define UFFD_FEATURE_SIGBUS (1 << 7)
#endif
#define H3_FEATURE_MOVE (1 << 16)
#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif
struct h3_uffdio_move {
  uint64_t dst, src, len, mode;
  int64_t move;
};
#define H3_UFFDIO_MOVE _IOWR(UFFDIO, 0x05, struct h3_uffdio_move)

static const char zeros[256 * 1024]; /* .bss: the kernel's zero page, no memory of ours */

static int uffd_new(int *error) {
  int fd = h3_fault_hit(H3_FAULT_IOCTL) ? -1 : (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY);
  if (fd >= 0) return fd;
  *error = errno;
  const int device = open("/dev/userfaultfd", O_RDWR | O_CLOEXEC);
  if (device < 0) return -1;
  fd = ioctl(device, USERFAULTFD_IOC_NEW, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY);
  close(device);
  return fd;
}

int h3_uffd_open(int want_sigbus, uint64_t *features, int *error) {
  *error = 0;
  int fd = uffd_new(error);
  if (fd < 0) return -1;
  struct uffdio_api api = {.api = UFFD_API, .features = 0};
  if (ioctl(fd, UFFDIO_API, &api)) goto refused;
  *features = api.features;
  if (want_sigbus) { /* the handshake is once per descriptor: a second one asks for what the first reported */
    close(fd);
    fd = uffd_new(error);
    if (fd < 0) return -1;
    api = (struct uffdio_api){.api = UFFD_API,
                              .features = UFFD_FEATURE_SIGBUS | (*features & (H3_FEATURE_MOVE | UFFD_FEATURE_PAGEFAULT_FLAG_WP))};
    if (ioctl(fd, UFFDIO_API, &api)) goto refused;
  }
  return fd;
refused:
  *error = errno;
  close(fd);
  return -1;
}

static int watch(h3_pager *pager, char *address, uint64_t bytes) {
  const int injected = h3_fault_hit(H3_FAULT_IOCTL);
  struct uffdio_register reg = {.range = {(uintptr_t)address, bytes}, .mode = UFFDIO_REGISTER_MODE_MISSING};
  const int guard = pager->guards && address != pager->arena;
  if (guard || pager->mode == H3_MODE_COPY) reg.mode |= UFFDIO_REGISTER_MODE_WP;
  int refused = injected || ioctl(pager->uffd, UFFDIO_REGISTER, &reg);
  if (guard && !injected && (refused || !(reg.ioctls >> _UFFDIO_WRITEPROTECT & 1))) { /* commits then compare all that is resident */
    pager->guards = 0;
    if (refused && pager->mode == H3_MODE_MOVE) {
      reg.mode = UFFDIO_REGISTER_MODE_MISSING;
      refused = ioctl(pager->uffd, UFFDIO_REGISTER, &reg);
    }
  }
  return refused ? h3_set_errno(H3_E_IO, injected ? injected : errno) : H3_OK;
}

int h3_deliver_register(h3_pager *pager, char *address, uint64_t bytes, int accessible) {
  /* Not inherited: a child's copy would read as silent zeros, and share pages that then cannot be moved. */
  if (madvise(address, bytes, MADV_DONTFORK)) return h3_set_errno(H3_E_IO, errno);
  madvise(address, bytes, MADV_NOHUGEPAGE); /* a huge page would exceed the budget; absent where THP is compiled out */
  if (pager->mode != H3_MODE_PROTECT) {
    const int status = watch(pager, address, bytes);
    if (status < 0) return status;
  }
  if (accessible && mprotect(address, bytes, PROT_READ | PROT_WRITE)) return h3_set_errno(H3_E_NOMEM, errno);
  return H3_OK;
}

/* ---- the ioctls; each resumes partial progress ---- */

static int uffd_copy(h3_pager *pager, char *to, const char *from, uint64_t bytes) {
  for (uint64_t done = 0; done < bytes;) {
    struct uffdio_copy copy = {.dst = (uintptr_t)to + done, .src = (uintptr_t)from + done, .len = bytes - done};
    const int injected = h3_fault_hit(H3_FAULT_IOCTL);
    if (!injected && ioctl(pager->uffd, UFFDIO_COPY, &copy) == 0) return H3_OK;
    const int error = injected ? injected : errno;
    if (!injected && copy.copy > 0) done += (uint64_t)copy.copy;
    else if (error == EEXIST) done += H3_PAGE; /* someone else filled it */
    else if (error != EAGAIN) return h3_set_errno(error == ENOMEM ? H3_E_NOMEM : H3_E_IO, error);
  }
  return H3_OK;
}

/* Bytes at the front of a span that lie at `to` and no longer at `from`. Pages under migration count as present. */
static uint64_t moved_already(char *to, char *from, uint64_t bytes) {
  unsigned char there[H3_MAX_CHUNK / H3_PAGE], here[H3_MAX_CHUNK / H3_PAGE];
  const size_t pages = bytes / H3_PAGE;
  size_t n = 0;
  if (pages > sizeof there || mincore(to, bytes, there) || mincore(from, bytes, here)) return 0;
  while (n < pages && (there[n] & 1) && !(here[n] & 1)) n++;
  return n * H3_PAGE;
}

/* One page of a slot that stays put (a device holds it, say): its bytes go instead. */
static int copy_page(h3_pager *pager, char *to, char *from) {
  const int status = uffd_copy(pager, to, from, H3_PAGE);
  if (status == H3_OK) madvise(from, H3_PAGE, MADV_DONTNEED);
  return status;
}

/* Moves pages that the caller owns, whole or not at all. What the kernel says of partial progress is a lower bound: 6.18
 * moves pages whose neighbours migrate (memory compaction) and reports fewer, or none with EAGAIN, and then answers EEXIST
 * for what it has moved. So where it left off is read from the page tables.
 * from_slot: nobody else writes to the source, so that a page that cannot move may be copied. */
static int move_pages(h3_pager *pager, char *to, char *from, uint64_t bytes, int from_slot, int undo) {
  int busy = 0, tries = 0;
  for (uint64_t done = 0; done < bytes;) {
    struct h3_uffdio_move move = {.dst = (uintptr_t)to + done, .src = (uintptr_t)from + done, .len = bytes - done};
    const int injected = undo ? 0 : h3_fault_hit(H3_FAULT_IOCTL);
    if ((!injected || injected == EAGAIN) && ioctl(pager->uffd, H3_UFFDIO_MOVE, &move) == 0 && !injected) return H3_OK;
    const int error = injected ? injected : errno; /* injected EAGAIN: moved, and not reported */
    if (!injected && move.move > 0) {
      done += (uint64_t)move.move;
      continue;
    }
    if (error == EAGAIN) continue;
    if (error == EEXIST) {
      const uint64_t more = moved_already(to + done, from + done, bytes - done);
      done += more;
      if (more) continue;
    }
    if (error == EBUSY) {
      if (++busy < 100) {
        usleep(20);
        continue;
      }
      if (from_slot && copy_page(pager, to + done, from + done) == H3_OK) {
        done += H3_PAGE;
        continue;
      }
    }
    if (done && from_slot && ++tries < 2000) { /* others see, and may write, what has arrived: the rest should follow */
      usleep(1000);
      continue;
    }
    if (done) /* put back what moved, so that the block is whole on one side */
      while (move_pages(pager, from, to, done, !from_slot, 1) < 0) usleep(1000);
    return h3_set_errno(error == EBUSY ? H3_E_BUSY : error == ENOMEM ? H3_E_NOMEM : H3_E_IO, error);
  }
  return H3_OK;
}

static int uffd_write_protect(h3_pager *pager, char *address, uint64_t bytes, int on) {
  struct uffdio_writeprotect wp = {.range = {(uintptr_t)address, bytes},
                                   .mode = on ? UFFDIO_WRITEPROTECT_MODE_WP : UFFDIO_WRITEPROTECT_MODE_DONTWAKE};
  for (;;) {
    const int injected = h3_fault_hit(H3_FAULT_IOCTL);
    if (!injected && ioctl(pager->uffd, UFFDIO_WRITEPROTECT, &wp) == 0) return H3_OK;
    const int error = injected ? injected : errno;
    if (error != EAGAIN) return h3_set_errno(H3_E_IO, error);
  }
}

/* ---- page protection form ---- */

static int remap(char *to, char *from, uint64_t bytes) {
  const int injected = h3_fault_hit(H3_FAULT_IOCTL);
  if (injected) return h3_set_errno(H3_E_IO, injected);
  void *moved = mremap(from, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, to);
  if (moved == MAP_FAILED) return h3_set_errno(errno == ENOMEM ? H3_E_NOMEM : H3_E_IO, errno);
  return H3_OK;
}

/* A fresh mapping in place of what a move left, so that neighbours merge and the count of mappings stays low. */
static void fence(char *address, uint64_t bytes) {
  void *fresh = mmap(address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  if (fresh == MAP_FAILED) mprotect(address, bytes, PROT_NONE);
  madvise(address, bytes, MADV_DONTFORK);
  madvise(address, bytes, MADV_NOHUGEPAGE);
}

static int protect_take(char *block, char *slot, uint64_t bytes) {
  if (mprotect(block, bytes, PROT_NONE)) return h3_set_errno(H3_E_NOMEM, errno);
  const int status = remap(slot, block, bytes);
  if (status < 0) {
    mprotect(block, bytes, PROT_READ | PROT_WRITE);
    return status;
  }
  fence(block, bytes);
  if (mprotect(slot, bytes, PROT_READ | PROT_WRITE)) return h3_set_errno(H3_E_NOMEM, errno);
  return H3_OK;
}

/* ---- the forms behind one interface ---- */

static char *block_address(const h3_range *range, uint64_t block) {
  return range->address + block * range->block_bytes;
}

static uint64_t block_span(const h3_range *range, uint64_t block) {
  return (uint64_t)h3_pages_of(range, block) * H3_PAGE;
}

int h3_slot_materialise(h3_pager *pager, char *address, uint64_t bytes) {
  if (pager->mode != H3_MODE_MOVE) return H3_OK; /* copy: no slot memory at all; protect: ordinary memory */
  for (uint64_t done = 0; done < bytes; done += sizeof zeros) {
    const uint64_t part = bytes - done < sizeof zeros ? bytes - done : sizeof zeros;
    const int status = uffd_copy(pager, address + done, zeros, part);
    if (status < 0) return status;
  }
  return H3_OK;
}

void h3_slot_discard(h3_pager *pager, char *address, uint64_t bytes) {
  if (pager->mode == H3_MODE_PROTECT) {
    void *fresh = mmap(address, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (fresh != MAP_FAILED) {
      madvise(address, bytes, MADV_DONTFORK);
      madvise(address, bytes, MADV_NOHUGEPAGE);
      return;
    }
  }
  madvise(address, bytes, MADV_DONTNEED);
}

int h3_block_place(h3_range *range, uint64_t block, char *from) {
  h3_pager *pager = range->pager;
  char *to = block_address(range, block);
  const uint64_t bytes = block_span(range, block);
  if (pager->mode == H3_MODE_MOVE) return move_pages(pager, to, from, bytes, 1, 0);
  if (pager->mode == H3_MODE_COPY) return uffd_copy(pager, to, from, bytes);
  return remap(to, from, bytes);
}

int h3_block_take(h3_range *range, uint64_t block, char *slot, char **data) {
  h3_pager *pager = range->pager;
  char *from = block_address(range, block);
  const uint64_t bytes = block_span(range, block);
  *data = pager->mode == H3_MODE_COPY ? from : slot;
  if (pager->mode == H3_MODE_MOVE) return move_pages(pager, slot, from, bytes, 0, 0);
  if (pager->mode == H3_MODE_COPY) return range->writable ? uffd_write_protect(pager, from, bytes, 1) : H3_OK;
  return protect_take(from, slot, bytes);
}

int h3_block_untake(h3_range *range, uint64_t block, char *slot) {
  h3_pager *pager = range->pager;
  /* Whatever the range is by now: a detach may have made it read-only since the block was protected. */
  if (pager->mode == H3_MODE_COPY)
    return uffd_write_protect(pager, block_address(range, block), block_span(range, block), 0);
  return h3_block_place(range, block, slot);
}

void h3_block_taken(h3_range *range, uint64_t block) {
  if (range->pager->mode == H3_MODE_COPY)
    madvise(block_address(range, block), block_span(range, block), MADV_DONTNEED);
}

int h3_block_place_zero(h3_range *range, uint64_t block) {
  char *to = block_address(range, block);
  const uint64_t bytes = block_span(range, block);
  if (range->pager->mode == H3_MODE_PROTECT)
    return mprotect(to, bytes, PROT_READ | PROT_WRITE) ? h3_set_errno(H3_E_NOMEM, errno) : H3_OK;
  for (uint64_t done = 0; done < bytes;) {
    struct uffdio_zeropage zero = {.range = {(uintptr_t)to + done, bytes - done}};
    if (ioctl(range->pager->uffd, UFFDIO_ZEROPAGE, &zero) == 0) break;
    if (zero.zeropage > 0) done += (uint64_t)zero.zeropage;
    else if (errno == EEXIST) done += H3_PAGE;
    else if (errno != EAGAIN) return h3_set_errno(H3_E_IO, errno);
  }
  return H3_OK;
}

int h3_blocks_protect(h3_range *range, uint64_t first, uint64_t count, int on) {
  char *address = block_address(range, first);
  const uint64_t bytes = (count - 1) * range->block_bytes + block_span(range, first + count - 1);
  if (range->pager->mode != H3_MODE_PROTECT) return uffd_write_protect(range->pager, address, bytes, on);
  const int injected = h3_fault_hit(H3_FAULT_IOCTL);
  if (!injected && mprotect(address, bytes, on ? PROT_READ : PROT_READ | PROT_WRITE) == 0) return H3_OK;
  return h3_set_errno(H3_E_NOMEM, injected ? injected : errno);
}

void h3_block_discard(h3_range *range, uint64_t block) {
  char *address = block_address(range, block);
  const uint64_t bytes = block_span(range, block);
  if (range->pager->mode == H3_MODE_PROTECT) fence(address, bytes);
  else madvise(address, bytes, MADV_DONTNEED);
}

/* What this kernel and processor offer. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "internal.h"
#include "pager.h"

int h3_probe(int *errno_of_uffd) {
  int bits = 0;
  uint64_t features = 0;
  const int fd = h3_uffd_open(0, &features, errno_of_uffd);
  if (fd >= 0) {
    close(fd);
    bits |= *errno_of_uffd ? H3_PROBE_UFFD_DEVICE : H3_PROBE_UFFD_SYSCALL;
    if (features & (1 << 7)) bits |= H3_PROBE_SIGBUS;
    if (features & (1 << 16)) bits |= H3_PROBE_MOVE;
  }
  if (access("/dev/userfaultfd", R_OK | W_OK) == 0) bits |= H3_PROBE_UFFD_DEVICE;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) bits |= H3_PROBE_AVX2;
  if (__builtin_cpu_supports("avx512f")) bits |= H3_PROBE_AVX512;
  unsigned a, b, c, d; /* f16c has no builtin in every compiler: leaf 1, bit 29 of ecx */
  if (__get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 29))) bits |= H3_PROBE_F16C;
#endif
  return bits;
}

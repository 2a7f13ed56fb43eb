/* internal.h: what the C files share and no caller sees: errno of the last failure, fault injection, zstd's functions.
 */
#ifndef H3_INTERNAL_H
#define H3_INTERNAL_H
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "h3store.h"

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "h3store stores little-endian data and is built for little-endian processors only"
#endif

/* initial-exec: the lazy form may call malloc on a thread's first access, and fault handlers read these. */
#define H3_TLS static _Thread_local __attribute__((tls_model("initial-exec")))
#define H3_LIKELY(x) __builtin_expect(!!(x), 1)
#define H3_UNLIKELY(x) __builtin_expect(!!(x), 0)

/* Inner loops compiled twice, for the processor at hand. Sanitizer builds skip it: an instrumented resolver runs
 * before the sanitizer's runtime does. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define H3_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define H3_CLONES
#endif
/* Functions written in AVX2, and whether they may run here. */
#if defined(__x86_64__) && defined(__GNUC__)
#define H3_AVX2 __attribute__((target("avx2,bmi,popcnt")))
#define H3_HAS_AVX2 (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi"))
#endif
#define H3_INLINE static inline __attribute__((always_inline))

/* Remembers err as this thread's h3_last_errno and returns status. Async-signal-safe. */
int h3_set_errno(int status, int err);
/* Status for an errno of a write: H3_E_NOSPACE for a full disk, quota or file size limit, else H3_E_IO. */
int h3_write_status(int err);

extern atomic_int h3_fault_armed[H3_FAULT_KINDS];
int h3_fault_slow(int kind);
/* Errno to fail with, or 0. Every read, write, allocation and ioctl asks first; one branch when disarmed. */
H3_INLINE int h3_fault_hit(int kind) {
  if (H3_LIKELY(!atomic_load_explicit(&h3_fault_armed[kind], memory_order_relaxed))) return 0;
  return h3_fault_slow(kind);
}

typedef struct h3_zstd_calls {
  size_t (*estimate_dctx_size)(void);
  void *(*init_static_dctx)(void *workspace, size_t bytes);
  size_t (*decompress_dctx)(void *dctx, void *out, size_t out_cap, const void *in, size_t bytes);
  size_t (*estimate_cctx_size)(int level);
  void *(*init_static_cctx)(void *workspace, size_t bytes);
  size_t (*compress_cctx)(void *cctx, void *out, size_t out_cap, const void *in, size_t bytes, int level);
  unsigned (*is_error)(size_t code);
  size_t (*compress_bound)(size_t bytes);
} h3_zstd_calls;
/* Set once by h3_init, constant afterwards. */
extern h3_zstd_calls h3_zstd_fn;

/* One more user of a file; h3_file_destroy lets go of it. */
void h3_file_retain(h3_file *file);
/* Reads as h3_file_read does, past the page cache where the file system can: *at, inside the page-aligned buffer of
 * bytes + H3_READ_SLACK, is where the bytes begin. What the page cache holds already is copied from there to plain, at any
 * address, and *at is plain; that may be buffer too. */
enum { H3_READ_SLACK = 8192 };
int h3_file_read_direct(h3_file *file, uint64_t offset, size_t bytes, char *buffer, char *plain, char **at);

/* Highest zstd level that a codec has working memory for. */
enum { H3_MAX_LEVEL = 3 };
/* H3_OK, or H3_E_INVALID when a field of spec breaks its rule. */
int h3_spec_check(const h3_spec *spec);
/* A chunk that has the check of raw bytes, and nothing else. */
h3_chunk h3_checked(const void *raw, size_t bytes);
/* Anonymous private memory, zeroed on first use; NULL with h3_last_errno set. */
void *h3_map(size_t bytes);
void h3_unmap(void *memory, size_t bytes);
#endif

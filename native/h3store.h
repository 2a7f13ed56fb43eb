/* h3store.h: the contract between the native engine and everything above it.
 *
 * Purpose. Tensors larger than memory: ranges of ordinary address space whose blocks are filled from an archive
 * when touched, kept under one hard byte budget, and written back when changed. Plus the chunk codec, and the CPU
 * kernels of the decoder. Nothing here knows Python: a thread may fault while it holds the interpreter lock.
 *
 * Dangers.
 *  - Signals: fills run inside SIGBUS ("signal" delivery) or SIGSEGV ("dispatch" delivery) handlers of the thread
 *    that touched the page. Whatever they call must be async-signal-safe: no malloc, no stdio. A lock that fill takes
 *    is never held by code that touches a range.
 *  - Threads: every function may be called from any thread unless it says otherwise.
 *  - Fork: ranges and arena are not inherited; see h3_after_fork_child.
 *
 * This file is parsed twice: by the C compiler and by cffi. Keep declarations plain: lines that start with '#' are
 * dropped for cffi, so constants that Python needs are enums.
 */
#ifndef H3STORE_H
#define H3STORE_H
#include <stddef.h>
#include <stdint.h>

/* ---- status: 0 or a negative code; the text of each is h3_strerror's ------------------------------------------- */
enum h3_status {
  H3_OK = 0,
  H3_E_NOMEM = -1000,       /* host memory or address space refused */
  H3_E_IO = -1001,          /* read or write failed; h3_last_errno says how */
  H3_E_NOSPACE = -1002,     /* file system full or quota reached */
  H3_E_CORRUPT = -1003,     /* a chunk does not decode to the bytes its checksum promises */
  H3_E_BUDGET = -1004,      /* the request cannot fit the byte budget (all of it pinned or in use) */
  H3_E_INVALID = -1005,     /* an argument breaks its stated rule */
  H3_E_UNSUPPORTED = -1006, /* the kernel or the processor lacks what was asked */
  H3_E_READONLY = -1007,    /* write to a read-only range or file */
  H3_E_CLOSED = -1008,      /* the object was closed, or belongs to a parent process */
  H3_E_BUSY = -1009,        /* pages are shared with a forked child or pinned by a device */
  H3_E_TRUNCATED = -1010    /* the file ends before the bytes its index promises */
};
const char *h3_strerror(int status);
/* errno of the last H3_E_IO or H3_E_NOSPACE on this thread, 0 if none. */
int h3_last_errno(void);

/* ---- start ------------------------------------------------------------------------------------------------------ */
/* Addresses of the zstd functions, taken once from a library that the process already holds. */
typedef struct h3_zstd {
  uintptr_t version_number;
  uintptr_t estimate_dctx_size;
  uintptr_t init_static_dctx;
  uintptr_t decompress_dctx;
  uintptr_t estimate_cctx_size;
  uintptr_t init_static_cctx;
  uintptr_t compress_cctx;
  uintptr_t is_error;
  uintptr_t compress_bound;
} h3_zstd;
/* Must be the first call. H3_E_INVALID when a pointer is null or the version is below 1.5.0. */
int h3_init(const h3_zstd *zstd);

/* ---- codec: one chunk to stored bytes and back ------------------------------------------------------------------- */
enum h3_filter {
  H3_FILTER_RAW = 0,       /* stored = raw bytes */
  H3_FILTER_ZERO = 1,      /* every byte is zero; nothing stored */
  H3_FILTER_ZSTD = 2,      /* one zstd frame */
  H3_FILTER_BYTEPLANE = 3, /* bytes regrouped by significance, each plane raw or zstd */
  H3_FILTER_EXPNIBBLE = 4, /* float exponents as nibbles below the chunk's maximum, sign and mantissa raw */
  H3_FILTER_COUNT = 5,     /* of those above, which a spec may name */
  H3_FILTER_PATCH = 5      /* the pages that differ from another chunk; made and read by ranges, not by the codec */
};
enum h3_delta {
  H3_DELTA_NONE = 0,
  H3_DELTA_ROW = 1,  /* each element minus the one row_bytes before it, modulo 2^bits */
  H3_DELTA_BASE = 2, /* each element minus the same element of the base chunk, modulo 2^bits */
  H3_DELTA_COUNT = 3
};
enum h3_check_kind {
  H3_CHECK_XXH64 = 0, /* seed 0 */
  H3_CHECK_XXH3 = 1,  /* 64 bits, default secret, seed 0 */
  H3_CHECK_COUNT = 2
};
enum h3_limits {
  H3_MIN_CHUNK = 4096,    /* bytes; block sizes are multiples of this */
  H3_MAX_CHUNK = 4194304, /* bytes */
  H3_MAX_BASE_DEPTH = 8   /* archives that lean on one another */
};
/* One chunk's index entry. In the file it is these 24 bytes, little-endian, in this order. */
typedef struct h3_chunk {
  uint64_t offset;       /* of the stored bytes in the file */
  uint64_t check;        /* hash of the raw bytes, by check_kind */
  uint32_t stored_bytes; /* 0 for H3_FILTER_ZERO */
  uint8_t filter;        /* h3_filter */
  uint8_t delta;         /* h3_delta */
  uint8_t check_kind;    /* h3_check_kind; encoders give H3_CHECK_XXH3 */
  uint8_t reserved;      /* 0 */
} h3_chunk;
/* How a tensor's chunks are encoded. Chosen per tensor, by trial; recorded per chunk. */
typedef struct h3_spec {
  uint32_t elem_bytes; /* 1, 2, 4 or 8 */
  uint32_t row_bytes;  /* for H3_DELTA_ROW; a multiple of elem_bytes; 0: no rows */
  uint8_t filter;      /* h3_filter to try first; an encoder may fall to ZERO or RAW, never above raw size */
  uint8_t delta;       /* h3_delta */
  uint8_t exp_bits;    /* exponent bits below the sign: 8 for bf16 and fp32, 5 for fp16, 0: not a float */
  uint8_t level;       /* zstd level, 1 by default */
} h3_spec;
/* Working memory of one encode or decode at a time: static zstd contexts and scratch; never allocates after create. */
typedef struct h3_codec h3_codec;
int h3_codec_create(h3_codec **out); /* H3_E_NOMEM */
void h3_codec_destroy(h3_codec *codec);
/* Encodes raw[raw_bytes] into out[out_cap] (out_cap >= raw_bytes); fills chunk but for offset. base: the base chunk's
 * raw bytes, raw_bytes long, or NULL. Async-signal-safe. H3_E_INVALID. */
int h3_chunk_encode(h3_codec *codec, const h3_spec *spec, const void *raw, uint32_t raw_bytes, const void *base,
                    void *out, uint32_t out_cap, h3_chunk *chunk);
/* Decodes and verifies; raw is complete and right, or the status is H3_E_CORRUPT. stored is untrusted: nothing outside
 * the two buffers is read or written whatever it holds. spec gives elem_bytes, row_bytes, exp_bits; filter and delta
 * come from chunk. Async-signal-safe. */
int h3_chunk_decode(h3_codec *codec, const h3_spec *spec, const h3_chunk *chunk, const void *stored, const void *base,
                    void *raw, uint32_t raw_bytes);
/* XXH64 of a buffer. Source: the XXH64 section of the xxHash format specification. */
uint64_t h3_xxh64(const void *data, size_t bytes, uint64_t seed);
/* XXH3 of a buffer: 64 bits, default secret, seed 0. Three times as fast. Source: its sections of the same. */
uint64_t h3_xxh3(const void *data, size_t bytes);
/* 1 if raw bytes have the check of a chunk, by the hash that it names. */
int h3_check_holds(const h3_chunk *chunk, const void *raw, size_t bytes);

/* ---- file: positions in an append-only file ---------------------------------------------------------------------- */
/* Borrows fd (the caller closes it after the last user of the file is gone). tail: where the next append goes. */
typedef struct h3_file h3_file;
int h3_file_create(int fd, uint64_t tail, int writable, h3_file **out);
void h3_file_destroy(h3_file *file);
uint64_t h3_file_tail(const h3_file *file);
void h3_file_set_tail(h3_file *file, uint64_t tail); /* only while nobody appends */
/* Whole reads and writes, EINTR and short transfers resumed. Block on the disk. Async-signal-safe.
 * H3_E_IO, H3_E_NOSPACE, H3_E_TRUNCATED (read past the end), H3_E_READONLY. */
int h3_file_read(h3_file *file, uint64_t offset, void *out, size_t bytes);
/* After a failure the bytes that did reach the disk are given back; the gap in the offsets stays. */
int h3_file_append(h3_file *file, const void *data, size_t bytes, uint64_t *offset);
/* Overwrites bytes at a position: for the commit slots, which are the only bytes of an archive that ever change. */
int h3_file_overwrite(h3_file *file, uint64_t offset, const void *data, size_t bytes);
/* Waits until what was written is on the disk (fdatasync). H3_E_IO, H3_E_NOSPACE. */
int h3_file_sync(h3_file *file);
/* Gives back the disk space of bytes that nothing refers to, where the file system can; they then read as zeros. */
void h3_file_discard(h3_file *file, uint64_t offset, uint64_t bytes);
/* Encodes bytes (in chunks of chunk_bytes, the last may be shorter) and appends them; chunks gets one entry each.
 * base: NULL, or the base tensor's raw bytes. Uses n_threads threads. Blocks. */
int h3_encode_append(h3_file *file, const h3_spec *spec, const void *raw, uint64_t bytes, uint32_t chunk_bytes,
                     const void *base, int n_threads, h3_chunk *chunks);

/* ---- fault injection: the n-th call of a kind fails ---------------------------------------------------------------- */
enum h3_fault_kind {
  H3_FAULT_READ = 0,
  H3_FAULT_WRITE = 1,
  H3_FAULT_ALLOC = 2,
  H3_FAULT_IOCTL = 3,
  H3_FAULT_KINDS = 4
};
/* From the n-th call of kind on (1 = the next), `count` calls fail (-1: for ever) with error_no. n = 0 disarms. EAGAIN on
 * a move of pages: they are moved, and reported as not moved, as Linux 6.18 does while memory is compacted. */
void h3_fault_arm(int kind, long n, long count, int error_no);
/* Calls of the kind that have failed by injection since it was armed. */
long h3_fault_fired(int kind);

/* ---- pager: ranges under one budget -------------------------------------------------------------------------------- */
enum h3_delivery {
  H3_DELIVERY_AUTO = 0,
  H3_DELIVERY_SIGNAL = 1,  /* userfaultfd, SIGBUS in the faulting thread, UFFDIO_MOVE or COPY */
  H3_DELIVERY_DISPATCH = 2, /* no userfaultfd: page protection; operands made resident before an op, SIGSEGV for the rest */
  H3_DELIVERY_SIGNAL_COPY = 3 /* as SIGNAL on a kernel without UFFDIO_MOVE */
};
typedef struct h3_pager h3_pager;
typedef struct h3_range h3_range;
typedef struct h3_pager_config {
  uint64_t budget_bytes; /* hard bound on resident block bytes, slots included */
  int delivery;          /* h3_delivery */
  int contexts;          /* fills, encodes at once; 0: by processor count */
} h3_pager_config;
typedef struct h3_range_config {
  uint64_t bytes;          /* length of the data */
  uint64_t capacity_bytes; /* address space to reserve; >= bytes */
  uint32_t block_bytes;    /* multiple of 4096, at most H3_MAX_CHUNK; also the chunk size */
  int writable;            /* evicted blocks that changed are appended to file */
  int cyclic;              /* touched in repeated order: evict the newest, so a fixed part stays resident */
  h3_spec spec;
  h3_file *file;          /* source of chunks and sink of dirty blocks; NULL: every block starts as zeros, no write back */
  const h3_chunk *chunks; /* one per block of bytes, copied; NULL: all zero */
  h3_range *base;         /* for H3_DELTA_BASE: range of the base tensor, kept alive by the caller; or NULL */
  const char *label;      /* copied, at most 255 bytes: how messages name the range; or NULL */
} h3_range_config;
typedef struct h3_pager_stats {
  uint64_t budget_bytes, resident_bytes, peak_resident_bytes, pinned_bytes;
  uint64_t faults, write_faults, fills, prefetches, evictions, write_backs, waits;
  uint64_t bytes_read, bytes_written, bytes_decoded, bytes_encoded;
  uint64_t errors;
  int delivery, move_supported;
} h3_pager_stats;
/* Blocks only for system calls. H3_E_BUDGET when budget_bytes is below one page, H3_E_UNSUPPORTED when the asked
 * delivery is refused (AUTO falls to DISPATCH). */
int h3_pager_create(const h3_pager_config *config, h3_pager **out);
/* All ranges must be gone. */
void h3_pager_destroy(h3_pager *pager);
void h3_pager_get_stats(h3_pager *pager, h3_pager_stats *out);
/* H3_E_BUDGET when block_bytes exceeds the budget. */
int h3_range_create(h3_pager *pager, const h3_range_config *config, h3_range **out);
/* Drops every block, unsaved ones too. No other thread may use the range. */
void h3_range_destroy(h3_range *range);
void *h3_range_address(const h3_range *range);
/* Makes [offset, offset+bytes) resident, as far as the budget allows without evicting what this call brought in.
 * Blocks on the disk. Returns the first error; done gets the bytes made resident. */
int h3_range_prefetch(h3_range *range, uint64_t offset, uint64_t bytes, uint64_t *done);
/* The same for a list of blocks (ascending, distinct, below the block count, else H3_E_INVALID): read at queue depth,
 * decoded in parallel. A block that fails fails no other; the status and failed are those of the lowest. More blocks than
 * the budget holds push one another out. */
int h3_range_fetch(h3_range *range, const uint64_t *blocks, uint64_t n, uint64_t *failed);
/* Rows at base + index * stride of row_bytes each; indices from 0 to rows - 1, or from -rows where wrap is set. */
typedef struct h3_row_set {
  uint64_t base, stride, row_bytes;
  int64_t rows;
  int wrap;
} h3_row_set;
enum h3_rows_states { H3_ROWS_ABSENT = 0, H3_ROWS_RESIDENT = 1 };
/* Whether everything of the rows is resident now. H3_E_INVALID: an index, or a row, lies outside. */
int h3_rows_state(h3_range *range, const h3_row_set *set, const int64_t *index, uint64_t n);
/* Copies the rows to out, in the order of index, if everything of them is resident, on at most `threads` threads: the status
 * is h3_rows_state's, and out is undefined unless it is H3_ROWS_RESIDENT. Inside an operation (h3_op_enter) only: what is
 * evicted meanwhile is faulted in. out must be ordinary memory. */
int h3_rows_copy(h3_range *range, const h3_row_set *set, const int64_t *index, uint64_t n, void *out, int threads);
/* Asks for huge pages where memory that nobody has touched yet has room for whole ones. A hint. */
void h3_huge_pages(uintptr_t address, uint64_t bytes);
/* Copies n rows of row_bytes at byte offsets (ascending) of the range to out + position * row_bytes, each block read once,
 * at queue depth. Blocks stay resident only where the budget has room left: nothing is evicted. Blocks on the disk.
 * out must be ordinary memory. On an error, that of the lowest block that failed, out is undefined. */
int h3_rows_gather(h3_range *range, const int64_t *offsets, const int64_t *positions, uint64_t n, uint64_t row_bytes,
                   void *out, uint64_t *failed);
/* Counted hold: resident and writable, for system calls and devices too, until unpinned. H3_E_BUDGET when it can't fit; then
 * nothing stays pinned. */
int h3_range_pin(h3_range *range, uint64_t offset, uint64_t bytes);
void h3_range_unpin(h3_range *range, uint64_t offset, uint64_t bytes);
/* The same by address, for kernels: an address in no range is plain memory, and both do nothing and return H3_OK. */
int h3_pin_address(const void *address, uint64_t bytes);
void h3_unpin_address(const void *address, uint64_t bytes);
/* 1 if the address lies in a live range. */
int h3_is_tiered(uintptr_t address);
/* Where the live range that holds the address starts; 0 if none does. */
uintptr_t h3_range_start(uintptr_t address);
/* Writes back every changed block among [first, first+count), brings their entries in chunks (may be NULL) up to date
 * and says which those were: n_changed numbers in changed[count] (may be NULL, both). After an error chunks is as it was.
 * Concurrent writers see no torn block; what they write later is dirty again. Blocks on the disk. */
int h3_range_flush(h3_range *range, uint64_t first, uint64_t count, h3_chunk *chunks, uint64_t *changed,
                   uint64_t *n_changed);
/* The same for all that changed since the last call of this function, at a cost that does not grow with what did not: from
 * block *next on (0 at first), until about 64 MiB of blocks are compared or changed, which has room for limit (>= 64)
 * numbers, is full; *next then says where to go on, and equals count at the end. chunks is that of the last call, or of an
 * h3_range_flush of all blocks; its entries are brought up to date also before an error. H3_E_INVALID: count is not the number
 * of blocks, or *next is not below it. */
int h3_range_flush_changes(h3_range *range, uint64_t *next, h3_chunk *chunks, uint64_t count, uint64_t *changed,
                           uint64_t limit, uint64_t *n_changed);
/* Makes the next flush compare every resident block. Flushes otherwise pass over blocks that no processor has written to since
 * an earlier one, which a device can do that got hold of their pages before that. */
void h3_range_recheck(h3_range *range);
/* Evicts clean and dirty blocks of [offset, offset+bytes) that are not pinned. */
int h3_range_drop(h3_range *range, uint64_t offset, uint64_t bytes);
/* Encodes blocks [first, first+count) as they are now and appends them to another file. Blocks on the disk. */
int h3_range_export(h3_range *range, uint64_t first, uint64_t count, const h3_spec *spec, h3_file *file,
                    h3_chunk *chunks);
/* Sets the data length within capacity_bytes; new bytes are zero. Blocks past a shorter length are dropped. */
int h3_range_resize(h3_range *range, uint64_t bytes);
uint64_t h3_range_resident_bytes(h3_range *range);
/* How blocks are encoded from now on; elem_bytes, row_bytes and exp_bits must stay. H3_E_INVALID. */
int h3_range_set_spec(h3_range *range, const h3_spec *spec);
/* Reads from another handle of the same bytes from now on, and no longer writes back. The old handle is unused when this
 * returns. For a store that closes while tensors live. H3_E_BUSY after 5 s of fills that never pause. */
int h3_range_detach(h3_range *range, h3_file *file);
/* While an operation is in flight a failed fill gives it a quarantined zero block and a range error instead of killing the
 * process. Around an operation: entered = h3_op_enter(); ...; if (h3_op_leave(entered)) ask h3_range_take_error of every
 * operand's range. enter also puts our signal handlers back if somebody replaced them, and unblocks their signals in a
 * thread's first operation. Both on the same thread. */
uint64_t h3_op_enter(void);
int h3_op_leave(uint64_t entered);
/* The error of a fill whose zeros the operation that entered then may have seen, and its block; H3_OK if none. Takes the
 * zeros away. Operations on the same range that ran at the same time get the error as well. */
int h3_range_take_error(h3_range *range, uint64_t entered, uint64_t *block);
/* Signal ownership: 1 if our handler is installed for the delivery's signal. h3_signals_install puts it back,
 * keeping what it finds as the handler for foreign addresses. */
int h3_signals_ours(void);
int h3_signals_install(void);
/* What this machine offers: bit set of h3_probe_bit. */
enum h3_probe_bit {
  H3_PROBE_UFFD_SYSCALL = 1, H3_PROBE_UFFD_DEVICE = 2, H3_PROBE_SIGBUS = 4, H3_PROBE_MOVE = 8, H3_PROBE_AVX2 = 16,
  H3_PROBE_AVX512 = 32, H3_PROBE_F16C = 64
};
int h3_probe(int *errno_of_uffd);
/* pthread_atfork hooks are installed by h3_pager_create; this reports how often a child was repaired. */
long h3_fork_repairs(void);

/* ---- compute: kernels of the decoder ------------------------------------------------------------------------------- */
/* Activations and accumulation are float32 whatever the storage type; weights and KV are converted exactly. Kernels
 * block until done and run on a pool of threads that the library owns. They hold what they read with h3_pin_address, a
 * bounded piece at a time, so weights and KV blocks may lie in ranges; a failed hold ends the kernel with that status
 * and leaves its output undefined. Results do not depend on the number of threads, nor on what was resident.
 * Every kernel: H3_E_INVALID for a size or type that breaks its rule, H3_E_NOMEM for scratch. */
enum h3_dtype { H3_F32 = 0, H3_BF16 = 1, H3_F16 = 2 };
enum h3_compute_limits {
  H3_MAX_THREADS = 64,
  H3_MAX_HEAD_DIM = 256, /* head_dim is a multiple of 8 up to this */
  H3_PANEL_BYTES = 262144 /* weights held at once by a thread, unless one row is longer */
};
/* Threads that kernels use from now on, the caller included; 1..H3_MAX_THREADS, else nothing changes. */
int h3_set_threads(int n);
int h3_get_threads(void);
/* What could not be held when a kernel last failed on memory: an address inside it, for the message. 0 if none did. */
uintptr_t h3_failed_hold(void);
/* Name of the kernels in use: "avx2" or "generic". h3_set_isa("generic") forces the portable ones (for tests),
 * h3_set_isa("auto") goes back. H3_E_UNSUPPORTED when the processor lacks it. */
const char *h3_isa(void);
int h3_set_isa(const char *name);
/* y[rows][n] = x[rows][k] w[n][k]^T + bias, or += when accumulate. w: row-major, of h3_dtype type;
 * bias: n floats or NULL. exact_rows: 1 gives each row the same bits however many rows there are (prefill), 0 may
 * take a faster order for few rows (decode). */
int h3_linear(const float *x, int64_t rows, const void *w, int type, const float *bias, int64_t n, int64_t k,
              int accumulate, int exact_rows, float *y);
/* out[rows][k] = w[ids[row]][k]; ids in [0, vocab) or H3_E_INVALID. */
int h3_embed(const int64_t *ids, int64_t rows, const void *w, int type, int64_t vocab, int64_t k, float *out);
/* y = x / sqrt(mean(x^2) + eps) * weight, row by row; y may be x. Source: Zhang and Sennrich 2019, section 3. */
int h3_rmsnorm(const float *x, int64_t rows, int64_t k, const float *weight, float eps, float *y);
/* y[rows][n] = silu(x[:, :n]) * x[:, n:]; x is [rows][2 n]. */
int h3_silu_mul(const float *x, int64_t rows, int64_t n, float *y);

/* One layer's KV blocks, in token order: block b holds tokens [b block_tokens, (b + 1) block_tokens) as
 * (2, num_kv_heads, block_tokens, head_dim), K then V. block_tokens is a multiple of 16, at most 512. */
typedef struct h3_kv {
  const uint64_t *table; /* block base addresses */
  int64_t n_blocks;
  int32_t num_kv_heads, head_dim, block_tokens;
  int32_t type; /* h3_dtype */
} h3_kv;
/* qkv[rows] of row_stride floats: num_heads query heads, then num_kv_heads of K, then of V. Rotates the query heads in
 * place and K on its way to token start + row of the blocks (half-split pairs: x cos + rotate_half(x) sin), V as it
 * is. cos, sin: [rows][head_dim / 2]. Source: Su et al. 2021, section 3.4.2. */
int h3_rope_write(float *qkv, int64_t rows, int64_t row_stride, int32_t num_heads, const float *cos, const float *sin,
                  const h3_kv *kv, int64_t start);
/* Softmax attention of rows of queries (row_stride floats apart, num_heads heads first) over tokens
 * [kv_from, kv_to): row r sees those below first + r + 1 only, so first is its own position; first >= kv_to means that
 * all are seen. kv_from is a multiple of block_tokens. out[rows][num_heads * head_dim]; lse (may be NULL) [rows][num_heads], natural log. No token seen: zeros and
 * -inf. exact_rows as in h3_linear. Source: Dao et al. 2022 and 2023, online softmax and its log-sum-exp. */
int h3_block_attention(const float *q, int64_t rows, int64_t row_stride, int32_t num_heads, const h3_kv *kv,
                       int64_t kv_from, int64_t kv_to, int64_t first, float scale, int exact_rows, float *out,
                       float *lse);
/* Merges two partial results over disjoint tokens into the first: out[n][head_dim], lse[n]. */
int h3_attention_merge(float *out, float *lse, const float *other_out, const float *other_lse, int64_t n,
                       int32_t head_dim);

#endif

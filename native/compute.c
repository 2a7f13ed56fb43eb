/* compute.c: linear layers and the row-wise kernels of the decoder, over the vector primitives that fit the processor.
 *
 * A linear layer is cut into units of output columns. A unit holds its rows of w with h3_pin_address while it reads them:
 * few rows of x stream w once (dots); many rows first turn 16 rows of w into a packed float panel, then run tiles.
 */
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <stdatomic.h>
#include <string.h>
#include "compute.h"

enum {
  PACKED_BYTES = 196608,  /* packed panels of one unit: they stay in a core's second-level cache with the rows of x */
  SMALL_UNIT = 32768,      /* products below which handing out a unit costs more than doing it */
  ROW_BLOCK_BYTES = 131072 /* rows of x that meet all panels of a unit before the next rows come */
};

static _Atomic(const h3_kernels *) chosen;

static const h3_kernels *best_kernels(void) {
#if defined(__x86_64__)
  unsigned a, b, c, d; /* clang 14 knows no builtin name for F16C */
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C))
    return &h3_kernels_avx2;
#endif
  return &h3_kernels_generic;
}

const h3_kernels *h3_active_kernels(void) {
  const h3_kernels *kernels = atomic_load(&chosen);
  if (!kernels) atomic_store(&chosen, kernels = best_kernels());
  return kernels;
}

const char *h3_isa(void) { return h3_active_kernels()->name; }

int h3_set_isa(const char *name) {
  if (!name) return H3_E_INVALID;
  const h3_kernels *best = best_kernels();
  if (!strcmp(name, "generic"))
    best = &h3_kernels_generic;
  else if (strcmp(name, "auto") && strcmp(name, best->name))
    return H3_E_UNSUPPORTED;
  atomic_store(&chosen, best);
  return H3_OK;
}

static _Atomic uintptr_t failed_hold;

int h3_hold(const void *address, uint64_t bytes) {
  int status = h3_pin_address(address, bytes);
  if (status) atomic_store(&failed_hold, (uintptr_t)address);
  return status;
}

uintptr_t h3_failed_hold(void) { return atomic_load(&failed_hold); }

/* ---- linear ---------------------------------------------------------------------------------------------------- */

typedef struct linear_job {
  const h3_kernels *kernels;
  const float *x, *bias;
  const char *w;
  float *y;
  int64_t rows, n, k, columns; /* columns of a unit */
  size_t row_bytes;
  int type, accumulate;
} linear_job;

static int dots_unit(void *context, int64_t unit, int worker) {
  (void)worker;
  const linear_job *job = context;
  int64_t first = unit * job->columns, count = h3_min64(job->columns, job->n - first);
  const char *w = job->w + (size_t)first * job->row_bytes;
  int status = h3_hold(w, (uint64_t)count * job->row_bytes);
  if (status) return status;
  for (int64_t row = 0; row < job->rows; row += 4)
    job->kernels->dots(job->x + row * job->k, job->k, (int)h3_min64(4, job->rows - row), w, job->type, count, job->k,
                       job->bias ? job->bias + first : NULL, job->accumulate, job->y + row * job->n + first, job->n);
  h3_unpin_address(w, (uint64_t)count * job->row_bytes);
  return H3_OK;
}

/* All rows of x against the packed panels of one unit. */
static void run_tiles(const linear_job *job, const float *packed, int64_t first, int64_t count) {
  const int64_t block = H3_MR * h3_max64(1, ROW_BLOCK_BYTES / (H3_MR * 4 * job->k));
  for (int64_t from = 0; from < job->rows; from += block) {
    const int64_t to = h3_min64(job->rows, from + block);
    for (int64_t j = 0; j < count; j += H3_NR)
      for (int64_t row = from; row < to; row += H3_MR)
        job->kernels->tile(job->x + row * job->k, job->k, (int)h3_min64(H3_MR, to - row), packed + j * job->k, H3_NR,
                           job->k, (int)h3_min64(H3_NR, count - j), job->bias ? job->bias + first + j : NULL, job->accumulate,
                           job->y + row * job->n + first + j, job->n);
  }
}

static int tiles_unit(void *context, int64_t unit, int worker) {
  (void)worker;
  const linear_job *job = context;
  int64_t first = unit * job->columns, count = h3_min64(job->columns, job->n - first);
  void *packed;
  int status = h3_scratch(H3_SCRATCH_PANELS, (size_t)(job->columns * job->k) * 4, &packed);
  for (int64_t j = 0; j < count && status == H3_OK; j += H3_NR) {
    const char *w = job->w + (size_t)(first + j) * job->row_bytes;
    const int64_t held = h3_min64(H3_NR, count - j);
    status = h3_hold(w, (uint64_t)held * job->row_bytes);
    if (status) break;
    job->kernels->pack16(w, job->type, held, job->k, (float *)packed + j * job->k);
    h3_unpin_address(w, (uint64_t)held * job->row_bytes);
  }
  if (status == H3_OK) run_tiles(job, packed, first, count);
  return status;
}

int h3_linear(const float *x, int64_t rows, const void *w, int type, const float *bias, int64_t n, int64_t k,
              int accumulate, int exact_rows, float *y) {
  if (!x || !w || !y || rows < 0 || n <= 0 || k <= 0 || !h3_type_valid(type))
    return H3_E_INVALID;
  if (!rows) return H3_OK;
  linear_job job = {.kernels = h3_active_kernels(), .x = x, .bias = bias, .w = w, .y = y, .rows = rows, .n = n, .k = k,
                    .row_bytes = (size_t)k * h3_type_bytes(type), .type = type, .accumulate = accumulate};
  int few = !exact_rows && rows <= 4;
  size_t per_column = few ? job.row_bytes : (size_t)k * 4;
  int64_t columns = (int64_t)((few ? (size_t)H3_PANEL_BYTES : (size_t)PACKED_BYTES) / per_column);
  int64_t share = n / (4 * h3_get_threads()); /* a few units a thread, or the last ones leave threads idle */
  int64_t least = SMALL_UNIT / (k * (few ? 1 : rows));
  job.columns = h3_max64(H3_NR, h3_min64(columns, h3_max64(share, least)) / H3_NR * H3_NR);
  return h3_parallel(few ? dots_unit : tiles_unit, &job, (n + job.columns - 1) / job.columns);
}

/* ---- row-wise -------------------------------------------------------------------------------------------------- */

int h3_embed(const int64_t *ids, int64_t rows, const void *w, int type, int64_t vocab, int64_t k, float *out) {
  if (!ids || !w || !out || rows < 0 || k <= 0 || !h3_type_valid(type)) return H3_E_INVALID;
  size_t row_bytes = (size_t)k * h3_type_bytes(type);
  for (int64_t row = 0; row < rows; row++)
    if (ids[row] < 0 || ids[row] >= vocab) return H3_E_INVALID;
  for (int64_t row = 0; row < rows; row++) {
    const char *from = (const char *)w + (size_t)ids[row] * row_bytes;
    int status = h3_hold(from, row_bytes);
    if (status) return status;
    h3_active_kernels()->to_float(from, type, k, out + row * k);
    h3_unpin_address(from, row_bytes);
  }
  return H3_OK;
}

typedef struct rows_job {
  const h3_kernels *kernels;
  const float *x, *weight;
  float *y, eps;
  int64_t rows, width, rows_per_unit;
} rows_job;

static int rmsnorm_unit(void *context, int64_t unit, int worker) {
  (void)worker;
  const rows_job *job = context;
  const int64_t from = unit * job->rows_per_unit, to = h3_min64(job->rows, from + job->rows_per_unit);
  for (int64_t row = from; row < to; row++)
    job->kernels->rmsnorm(job->x + row * job->width, job->width, job->weight, job->eps, job->y + row * job->width);
  return H3_OK;
}

static int silu_mul_unit(void *context, int64_t unit, int worker) {
  (void)worker;
  const rows_job *job = context;
  const int64_t n = job->width, from = unit * job->rows_per_unit, to = h3_min64(job->rows, from + job->rows_per_unit);
  for (int64_t row = from; row < to; row++)
    job->kernels->silu_mul(job->x + row * 2 * n, job->x + row * 2 * n + n, n, job->y + row * n);
  return H3_OK;
}

static int by_rows(h3_unit_fn fn, rows_job *job) {
  job->kernels = h3_active_kernels();
  job->rows_per_unit = h3_max64(1, 16384 / job->width); /* smaller pieces cost more to hand out than to do */
  return h3_parallel(fn, job, (job->rows + job->rows_per_unit - 1) / job->rows_per_unit);
}

int h3_rmsnorm(const float *x, int64_t rows, int64_t k, const float *weight, float eps, float *y) {
  if (!x || !weight || !y || rows < 0 || k <= 0) return H3_E_INVALID;
  return by_rows(rmsnorm_unit, &(rows_job){.x = x, .weight = weight, .y = y, .eps = eps, .rows = rows, .width = k});
}

int h3_silu_mul(const float *x, int64_t rows, int64_t n, float *y) {
  if (!x || !y || rows < 0 || n <= 0) return H3_E_INVALID;
  return by_rows(silu_mul_unit, &(rows_job){.x = x, .y = y, .rows = rows, .width = n});
}

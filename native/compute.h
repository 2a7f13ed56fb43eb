/* compute.h: what the kernel files share and nobody else sees: the thread pool and the table of vector primitives. */
#ifndef H3_COMPUTE_H
#define H3_COMPUTE_H
#include "h3store.h"

/* Runs fn(context, unit, worker) for units [0, n_units), each once, on the pool; worker < h3_get_threads(). Returns the
 * first status that is not H3_OK, after which units still waiting are skipped. A unit that meets a full budget
 * (H3_E_BUDGET, before it changed anything) runs again alone, when no other worker holds memory. Blocks. When the pool
 * is taken by another thread, the caller does all the units itself. */
typedef int (*h3_unit_fn)(void *context, int64_t unit, int worker);
int h3_parallel(h3_unit_fn fn, void *context, int64_t n_units);

/* h3_pin_address, and keeps the address when that fails (h3_failed_hold). */
int h3_hold(const void *address, uint64_t bytes);

/* Scratch of one thread that calls kernels, kept from call to call and freed when the thread ends; slot is one of
 * h3_scratch_slot. H3_E_NOMEM. Contents are undefined. */
enum h3_scratch_slot { H3_SCRATCH_PANELS, H3_SCRATCH_STATE, H3_SCRATCH_ROWS, H3_SCRATCH_SLOTS };
int h3_scratch(int slot, size_t bytes, void **out);

static inline int64_t h3_min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t h3_max64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline size_t h3_type_bytes(int type) { return type == H3_F32 ? 4 : 2; }
static inline int h3_type_valid(int type) { return type == H3_F32 || type == H3_BF16 || type == H3_F16; }

enum { H3_MR = 6, H3_NR = 16 }; /* the tile of gemm: rows and columns */

/* Vector primitives, one implementation per instruction set, same bits for a given set whatever the blocking. */
typedef struct h3_kernels {
  const char *name;
  /* y[m][n] (+)= sum_k x[m][k] w[n][k] (+ bias[n]) for rows m <= 4, columns n. */
  void (*dots)(const float *x, int64_t ldx, int rows, const void *w, int type, int64_t n, int64_t k, const float *bias,
               int accumulate, float *y, int64_t ldy);
  /* out[k][16] = up to 16 rows of w as columns, zeros for the rows that are missing. */
  void (*pack16)(const void *w, int type, int64_t rows, int64_t k, float *out);
  /* c[rows][columns] (+)= a[rows][k] b[k][16] (+ bias); rows <= H3_MR, columns <= 16; b rows ldb floats apart. */
  void (*tile)(const float *a, int64_t lda, int rows, const float *b, int64_t ldb, int64_t k, int columns,
               const float *bias, int accumulate, float *c, int64_t ldc);
  void (*to_float)(const void *in, int type, int64_t n, float *out);
  void (*from_float)(const float *in, int type, int64_t n, void *out); /* round to nearest even */
  /* x[i] = exp(x[i] - shift), returns the sum; n a multiple of 8; -inf gives 0. */
  float (*exp_sum)(float *x, int64_t n, float shift);
  float (*maximum)(const float *x, int64_t n); /* n a multiple of 8 */
  void (*scale)(float *x, int64_t n, float factor);
  void (*rmsnorm)(const float *x, int64_t k, const float *weight, float eps, float *y);
  void (*silu_mul)(const float *gate, const float *up, int64_t n, float *y);
  /* s[g][t] = q[g] . k[t] for g < groups, t < tokens; rows of s are lds apart; dim a multiple of 8. next: what will be
   * read after this, as long as k, or NULL; never touched, only asked for early. */
  void (*scores)(const float *q, int groups, const void *k, int type, int64_t tokens, int64_t dim, const void *next,
                 float *s, int64_t lds);
  /* o[g] += sum_t p[g][t] v[t] */
  void (*weigh)(const float *p, int64_t ldp, int groups, const void *v, int type, int64_t tokens, int64_t dim,
                const void *next, float *o);
} h3_kernels;
extern const h3_kernels h3_kernels_generic;
#if defined(__x86_64__)
extern const h3_kernels h3_kernels_avx2;
#endif
const h3_kernels *h3_active_kernels(void);

#endif

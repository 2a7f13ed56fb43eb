/* attn.c: writing K and V into blocks, and attention over blocks named by address.
 *
 * Few queries (decode): one pass over the blocks straight from where they lie; each unit of blocks gives a partial
 * result and the partial results merge in token order, so the bits do not depend on who did which unit.
 * Many queries (prefill): blocks become float panels a span at a time, once for all rows of the call; rows then meet the
 * span tile by tile. Spans start at multiples of their length, so a row's bits do not depend on its neighbours.
 */
#include <math.h>
#include <string.h>
#include "compute.h"

enum {
  SPAN_TOKENS = 512, /* tokens of float panels at once: their K of one head stays in the second-level cache */
  TILE_ROWS = 24,    /* query rows that share a pass over the span's panels */
  UNIT_TILES = 4,
  DECODE_UNITS = 256 /* partial results kept at most */
};

static int kv_valid(const h3_kv *kv, int32_t num_heads) {
  return kv && kv->table && kv->n_blocks >= 0 && kv->num_kv_heads > 0 && num_heads > 0 &&
         num_heads % kv->num_kv_heads == 0 && kv->head_dim > 0 && kv->head_dim % 8 == 0 &&
         kv->head_dim <= H3_MAX_HEAD_DIM && kv->block_tokens > 0 && kv->block_tokens % 16 == 0 &&
         kv->block_tokens <= SPAN_TOKENS && h3_type_valid(kv->type);
}

static size_t head_bytes(const h3_kv *kv) {
  return (size_t)kv->block_tokens * (size_t)kv->head_dim * h3_type_bytes(kv->type);
}

static size_t block_bytes(const h3_kv *kv) { return 2 * (size_t)kv->num_kv_heads * head_bytes(kv); }

static char *block_at(const h3_kv *kv, int64_t block) { return (char *)(uintptr_t)kv->table[block]; }

/* Where head h's K of a block starts; its V is num_kv_heads heads further. */
static char *k_of(const h3_kv *kv, char *block, int32_t head) { return block + (size_t)head * head_bytes(kv); }
static char *v_of(const h3_kv *kv, char *block, int32_t head) { return k_of(kv, block, kv->num_kv_heads + head); }

/* ---- rope and write -------------------------------------------------------------------------------------------- */

typedef struct write_job {
  const h3_kernels *kernels;
  const h3_kv *kv;
  float *qkv;
  const float *cos, *sin;
  int64_t rows, row_stride, start;
  int32_t num_heads;
} write_job;

static void rotate(const float *x, const float *cos, const float *sin, int32_t half, float *y) {
  for (int32_t i = 0; i < half; i++) {
    float a = x[i], b = x[i + half];
    y[i] = a * cos[i] - b * sin[i];
    y[i + half] = b * cos[i] + a * sin[i];
  }
}

static void write_row(const write_job *job, int64_t row, char *block) {
  const h3_kv *kv = job->kv;
  const int32_t dim = kv->head_dim, half = dim / 2;
  const float *cos = job->cos + row * half, *sin = job->sin + row * half;
  float *heads = job->qkv + row * job->row_stride, rotated[H3_MAX_HEAD_DIM];
  const size_t slot = (size_t)((job->start + row) % kv->block_tokens) * (size_t)dim * h3_type_bytes(kv->type);
  for (int32_t h = 0; h < job->num_heads; h++) rotate(heads + h * dim, cos, sin, half, heads + h * dim);
  const float *k = heads + (int64_t)job->num_heads * dim, *v = k + (int64_t)kv->num_kv_heads * dim;
  for (int32_t h = 0; h < kv->num_kv_heads; h++) {
    rotate(k + h * dim, cos, sin, half, rotated);
    job->kernels->from_float(rotated, kv->type, dim, k_of(kv, block, h) + slot);
    job->kernels->from_float(v + h * dim, kv->type, dim, v_of(kv, block, h) + slot);
  }
}

static int write_unit(void *context, int64_t unit, int worker) {
  (void)worker;
  const write_job *job = context;
  const int64_t tokens = job->kv->block_tokens, block = job->start / tokens + unit;
  const int64_t from = h3_max64(job->start, block * tokens), to = h3_min64(job->start + job->rows, (block + 1) * tokens);
  int status = h3_hold(block_at(job->kv, block), block_bytes(job->kv));
  if (status) return status;
  for (int64_t token = from; token < to; token++) write_row(job, token - job->start, block_at(job->kv, block));
  h3_unpin_address(block_at(job->kv, block), block_bytes(job->kv));
  return H3_OK;
}

int h3_rope_write(float *qkv, int64_t rows, int64_t row_stride, int32_t num_heads, const float *cos, const float *sin,
                  const h3_kv *kv, int64_t start) {
  if (!qkv || !cos || !sin || rows < 0 || start < 0 || !kv_valid(kv, num_heads) ||
      start + rows > kv->n_blocks * kv->block_tokens || row_stride < (num_heads + 2 * kv->num_kv_heads) * kv->head_dim)
    return H3_E_INVALID;
  if (!rows) return H3_OK;
  write_job job = {h3_active_kernels(), kv, qkv, cos, sin, rows, row_stride, start, num_heads};
  int64_t last = (start + rows - 1) / kv->block_tokens;
  return h3_parallel(write_unit, &job, last - start / kv->block_tokens + 1);
}

/* ---- attention ------------------------------------------------------------------------------------------------- */

typedef struct attention_job {
  const h3_kernels *kernels;
  const h3_kv *kv;
  const float *q;
  int64_t rows, row_stride, kv_from, kv_to, first;
  int32_t num_heads, group;
  float scale;
  float *out, *lse;
  /* decode */
  int64_t blocks_per_unit, n_units;
  float *partial_out, *partial_max, *partial_sum; /* [unit][row][head](dim) */
  /* prefill; query rows are (row, group) pairs, one list per KV head */
  int64_t query_rows, span_from, span_tokens; /* span_tokens: of the span at hand, a multiple of 16 */
  float *queries, *acc, *row_max, *row_sum;   /* [kv head][query row](dim) */
  float *k_panels, *v_rows;                   /* [kv head][SPAN_TOKENS][dim]; K as panels [dim][16] */
} attention_job;

/* Tokens below this are seen by the row. */
static int64_t row_end(const attention_job *job, int64_t row) { return h3_min64(job->kv_to, job->first + row + 1); }

/* Folds [n] scores of one query (overwritten by weights) into its running maximum and sum; returns the factor for what
 * was accumulated before. */
static float fold_scores(const h3_kernels *kernels, float *s, int64_t n, float *running_max, float *running_sum) {
  float top = kernels->maximum(s, n);
  if (top < *running_max) top = *running_max;
  if (top == -INFINITY) {
    memset(s, 0, (size_t)n * sizeof *s);
    return 1.0f;
  }
  float factor = expf(*running_max - top);
  *running_sum = *running_sum * factor + kernels->exp_sum(s, n, top);
  *running_max = top;
  return factor;
}

/* One row's queries of one KV head against `tokens` tokens of a block. */
static void decode_head(const attention_job *job, const float *q, char *block, int32_t head, int64_t tokens,
                        const char *next, float *out, float *running_max, float *running_sum) {
  const int32_t dim = job->kv->head_dim, group = job->group;
  const int64_t padded = (tokens + 7) / 8 * 8;
  float s[8][SPAN_TOKENS];
  for (int32_t g = 0; g < group; g += 8) {
    const int n = (int)h3_min64(8, group - g);
    job->kernels->scores(q + g * dim, n, k_of(job->kv, block, head), job->kv->type, tokens, dim,
                         g ? NULL : v_of(job->kv, block, head), s[0], SPAN_TOKENS);
    for (int i = 0; i < n; i++) {
      for (int64_t t = tokens; t < padded; t++) s[i][t] = -INFINITY;
      float factor = fold_scores(job->kernels, s[i], padded, &running_max[g + i], &running_sum[g + i]);
      job->kernels->scale(out + (g + i) * dim, dim, factor);
    }
    job->kernels->weigh(s[0], SPAN_TOKENS, n, v_of(job->kv, block, head), job->kv->type, tokens, dim,
                        g ? NULL : next, out + g * dim);
  }
}

/* next: the block that this thread goes on with, or NULL. */
static void decode_block(const attention_job *job, int64_t unit, int64_t block, int64_t row, char *next) {
  const int32_t dim = job->kv->head_dim;
  const int64_t from = block * job->kv->block_tokens;
  const int64_t tokens = h3_min64(job->kv->block_tokens, row_end(job, row) - from);
  if (tokens <= 0) return;
  const int64_t at = (unit * job->rows + row) * job->num_heads;
  for (int32_t h = 0; h < job->kv->num_kv_heads; h++) {
    const int64_t query = h * job->group;
    const char *then = h + 1 < job->kv->num_kv_heads ? k_of(job->kv, block_at(job->kv, block), h + 1) : next;
    decode_head(job, job->queries + (row * job->num_heads + query) * dim, block_at(job->kv, block), h, tokens, then,
                job->partial_out + (at + query) * dim, job->partial_max + at + query, job->partial_sum + at + query);
  }
}

static int decode_unit(void *context, int64_t unit, int worker) {
  (void)worker;
  const attention_job *job = context;
  const int64_t tokens = job->kv->block_tokens, lists = job->rows * job->num_heads;
  const int64_t from = job->kv_from / tokens + unit * job->blocks_per_unit;
  const int64_t to = h3_min64(from + job->blocks_per_unit, (job->kv_to + tokens - 1) / tokens);
  memset(job->partial_out + unit * lists * job->kv->head_dim, 0, (size_t)(lists * job->kv->head_dim) * sizeof(float));
  for (int64_t i = 0; i < lists; i++) job->partial_max[unit * lists + i] = -INFINITY, job->partial_sum[unit * lists + i] = 0;
  for (int64_t block = from; block < to; block++) {
    int status = h3_hold(block_at(job->kv, block), block_bytes(job->kv));
    if (status) return status;
    char *next = block + 1 < to ? block_at(job->kv, block + 1) : NULL;
    for (int64_t row = 0; row < job->rows; row++) decode_block(job, unit, block, row, row ? NULL : next);
    h3_unpin_address(block_at(job->kv, block), block_bytes(job->kv));
  }
  return H3_OK;
}

static void merge_units(const attention_job *job) {
  const int64_t lists = job->rows * job->num_heads, dim = job->kv->head_dim;
  for (int64_t i = 0; i < lists; i++) {
    float top = -INFINITY, sum = 0.0f, *out = job->out + i * dim;
    for (int64_t unit = 0; unit < job->n_units; unit++) top = fmaxf(top, job->partial_max[unit * lists + i]);
    memset(out, 0, (size_t)dim * sizeof *out);
    for (int64_t unit = 0; unit < job->n_units && top > -INFINITY; unit++) {
      const float factor = expf(job->partial_max[unit * lists + i] - top);
      const float *part = job->partial_out + (unit * lists + i) * dim;
      sum += job->partial_sum[unit * lists + i] * factor;
      for (int64_t d = 0; d < dim; d++) out[d] += part[d] * factor;
    }
    if (sum > 0.0f) job->kernels->scale(out, dim, 1.0f / sum);
    if (job->lse) job->lse[i] = top + logf(sum);
  }
}

static void scale_queries(const attention_job *job, float *scaled) {
  const int64_t width = (int64_t)job->num_heads * job->kv->head_dim;
  for (int64_t row = 0; row < job->rows; row++) {
    memcpy(scaled + row * width, job->q + row * job->row_stride, (size_t)width * sizeof(float));
    job->kernels->scale(scaled + row * width, width, job->scale);
  }
}

static int attend_few(attention_job *job) {
  const int64_t tokens = job->kv->block_tokens, lists = job->rows * job->num_heads, dim = job->kv->head_dim;
  const int64_t blocks = (job->kv_to - job->kv_from + tokens - 1) / tokens;
  job->blocks_per_unit = h3_max64(h3_min64(4, blocks / 8), (blocks + DECODE_UNITS - 1) / DECODE_UNITS);
  job->blocks_per_unit = h3_max64(1, job->blocks_per_unit);
  job->n_units = blocks ? (blocks + job->blocks_per_unit - 1) / job->blocks_per_unit : 0;
  void *memory;
  int status = h3_scratch(H3_SCRATCH_STATE, (size_t)(lists * (dim + job->n_units * (dim + 2))) * sizeof(float), &memory);
  if (status) return status;
  job->queries = memory;
  job->partial_out = job->queries + lists * dim;
  job->partial_max = job->partial_out + job->n_units * lists * dim;
  job->partial_sum = job->partial_max + job->n_units * lists;
  scale_queries(job, job->queries);
  status = h3_parallel(decode_unit, job, job->n_units);
  if (status == H3_OK) merge_units(job);
  return status;
}

static int span_unit(void *context, int64_t unit, int worker) {
  (void)worker;
  const attention_job *job = context;
  const h3_kv *kv = job->kv;
  const int64_t dim = kv->head_dim, at = unit * kv->block_tokens;
  char *block = block_at(kv, job->span_from / kv->block_tokens + unit);
  const int64_t tokens = h3_min64(kv->block_tokens, job->kv_to - job->span_from - at), padded = (tokens + 15) / 16 * 16;
  int status = h3_hold(block, block_bytes(kv));
  if (status) return status;
  for (int32_t h = 0; h < kv->num_kv_heads; h++) {
    float *k = job->k_panels + (h * SPAN_TOKENS + at) * dim, *v = job->v_rows + (h * SPAN_TOKENS + at) * dim;
    const size_t panel = 16 * (size_t)dim * h3_type_bytes(kv->type);
    for (int64_t t = 0; t < padded; t += 16)
      job->kernels->pack16(k_of(kv, block, h) + (size_t)(t / 16) * panel, kv->type, 16, dim, k + t * dim);
    job->kernels->to_float(v_of(kv, block, h), kv->type, tokens * dim, v);
    /* tokens past the end get weight zero, and zero times what lies there must be zero */
    memset(v + tokens * dim, 0, (size_t)((padded - tokens) * dim) * sizeof *v);
  }
  h3_unpin_address(block, block_bytes(kv));
  return H3_OK;
}

/* Scores of `rows` query rows against the first `tokens` tokens of the span, into s (SPAN_TOKENS apart), masked. */
static void tile_scores(const attention_job *job, int32_t head, int64_t from, int64_t rows, int64_t tokens, float *s) {
  const int64_t dim = job->kv->head_dim;
  const float *q = job->queries + (head * job->query_rows + from) * dim;
  const float *k = job->k_panels + (int64_t)head * SPAN_TOKENS * dim;
  for (int64_t t = 0; t < tokens; t += H3_NR)
    for (int64_t r = 0; r < rows; r += H3_MR)
      job->kernels->tile(q + r * dim, dim, (int)h3_min64(H3_MR, rows - r), k + t * dim, H3_NR, dim,
                         H3_NR, NULL, 0, s + r * SPAN_TOKENS + t, SPAN_TOKENS);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t t = h3_max64(0, row_end(job, (from + r) / job->group) - job->span_from); t < tokens; t++)
      s[r * SPAN_TOKENS + t] = -INFINITY;
}

static void attend_tile(const attention_job *job, int32_t head, int64_t from, int64_t rows) {
  const int64_t dim = job->kv->head_dim, list = head * job->query_rows + from;
  const int64_t seen = row_end(job, (from + rows - 1) / job->group) - job->span_from;
  const int64_t tokens = h3_min64(job->span_tokens, (seen + 15) / 16 * 16);
  float s[TILE_ROWS * SPAN_TOKENS], *acc = job->acc + list * dim;
  if (tokens <= 0) return;
  tile_scores(job, head, from, rows, tokens, s);
  for (int64_t r = 0; r < rows; r++) {
    float factor = fold_scores(job->kernels, s + r * SPAN_TOKENS, tokens, job->row_max + list + r, job->row_sum + list + r);
    job->kernels->scale(acc + r * dim, dim, factor);
  }
  const float *v = job->v_rows + (int64_t)head * SPAN_TOKENS * dim;
  for (int64_t d = 0; d < dim; d += H3_NR)
    for (int64_t r = 0; r < rows; r += H3_MR)
      job->kernels->tile(s + r * SPAN_TOKENS, SPAN_TOKENS, (int)h3_min64(H3_MR, rows - r), v + d, dim, tokens,
                         (int)h3_min64(H3_NR, dim - d), NULL, 1, acc + r * dim + d, dim);
}

static int tiles_unit(void *context, int64_t unit, int worker) {
  (void)worker;
  const attention_job *job = context;
  const int64_t unit_rows = UNIT_TILES * TILE_ROWS, per_head = (job->query_rows + unit_rows - 1) / unit_rows;
  const int32_t head = (int32_t)(unit / per_head);
  const int64_t from = unit % per_head * unit_rows, to = h3_min64(job->query_rows, from + unit_rows);
  for (int64_t row = from; row < to; row += TILE_ROWS) attend_tile(job, head, row, h3_min64(TILE_ROWS, to - row));
  return H3_OK;
}

/* Query heads of one KV head become neighbours, scaled; accumulators start empty. */
static void gather_queries(const attention_job *job) {
  const int64_t dim = job->kv->head_dim, group = job->group, lists = job->rows * job->num_heads;
  for (int64_t row = 0; row < job->rows; row++)
    for (int64_t h = 0; h < job->num_heads; h++) {
      const int64_t to = (h / group) * job->query_rows + row * group + h % group;
      memcpy(job->queries + to * dim, job->q + row * job->row_stride + h * dim, (size_t)dim * sizeof(float));
    }
  job->kernels->scale(job->queries, lists * dim, job->scale);
  memset(job->acc, 0, (size_t)(lists * dim) * sizeof(float));
  memset(job->row_sum, 0, (size_t)lists * sizeof(float));
  for (int64_t i = 0; i < lists; i++) job->row_max[i] = -INFINITY;
}

static void scatter_results(const attention_job *job) {
  const int64_t dim = job->kv->head_dim, group = job->group;
  for (int64_t row = 0; row < job->rows; row++)
    for (int64_t h = 0; h < job->num_heads; h++) {
      const int64_t from = (h / group) * job->query_rows + row * group + h % group, to = row * job->num_heads + h;
      float sum = job->row_sum[from];
      memcpy(job->out + to * dim, job->acc + from * dim, (size_t)dim * sizeof(float));
      if (sum > 0.0f) job->kernels->scale(job->out + to * dim, dim, 1.0f / sum);
      if (job->lse) job->lse[to] = job->row_max[from] + logf(sum);
    }
}

static int attend_many(attention_job *job) {
  const int64_t dim = job->kv->head_dim, lists = job->rows * job->num_heads, block = job->kv->block_tokens;
  const int64_t span = SPAN_TOKENS / block * block, head_floats = (int64_t)job->kv->num_kv_heads * SPAN_TOKENS * dim;
  void *panels, *rows;
  int status = h3_scratch(H3_SCRATCH_STATE, (size_t)(2 * head_floats + H3_NR) * sizeof(float), &panels);
  if (status == H3_OK) status = h3_scratch(H3_SCRATCH_ROWS, (size_t)(lists * (2 * dim + 2)) * sizeof(float), &rows);
  if (status) return status;
  job->k_panels = panels, job->v_rows = job->k_panels + head_floats;
  job->query_rows = job->rows * job->group;
  job->queries = rows, job->acc = job->queries + lists * dim;
  job->row_max = job->acc + lists * dim, job->row_sum = job->row_max + lists;
  gather_queries(job);
  const int64_t unit_rows = UNIT_TILES * TILE_ROWS, units = (job->query_rows + unit_rows - 1) / unit_rows;
  const int64_t end = row_end(job, job->rows - 1);
  for (int64_t from = job->kv_from; from < end && status == H3_OK; from += span) {
    const int64_t tokens = h3_min64(span, end - from);
    job->span_from = from, job->span_tokens = (tokens + 15) / 16 * 16;
    status = h3_parallel(span_unit, job, (tokens + block - 1) / block);
    if (status == H3_OK) status = h3_parallel(tiles_unit, job, units * job->kv->num_kv_heads);
  }
  if (status == H3_OK) scatter_results(job);
  return status;
}

int h3_block_attention(const float *q, int64_t rows, int64_t row_stride, int32_t num_heads, const h3_kv *kv,
                       int64_t kv_from, int64_t kv_to, int64_t first, float scale, int exact_rows, float *out,
                       float *lse) {
  if (!q || !out || rows < 0 || !kv_valid(kv, num_heads) || row_stride < (int64_t)num_heads * kv->head_dim ||
      kv_from < 0 || kv_to < kv_from || kv_from % kv->block_tokens || kv_to > kv->n_blocks * kv->block_tokens || first < 0)
    return H3_E_INVALID;
  if (!rows) return H3_OK;
  attention_job job = {.kernels = h3_active_kernels(), .kv = kv, .q = q, .rows = rows, .row_stride = row_stride,
                       .kv_from = kv_from, .kv_to = kv_to, .first = first, .num_heads = num_heads,
                       .group = num_heads / kv->num_kv_heads, .scale = scale, .out = out, .lse = lse};
  return !exact_rows && rows <= 4 ? attend_few(&job) : attend_many(&job);
}

int h3_attention_merge(float *out, float *lse, const float *other_out, const float *other_lse, int64_t n,
                       int32_t head_dim) {
  if (!out || !lse || !other_out || !other_lse || n < 0 || head_dim <= 0) return H3_E_INVALID;
  for (int64_t i = 0; i < n; i++) {
    const float top = fmaxf(lse[i], other_lse[i]);
    if (top == -INFINITY) continue; /* both empty: out is zeros already */
    const float a = expf(lse[i] - top), b = expf(other_lse[i] - top), sum = a + b;
    for (int32_t d = 0; d < head_dim; d++)
      out[i * head_dim + d] = (out[i * head_dim + d] * a + other_out[i * head_dim + d] * b) / sum;
    lse[i] = top + logf(sum);
  }
  return H3_OK;
}

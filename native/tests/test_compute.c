/* The decoder's kernels: random shapes against sums in double, from several threads at once and after a fork. Every
 * buffer is a heap block of exactly its size, so that a sanitizer sees one element too far. */
#include <math.h>
#include <pthread.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "test.h"

static float uniform(uint64_t *rng) { return (float)((double)(next(rng) >> 11) / 0x1p53 * 2.0 - 1.0); }
static int64_t from_to(uint64_t *rng, int64_t low, int64_t high) { return low + below(rng, (uint32_t)(high - low + 1)); }

static float *numbers(uint64_t *rng, int64_t count) {
  float *x = malloc((size_t)count * sizeof *x);
  CHECK(x);
  for (int64_t i = 0; i < count; i++) x[i] = uniform(rng);
  return x;
}

/* Values that every type holds exactly: the rounding of storage is not what is tested here. */
static float *coarse(uint64_t *rng, int64_t count) {
  float *x = numbers(rng, count);
  for (int64_t i = 0; i < count; i++) x[i] = roundf(x[i] * 64) / 64;
  return x;
}

static uint16_t half_of(float x, int type) {
  uint32_t u;
  memcpy(&u, &x, 4);
  if (type == H3_BF16) return (uint16_t)(u >> 16);
  if (x == 0.0f) return 0;
  return (uint16_t)((u >> 16 & 0x8000u) | (((u & 0x7fffffffu) >> 13) - (112u << 10)));
}

static void *stored_as(const float *x, int64_t count, int type) {
  void *out = malloc((size_t)count * (type == H3_F32 ? 4 : 2));
  CHECK(out);
  for (int64_t i = 0; i < count; i++) {
    if (type == H3_F32)
      ((float *)out)[i] = x[i];
    else
      ((uint16_t *)out)[i] = half_of(x[i], type);
  }
  return out;
}

static void check_near(float got, double expected, double size) {
  if (fabs((double)got - expected) > 1e-5 * size) {
    fprintf(stderr, "got %g, expected %g\n", (double)got, expected);
    exit(1);
  }
}

static void check_linear(uint64_t *rng) {
  const int type = (int)below(rng, 3), accumulate = (int)below(rng, 2), exact = (int)below(rng, 2);
  const int64_t rows = from_to(rng, 1, 9), n = from_to(rng, 1, 70), k = from_to(rng, 1, 90);
  const int biased = (int)below(rng, 2);
  float *x = numbers(rng, rows * k), *w = coarse(rng, n * k), *bias = numbers(rng, n), *y = numbers(rng, rows * n);
  float *before = malloc((size_t)(rows * n) * sizeof *before);
  CHECK(before);
  memcpy(before, y, (size_t)(rows * n) * sizeof *y);
  void *stored = stored_as(w, n * k, type);
  CHECK(h3_linear(x, rows, stored, type, biased ? bias : NULL, n, k, accumulate, exact, y) == H3_OK);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t j = 0; j < n; j++) {
      double sum = (biased ? (double)bias[j] : 0.0) + (accumulate ? (double)before[r * n + j] : 0.0);
      for (int64_t i = 0; i < k; i++) sum += (double)x[r * k + i] * (double)w[j * k + i];
      check_near(y[r * n + j], sum, 10);
    }
  free(x), free(w), free(bias), free(y), free(before), free(stored);
}

typedef struct cache {
  h3_kv kv;
  uint64_t *table;
  float *qkv; /* [token][query heads, K heads, V heads][dim] */
  int64_t tokens, width;
  int32_t num_heads;
} cache;

/* Blocks that hold NaN but for the tokens written, in two calls, without rotation: cos 1, sin 0. */
static cache make_cache(uint64_t *rng) {
  const int32_t dim = (int32_t)(8 * from_to(rng, 1, 5)), heads = (int32_t)from_to(rng, 1, 3), block = 16 << below(rng, 3);
  cache c = {.tokens = from_to(rng, 1, 200), .num_heads = heads * (int32_t)from_to(rng, 1, 6)};
  c.width = (c.num_heads + 2 * heads) * dim;
  c.kv = (h3_kv){.n_blocks = (c.tokens + block - 1) / block, .num_kv_heads = heads, .head_dim = dim,
                 .block_tokens = block, .type = (int)below(rng, 3)};
  c.kv.table = c.table = malloc((size_t)c.kv.n_blocks * sizeof *c.table);
  CHECK(c.table);
  for (int64_t i = 0; i < c.kv.n_blocks; i++) {
    const size_t bytes = 2 * (size_t)heads * (size_t)block * (size_t)dim * (c.kv.type == H3_F32 ? 4 : 2);
    void *memory = malloc(bytes);
    CHECK(memory);
    memset(memory, 0xff, bytes);
    c.table[i] = (uint64_t)(uintptr_t)memory;
  }
  float *cosine = malloc((size_t)(c.tokens * dim / 2) * 4), *sine = calloc((size_t)(c.tokens * dim / 2), 4);
  CHECK(cosine && sine);
  for (int64_t i = 0; i < c.tokens * dim / 2; i++) cosine[i] = 1;
  c.qkv = coarse(rng, c.tokens * c.width);
  const int64_t cut = from_to(rng, 0, c.tokens), half = dim / 2;
  CHECK(h3_rope_write(c.qkv, cut, c.width, c.num_heads, cosine, sine, &c.kv, 0) == H3_OK);
  CHECK(h3_rope_write(c.qkv + cut * c.width, c.tokens - cut, c.width, c.num_heads, cosine + cut * half,
                      sine + cut * half, &c.kv, cut) == H3_OK);
  CHECK(h3_rope_write(c.qkv, c.tokens, c.width, c.num_heads, cosine, sine, &c.kv, c.kv.n_blocks * block) == H3_E_INVALID);
  free(cosine), free(sine);
  return c;
}

static void free_cache(cache *c) {
  for (int64_t i = 0; i < c->kv.n_blocks; i++) free((void *)(uintptr_t)c->table[i]);
  free(c->table), free(c->qkv);
}

/* One query head of one row: softmax in double over tokens [0, end). */
static void expected_head(const cache *c, const float *q, int32_t head, int64_t end, double *out, double *lse) {
  const int64_t dim = c->kv.head_dim, kv_head = head / (c->num_heads / c->kv.num_kv_heads);
  double sum = 0;
  memset(out, 0, (size_t)dim * sizeof *out);
  for (int64_t t = 0; t < end; t++) {
    const float *k = c->qkv + t * c->width + (c->num_heads + kv_head) * dim, *v = k + c->kv.num_kv_heads * dim;
    double score = 0;
    for (int64_t d = 0; d < dim; d++) score += (double)q[d] * (double)k[d];
    const double weight = exp(0.25 * score);
    sum += weight;
    for (int64_t d = 0; d < dim; d++) out[d] += weight * (double)v[d];
  }
  for (int64_t d = 0; d < dim; d++) out[d] /= sum;
  *lse = log(sum);
}

static void check_attention(uint64_t *rng) {
  cache c = make_cache(rng);
  const int64_t dim = c.kv.head_dim, rows = from_to(rng, 1, c.tokens < 40 ? c.tokens : 40), first = c.tokens - rows;
  const int64_t lists = rows * c.num_heads;
  float *out = malloc((size_t)(lists * dim) * 4), *lse = malloc((size_t)lists * 4);
  float *q = numbers(rng, lists * dim);
  double expected[64], expected_lse;
  CHECK(out && lse);
  CHECK(h3_block_attention(q, rows, c.num_heads * dim, c.num_heads, &c.kv, 0, c.tokens, first, 0.25f,
                           (int)below(rng, 2), out, lse) == H3_OK);
  for (int64_t i = 0; i < lists; i++) {
    expected_head(&c, q + i * dim, (int32_t)(i % c.num_heads), first + i / c.num_heads + 1, expected, &expected_lse);
    check_near(lse[i], expected_lse, 3);
    for (int64_t d = 0; d < dim; d++) check_near(out[i * dim + d], expected[d], 3);
  }
  free(out), free(lse), free(q), free_cache(&c);
}

static void *work(void *argument) {
  uint64_t rng = test_seed * 1000 + (uint64_t)(uintptr_t)argument;
  for (int i = 0; i < 30; i++) check_linear(&rng), check_attention(&rng);
  return NULL;
}

int main(void) {
  test_start();
  for (int isa = 0; isa < 2; isa++) {
    CHECK(h3_set_isa(isa ? "generic" : "auto") == H3_OK);
    for (int threads = 1; threads <= 5; threads += 2) {
      CHECK(h3_set_threads(threads) == H3_OK);
      work((void *)(uintptr_t)threads);
    }
    pthread_t callers[4];
    for (uintptr_t i = 0; i < 4; i++) CHECK(!pthread_create(&callers[i], NULL, work, (void *)(i + 10)));
    for (int i = 0; i < 4; i++) CHECK(!pthread_join(callers[i], NULL));
  }
#if !defined(__SANITIZE_THREAD__) /* it ends a child that starts threads */
  pid_t child = fork();
  if (!child) {
    work((void *)77);
    _exit(0);
  }
  int status;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
#endif
  work((void *)78);
  return 0;
}

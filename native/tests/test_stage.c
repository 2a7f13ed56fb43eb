/* Read buffers shared by threads: no two hold the same bytes, who waits is served, and a full area says so. */
#define _GNU_SOURCE
#include <pthread.h>
#include <string.h>

#include "../internal.h"
#include "../stage.h"
#include "test.h"

enum { THREADS = 8, ROUNDS = 3000, KIB = 1024 };

static void *use(void *argument) {
  uint64_t state = 7919 * ((uintptr_t)argument + 1);
  for (int i = 0; i < ROUNDS; i++) {
    const uint64_t bytes = 1 + below(&state, H3_STAGE_MOST);
    h3_stage stage;
    if (i % 4 == 0 && !h3_stage_acquire(bytes, &stage)) continue;
    if (i % 4) CHECK(h3_stage_wait(bytes, &stage));
    CHECK(stage.units && (uintptr_t)stage.data % 4096 == 0);
    const int mark = (int)(uintptr_t)argument + 1;
    char *ends[2] = {stage.data, stage.data + bytes + H3_READ_SLACK - 1};
    *ends[0] = *ends[1] = (char)mark;
    if (i % 64 == 0) memset(stage.data, mark, bytes + H3_READ_SLACK);
    CHECK(*ends[0] == mark && *ends[1] == mark);
    h3_stage_release(&stage);
    CHECK(!stage.units);
    h3_stage_release(&stage); /* of nothing */
  }
  return NULL;
}

static void fill_up(void) {
  h3_stage held[64], more;
  int n = 0;
  while (n < 64 && h3_stage_acquire(100 * KIB, &held[n])) n++;
  CHECK(n == 64);
  CHECK(!h3_stage_acquire(1, &more));
  CHECK(!h3_stage_acquire(H3_STAGE_MOST + 1, &more) && !h3_stage_wait(H3_STAGE_MOST + 1, &more));
  for (int i = 0; i < n; i += 2) h3_stage_release(&held[i]);
  CHECK(!h3_stage_acquire(200 * KIB, &more)); /* half is free, but in pieces */
  CHECK(h3_stage_acquire(1, &more) && more.data == held[1].data - 128 * KIB);
  h3_stage_release(&more);
  for (int i = 1; i < n; i += 2) h3_stage_release(&held[i]);
  CHECK(h3_stage_acquire(H3_STAGE_MOST, &more));
  h3_stage_release(&more);
}

int main(void) {
  pthread_t threads[THREADS];
  test_start();
  fill_up();
  for (uintptr_t i = 0; i < THREADS; i++) CHECK(!pthread_create(&threads[i], NULL, use, (void *)i));
  for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
  fill_up();
  return 0;
}

/* stage.c: buffers for reads of files, on huge pages where there are any. */
#ifndef H3_STAGE_H
#define H3_STAGE_H
#include <stdint.h>

enum { H3_STAGE_MOST = 1 << 20 }; /* bytes that one read may have */

typedef struct h3_stage {
  char *data;     /* page-aligned, the bytes asked for + H3_READ_SLACK */
  uint64_t units; /* 0: none is held */
} h3_stage;

/* Ordinary context, once before the others. */
int h3_stage_init(void);
void h3_stage_after_fork(void);
/* 0: nothing of that size is free now, or it is more than H3_STAGE_MOST. Async-signal-safe. */
int h3_stage_acquire(uint64_t bytes, h3_stage *stage);
/* The same after waiting for others to let go; the caller owns no block, and holds no other stage. */
int h3_stage_wait(uint64_t bytes, h3_stage *stage);
void h3_stage_release(h3_stage *stage);
#endif

/* Read-ahead: faults that follow one another ask the fetch pool for what comes next. Runs in fault handlers.
 *
 * A thread that scans touches blocks as they arrive and so faults on, or waits for, nearly each of them while the disk is
 * the slower side: each such touch moves its stream's window on. Where the pool is ahead a scan meets no fault until the
 * window's end, and pays for one block there.
 *
 * A tensor may be scanned by several threads, each in its own part: a range follows H3_STREAMS of them.
 * Locks: range->ahead_lock guards the streams; who finds it taken does without. Taken before pool.lock (fetch.c). */
#include "internal.h"
#include "pager.h"

enum { WINDOW_BYTES = 8 << 20, WINDOW_BLOCKS = 2, SHARE = 32, SHARE_AT_LEAST = 8 };

/* The stream that this block continues, or the one longest without a touch, started anew here. */
static h3_stream *stream_of(h3_range *range, uint64_t block, int *continues) {
  h3_stream *oldest = &range->streams[0];
  *continues = 1;
  for (int i = 0; i < H3_STREAMS; i++) {
    h3_stream *stream = &range->streams[i];
    if (stream->turn && block > stream->last && block <= stream->end) return stream;
    if (stream->turn < oldest->turn) oldest = stream;
  }
  *continues = 0;
  *oldest = (h3_stream){.last = block, .end = block + 1};
  return oldest;
}

/* Blocks that a stream may be ahead by: a scan owns a tenth of the budget, and two threads may share it. 0: too few. */
static uint64_t most_ahead(const h3_range *range) {
  const uint64_t budget = range->pager->budget, block = range->block_bytes;
  if (WINDOW_BLOCKS * block > budget / SHARE_AT_LEAST) return 0;
  const uint64_t bytes = budget / SHARE < WINDOW_BYTES ? budget / SHARE : WINDOW_BYTES;
  return bytes / block > WINDOW_BLOCKS ? bytes / block : WINDOW_BLOCKS;
}

static void move_on(h3_range *range, h3_stream *stream, uint64_t block) {
  const uint64_t most = most_ahead(range), count = h3_block_count(range);
  stream->window = stream->window * 2 < most ? stream->window * 2 : most;
  if (stream->window < WINDOW_BLOCKS) stream->window = most < WINDOW_BLOCKS ? most : WINDOW_BLOCKS;
  uint64_t from = stream->end > block + 1 ? stream->end : block + 1, to = block + 1 + stream->window;
  if (to > count) to = count;
  /* Half a window at a time, so that reads are long. */
  if (from >= to || (from + stream->window / 2 > to && to < count)) return;
  if (h3_pool_ask(range, stream, from, to)) stream->end = to;
}

int h3_ahead(h3_range *range, uint64_t block) {
  uint32_t open = 0;
  int continues;
  if (range->cyclic || most_ahead(range) == 0) return 0;
  if (!atomic_compare_exchange_strong(&range->ahead_lock.word, &open, 1)) return 0;
  h3_stream *stream = stream_of(range, block, &continues);
  stream->turn = ++range->stream_turn;
  stream->last = block;
  if (continues) {
    if (stream->end <= block) stream->end = block + 1;
    stream->hits++;
    move_on(range, stream, block);
  }
  const int scan = stream->hits > 1;
  h3_lock_release(&range->ahead_lock);
  return scan;
}

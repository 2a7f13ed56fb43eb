/* Inside of the pager: structures, page states, lock order. Nothing outside native/ includes this.
 *
 * Locks, in the order they may be taken:
 *   1. h3_registry_lock    the list of pagers, the list of a pager's ranges (create, destroy, fork)
 *   2. range->flush_lock   one flush or resize of a range at a time
 *   3. range->quarantine_lock  one failed fill at a time
 *   4. pool.lock, job->lock (fetch.c): who works on what. The fetch pool's workers own several blocks at once, those of one
 *      read, and wait for nobody else's block while they do: what others own is served last.
 *   5. pager->lock         slots, lists, accounting, chunk entries. Never held across I/O, an ioctl or a touch of a range.
 * A block's word and a context are not locks to be nested: a thread owns at most one block (FILLING or EVICTING) that it
 * was asked for plus one victim, never waits for a block while it owns one, and waits for a context owning no other. A
 * flush owns the protection (GUARDING) of up to 64 blocks during one ioctl, and waits for nothing meanwhile.
 *
 * Block states and who may move them (one atomic word per block):
 *   ABSENT   -> FILLING   any toucher, by compare-and-swap; it now owns the block
 *   FILLING  -> RESIDENT  the owner, after the pages are placed whole
 *   FILLING  -> ABSENT    the owner, on error
 *   RESIDENT -> EVICTING  an evictor, only with no pins, by compare-and-swap
 *   EVICTING -> ABSENT    the owner, after changed bytes are safe in the file
 *   EVICTING -> RESIDENT  the owner, when they could not be saved
 * A resident block's pages may be write-protected, see guard.c; with GUARDING set it can be held, and not evicted:
 *   -        -> GUARDED + GUARDING  a flush, with no pins, by compare-and-swap: about to protect them
 *   GUARDED  -> GUARDING            a writer that faulted, or a pin: about to take the protection away
 *   GUARDING -> cleared             whoever set it, after the ioctl
 */
#ifndef H3_PAGER_H
#define H3_PAGER_H
#include "h3store.h"
#include "lock.h"
#include "stage.h"

enum { H3_RING = 16 };
enum { H3_PAGE = 4096, H3_GRANULE_SHIFT = 21, H3_CLASSES = H3_MAX_CHUNK / H3_PAGE + 1, H3_MAX_CONTEXTS = 32 };
#define H3_NO_SLOT UINT32_MAX

/* Block word: state in the low bits, flags, pin count from bit 8 up. */
enum {
  H3_ABSENT = 0,
  H3_FILLING = 1,
  H3_RESIDENT = 2,
  H3_EVICTING = 3,
  H3_STATE_MASK = 3,
  H3_FORCE_DIRTY = 4, /* write back whatever the hash says: the block's length changed */
  H3_QUARANTINE = 8,  /* zeros given in place of a block that could not be read; never written back */
  H3_WAITERS = 16,
  H3_DISCARD = 32, /* leaves without being saved: its range is going, or its bytes are past the new end */
  H3_GUARDED = 64, /* its pages may be write-protected */
  H3_GUARDING = 128, /* somebody is changing that */
  H3_ONE_PIN = 256
};

typedef struct h3_block {
  _Atomic uint32_t word;
  _Atomic uint32_t slot; /* while resident its slot, H3_NO_SLOT for quarantined zeros; while absent when it left, see replace.c */
  h3_chunk chunk; /* stored_bytes 0 with filter RAW: never written, all zero. Written under pager->lock, by the block's owner
                     or a flush that holds it; read by those, or under pager->lock */
} h3_block;

typedef struct h3_slot {
  char *address;
  h3_range *range; /* owner while its block is resident */
  uint64_t block;
  uint32_t pages;
  uint32_t prev, next; /* eviction list, or free list through next */
  int has_base;        /* base, and the hashes of its pages, are those of the block in it; see patch.c */
  h3_chunk base;       /* written by the block's owner, or a flush that holds it */
  uint32_t admitted;   /* the pager's count of admissions when its block came */
  uint8_t list;
} h3_slot;

/* Bytes of a file that somebody has read ahead of their use. */
typedef struct h3_window {
  const h3_file *file;
  uint64_t offset, bytes;
  char *data;
} h3_window;

typedef struct h3_context {
  h3_codec *codec;
  char *stored;                     /* encoded bytes, H3_MAX_CHUNK + H3_READ_SLACK */
  char *copy;                       /* raw bytes of one block */
  char *pages;                      /* changed pages of a patched block */
  uint32_t watch;                   /* slot whose base h3_chunk_load has to remember, or H3_NO_SLOT */
  char *base[H3_MAX_BASE_DEPTH];    /* raw bytes of base chunks */
  const h3_window *window;          /* file bytes that its user has read already, or NULL */
  h3_stage stage;                   /* what was read last, where it fits one */
} h3_context;

enum { H3_LIST_SCAN, H3_LIST_NEW, H3_LIST_KEPT, H3_LIST_CYCLIC, H3_LISTS };

typedef struct h3_list {
  uint32_t head, tail;
  uint64_t bytes, count;
} h3_list;

/* A scan of a range, as its faults show it. */
enum { H3_STREAMS = 8 };
typedef struct h3_stream {
  _Atomic uint64_t last; /* block touched last */
  uint64_t end;       /* blocks below have been asked for */
  uint64_t window;    /* blocks that it may be ahead by */
  uint64_t hits;      /* touches that continued it */
  uint64_t turn;      /* of its last touch; 0: none */
} h3_stream;

enum { H3_MODE_MOVE = 0, H3_MODE_COPY = 1, H3_MODE_PROTECT = 2 };

struct h3_pager {
  h3_pager *next; /* registry */
  _Atomic long references; /* the owner's and one per range: whoever goes last frees, in whatever order they go */
  int mode, delivery, uffd;
  _Atomic int guards; /* resident pages can be write-protected */
  uint64_t budget;
  char *arena;
  uint64_t arena_bytes;
  h3_range *ranges;
  int forked; /* in a child: reads only, the file's tail belongs to the parent */
  h3_lock lock; /* guards from here to contexts */
  uint64_t arena_used;
  h3_slot *slots;
  uint32_t n_slots, max_slots, live_slots, live_limit;
  uint64_t *page_hashes; /* one per page of the arena: of the chunk that the block in that slot is based on */
  uint32_t warm[H3_CLASSES]; /* free slots that hold pages */
  uint32_t cold[H3_CLASSES]; /* free slots without pages */
  h3_list lists[H3_LISTS];
  uint32_t admissions;
  _Atomic uint32_t largest_block; /* of any range so far, bytes */
  uint64_t charged, peak, pinned; /* pinned: bytes held by h3_range_pin */
  uint32_t in_flight;       /* slots held by fills and evictions under way */
  _Atomic uint32_t kernel_pins; /* holds by address, which end soon */
  _Atomic uint32_t event;       /* bumped when a slot comes free or a block gets evictable */
  h3_context contexts[H3_MAX_CONTEXTS];
  int n_contexts;
  _Atomic uint32_t free_contexts; /* bit set */
  _Atomic uint32_t context_waiters;
  _Atomic uint64_t faults, write_faults, fills, prefetches, evictions, write_backs, waits, bytes_read, bytes_written, bytes_decoded,
      bytes_encoded, errors;
};

struct h3_range {
  h3_range *next; /* of the pager */
  _Atomic long references; /* the owner's and one per range that leans on it */
  h3_pager *pager;
  char *address;
  uint64_t capacity, n_blocks_capacity;
  _Atomic uint64_t bytes;
  uint32_t block_bytes;
  _Atomic int writable;
  int cyclic;
  int unsaved; /* changes could not be saved before a fork */
  h3_spec layout; /* constant: what decoding needs of a spec */
  h3_spec spec;   /* of what is saved from now on; guarded by pager->lock */
  h3_file *_Atomic file;
  h3_range *base;
  h3_block *blocks;
  _Atomic uint64_t *unproven; /* a bit per block, see guard.c; both lie behind blocks */
  _Atomic uint64_t *unreported; /* a bit per block: its entry is newer than what the last flush of changes said; set and cleared
                                   under pager->lock */
  _Atomic int guarded;  /* some block was protected at some time */
  _Atomic uint64_t resident;
  h3_lock ahead_lock; /* guards streams; see ahead.c */
  h3_stream streams[H3_STREAMS];
  uint64_t stream_turn;
  _Atomic uint32_t still;   /* nothing may be asked ahead now */
  _Atomic uint32_t readers; /* who reads the file without owning a slot: detach and destroy wait for them */
  _Atomic int error; /* of the last failed fill */
  _Atomic uint64_t error_epoch;
  _Atomic uint64_t error_block, quarantined;
  h3_lock quarantine_lock; /* one failed fill at a time: error, error_block, ring */
  h3_lock flush_lock;
  uint64_t pinned; /* guarded by pager->lock */
  uint32_t ring[H3_RING]; /* blocks quarantined last; the oldest leaves when another comes */
  _Atomic uint32_t ring_at;
  char label[256];
};

/* region.c: address space, lookup, slots */
int h3_map_reserve(uint64_t bytes, char **out); /* not accessible yet: see h3_deliver_register */
void h3_map_set(char *address, uint64_t bytes, h3_range *range);
h3_range *h3_map_find(const void *address);
int h3_map_init(void);
uint32_t h3_pages_of(const h3_range *range, uint64_t block); /* pages the block's data takes */
uint32_t h3_raw_bytes(const h3_range *range, uint64_t block);
uint32_t h3_class_of(const h3_range *range, uint64_t block);
uint64_t h3_block_count(const h3_range *range);
h3_spec h3_range_spec(h3_range *range);
/* A free slot of `pages`, evicting as the budget asks. H3_E_BUDGET, or what a write back met. */
int h3_slot_acquire(h3_pager *pager, uint32_t pages, uint32_t *out);
/* The same for work that nobody waits for: H3_E_BUDGET at once where the other would wait for kernels to let go. */
int h3_slot_acquire_idle(h3_pager *pager, uint32_t pages, uint32_t *out);
void h3_slot_release(h3_pager *pager, uint32_t slot, int keep_pages);

/* replace.c: which block leaves. All but the last three under pager->lock */
void h3_admit(h3_pager *pager, uint32_t slot, int scan);   /* the slot's block is coming; sets the block's slot */
void h3_readmit(h3_pager *pager, uint32_t slot); /* it could not leave after all */
void h3_retire(h3_pager *pager, uint32_t slot);  /* off its list */
uint32_t h3_victim(h3_pager *pager);             /* EVICTING and off its list, or H3_NO_SLOT */
uint32_t h3_left_stamp(h3_pager *pager);         /* counts an eviction */
/* Of an absent block, by its owner: rows of it were read and it did not come in; whether that or more has happened. */
void h3_passed_by(h3_pager *pager, h3_block *block);
int h3_was_here(const h3_block *block);

/* deliver.c: how pages enter and leave, and who hears of a fault */
int h3_uffd_open(int want_sigbus, uint64_t *features, int *error);
/* Puts a reserved mapping under our eyes, then makes it accessible if asked: nothing can fill it in between. */
int h3_deliver_register(h3_pager *pager, char *address, uint64_t bytes, int accessible);
int h3_slot_materialise(h3_pager *pager, char *address, uint64_t bytes);
void h3_slot_discard(h3_pager *pager, char *address, uint64_t bytes);
int h3_block_place(h3_range *range, uint64_t block, char *from);             /* from: where the block was decoded */
int h3_block_take(h3_range *range, uint64_t block, char *slot, char **data); /* data: stable bytes, ours alone */
int h3_block_untake(h3_range *range, uint64_t block, char *slot);
void h3_block_taken(h3_range *range, uint64_t block);                       /* after take, when the block stays out */
int h3_block_place_zero(h3_range *range, uint64_t block);
void h3_block_discard(h3_range *range, uint64_t block);
/* Write protection of resident blocks [first, first + count), which the caller keeps from leaving. On an error some pages
 * may have it. */
int h3_blocks_protect(h3_range *range, uint64_t first, uint64_t count, int on);

/* guard.c */
/* A block's bytes may differ from its entry from now on; before anybody can write to it. */
void h3_unproven_set(h3_range *range, uint64_t block);
/* Takes the bits of mask from a word of unproven and protects their blocks where they can be; those that can't get their
 * bits back. Returns those that a flush has to look at. */
uint64_t h3_guard_begin(h3_range *range, uint64_t word, uint64_t mask);
void h3_guard_failed(h3_range *range, uint64_t word, uint64_t found); /* they could not be looked at */
/* Makes a block writable that a flush has protected. faulted: it looked resident when a write to it faulted. */
int h3_unguard(h3_range *range, uint64_t block, int faulted);
/* A block's chunk is another one from now on. By its owner, or a flush that holds it. */
void h3_entry_set(h3_range *range, uint64_t block, const h3_chunk *chunk);

/* range.c */
/* Evicts a resident block that nobody holds; without save its changes are lost. H3_OK also when it stays. */
int h3_block_leave(h3_range *range, uint64_t block, int save);

/* fill.c */
enum { H3_WHY_FAULT = 0, H3_WHY_PREFETCH = 1, H3_WHY_SCAN = 2 }; /* SCAN: a fault that follows others */
int h3_block_acquire(h3_range *range, uint64_t block, int pin, int why);
/* Takes a block from ABSENT to FILLING; 0 if it is anything else. Who claims must fill or settle it. */
int h3_block_claim(h3_range *range, uint64_t block);
/* What a fill that nobody waits for may be given: bytes read already, and who looks at the block before others can. */
typedef struct h3_fill_with {
  const h3_window *window;
  void (*visit)(void *argument, uint64_t block, const char *raw);
  void *argument;
  int scan; /* most likely read once: see replace.c */
} h3_fill_with;
/* Fills a block that the caller has claimed; on an error it is absent again. */
int h3_block_fill(h3_range *range, uint64_t block, const h3_fill_with *with);
/* Pins a resident block: 1; 0 if it is absent, negative if its bytes are zeros in place of data. Waits while it moves. */
int h3_block_hold(h3_range *range, uint64_t block);
void h3_block_unpin(h3_range *range, uint64_t block);
void h3_block_settle(h3_block *block, uint32_t state, uint32_t set);
uint32_t h3_block_await(h3_block *block, uint32_t seen); /* until its owner moves it on; the word then */
h3_context *h3_context_acquire(h3_pager *pager);
void h3_context_release(h3_pager *pager, h3_context *context);
int h3_chunk_load(h3_context *context, h3_range *range, uint64_t block, const h3_chunk *chunk, char *raw, int depth);

/* fetch.c */
/* Makes blocks [first, end) resident at queue depth, those that can be. failed: the first block that could not be. */
int h3_fetch_span(h3_range *range, uint64_t first, uint64_t end, uint64_t *failed);
void h3_pool_after_fork(void);
/* Threads for work that is asked for inside fault handlers, where none can be started. Ordinary context. */
void h3_pool_start(void);
extern _Atomic uint32_t h3_pool_wanted; /* somebody asked, and there was no thread */
/* Asks for blocks [from, to) soon, as far as the stream has not passed them by then; 0 if the pool can't take it.
 * Async-signal-safe. */
int h3_pool_ask(h3_range *range, const h3_stream *stream, uint64_t from, uint64_t to);
/* Between the two nobody works for the range unless a caller waits for it. */
void h3_ahead_stop(h3_range *range);
void h3_ahead_resume(h3_range *range);

/* ahead.c: a fault on a block is about to be served; 1 if it is one of a scan */
int h3_ahead(h3_range *range, uint64_t block);

/* evict.c */
/* The slot's block is EVICTING and off its list; on H3_OK the slot is free and holds pages. */
int h3_evict(h3_pager *pager, uint32_t slot);
/* Encodes raw and appends it to file; chunk gets the new entry. */
int h3_block_save(h3_range *range, uint64_t block, const char *raw, const h3_spec *spec, h3_file *file,
                  h3_context *context, h3_chunk *chunk);
int h3_is_dirty(const h3_block *block, const char *raw, uint32_t raw_bytes);

/* Appends context->stored as chunk's stored bytes; raw_bytes for the counters. */
int h3_block_append(h3_range *range, h3_file *file, h3_context *context, uint32_t raw_bytes, h3_chunk *chunk);
/* Saves a changed resident block to the range's file, as a record of its changed pages where they are few. */
int h3_block_save_change(h3_range *range, uint64_t block, const char *raw, h3_context *context, h3_chunk *chunk);

/* patch.c */
enum { H3_NOT_PATCHED = 1 };
/* Keeps a chunk and the hashes of its pages with a slot. */
void h3_base_remember(h3_pager *pager, uint32_t slot, const h3_chunk *base, const char *raw, uint32_t raw_bytes);
/* H3_OK, an error, or H3_NOT_PATCHED: too much of the block has changed. */
int h3_patch_save(h3_range *range, uint64_t block, const char *raw, const h3_spec *spec, h3_context *context,
                  h3_chunk *chunk);
int h3_patch_load(h3_context *context, h3_range *range, uint64_t block, const h3_chunk *chunk, char *raw, int depth);

/* signals.c */
int h3_signals_needed(int signal_number);
void h3_error_mark(h3_range *range);
void h3_zeros_gone(h3_range *range);
void h3_signals_after_fork(void);

/* fork.c */
int h3_fork_install(void);
extern h3_lock h3_registry_lock;
extern h3_pager *h3_registry;

/* pager.c */
void h3_pager_release(h3_pager *pager);
void h3_slots_reset(h3_pager *pager);
int h3_pager_attach(h3_pager *pager); /* descriptor, arena and registration; also in a forked child */
typedef struct h3_sigmask {
  unsigned char bytes[128];
} h3_sigmask;
void h3_signals_block(h3_sigmask *saved);
void h3_signals_restore(const h3_sigmask *saved);
#endif

/* Futex lock and wait on a word: usable inside a fault handler, unlike a pthread mutex with its owner bookkeeping. */
#ifndef H3_LOCK_H
#define H3_LOCK_H
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef struct h3_lock {
  _Atomic uint32_t word; /* 0 free, 1 held, 2 held and waited for */
} h3_lock;

static inline void h3_futex_wait(_Atomic uint32_t *word, uint32_t seen) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static inline void h3_futex_wake(_Atomic uint32_t *word, int count) {
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

static inline void h3_lock_acquire(h3_lock *lock) {
  uint32_t seen = 0;
  if (atomic_compare_exchange_strong(&lock->word, &seen, 1)) return;
  if (seen != 2) seen = atomic_exchange(&lock->word, 2);
  while (seen != 0) {
    h3_futex_wait(&lock->word, 2);
    seen = atomic_exchange(&lock->word, 2);
  }
}

static inline void h3_lock_release(h3_lock *lock) {
  if (atomic_exchange(&lock->word, 0) == 2) h3_futex_wake(&lock->word, 1);
}
#endif

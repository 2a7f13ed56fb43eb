/* Who hears of a fault: our handlers for SIGBUS (userfaultfd) and SIGSEGV (page protection). The faulting thread fills its
 * own block here. Handlers run with every asynchronous signal masked. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>

#include "internal.h"
#include "pager.h"

static struct sigaction previous[2]; /* what we found, for addresses that are not ours: SIGBUS, SIGSEGV */
static _Atomic int needed[2];
static _Atomic long ops_in_flight, zeros_present; /* zeros_present: quarantined blocks of all ranges */
static _Atomic uint64_t error_epoch; /* moves when zeros come and when they have gone */
static pthread_mutex_t install_lock = PTHREAD_MUTEX_INITIALIZER; /* guards previous and needed; never taken in a handler */
H3_TLS int in_foreign, foreign_repeats;
H3_TLS const void *foreign_address;
H3_TLS int thread_ops, thread_had_ops; /* operations this thread is in, and whether it ever was in one */

/* A thread that blocks the fault signals dies of its first fault, and libraries that start threads with every signal blocked
 * mean the asynchronous ones. */
static void first_operation(void) {
  sigset_t faults;
  sigemptyset(&faults);
  sigaddset(&faults, SIGBUS);
  sigaddset(&faults, SIGSEGV);
  pthread_sigmask(SIG_UNBLOCK, &faults, NULL);
  thread_had_ops = 1;
}

uint64_t h3_op_enter(void) {
  thread_ops++;
  if (H3_UNLIKELY(!thread_had_ops)) first_operation();
  atomic_fetch_add(&ops_in_flight, 1);
  if (!h3_signals_ours()) h3_signals_install();
  if (H3_UNLIKELY(atomic_load(&h3_pool_wanted))) h3_pool_start();
  return atomic_load(&error_epoch);
}

int h3_op_leave(uint64_t entered) {
  thread_ops--;
  atomic_fetch_sub(&ops_in_flight, 1);
  return atomic_load(&zeros_present) > 0 || atomic_load(&error_epoch) != entered;
}

void h3_error_mark(h3_range *range) { atomic_store(&range->error_epoch, atomic_fetch_add(&error_epoch, 1) + 1); }

void h3_zeros_gone(h3_range *range) {
  atomic_fetch_sub(&range->quarantined, 1);
  atomic_fetch_sub(&zeros_present, 1);
}

/* An operation will report a failed fill of this thread: its own, or that of the thread it works for. A thread that runs
 * operations itself but is in none now reads by pointer, and nobody would tell it. */
static int op_will_report(void) { return thread_ops > 0 || (!thread_had_ops && atomic_load(&ops_in_flight) > 0); }

/* In a child only the forking thread is left. */
void h3_signals_after_fork(void) {
  atomic_store(&ops_in_flight, thread_ops);
  pthread_mutex_init(&install_lock, NULL);
}


static void default_action(int number) {
  struct sigaction action = {.sa_handler = SIG_DFL};
  sigaction(number, &action, NULL);
}

/* Hands a fault at somebody else's address to the handler that was there before. A handler that reports, puts back "the
 * one before" (us) and returns, as Python's faulthandler does, would meet the same fault for ever. */
static void foreign(int number, siginfo_t *info, void *context) {
  const struct sigaction *before = &previous[number == SIGSEGV];
  foreign_repeats = info->si_addr == foreign_address ? foreign_repeats + 1 : 0;
  foreign_address = info->si_addr;
  if (in_foreign || foreign_repeats > 2 || before->sa_handler == SIG_DFL || before->sa_handler == SIG_IGN) {
    default_action(number);
    if (info->si_code <= 0) raise(number); /* sent, not faulted: returning would lose it */
    return;
  }
  in_foreign = 1;
  if (before->sa_flags & SA_SIGINFO) before->sa_sigaction(number, info, context);
  else before->sa_handler(number);
  in_foreign = 0;
}

static char *put_text(char *to, const char *end, const char *text) {
  while (*text && to < end) *to++ = *text++;
  return to;
}

static char *put_number(char *to, const char *end, uint64_t value) {
  char digits[24];
  int n = 0;
  do digits[n++] = (char)('0' + value % 10);
  while (value /= 10);
  while (n && to < end) *to++ = digits[--n];
  return to;
}

/* No op to raise an error from: one line, then the default action. */
static void give_up(int number, const h3_range *range, uint64_t block, const char *why) {
  char line[512], *at = line, *end = line + sizeof line - 1;
  at = put_text(at, end, "h3store: ");
  at = put_text(at, end, range->label[0] ? range->label : "a tiered range");
  at = put_text(at, end, ", block ");
  at = put_number(at, end, block);
  at = put_text(at, end, ": ");
  at = put_text(at, end, why);
  at = put_text(at, end, "; the memory cannot be given, and no tensor operation is in flight to raise an error from\n");
  if (write(STDERR_FILENO, line, (size_t)(at - line)) < 0) errno = 0;
  default_action(number);
}

/* Zeros of the kernel's in place of a block that cannot be read; the op in flight reports the error and drops them. */
static int quarantine_held(h3_range *range, uint64_t index, int status) {
  h3_block *block = &range->blocks[index];
  uint32_t seen = atomic_load(&block->word);
  if ((seen & H3_STATE_MASK) != H3_ABSENT) return H3_OK;
  range->error = status;
  range->error_block = index;
  h3_error_mark(range); /* before anybody can see the zeros */
  if (!atomic_compare_exchange_strong(&block->word, &seen, (seen & H3_FORCE_DIRTY) | H3_FILLING)) return H3_OK;
  /* Few at a time: zeros that are written to are memory outside the budget. What leaves is reported already. */
  const uint32_t turn = atomic_fetch_add(&range->ring_at, 1), oldest = range->ring[turn % H3_RING];
  if (turn >= H3_RING && oldest != index && (atomic_load(&range->blocks[oldest].word) & H3_QUARANTINE))
    h3_block_leave(range, oldest, 0);
  range->ring[turn % H3_RING] = (uint32_t)index;
  atomic_fetch_add(&range->quarantined, 1);
  atomic_fetch_add(&zeros_present, 1);
  const int placed = h3_block_place_zero(range, index);
  if (placed < 0) {
    h3_zeros_gone(range);
    h3_block_settle(block, H3_ABSENT, 0);
    return placed;
  }
  block->slot = H3_NO_SLOT;
  h3_block_settle(block, H3_RESIDENT, H3_QUARANTINE);
  return H3_OK;
}

static int quarantine(h3_range *range, uint64_t index, int status) {
  h3_lock_acquire(&range->quarantine_lock);
  const int placed = quarantine_held(range, index, status);
  h3_lock_release(&range->quarantine_lock);
  return placed;
}

static int is_resident(h3_range *range, uint64_t index) {
  return (atomic_load(&range->blocks[index].word) & H3_STATE_MASK) == H3_RESIDENT;
}

/* A write to a block that a flush has protected, or a touch of one that another thread has just filled. */
static int make_writable(h3_range *range, uint64_t index) {
  atomic_fetch_add(&range->pager->write_faults, 1);
  const int status = h3_unguard(range, index, 1);
  return status < 0 ? h3_block_leave(range, index, 1) : status; /* it comes back unprotected */
}

static int fetch(h3_range *range, uint64_t index) {
  atomic_fetch_add(&range->pager->faults, 1);
  return h3_block_acquire(range, index, 0, h3_ahead(range, index) ? H3_WHY_SCAN : H3_WHY_FAULT);
}

static void on_fault(int number, siginfo_t *info, void *context) {
  const int saved = errno;
  const char *address = info->si_addr;
  h3_range *range = info->si_code > 0 ? h3_map_find(address) : NULL;
  if (!range) {
    foreign(number, info, context);
    errno = saved;
    return;
  }
  const uint64_t offset = (uint64_t)(address - range->address), index = offset / range->block_bytes;
  const uint64_t end = (range->bytes + H3_PAGE - 1) & ~(uint64_t)(H3_PAGE - 1);
  if (offset >= end) {
    give_up(number, range, index, "touched past the end of its data");
  } else {
    foreign_repeats = 0;
    int status = atomic_load(&range->guarded) && is_resident(range, index) ? make_writable(range, index) : fetch(range, index);
    if (status < 0 && op_will_report()) status = quarantine(range, index, status);
    if (status < 0) give_up(number, range, index, h3_strerror(status));
  }
  errno = saved;
}

static int is_ours(int number) {
  struct sigaction now;
  return sigaction(number, NULL, &now) == 0 && (now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_fault;
}

/* No SA_ONSTACK: a decoder wants more stack than the alternate stacks that exist in practice. */
static int install(int number) {
  if (is_ours(number)) return H3_OK;
  struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_RESTART};
  sigfillset(&action.sa_mask);
  sigdelset(&action.sa_mask, SIGBUS);
  sigdelset(&action.sa_mask, SIGSEGV);
  sigdelset(&action.sa_mask, SIGFPE);
  sigdelset(&action.sa_mask, SIGILL);
  struct sigaction found;
  if (sigaction(number, &action, &found)) return h3_set_errno(H3_E_UNSUPPORTED, errno);
  previous[number == SIGSEGV] = found;
  return H3_OK;
}

int h3_signals_install(void) {
  pthread_mutex_lock(&install_lock);
  int status = needed[0] ? install(SIGBUS) : H3_OK;
  if (status == H3_OK && needed[1]) status = install(SIGSEGV);
  pthread_mutex_unlock(&install_lock);
  return status;
}

int h3_signals_needed(int number) {
  atomic_store(&needed[number == SIGSEGV], 1);
  return h3_signals_install();
}

int h3_signals_ours(void) { return (!needed[0] || is_ours(SIGBUS)) && (!needed[1] || is_ours(SIGSEGV)); }

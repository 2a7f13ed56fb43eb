/* Files and threaded encoding: concurrent appenders, every n-th read, write and allocation failing, full and cut files. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "test.h"

enum { BYTES = 3 * 1000 * 1000 + 17, CHUNK = 16384, CHUNKS = BYTES / CHUNK + 1, APPENDERS = 4, APPENDS = 200 };
static const h3_spec spec = {.elem_bytes = 2, .filter = H3_FILTER_EXPNIBBLE, .exp_bits = 8, .level = 1};

static int open_temporary(void) {
  FILE *file = tmpfile(); /* without a name, and open until the end */
  CHECK(file);
  return fileno(file);
}

static void read_back(h3_file *file, const uint8_t *raw, const h3_chunk *chunks) {
  h3_codec *codec = NULL;
  uint8_t *stored = malloc(CHUNK), *back = malloc(CHUNK);
  CHECK(h3_codec_create(&codec) == H3_OK);
  for (uint32_t i = 0; i < CHUNKS; i++) {
    uint32_t size = i + 1 < CHUNKS ? CHUNK : BYTES - i * CHUNK;
    CHECK(h3_file_read(file, chunks[i].offset, stored, chunks[i].stored_bytes) == H3_OK);
    CHECK(h3_chunk_decode(codec, &spec, &chunks[i], stored, NULL, back, size) == H3_OK);
    CHECK(!memcmp(back, raw + (size_t)i * CHUNK, size));
  }
  h3_codec_destroy(codec);
  free(back);
  free(stored);
}

/* Raises n until a run ends without the fault firing; each failing run says so and the next one works. */
static void check_faults(const uint8_t *raw, int kind, int err, int expected, long step) {
  h3_chunk *chunks = calloc(CHUNKS, sizeof *chunks);
  long fired = 1;
  for (long n = 1; fired; n += step) {
    int fd = open_temporary();
    h3_file *file = NULL;
    CHECK(h3_file_create(fd, 4096, 1, &file) == H3_OK);
    h3_fault_arm(kind, n, 1, err);
    int status = h3_encode_append(file, &spec, raw, BYTES, CHUNK, NULL, 2, chunks);
    h3_fault_arm(kind, 0, 0, 0);
    fired = h3_fault_fired(kind);
    CHECK(fired ? status == expected && h3_last_errno() == err : status == H3_OK);
    CHECK(h3_encode_append(file, &spec, raw, BYTES, CHUNK, NULL, 2, chunks) == H3_OK);
    read_back(file, raw, chunks);
    h3_file_destroy(file);
    close(fd);
  }
  free(chunks);
}

static void check_read_faults(void) {
  int fd = open_temporary();
  h3_file *file = NULL;
  uint64_t at;
  char out[6];
  CHECK(h3_file_create(fd, 0, 1, &file) == H3_OK);
  CHECK(h3_file_append(file, "abcdef", 6, &at) == H3_OK && at == 0 && h3_file_tail(file) == 6);
  h3_fault_arm(H3_FAULT_READ, 1, -1, EIO);
  CHECK(h3_file_read(file, 0, out, 6) == H3_E_IO && h3_last_errno() == EIO);
  h3_fault_arm(H3_FAULT_READ, 1, 3, EINTR); /* interrupted reads are resumed */
  CHECK(h3_file_read(file, 0, out, 6) == H3_OK && !memcmp(out, "abcdef", 6) && h3_fault_fired(H3_FAULT_READ) == 3);
  h3_fault_arm(H3_FAULT_READ, 0, 0, 0);
  CHECK(h3_file_read(file, 1, out, 6) == H3_E_TRUNCATED);
  CHECK(h3_file_read(file, UINT64_MAX - 2, out, 6) == H3_E_TRUNCATED);
  CHECK(h3_file_overwrite(file, 2, "XY", 2) == H3_OK && h3_file_read(file, 0, out, 6) == H3_OK && out[2] == 'X');
  h3_file_destroy(file);
  CHECK(h3_file_create(fd, 6, 0, &file) == H3_OK);
  CHECK(h3_file_append(file, "g", 1, &at) == H3_E_READONLY && h3_file_overwrite(file, 0, "g", 1) == H3_E_READONLY);
  h3_file_destroy(file);
  close(fd);
  CHECK(h3_file_create(fd, 6, 0, &file) == H3_OK);
  CHECK(h3_file_read(file, 0, out, 6) == H3_E_IO && h3_last_errno() == EBADF);
  h3_file_destroy(file);
}

typedef struct appender {
  h3_file *file;
  uint8_t value;
  uint64_t offsets[APPENDS];
} appender;

static void *append_many(void *argument) {
  appender *a = argument;
  uint8_t data[512];
  memset(data, a->value, sizeof data);
  for (int i = 0; i < APPENDS; i++) CHECK(h3_file_append(a->file, data, sizeof data, &a->offsets[i]) == H3_OK);
  return NULL;
}

static void check_appenders(void) {
  int fd = open_temporary();
  h3_file *file = NULL;
  pthread_t threads[APPENDERS];
  static appender appenders[APPENDERS];
  CHECK(h3_file_create(fd, 0, 1, &file) == H3_OK);
  for (int t = 0; t < APPENDERS; t++) {
    appenders[t] = (appender){.file = file, .value = (uint8_t)(t + 1)};
    CHECK(!pthread_create(&threads[t], NULL, append_many, &appenders[t]));
  }
  for (int t = 0; t < APPENDERS; t++) pthread_join(threads[t], NULL);
  CHECK(h3_file_tail(file) == 512ULL * APPENDERS * APPENDS);
  for (int t = 0; t < APPENDERS; t++) {
    for (int i = 0; i < APPENDS; i++) {
      uint8_t data[512];
      CHECK(h3_file_read(file, appenders[t].offsets[i], data, sizeof data) == H3_OK);
      for (size_t k = 0; k < sizeof data; k++) CHECK(data[k] == t + 1);
    }
  }
  h3_file_destroy(file);
  close(fd);
}

int main(void) {
  test_start();
  uint64_t rng = test_seed * 0x9E3779B97F4A7C15ULL;
  uint8_t *raw = malloc(BYTES);
  for (uint32_t i = 0; i < BYTES; i++) raw[i] = (uint8_t)(i & 1 ? 0x3c + below(&rng, 4) : next(&rng));
  check_read_faults();
  check_appenders();
  check_faults(raw, H3_FAULT_WRITE, EIO, H3_E_IO, 1);
  check_faults(raw, H3_FAULT_WRITE, ENOSPC, H3_E_NOSPACE, 1);
  check_faults(raw, H3_FAULT_ALLOC, ENOMEM, H3_E_NOMEM, 1);
  h3_chunk chunk;
  h3_file *none = NULL;
  CHECK(h3_encode_append(none, &spec, raw, 1, 4097, NULL, 1, &chunk) == H3_E_INVALID);
  CHECK(h3_encode_append(none, &spec, raw, 1, CHUNK, NULL, 0, &chunk) == H3_E_INVALID);
  CHECK(h3_encode_append(none, &spec, raw, 0, CHUNK, NULL, 1, &chunk) == H3_OK);
  free(raw);
  puts("test_encode: ok");
  return 0;
}

#include "test.h"

#include <dlfcn.h>

uint64_t test_seed = 1;

static void *symbol(void *library, const char *name) {
  void *address = dlsym(library, name);
  if (!address) {
    fprintf(stderr, "no %s in the zstd library\n", name);
    exit(2);
  }
  return address;
}

void test_start(void) {
  const char *path = getenv("H3_TEST_ZSTD"), *seed = getenv("H3_TEST_SEED");
  /* Lazy: the package's module also refers to Python, which no test calls. */
  void *library = path && *path ? dlopen(path, RTLD_LAZY) : NULL;
  if (!library) library = dlopen("libzstd.so.1", RTLD_LAZY);
  if (!library) {
    fprintf(stderr, "no zstd: set H3_TEST_ZSTD to a library that has it (%s)\n", dlerror());
    exit(2);
  }
  if (seed) test_seed = strtoull(seed, NULL, 10);
  h3_zstd zstd = {
      .version_number = (uintptr_t)symbol(library, "ZSTD_versionNumber"),
      .estimate_dctx_size = (uintptr_t)symbol(library, "ZSTD_estimateDCtxSize"),
      .init_static_dctx = (uintptr_t)symbol(library, "ZSTD_initStaticDCtx"),
      .decompress_dctx = (uintptr_t)symbol(library, "ZSTD_decompressDCtx"),
      .estimate_cctx_size = (uintptr_t)symbol(library, "ZSTD_estimateCCtxSize"),
      .init_static_cctx = (uintptr_t)symbol(library, "ZSTD_initStaticCCtx"),
      .compress_cctx = (uintptr_t)symbol(library, "ZSTD_compressCCtx"),
      .is_error = (uintptr_t)symbol(library, "ZSTD_isError"),
      .compress_bound = (uintptr_t)symbol(library, "ZSTD_compressBound"),
  };
  CHECK(h3_init(&zstd) == H3_OK);
  zstd.compress_bound = 0;
  CHECK(h3_init(&zstd) == H3_E_INVALID);
}

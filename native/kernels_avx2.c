/* The vector primitives for x86-64 with AVX2, FMA and F16C; chosen at run time (compute.c). */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#include <immintrin.h>
#define H3_KERNELS h3_kernels_avx2
#define H3_ISA_NAME "avx2"
#define H3_HAVE_AVX2
#include "kernels_impl.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int h3_no_avx2_here; /* a C file must declare something */
#endif

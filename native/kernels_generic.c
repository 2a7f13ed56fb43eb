/* The vector primitives for any processor: the compiler maps eight lanes to what the base instruction set has. */
#define H3_KERNELS h3_kernels_generic
#define H3_ISA_NAME "generic"
#include "kernels_impl.h"

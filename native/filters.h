/* filters.h: pure transforms of element arrays. No state, no allocation; n counts elements unless said otherwise. */
#ifndef H3_FILTERS_H
#define H3_FILTERS_H
#include <stddef.h>
#include <stdint.h>

/* Bijections of one element, applied before its bytes are split. */
enum h3_map_mode {
  H3_MAP_NONE = 0,
  H3_MAP_ROTATE = 1, /* rotate left by 1: a float's sign goes to the low bit, its exponent starts the top byte */
  H3_MAP_ZIGZAG = 2  /* small differences of either sign become small unsigned numbers */
};

int h3_all_zero(const uint8_t *data, size_t bytes);

/* out = x - y, modulo 2^(8 elem). */
void h3_delta_sub(const uint8_t *x, const uint8_t *y, uint8_t *out, size_t n, uint32_t elem);
/* x += y. */
void h3_delta_add(uint8_t *x, const uint8_t *y, size_t n, uint32_t elem);
/* Row form: element i minus element i - row (row in elements); the first row stays. */
void h3_delta_row_sub(const uint8_t *x, uint8_t *out, size_t n, size_t row, uint32_t elem);
void h3_delta_row_add(uint8_t *x, size_t n, size_t row, uint32_t elem);

/* Bytes regrouped by significance, elem 2, 4 or 8: plane p (0 = lowest byte) is planes[p n .. p n + n). */
void h3_planes_split(const uint8_t *in, size_t n, uint32_t elem, int mode, uint8_t *planes);
/* planes[p] points to n bytes each. */
void h3_planes_join(const uint8_t *const planes[8], size_t n, uint32_t elem, int mode, uint8_t *out);

/* Elements of 2 or 4 bytes whose top 16 bits are sign, 8 exponent bits, 7 mantissa bits: bf16, fp32.
 * nib: (n + 1) / 2 bytes; byte j holds the nibble of element j below that of element j + (n + 1) / 2.
 * nibble = ref - exponent if that is 0..14, else 15 (escape). rest: n bytes of sign and mantissa.
 * low: the low 16 bits of n 4-byte elements; unused for 2-byte ones. */
unsigned h3_exp_max(const uint8_t *in, size_t n, uint32_t elem);
/* The reference that leaves the fewest escapes. */
unsigned h3_exp_best_ref(const uint8_t *in, size_t n, uint32_t elem);
/* Also the exponents of escaped elements, in the order of their nibbles in nib (low nibble first); returns how many.
 * escapes holds n + 2: two are written past the last. */
size_t h3_exp_pack(const uint8_t *in, size_t n, uint32_t elem, unsigned ref, uint8_t *nib, uint8_t *rest, uint8_t *low,
                   uint8_t *escapes);
void h3_exp_unpack(const uint8_t *nib, const uint8_t *rest, const uint8_t *low, size_t n, uint32_t elem, unsigned ref,
                   uint8_t *out);
/* Puts the exponents back; 0 when nib holds exactly n_escapes escapes, else -1. */
int h3_exp_restore(uint8_t *out, size_t n, uint32_t elem, const uint8_t *nib, const uint8_t *escapes, size_t n_escapes);
#endif

/* From dequantised coefficients of a block to samples: the bits of libjpeg's accurate integer transform (islow). */
#ifndef PENSTOCK_IDCT_H
#define PENSTOCK_IDCT_H

#include <stddef.h>
#include <stdint.h>

/* Write the samples of a block, `size` (8, 4, 2 or 1) of a side. `block` has 64 coefficients row by row, aligned to 16
 * bytes, none behind the one that is `last` in zigzag order. */
void pst_idct(const int16_t *block, int last, int size, uint8_t *out, ptrdiff_t stride, int avx2);

#endif

/* From dequantised coefficients of a block to samples: the bits of libjpeg's accurate integer transform (islow). */
#ifndef PENSTOCK_IDCT_H
#define PENSTOCK_IDCT_H

#include <stddef.h>
#include <stdint.h>

/* Write the samples of a block, `size` (8, 4 or 2) of a side, from 64 coefficients row by row, aligned to 16 bytes. */
void pst_idct(const int16_t *block, int size, uint8_t *out, ptrdiff_t stride, int avx2);

/* The same of any `size`, 1 too, for a block that has a DC value only. */
void pst_idct_dc(int dc, int size, uint8_t *out, ptrdiff_t stride);

#endif

/* From dequantised coefficients of a block to samples: the bits of libjpeg's accurate integer transform (islow). */
#ifndef PENSTOCK_IDCT_H
#define PENSTOCK_IDCT_H

#include <stddef.h>
#include <stdint.h>

void idct(const int16_t *block, int last, int size, uint8_t *out, ptrdiff_t stride, int avx2);

#endif

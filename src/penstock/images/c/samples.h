/* From coefficients of a block to samples, and from rows of samples to pixels of RGB: the bits of libjpeg's accurate
 * integer transform (islow), "fancy" upsampling and rounding.
 */
#ifndef PENSTOCK_SAMPLES_H
#define PENSTOCK_SAMPLES_H

#include <stddef.h>
#include <stdint.h>

#define PST_SLACK 64 /* bytes behind rows of samples and of pixels, which may be read and written */

/* Write the samples of a block, `size` (8, 4 or 2) of a side, from 64 dequantised coefficients row by row, aligned to
 * 16 bytes. */
void pst_idct(const int16_t *block, int size, uint8_t *out, ptrdiff_t stride, int avx2);

/* The same of any `size`, 1 too, for a block that has a DC value only. */
void pst_idct_dc(int dc, int size, uint8_t *out, ptrdiff_t stride);

/* Twice as many samples of a row, by a triangle filter. There is one before the first, and one behind the last. */
void pst_upsample_h2v1(const uint8_t *samples, long count, uint8_t *out);

/* Twice as many samples of a row that lies between two rows of samples, nearer to one. */
void pst_upsample_h2v2(const uint8_t *near, const uint8_t *far, long count, uint8_t *out);

void pst_ycc_to_rgb(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, long count, uint8_t *out, int avx2);
void pst_gray_to_rgb(const uint8_t *y, long count, uint8_t *out);

#endif

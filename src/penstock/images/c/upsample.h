/* From samples to pixels, a row at a time: libjpeg's triangle filter for half-size colours, and its YCbCr to RGB. */
#ifndef PENSTOCK_UPSAMPLE_H
#define PENSTOCK_UPSAMPLE_H

#include <stdint.h>

#define PIXELS_SLACK 64 /* bytes behind all rows, of samples and of pixels, that may be read and written */

void upsample_across(const uint8_t *samples, long count, uint8_t *out, int avx2);
void upsample_both(const uint8_t *near, const uint8_t *far, long count, uint8_t *out, int avx2);
void to_rgb(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, long count, uint8_t *out, int avx2);
void grey_to_rgb(const uint8_t *y, long count, uint8_t *out);

#endif

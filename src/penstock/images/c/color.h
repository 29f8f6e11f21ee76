/* From samples to pixels of RGB, a row at a time, rounded as libjpeg does. */
#ifndef PENSTOCK_COLOR_H
#define PENSTOCK_COLOR_H

#include <stdint.h>

#define PST_SLACK 64 /* bytes behind rows of samples and of pixels, which may be read and written */

void pst_ycc_to_rgb(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, long count, uint8_t *out, int avx2);
void pst_gray_to_rgb(const uint8_t *y, long count, uint8_t *out);

#endif

/* libjpeg's "fancy" upsampling, a row at a time: a triangle filter for colours of half the width, and of half the
 * height.
 */
#ifndef PENSTOCK_UPSAMPLE_H
#define PENSTOCK_UPSAMPLE_H

#include <stdint.h>

/* Twice as many samples of a row. There is one before the first, and one behind the last. */
void pst_upsample_h2v1(const uint8_t *samples, long count, uint8_t *out);

/* Twice as many samples of a row that lies between two rows of samples, nearer to one. */
void pst_upsample_h2v2(const uint8_t *near, const uint8_t *far, long count, uint8_t *out);

#endif

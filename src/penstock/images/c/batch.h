/* Images of a batch, each drawn into its place in one array. */
#ifndef PENSTOCK_BATCH_H
#define PENSTOCK_BATCH_H

#include "decode.h"

typedef struct {
    pst_resize_job job;  /* what is drawn; its result is the part of this image's result that is not filled */
    pst_request request; /* of a file */
    const uint8_t *rows; /* of pixels, which are the job's source; NULL: there is a file */
    ptrdiff_t stride;    /* bytes from one of these rows to the next */
    int inside[4];       /* top, left, bottom and right of what is drawn, in pixels of the result */
} pst_batch_image;

/* Draw `count` images. `whole` says what they have in common, and where the first result is; the others follow `stride`
 * items apart. What is not drawn is filled with an item for each channel, if there is `fill`. status[i] is 0, or 1 for
 * an image that could not be drawn: its result is of no use then. Returns the nanoseconds that went into resizing
 * files. */
int64_t pst_batch_draw(const pst_resize_job *whole, size_t stride, const uint8_t *fill, pst_batch_image *images,
                       size_t count, char *status);

#endif

/* Images of a batch, each drawn into its place in one array. */
#ifndef PENSTOCK_BATCH_H
#define PENSTOCK_BATCH_H

#include "resize.h"

typedef struct {
    const uint8_t *data; /* a JPEG file; or the first row of pixels */
    size_t size;         /* bytes of the file */
    double box[4];       /* left, top, right, bottom: what is drawn, in pixels of the image */
    int inside[4];       /* top, left, bottom, right: where it is drawn, in pixels of the result; the rest is filled */
    int width, height;   /* of the image, as the caller knows it; of a file 0 is not known */
    int flip_x, flip_y;
} pst_batch_image;

typedef struct {
    pst_resize_job
        job;       /* of every image: layout, table and filter; `out` and its sizes are those of the first result */
    size_t result; /* entries from one result to the next */
    const uint8_t *fill; /* an entry for each channel */
    int files;           /* images are JPEG files, or pixels with `stride` bytes from one row to the next */
    ptrdiff_t stride;
    unsigned long long max_pixels;
    int64_t resizing; /* nanoseconds that went into other than decoding */
} pst_batch;

/* Draw `count` images. status[i] is 0, or 1 where an image could not be decoded: its result is of no use then. */
void pst_batch_draw(pst_batch *batch, const pst_batch_image *images, size_t count, char *status);

#endif

/* JPEG files: a box of the image, decoded at 1/1, 1/2, 1/4 or 1/8 of its size and resized into memory of the caller;
 * many of these in one call; entries, and restart markers.
 *
 * Promises:
 *
 * - Pixels are those of a full decode by libjpeg, resized. A box of whole pixels that has the size of its result is
 * copied.
 * - Nothing is written outside the caller's memory, and no error ends the process (libjpeg.h).
 * - What a thread keeps between calls are tables that are made again where they differ, so threads need no locks.
 * - Memory: some rows and tables (some 200 KB at ordinary widths); of a file in several scans (progressive) all
 *   coefficients, 2 bytes each. Pixels and the number of scans are limited.
 */
#ifndef PENSTOCK_DECODE_H
#define PENSTOCK_DECODE_H

#include <stddef.h>
#include <stdint.h>

#include "libjpeg.h"
#include "resize.h"

/* What is asked for, and what came of it: zeroed, but for what the caller sets. */
typedef struct {
    /* The result, the table, the filter, and the box in pixels of the image. Of a file the size of its source is not
     * set. */
    pst_resize_job job;
    const uint8_t *rows; /* of pixels, which are the job's source; NULL: a file is, and all that follows is for files */
    ptrdiff_t stride;    /* bytes from one of these rows to the next */
    const uint8_t *data; /* the file */
    size_t size;
    /* 1, 2, 4 or 8: shrink the image by that, and round the box outward to whole pixels; 0: shrink it as much as leaves
     * the box as large as its result. */
    int scale;
    unsigned long long max_pixels;        /* of the image */
    long expected_width, expected_height; /* what the caller has read in the header; 0 is nothing */
    const uint8_t *entries;               /* of this file, from `pst_entries`; NULL is none */
    size_t entries_size;
    int own;     /* use our own decoder where it takes the file, or libjpeg alone: the pixels are the same */
    int partial; /* damage and missing data are forgiven where libjpeg can go on, which decodes then */

    int64_t resizing; /* nanoseconds that went into other than decoding */
    char message[JMSG_LENGTH_MAX];
} pst_request;

/* Resize a box of pixels, or of a file, which is decoded. After an error the result may be written in part. */
enum pst_outcome pst_draw(pst_request *req);

#define PST_MAX_INTERVAL 65535 /* MCUs between points where decoding can begin */

/* The next two write into new memory, which the caller frees: PST_DONE; PST_NO_MEMORY; PST_OUTSIDE for a number that
 * is out of range; or anything else for a file of which nothing is made. Then there is no memory. */

/* The entries of a file, every `step` MCUs of a row: points where decoding can begin. There are none of a file whose
 * restart markers are as good, that libjpeg has to decode, or that is damaged. */
enum pst_outcome pst_entries(const uint8_t *data, size_t size, long step, uint8_t **out, size_t *out_size);

/* The JPEG with a restart marker every `interval` MCUs (0: none; -1: as many as suit its width). */
enum pst_outcome pst_transcode(const uint8_t *data, size_t size, long interval, unsigned long long max_pixels,
                               uint8_t **out, size_t *out_size);

/* The width and height of a file that our own decoder takes, by its header; 0 x 0 of others. */
void pst_size(const uint8_t *data, size_t size, int32_t found[2]);

/* An image of a batch, which is drawn into its place in one array. */
typedef struct {
    pst_request request; /* its result is the part of this image's result that is not filled */
    int inside[4];       /* left, top, right and bottom of what is drawn, in pixels of the result */
} pst_batch_image;

/* Draw `count` images. `whole` says what they have in common, and where the first result is; the others follow `stride`
 * items apart. What is not drawn is filled with an item for each channel, if there is `fill`. status[i] is 0, or 1 for
 * an image that could not be drawn: its result is of no use then. Returns the nanoseconds that went into resizing
 * files. */
int64_t pst_batch_draw(const pst_resize_job *whole, size_t stride, const uint8_t *fill, pst_batch_image *images,
                       size_t count, char *status);

#endif

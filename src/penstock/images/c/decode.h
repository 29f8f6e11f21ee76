/* JPEG: the pixels of a box of the image, at 1/1, 1/2, 1/4 or 1/8 of their size, into memory of the caller.
 *
 * Promises:
 *
 * - Pixels are those of a full decode by libjpeg. That upsamples colour without its neighbours at the edge of a cropped
 *   row, so two columns more than asked for are decoded on either side.
 * - Nothing is written outside the caller's memory, and no error ends the process (libjpeg.h).
 * - What a thread keeps between calls is memory and tables that are made again where they differ, so threads need no
 *   locks.
 * - Memory: a few rows and tables (some 200 KB at ordinary widths); of a file in several scans (progressive) all
 *   coefficients, 2 bytes each. Pixels and the number of scans are limited.
 */
#ifndef PENSTOCK_DECODE_H
#define PENSTOCK_DECODE_H

#include <stddef.h>
#include <stdint.h>

#include "libjpeg.h"
#include "resize.h"

/* What is asked for and what came of it: zeroed, but for what the caller sets. */
typedef struct {
    const uint8_t *data; /* the file */
    size_t size;
    double left, top, right, bottom;      /* in pixels of the image; right <= 0 is all of it */
    unsigned long long max_pixels;        /* of the image */
    long expected_width, expected_height; /* what the caller has read in the header; 0 is nothing */
    const uint8_t *entries;               /* of this file, from `pst_entries`; NULL is none */
    size_t entries_size;
    int own;     /* use our own decoder where it takes the file: the pixels are the same */
    int simd;    /* use AVX2 where there is some: the pixels are the same */
    int partial; /* damage and missing data are forgiven where libjpeg can go on; libjpeg alone decodes */

    pst_resize_job *job; /* draw the box there; its `out`, sizes and filter are set. NULL: the pixels go to `out` */
    int channels;        /* 1 or 3 */
    long target_height, target_width; /* shrink the box by 2, 4 or 8 as long as it stays as large as that; 0: do not */
    uint8_t *out;
    size_t capacity;
    long step; /* of pst_entries: MCUs from one entry of a row to the next */

    size_t needed; /* bytes in `out`, or the capacity that is needed */
    long image_width, image_height;
    long width, height; /* of what lies in `out` */
    long x, y;          /* its first pixel in the (shrunken) image */
    int scale;          /* 1, 2, 4 or 8 */
    int64_t resizing;   /* nanoseconds of drawing that went into other than decoding */
    char message[JMSG_LENGTH_MAX];
} pst_request;

/* Decode a box. */
enum pst_outcome pst_decode(pst_request *req);

/* Write the entries of a file into `out`, every `step` MCUs of a row: points where decoding can begin. Files that
 * libjpeg has to decode have none. */
enum pst_outcome pst_entries(pst_request *req);

/* The width and height of a file that our own decoder takes, by its header; 0 x 0 of others. */
void pst_size(const uint8_t *data, size_t size, int32_t found[2]);

#endif

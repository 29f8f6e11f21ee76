/* A decoder of ordinary baseline JPEGs for a box of the image: the pixels of libjpeg, from fewer of the coded bits.
 *
 *     pst_region *region = ...;                          kept by a thread, for the tables in it; zeros at first
 *     pst_frame frame;
 *     if (pst_frame_read(&frame, data, size) && pst_region_open(region, &frame, data, size, ...))
 *         pst_region_begin(region, scratch of pst_region_scratch(region) bytes);
 *     while ((count = pst_region_rows(region)) > 0)      rows of pixels in region->rows
 */
#ifndef PENSTOCK_REGION_H
#define PENSTOCK_REGION_H

#include "restart.h"

/* The samples of one component, of one row of MCUs: row 0 is the last one of the MCUs above, and there is one more. */
typedef struct {
    int wanted;                  /* or passed over */
    int size;                    /* samples of a block's side: 8, or 4, 2, 1 where the image is shrunken */
    int across, down;            /* blocks of an MCU */
    int columns, rows;           /* samples of an MCU */
    int twice_across, twice_down; /* whether there is a sample for two pixels */
    long width, height;          /* of the whole image */
    quantiser by;
    uint8_t *plane;              /* row 0, at the first MCU of the part */
    size_t stride;
} component;

typedef struct {
    code_tables tables;
    scan scan;
    track track;
    component components[3];
    int channels, avx2;
    int width, height;           /* pixels of an MCU */
    int late;                    /* pixel rows that wait for samples of the MCUs below */
    long image_height;           /* pixels of the shrunken image */
    long x, y, right, bottom;    /* the box */
    long left, top, end, below;  /* MCUs: from column `left` to `end`, from row `top` to `below` */
    long row;                    /* of MCUs, that comes next */
    uint8_t *colours[2], *rows;
    size_t stride;               /* of pixel rows */
} pst_region;

/* Prepare for the pixels of `box`, (left, top, right, bottom) in pixels of the image at 1/`scale` of its size: 1, 2, 4 or 8.
 * `channels` are 3 (RGB) or 1 (gray). `data` must stay until the last row, `frame` need not. `entries` of this file are those
 * of `pst_entries_write`, or NULL. 0: libjpeg has to decode it. */
int pst_region_open(pst_region *region, const pst_frame *frame, const uint8_t *data, size_t size, const uint8_t *entries,
                    size_t entries_size, int channels, int scale, const long box[4], int simd);

/* Bytes of memory that decoding takes, and the memory. */
size_t pst_region_scratch(const pst_region *region);
void pst_region_begin(pst_region *region, uint8_t *scratch);

/* The next rows of pixels, in `region->rows`, `region->stride` bytes apart: how many there are, 0 behind the last ones, -1
 * where the data is not as it should be. */
int pst_region_rows(pst_region *region);

/* Write the entries of a file, every `step` MCUs of a row: their size, or 0 for data that has none. Nothing is written
 * where that is more than `capacity`. */
size_t pst_entries_write(pst_region *region, const pst_frame *frame, const uint8_t *data, size_t size, long step,
                         uint8_t *out, size_t capacity);

#endif

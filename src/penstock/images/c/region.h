/* A decoder of ordinary baseline JPEGs for a box of the image: the pixels of libjpeg, from fewer of the coded bits.
 *
 *     static _Thread_local pst_region region;            45 KiB, most of it tables that the next file can use
 *     pst_frame frame;
 *     if (pst_frame_read(&frame, data, size) && pst_region_open(&region, &frame, data, size, ...))
 *         pst_region_begin(&region, memory of region.scratch bytes);
 *     while ((count = pst_region_rows(&region)) > 0)     rows of pixels are in region.rows
 */
#ifndef PENSTOCK_REGION_H
#define PENSTOCK_REGION_H

#include "restart.h"

/* The samples of one component of one row of MCUs. Row 0 is the last one of the MCUs above, where upsampling needs it,
 * and there is one more below. Each begins at the first MCU that is decoded. */
typedef struct {
    int block_size;            /* samples of a block's side: 8, or 4, 2, 1 in a shrunken image */
    int mcu_width, mcu_height; /* samples */
    long width, height;        /* of the whole image */
    uint8_t factors[PST_PLACES];
    uint8_t *samples;
    uint8_t *upsampled; /* one row of pixels */
    size_t stride, bytes;
} pst_plane;

typedef struct {
    pst_scan scan;
    pst_plane planes[PST_COMPONENTS];
    int components; /* that are decoded, others are skipped */
    int channels, avx2;
    int mcu_width, mcu_height;     /* pixels */
    int h2, v2;                    /* whether colours are upsampled: they are half as wide, half as high */
    long left, top, right, bottom; /* the box */
    long mcu_left, mcu_right;      /* MCU columns that are decoded */
    long mcu_row, mcu_bottom;      /* the MCU row that comes next, and the one behind the last */
    size_t scratch;                /* bytes of memory that decoding takes */
    uint8_t *rows;                 /* of pixels */
    size_t stride;                 /* bytes from one of them to the next */
} pst_region;

/* Prepare for the pixels of `box`, (left, top, right, bottom) inside the image at 1/`scale` of its size: 1, 2, 4 or 8.
 * `channels` are 3 (RGB) or 1 (gray). `data` must stay until the last row, `frame` need not. `entries` of this
 * file are those of `pst_entries_write`, or NULL. `simd` allows AVX2: the pixels are the same. 0: libjpeg has to decode
 * it. */
int pst_region_open(pst_region *region, const pst_frame *frame, const uint8_t *data, size_t size,
                    const uint8_t *entries, size_t entries_size, int channels, int scale, const long box[4], int simd);

/* `scratch` is memory of `region->scratch` bytes. */
void pst_region_begin(pst_region *region, uint8_t *scratch);

/* Decode the next rows of pixels, to `region->rows`, `region->stride` bytes apart: how many there are, 0 behind the
 * last ones, -1 where the data is not as it should be, and libjpeg has to decide. */
int pst_region_rows(pst_region *region);

#endif

/* A decoder of ordinary baseline JPEGs for a box of the image: the pixels of libjpeg, from fewer of the coded bits.
 *
 *     box_decoder *b = ...;                              what a thread keeps, 94 KiB; no state between images
 *     if (box_open(b, cinfo, data, size, ...))           after jpeg_read_header, of SOF0 or SOF1; 0: let libjpeg decode it
 *         box_begin(b, scratch of box_scratch(b) bytes);
 *     while ((count = box_rows(b)) > 0)                  rows of pixels in b->rows
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
    long image_height;           /* pixels */
    long x, y, right, bottom;    /* the box */
    long left, top, end, below;  /* MCUs: from column `left` to `end`, from row `top` to `below` */
    long row;                    /* of MCUs, that comes next */
    uint8_t *colours[2], *rows;
    size_t stride;               /* of pixel rows */
} box_decoder;

int box_open(box_decoder *b, const struct jpeg_decompress_struct *cinfo, const uint8_t *data, size_t size,
             size_t scan_begins, const uint8_t *entries, size_t entries_size, int channels, const long box[4], int simd);
size_t box_scratch(const box_decoder *b);
void box_begin(box_decoder *b, uint8_t *scratch);
int box_rows(box_decoder *b);

#endif

/* The headers of a JPEG from SOI to the first SOS, and which files the decoder of region.h accepts. */
#ifndef PENSTOCK_FRAME_H
#define PENSTOCK_FRAME_H

#include <stddef.h>
#include <stdint.h>

#define PST_TABLES 4 /* of each kind: two of quantisation and four of Huffman codes are usual */
#define PST_COMPONENTS 3
#define PST_MCU_BLOCKS 6 /* at most, of 4:2:0 */

/* A Huffman table as DHT defines it. */
typedef struct {
    uint8_t counts[16]; /* of codes, by length less one */
    uint8_t symbols[256];
    int size; /* how many symbols; 0: not defined */
} pst_huffman_definition;

typedef struct {
    int id;
    int h, v;         /* sampling factors, which are blocks of an MCU; 1 of a file with one component */
    int quantisation; /* number of its table */
    int dc, ac;       /* numbers of its Huffman tables */
} pst_frame_component;

typedef struct {
    long width, height; /* pixels */
    int components;     /* 1 (gray) or 3 (YCbCr) */
    pst_frame_component component[PST_COMPONENTS];
    uint8_t factors[PST_TABLES][64]; /* of quantisation, in zigzag order */
    pst_huffman_definition dc[PST_TABLES], ac[PST_TABLES];
    long restart_interval; /* MCUs; 0 is none */
    size_t scan;           /* offset of the entropy-coded data */

    int mcu_width, mcu_height; /* pixels */
    long mcus_per_row, mcu_rows;

    unsigned quantisation_defined; /* bit n: table n */
    int jfif, adobe;               /* whether there is a JFIF marker; Adobe's colour transform, -1 without its marker */
} pst_frame;

/* Read the headers: 1 for a file that the decoder accepts, 0 for any other, of which `frame` says nothing. */
int pst_frame_read(pst_frame *frame, const uint8_t *data, size_t size);

#endif

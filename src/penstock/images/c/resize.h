/* Resizing of 8-bit images whose rows come one after the other, as a decoder emits them: Pillow's two passes.
 *
 *     pst_resize_job job = {...};                            what is asked for; pst_resize_valid(&job)
 *     void *scratch = malloc(pst_resize_scratch(&job));      all the memory there is
 *     pst_resize_plan plan;
 *     pst_resize_begin(&plan, &job, scratch);
 *     pst_resize_rows(&plan, rows, stride, count);           as often as needed, until all rows of the source have come
 *
 * A row of the result is written as soon as the last row that it is made of has come.
 */
#ifndef PENSTOCK_RESIZE_H
#define PENSTOCK_RESIZE_H

#include <stddef.h>
#include <stdint.h>

#define PST_RESIZE_MAX_SIDE (1 << 20) /* pixels, of source and result */

typedef struct {
    int width, height;               /* of the source, in pixels of as many bytes as there are channels */
    double left, top, right, bottom; /* the box in it that is resized; pixel i covers i to i + 1 */

    void *out; /* the first item of the result, aligned as it should be */
    int out_width, out_height;
    int channels;        /* 1 or 3 */
    int planar;          /* result as [channels][height][width] instead of [height][width][channels] */
    size_t row_stride;   /* items from one row of it to the next */
    size_t plane_stride; /* items from one channel to the next, if planar */
    const void *table;   /* [channels][256] items that replace the bytes of the result; NULL: bytes as they are */
    int item_size;       /* bytes of an item: 1, 2, 4 or 8 */

    int bicubic;   /* or bilinear */
    int antialias; /* all pixels count where several make one */
    int flip_x, flip_y;
    int simd; /* use AVX2 where there is some; the result is the same */
} pst_resize_job;

/* How the pixels of one direction are made. Weights come in pairs, of which the last one may be half empty. */
typedef struct {
    int shift;                       /* weights are fixed-point numbers; those of one output add up to 1 << shift */
    int stride;                      /* weights that there is room for, for each output */
    int max_pairs;                   /* of all outputs */
    int32_t *first, *pairs, *weight; /* of output i: its first pixel, its number of pairs, its `stride` weights */
} pst_resize_axis;

typedef struct {
    pst_resize_job job;
    int copy; /* each pixel of the result is one of the source: there is no scratch, and nothing below is used but rows
               */
    int first_row, last_row,
        row;  /* of the source: those that the result is made of, from .. to - 1, and the next one */
    int done; /* rows of the result that are written */
    pst_resize_axis x, y;
    int avx2;
    int values;         /* of a row: out_width * channels */
    int32_t *offset;    /* of each output's first pixel in a row, in bytes */
    int16_t *lanes;     /* horizontal weights as vectors, see resize.c */
    ptrdiff_t overrun;  /* bytes behind a row that vectors are loaded from */
    uint8_t *padded[2]; /* rows with as many bytes behind them */
    uint16_t *ring;     /* pairs of rows after the first pass, interleaved */
    size_t ring_stride;
    int32_t *sums;
    uint8_t *line;
} pst_resize_plan;

/* Make the box of a job, rounded outward to whole pixels, its source: no pixel beside it counts. It begins at (x, y).
 */
void pst_resize_cut(pst_resize_job *job, int *x, int *y);

/* Whether the box of a job lies inside its source. */
int pst_resize_valid(const pst_resize_job *job);
size_t pst_resize_scratch(const pst_resize_job *job);
void pst_resize_begin(pst_resize_plan *plan, const pst_resize_job *job, void *scratch);
void pst_resize_rows(pst_resize_plan *plan, const uint8_t *rows, ptrdiff_t stride, int count);

/* All of that; 0 if there is no memory. */
int pst_resize(const pst_resize_job *job, const uint8_t *rows, ptrdiff_t stride);

#endif

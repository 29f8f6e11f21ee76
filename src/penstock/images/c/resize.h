/* Resizing of 8-bit images whose rows come one after the other, as a decoder emits them: Pillow's two passes.
 *
 *     pst_resize_job job = {...};                            what is asked for; pst_resize_valid(&job)
 *     void *scratch = malloc(pst_resize_scratch(&job));      all the memory there is
 *     pst_resize_plan plan;
 *     pst_resize_begin(&plan, &job, scratch);
 *     pst_resize_rows(&plan, rows, stride, count);           as often as needed, until all rows of the source have come
 *
 * A row of the result is written as soon as the last row that it is made of has come. Rows outside of plan.first_row ..
 * plan.last_row - 1 have to be counted in `plan.row`, and are not looked at.
 */
#ifndef PENSTOCK_RESIZE_H
#define PENSTOCK_RESIZE_H

#include <stddef.h>
#include <stdint.h>

#define RESIZE_MOST (1 << 20) /* pixels of a side, of source and result */

typedef struct {
    int width, height;               /* of the source, in pixels */
    double left, top, right, bottom; /* the box in it that is resized; pixel i covers i to i + 1 */
    int out_width, out_height;
    int channels;  /* 1 or 3 */
    int pixel;     /* bytes of a source pixel: 1 with one channel; 3, or 4 of which the last is left out */
    int bicubic;   /* or bilinear */
    int antialias; /* all pixels count where several make one */
    int flip_x, flip_y;
    const void *table; /* [channels][256] entries that the result is looked up in; NULL: bytes as they are */
    int entry;         /* bytes of an entry: 1, 2, 4 or 8 */
    int planar;        /* result as [channels][height][width] instead of [height][width][channels] */
    void *out;         /* the first entry of the result, aligned as it should be */
    size_t row, plane; /* entries from one row of it to the next, and from one channel to the next where it is planar */
    int simd;          /* use AVX2 where there is some; the result is the same */
} pst_resize_job;

/* How the pixels of one direction are made: of which, by what weights. Output i is made of pixels from first[i] on. */
typedef struct {
    int shift;  /* weights are fixed-point numbers; those of one output add up to 1 << shift */
    int stride; /* weights that there is room for, for each output */
    int most;   /* pairs of the output that has most */
    int32_t *first;
    int32_t *pairs; /* weights come in pairs, the last of which may be 0 */
    int32_t *weight;
} pst_resize_axis;

typedef struct {
    pst_resize_job job;
    pst_resize_axis x, y;
    int copy; /* each pixel of the result is one of the source: there are no weights, and no scratch */
    int avx2;
    int first_row, last_row; /* of the source, which the result is made of; last_row itself is not */
    int row, done;           /* rows that have come, and that have been written */
    int values;              /* of a row: out_width * channels */
    int safe_from, safe_to;  /* outputs that may be made by 16-byte loads from the caller's row */
    int tail, tail_bytes;    /* the end of a row that the others are made of: from which byte on, how many */
    int32_t *offset;         /* of each output's first pixel in a row, in bytes */
    int16_t *lanes;          /* horizontal weights as vectors; see resize.c */
    uint16_t *ring;          /* pairs of rows after the first pass, interleaved */
    size_t ring_stride;
    int32_t *sums;
    uint8_t *held, *tails[2], *line;
} pst_resize_plan;

int pst_resize_valid(const pst_resize_job *job);
size_t pst_resize_scratch(const pst_resize_job *job);
void pst_resize_begin(pst_resize_plan *plan, const pst_resize_job *job, void *scratch);
void pst_resize_rows(pst_resize_plan *plan, const uint8_t *rows, ptrdiff_t stride, int count);

/* All of that; 0 if there is no memory. */
int pst_resize(const pst_resize_job *job, const uint8_t *rows, ptrdiff_t stride);

#endif

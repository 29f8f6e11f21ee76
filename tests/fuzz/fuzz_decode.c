/* Decoding and drawing a box of any file, by our own decoder and by libjpeg.
 *
 * 1. Where libjpeg decodes the whole image, at a scale, each box of it has the same pixels, bit for bit: by libjpeg
 *    alone, by our own decoder, and by that with the entries that we made of the file.
 * 2. What our own decoder refuses, libjpeg has decided: the outcome is the same as without it.
 * 3. Where libjpeg refuses the box, so does our own decoder, unless the damage is in data that it has no need to look
 *    at: below the box, right of it in the last row, or behind restart markers. So if it decodes all rows from the
 * first to some below the box, in their full width, then libjpeg must decode the box.
 * 4. Of a file that has entries, libjpeg decodes the whole image.
 * 5. A drawing is the decoded box, resized, by vector instructions or not.
 * 6. Changed entries give some pixels or an error.
 * 7. Where damage is forgiven (libjpeg alone), a file without damage has the same pixels.
 *
 * AddressSanitizer sees to all memory: file, entries and results lie in blocks of exactly their size. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "input.h"

#define LARGEST_DRAWING 48
#define LOOKED_AHEAD 48 /* rows of pixels: libjpeg decodes up to 32 at once, and some that upsampling looks at */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The pixels of a box. */
typedef struct {
    enum pst_outcome outcome;
    fuzz_box box;
    uint8_t *pixels; /* NULL after an error */
    size_t row;      /* bytes */
    char message[JMSG_LENGTH_MAX];
} picture;

typedef struct {
    fuzz_input *in;
    fuzz_size size; /* of the image */
    fuzz_box box;   /* of it, that is asked for */
    int channels, scale, simd;
} question;

static picture decode(const question *q, const fuzz_box *box, int own, int partial, const uint8_t *entries,
                      size_t entries_size)
{
    picture made;
    pst_resize_job job = fuzz_pixels(box, q->scale, q->channels);
    job.simd = q->simd && own;
    pst_request req = fuzz_request(q->in, &job, q->scale);
    req.own = own;
    req.partial = partial;
    req.entries = entries;
    req.entries_size = entries_size;
    memset(&made, 0, sizeof made);
    made.pixels = job.out;
    made.row = job.row_stride;
    made.box = *box;
    made.outcome = pst_draw(&req);
    memcpy(made.message, req.message, sizeof made.message);
    if (made.outcome != PST_DONE) {
        free(made.pixels);
        made.pixels = NULL;
    }
    return made;
}

/* Whether two decodes have the same pixels in a box that lies in both. */
static void compare(const question *q, const picture *a, const picture *b, const fuzz_box *box, const char *what)
{
    const long left = (long)(box->left / q->scale), top = (long)(box->top / q->scale);
    const long width = fuzz_up(box->right, q->scale) - left, height = fuzz_up(box->bottom, q->scale) - top;
    const uint8_t *p[2];
    for (int i = 0; i < 2; i++) {
        const picture *from = i ? b : a;
        const long x = left - (long)(from->box.left / q->scale), y = top - (long)(from->box.top / q->scale);
        p[i] = from->pixels + (size_t)y * from->row + (size_t)(x * q->channels);
    }
    for (long y = 0; y < height; y++, p[0] += a->row, p[1] += b->row)
        for (long i = 0; i < width * q->channels; i++)
            EXPECT(p[0][i] == p[1][i], "%s: in row %ld, byte %ld of a box of %ld x %ld at 1/%d: %d and %d", what, y, i,
                   width, height, q->scale, p[0][i], p[1][i]);
}

/* The rows from the image's first one to `bottom`. */
static fuzz_box strip(const question *q, double bottom)
{
    const double height = (double)q->size.height;
    return (fuzz_box){0, 0, (double)q->size.width, bottom < height ? bottom : height};
}

/* A drawing of the box, as the tail says, in new memory of `size` bytes: of any size, or of the box's own, which
 * becomes one of whole pixels. */
static pst_resize_job make_job(fuzz_input *in, fuzz_box *box, int channels, const uint8_t *table, size_t *size)
{
    pst_resize_job job;
    memset(&job, 0, sizeof job);
    const int flags = fuzz_number(in, 255), spare = fuzz_number(in, 3), item = 1 << fuzz_number(in, 3);
    job.out_width = 1 + fuzz_number(in, LARGEST_DRAWING);
    job.out_height = 1 + fuzz_number(in, LARGEST_DRAWING);
    if (flags >> 7) {
        *box = (fuzz_box){floor(box->left), floor(box->top), ceil(box->right), ceil(box->bottom)};
        job.out_width = (int)(box->right - box->left);
        job.out_height = (int)(box->bottom - box->top);
    }
    job.left = box->left;
    job.top = box->top;
    job.right = box->right;
    job.bottom = box->bottom;
    job.channels = channels;
    job.bicubic = flags & 1;
    job.antialias = flags >> 1 & 1;
    job.flip_x = flags >> 2 & 1;
    job.flip_y = flags >> 3 & 1;
    job.planar = flags >> 4 & 1;
    job.simd = flags >> 5 & 1;
    job.table = flags >> 6 & 1 ? table : NULL;
    job.item_size = job.table ? item : 1;
    job.row_stride = (size_t)(job.out_width * (job.planar ? 1 : channels) + spare);
    job.plane_stride = job.planar ? job.row_stride * (size_t)job.out_height + (size_t)spare : 1;
    const size_t last = (size_t)job.out_height * job.row_stride - (size_t)spare;
    *size = (last + (job.planar ? job.plane_stride * (size_t)(channels - 1) : 0)) * (size_t)job.item_size;
    job.out = calloc(*size, 1);
    return job;
}

/* How much a box is shrunken in front of a drawing of this size. */
static int scale_of(const fuzz_box *box, const pst_resize_job *job)
{
    int scale = 1;
    while (scale < 8 && box->right - box->left >= 2.0 * scale * job->out_width &&
           box->bottom - box->top >= 2.0 * scale * job->out_height)
        scale *= 2;
    return scale;
}

/* Draw the box, and compare that with its pixels, resized. */
static void draw(question q, int own)
{
    static _Alignas(8) uint8_t table[3 * 256 * 8];
    for (size_t i = 0; i < sizeof table && !table[sizeof table - 1]; i++)
        table[i] = (uint8_t)(i * 167 + 13 + i / 256);
    size_t size;
    pst_resize_job job = make_job(q.in, &q.box, q.channels, table, &size);
    pst_request req = fuzz_request(q.in, &job, 0);
    req.own = own;
    const enum pst_outcome drawn = pst_draw(&req);

    q.scale = scale_of(&q.box, &job);
    q.simd = !job.simd;
    picture decoded = decode(&q, &q.box, own, 0, NULL, 0);
    const long x = (long)(q.box.left / q.scale), y = (long)(q.box.top / q.scale);
    pst_resize_job resizing = job;
    resizing.simd = !job.simd;
    resizing.width = (int)(fuzz_up(q.box.right, q.scale) - x);
    resizing.height = (int)(fuzz_up(q.box.bottom, q.scale) - y);
    resizing.left = q.box.left / q.scale - (double)x;
    resizing.top = q.box.top / q.scale - (double)y;
    resizing.right = q.box.right / q.scale - (double)x;
    resizing.bottom = q.box.bottom / q.scale - (double)y;
    EXPECT(drawn == decoded.outcome || (drawn == PST_OUTSIDE && !pst_resize_valid(&resizing)), "drawn: %d, decoded: %d",
           drawn, decoded.outcome);
    if (drawn == PST_DONE) {
        resizing.out = calloc(size, 1);
        EXPECT(pst_resize_valid(&resizing), "drawn, but cannot be resized");
        pst_resize(&resizing, decoded.pixels, (ptrdiff_t)decoded.row);
        EXPECT(!memcmp(job.out, resizing.out, size), "the drawing is not the resized box");
        free(resizing.out);
    }
    free(decoded.pixels);
    free(job.out);
}

/* With entries of the file, and with these after a few changes. */
static void enter(const question *q, const picture *without, enum pst_outcome whole)
{
    fuzz_input *in = q->in;
    const long step = 1 + fuzz_number(in, 6);
    const int changes = fuzz_number(in, 4), cut = fuzz_number(in, 7);
    uint8_t *entries;
    size_t size;
    if (pst_entries(in->data, in->size, step, &entries, &size) != PST_DONE)
        return;
    EXPECT(whole == PST_DONE, "there are entries of a file that libjpeg refuses: %d", whole);
    picture with = decode(q, &q->box, 1, 0, entries, size);
    EXPECT(with.outcome == without->outcome, "without entries: %d, with them: %d", without->outcome, with.outcome);
    compare(q, &with, without, &q->box, "with and without entries");
    free(with.pixels);

    for (int i = 0; i < changes; i++) {
        const size_t at = (size_t)(fuzz_number(in, 255) | fuzz_number(in, 255) << 8);
        entries[at % size] = (uint8_t)fuzz_number(in, 255);
    }
    if (!cut)
        entries = realloc(entries, size = size * 3 / 4);
    with = decode(q, &q->box, 1, 0, entries, size);
    EXPECT(with.outcome == PST_DONE || with.outcome == without->outcome, "with changed entries: %d", with.outcome);
    free(with.pixels);
    free(entries);
}

static void check(fuzz_input *in)
{
    question q;
    memset(&q, 0, sizeof q);
    q.in = in;
    const int flags = fuzz_number(in, 255);
    q.scale = 1 << fuzz_number(in, 3);
    q.channels = flags & 1 ? 1 : 3;
    q.simd = flags >> 1 & 1;
    q.size = fuzz_size_of(in->data, in->size, 0);
    const fuzz_size by_own = fuzz_size_of(in->data, in->size, 1);
    EXPECT(q.size.outcome == by_own.outcome && q.size.width == by_own.width && q.size.height == by_own.height,
           "the header: %d, %ld x %ld, by our own decoder: %d, %ld x %ld", q.size.outcome, q.size.width, q.size.height,
           by_own.outcome, by_own.width, by_own.height);
    if (q.size.outcome != PST_OUTSIDE)
        return;
    q.box = fuzz_take_box(in, q.size);

    const fuzz_box all = strip(&q, 1e9);
    picture theirs = decode(&q, &q.box, 0, 0, NULL, 0), ours = decode(&q, &q.box, 1, 0, NULL, 0);
    picture whole = decode(&q, &all, 0, 0, NULL, 0);
    if (whole.outcome == PST_DONE) {
        EXPECT(theirs.outcome == PST_DONE && ours.outcome == PST_DONE, "the whole image is decoded, a box: %d and %d",
               theirs.outcome, ours.outcome);
        compare(&q, &theirs, &whole, &q.box, "libjpeg's box and its whole image");
    }
    EXPECT(ours.outcome == theirs.outcome || ours.outcome == PST_DONE, "our own decoder: %d, libjpeg: %d", ours.outcome,
           theirs.outcome);
    if (ours.outcome == PST_DONE && theirs.outcome == PST_DONE)
        compare(&q, &ours, &theirs, &q.box, "our own decoder and libjpeg");
    if (ours.outcome == PST_DONE && theirs.outcome != PST_DONE) {
        const fuzz_box rows = strip(&q, q.box.bottom + LOOKED_AHEAD);
        picture more = decode(&q, &rows, 1, 0, NULL, 0);
        EXPECT(more.outcome != PST_DONE, "libjpeg refuses the box (%d: %s), our own decoder does not", theirs.outcome,
               theirs.message);
    }
    if (flags & 4)
        draw(q, flags >> 3 & 1);
    if (flags & 16)
        enter(&q, &ours, whole.outcome);
    if (flags >> 5 == 7) {
        picture forgiving = decode(&q, &q.box, 0, 1, NULL, 0);
        if (forgiving.outcome == PST_DONE && theirs.outcome == PST_DONE)
            compare(&q, &forgiving, &theirs, &q.box, "with and without forgiving damage");
        free(forgiving.pixels);
    }
    free(theirs.pixels);
    free(ours.pixels);
    free(whole.pixels);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_input in;
    if (fuzz_open(&in, data, size)) {
        check(&in);
        fuzz_close(&in);
    }
    return 0;
}

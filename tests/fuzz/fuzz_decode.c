/* Decoding and drawing a box of any file, by our own decoder and by libjpeg.
 *
 * 1. Where libjpeg decodes the whole image, at a scale, each box of it has the same pixels, bit for bit: by libjpeg
 *    alone, by our own decoder, and by that with the entries that we made of the file.
 * 2. What our own decoder refuses, libjpeg has decided: the outcome is the same as without it.
 * 3. Where libjpeg refuses the box, so does our own decoder, unless the damage is in data that it has no need to look
 *    at: below the box, right of it in the last row, or behind restart markers. So if it decodes all rows from the first
 *    to a little below the box, in their full width, then libjpeg must decode the box.
 * 4. Of a file that has entries, libjpeg decodes the whole image.
 * 5. A drawing is the decoded box, resized, by vector instructions or not. Where the box is decoded, it is drawn.
 * 6. Changed entries give some pixels or an error.
 * 7. Where damage is forgiven (libjpeg alone), a file without damage has the same pixels.
 *
 * AddressSanitizer sees to all memory: file, entries and results lie in blocks of exactly their size. */
#define _GNU_SOURCE /* memmem */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu.h"
#include "input.h"

#define LARGEST_DRAWING 48
#define LOOKED_AHEAD 48 /* rows of pixels: libjpeg decodes up to 32 at once, and some that upsampling looks at */

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    look_for_avx2();
    return 0;
}

static long shrunken(double value, int scale, int upward)
{
    const long low = (long)(value / scale);
    return low + (upward && (double)low * scale < value);
}

/* The first pixel of the box that `box` asks for, in what another decode of the same scale gave. */
static const uint8_t *pixel_of(const pst_request *decoded, const pst_request *box)
{
    const long x = shrunken(box->left, decoded->scale, 0) - decoded->x;
    const long y = shrunken(box->top, decoded->scale, 0) - decoded->y;
    EXPECT(x >= 0 && y >= 0 && shrunken(box->right, decoded->scale, 1) - decoded->x <= decoded->width &&
               shrunken(box->bottom, decoded->scale, 1) - decoded->y <= decoded->height,
           "the box is not in what was decoded");
    return decoded->out + (size_t)(y * decoded->width + x) * (size_t)decoded->channels;
}

/* Whether two decodes have the same pixels in a box. */
static void compare(const pst_request *a, const pst_request *b, const pst_request *box, const char *what)
{
    EXPECT(a->scale == b->scale, "%s: scale %d and %d", what, a->scale, b->scale);
    const uint8_t *p = pixel_of(a, box), *q = pixel_of(b, box);
    const long width = shrunken(box->right, a->scale, 1) - shrunken(box->left, a->scale, 0);
    const long height = shrunken(box->bottom, a->scale, 1) - shrunken(box->top, a->scale, 0);
    for (long y = 0; y < height; y++) {
        for (long i = 0; i < width * a->channels; i++)
            EXPECT(p[i] == q[i], "%s: in row %ld, byte %ld of a box of %ld x %ld at 1/%d: %d and %d", what, y, i, width,
                   height, a->scale, p[i], q[i]);
        p += a->width * a->channels;
        q += b->width * b->channels;
    }
}

/* The rows from the image's first one to `bottom`, at the scale of `like`: asked for by a target that gives this scale. */
static pst_request strip(const pst_request *asked, const pst_request *like, double bottom)
{
    pst_request req = *asked;
    req.left = req.top = 0;
    req.right = (double)like->image_width;
    req.bottom = bottom < (double)like->image_height ? bottom : (double)like->image_height;
    req.target_width = like->image_width / like->scale;
    req.target_height = (long)(req.bottom / like->scale);
    if (like->scale == 1)
        req.target_width = req.target_height = 0;
    return req;
}

/* The entries of the file, in memory of exactly their size: 0 if it has none. */
static uint8_t *make_entries(const pst_request *asked, long step, size_t *size)
{
    pst_request req = *asked;
    req.step = step;
    if (pst_entries(&req) != PST_TOO_SMALL)
        return NULL;
    *size = req.needed;
    uint8_t *entries = malloc(*size);
    req = *asked;
    req.step = step;
    req.out = entries;
    req.capacity = *size;
    if (pst_entries(&req) != PST_DONE) {
        free(entries);
        return NULL;
    }
    EXPECT(req.needed == *size, "%zu bytes of entries, and now %zu", *size, req.needed);
    return entries;
}

/* A drawing, as the tail says: `out` is new memory, and `size` are its bytes. */
static pst_resize_job make_job(fuzz_input *in, int channels, const uint8_t *table, size_t *size)
{
    pst_resize_job job;
    memset(&job, 0, sizeof job);
    const int flags = fuzz_number(in, 255), spare = fuzz_number(in, 3), entry = 1 << fuzz_number(in, 3);
    job.out_width = 1 + fuzz_number(in, LARGEST_DRAWING);
    job.out_height = 1 + fuzz_number(in, LARGEST_DRAWING);
    job.channels = job.pixel = channels;
    job.bicubic = flags & 1;
    job.antialias = flags >> 1 & 1;
    job.flip_x = flags >> 2 & 1;
    job.flip_y = flags >> 3 & 1;
    job.planar = flags >> 4 & 1;
    job.simd = flags >> 5 & 1;
    job.table = flags >> 6 & 1 ? table : NULL;
    job.entry = job.table ? entry : 1;
    job.row = (size_t)(job.out_width * (job.planar ? 1 : channels) + spare);
    job.plane = job.planar ? job.row * (size_t)job.out_height + (size_t)spare : 1;
    const size_t last = (size_t)(job.out_height - 1) * job.row + job.row - (size_t)spare;
    *size = (last + (job.planar ? job.plane * (size_t)(channels - 1) : 0)) * (size_t)job.entry;
    job.out = calloc(*size, 1);
    return job;
}

/* Draw the box, and compare that with its pixels, resized. */
static void draw(fuzz_input *in, const pst_request *asked, const pst_request *decoded, enum pst_outcome outcome)
{
    static _Alignas(8) uint8_t table[3 * 256 * 8];
    for (size_t i = 0; i < sizeof table && !table[sizeof table - 1]; i++)
        table[i] = (uint8_t)(i * 167 + 13 + i / 256);
    size_t size;
    pst_resize_job job = make_job(in, asked->channels, table, &size), expected = job;
    pst_request req = *asked;
    req.own = decoded->own;
    req.simd = job.simd;
    req.job = &job;
    const enum pst_outcome drawn = pst_decode(&req);
    if (drawn == PST_DONE && outcome == PST_DONE) {
        expected.out = calloc(size, 1);
        expected.simd = !expected.simd;
        expected.width = (int)(shrunken(asked->right, decoded->scale, 1) - shrunken(asked->left, decoded->scale, 0));
        expected.height = (int)(shrunken(asked->bottom, decoded->scale, 1) - shrunken(asked->top, decoded->scale, 0));
        expected.left = job.left;
        expected.top = job.top;
        expected.right = job.right;
        expected.bottom = job.bottom;
        EXPECT(pst_resize_valid(&expected), "drawn, but cannot be resized");
        void *scratch = malloc(pst_resize_scratch(&expected));
        pst_resize_plan plan;
        pst_resize_begin(&plan, &expected, scratch);
        pst_resize_rows(&plan, pixel_of(decoded, asked), (ptrdiff_t)(decoded->width * decoded->channels),
                        expected.height);
        EXPECT(!memcmp(job.out, expected.out, size), "the drawing is not the resized box");
        free(scratch);
        free(expected.out);
    } else if (drawn != PST_DONE) /* otherwise there is damage below the box, where only whole images are decoded */
        EXPECT(outcome == drawn || (drawn == PST_OUTSIDE && !pst_resize_valid(&job)), "decoded: %d, drawn: %d", outcome,
               drawn);
    free(job.out);
}

/* With entries of the file, and with these after a few changes. */
static void enter(fuzz_input *in, const pst_request *asked, const pst_request *decoded, enum pst_outcome outcome,
                  enum pst_outcome whole)
{
    size_t size = 0;
    const int changes = fuzz_number(in, 4), cut = fuzz_number(in, 7);
    uint8_t *entries = make_entries(asked, 1 + fuzz_number(in, 6), &size);
    if (!entries)
        return;
    EXPECT(whole == PST_DONE, "there are entries of a file that libjpeg refuses: %d", whole);
    pst_request req = *asked;
    req.own = 1;
    req.entries = entries;
    req.entries_size = size;
    enum pst_outcome entered = fuzz_decode(&req);
    EXPECT(entered == outcome, "without entries: %d, with them: %d", outcome, entered);
    if (entered == PST_DONE)
        compare(&req, decoded, asked, "with and without entries");
    free(req.out);

    for (int i = 0; i < changes; i++) {
        const size_t at = (size_t)(fuzz_number(in, 255) | fuzz_number(in, 255) << 8);
        entries[at % size] = (uint8_t)fuzz_number(in, 255);
    }
    uint8_t *changed = malloc(size);
    memcpy(changed, entries, size);
    free(entries);
    if (!cut)
        changed = realloc(changed, size = size * 3 / 4);
    req = *asked;
    req.own = 1;
    req.entries = changed;
    req.entries_size = size;
    entered = fuzz_decode(&req);
    EXPECT(entered != PST_NO_MEMORY && entered != PST_OUTSIDE, "with changed entries: %d", entered);
    free(req.out);
    free(changed);
}

static void decode(fuzz_input *in)
{
    pst_request asked;
    memset(&asked, 0, sizeof asked);
    asked.data = in->data;
    asked.size = in->size;
    asked.max_pixels = MAX_PIXELS;
    const int flags = fuzz_number(in, 255), target = fuzz_number(in, 2), simd = flags & 1;
    asked.channels = flags & 2 ? 1 : 3;

    /* The header alone: how large is the image? */
    pst_request header = asked;
    enum pst_outcome outcome = pst_decode(&header);
    if (outcome != PST_TOO_SMALL) {
        header = asked;
        header.own = 1;
        EXPECT(pst_decode(&header) == outcome, "the header is refused by libjpeg alone: %d", outcome);
        return;
    }
    fuzz_box(in, &asked, header.image_width, header.image_height);
    asked.target_width = fuzz_number(in, LARGEST_DRAWING);
    asked.target_height = 1 + fuzz_number(in, LARGEST_DRAWING);
    if (target == 0)
        asked.target_width = 0;
    else if (target == 1)
        asked.target_width = asked.target_height = 1;

    pst_request by_libjpeg = asked, own = asked;
    own.own = 1;
    own.simd = simd;
    const enum pst_outcome theirs = fuzz_decode(&by_libjpeg), ours = fuzz_decode(&own);
    pst_request whole = strip(&asked, &by_libjpeg, 1e9);
    const enum pst_outcome of_whole = fuzz_decode(&whole);
    if (of_whole == PST_DONE) {
        EXPECT(theirs == PST_DONE && ours == PST_DONE, "the whole image is decoded, a box: %d and %d", theirs, ours);
        compare(&by_libjpeg, &whole, &asked, "libjpeg's box and its whole image");
    }
    EXPECT(ours == theirs || ours == PST_DONE, "our own decoder: %d, libjpeg: %d", ours, theirs);
    if (ours == PST_DONE && theirs == PST_DONE)
        compare(&own, &by_libjpeg, &asked, "our own decoder and libjpeg");
    if (ours == PST_DONE && theirs != PST_DONE) {
        const int marked = memmem(in->data, in->size, "\xFF\xDD", 2) != NULL; /* libjpeg decodes all rows of these */
        pst_request rows = strip(&asked, &own, marked ? 1e9 : asked.bottom + LOOKED_AHEAD);
        rows.own = 1;
        EXPECT(fuzz_decode(&rows) != PST_DONE, "libjpeg refuses the box (%d: %s), our own decoder does not", theirs,
               by_libjpeg.message);
        free(rows.out);
    }
    if (flags & 4)
        draw(in, &asked, flags & 8 ? &own : &by_libjpeg, flags & 8 ? ours : theirs);
    if (flags & 16)
        enter(in, &asked, &own, ours, of_whole);
    if (flags >> 5 == 7) {
        pst_request forgiving = asked;
        forgiving.partial = 1;
        if (fuzz_decode(&forgiving) == PST_DONE && theirs == PST_DONE)
            compare(&forgiving, &by_libjpeg, &asked, "with and without forgiving damage");
        free(forgiving.out);
    }
    free(by_libjpeg.out);
    free(own.out);
    free(whole.out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_input in;
    if (fuzz_open(&in, data, size)) {
        decode(&in);
        fuzz_close(&in);
    }
    return 0;
}

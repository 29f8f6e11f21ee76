/* Other restart markers in any file.
 *
 * 1. The result is read to its end without a warning. It has the same size, sampling factors, tables of quantisation,
 *    coefficients, APPn and COM segments as the file, and the interval that was asked for.
 * 2. It has the same pixels, by our own decoder and by libjpeg, whole and in a box, where that begins at a marker;
 * where there is no marker, with and without entries.
 * 3. Put through it once more, it stays as it is.
 *
 * AddressSanitizer sees to all memory: file and results lie in blocks of exactly their size. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "input.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct {
    uint8_t *data[2];
    size_t size[2];
    long interval; /* of the second one */
} pair;

static void open_file(j_decompress_ptr cinfo, const uint8_t *data, size_t size)
{
    jpeg_mem_src(cinfo, data, (unsigned long)size);
    for (int marker = JPEG_APP0; marker < JPEG_APP0 + 16; marker++)
        jpeg_save_markers(cinfo, marker, 0xFFFF);
    jpeg_save_markers(cinfo, JPEG_COM, 0xFFFF);
    jpeg_read_header(cinfo, TRUE);
}

static void compare_headers(j_decompress_ptr a, j_decompress_ptr b)
{
    EXPECT(a->image_width == b->image_width && a->image_height == b->image_height, "another size");
    EXPECT(a->num_components == b->num_components && a->jpeg_color_space == b->jpeg_color_space, "other colours");
    for (int i = 0; i < a->num_components; i++) {
        const jpeg_component_info *p = &a->comp_info[i], *q = &b->comp_info[i];
        EXPECT(p->component_id == q->component_id, "another name of a component");
        EXPECT(p->h_samp_factor == q->h_samp_factor && p->v_samp_factor == q->v_samp_factor, "other sampling factors");
        EXPECT(!p->quant_table == !q->quant_table, "a table of quantisation more or less");
        for (int k = 0; k < DCTSIZE2 && p->quant_table; k++)
            EXPECT(p->quant_table->quantval[k] == q->quant_table->quantval[k], "another factor of quantisation");
    }
}

static void compare_coefficients(j_decompress_ptr a, jvirt_barray_ptr *of_a, j_decompress_ptr b, jvirt_barray_ptr *of_b)
{
    for (int i = 0; i < a->num_components; i++)
        for (JDIMENSION y = 0; y < a->comp_info[i].height_in_blocks; y++) {
            JBLOCKARRAY p = a->mem->access_virt_barray((j_common_ptr)a, of_a[i], y, 1, FALSE);
            JBLOCKARRAY q = b->mem->access_virt_barray((j_common_ptr)b, of_b[i], y, 1, FALSE);
            EXPECT(!memcmp(p[0], q[0], a->comp_info[i].width_in_blocks * sizeof(JBLOCK)),
                   "other coefficients in row %u of component %d", y, i);
        }
}

static void compare_segments(j_decompress_ptr a, j_decompress_ptr b)
{
    jpeg_saved_marker_ptr p = a->marker_list, q = b->marker_list;
    for (; p && q; p = p->next, q = q->next)
        EXPECT(p->marker == q->marker && p->data_length == q->data_length && !memcmp(p->data, q->data, p->data_length),
               "another segment 0x%02x", p->marker);
    EXPECT(!p && !q, "more or fewer segments");
}

static enum pst_outcome compare_second(j_decompress_ptr b, void *argument);

typedef struct {
    pair *files;
    j_decompress_ptr first;
    jvirt_barray_ptr *coefficients;
} comparison;

static enum pst_outcome run(pst_libjpeg_work *work, void *argument)
{
    char message[JMSG_LENGTH_MAX] = "";
    pst_libjpeg lib;
    memset(&lib, 0, sizeof lib);
    lib.message = message;
    const enum pst_outcome outcome = pst_libjpeg_run(&lib, work, argument);
    EXPECT(outcome == PST_DONE, "libjpeg: %s", message);
    return outcome;
}

static enum pst_outcome compare_first(j_decompress_ptr a, void *argument)
{
    comparison c = {argument, a, NULL};
    open_file(a, c.files->data[0], c.files->size[0]);
    c.coefficients = jpeg_read_coefficients(a);
    return run(compare_second, &c);
}

static enum pst_outcome compare_second(j_decompress_ptr b, void *argument)
{
    comparison *c = argument;
    open_file(b, c->files->data[1], c->files->size[1]);
    jvirt_barray_ptr *coefficients = jpeg_read_coefficients(b);
    compare_headers(c->first, b);
    EXPECT(b->restart_interval == (unsigned)c->files->interval || c->files->interval < 0, "another interval: %u",
           b->restart_interval);
    compare_coefficients(c->first, c->coefficients, b, coefficients);
    compare_segments(c->first, b);
    jpeg_finish_decompress(b);
    return PST_DONE;
}

/* The pixels of a box of both files, and of the second one with entries. */
static void compare_pixels(const pair *files, const fuzz_box *box, int scale, int channels, int own, long step)
{
    const fuzz_input in[2] = {{.data = files->data[0], .size = files->size[0]},
                              {.data = files->data[1], .size = files->size[1]}};
    uint8_t *entries = NULL, *pixels[3];
    size_t entries_size = 0, size = 0;
    /* Our own decoder leaves a scan with impossible coefficients to libjpeg: then there are none. */
    if (pst_entries(in[1].data, in[1].size, step, &entries, &entries_size) != PST_DONE)
        entries = NULL;
    enum pst_outcome outcome[3];
    for (int i = 0; i < 3; i++) {
        pst_resize_job job = fuzz_pixels(box, scale, channels);
        job.simd = i > 0;
        pst_request req = fuzz_request(&in[i > 0], &job, scale);
        req.own = own;
        req.entries = i == 2 ? entries : NULL;
        req.entries_size = i == 2 ? entries_size : 0;
        pixels[i] = job.out;
        size = job.row_stride * (size_t)job.out_height;
        outcome[i] = pst_draw(&req);
    }
    for (int i = 1; i < 3; i++) {
        EXPECT(outcome[0] == outcome[i], "outcome %d, and afterwards %d", outcome[0], outcome[i]);
        EXPECT(outcome[0] != PST_DONE || !memcmp(pixels[0], pixels[i], size),
               "other pixels, by our own decoder %d, with entries %d", own, i == 2);
    }
    for (int i = 0; i < 3; i++)
        free(pixels[i]);
    free(entries);
}

static void check(fuzz_input *in)
{
    static const long intervals[] = {-1, 0, 1, 2, 3, 4, 7, 65535};
    const long interval = intervals[fuzz_number(in, 7)];
    uint8_t *result, *again;
    size_t size, same_size;
    if (pst_transcode(in->data, in->size, interval, MAX_PIXELS, &result, &size) == PST_DONE) {
        result = realloc(result, size);
        pair files = {{in->data, result}, {in->size, size}, interval};
        run(compare_first, &files);

        EXPECT(pst_transcode(result, size, interval, MAX_PIXELS, &again, &same_size) == PST_DONE,
               "the second time, it is refused");
        EXPECT(size == same_size && !memcmp(result, again, size), "the second time, it is not the same");
        free(again);

        const int channels = fuzz_number(in, 1) ? 1 : 3, scale = 1 << fuzz_number(in, 3);
        const long step = 1 + fuzz_number(in, 6);
        const fuzz_size whole = fuzz_size_of(in->data, in->size, 0), same = fuzz_size_of(result, size, 0);
        EXPECT(whole.outcome == same.outcome && whole.width == same.width && whole.height == same.height,
               "the header: %d, and afterwards %d", whole.outcome, same.outcome);
        if (whole.outcome == PST_OUTSIDE) {
            const fuzz_box all = {0, 0, (double)whole.width, (double)whole.height}, box = fuzz_take_box(in, whole);
            compare_pixels(&files, &all, 1, channels, 0, step);
            compare_pixels(&files, &box, scale, channels, 1, step);
        }
        free(result);
    }
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

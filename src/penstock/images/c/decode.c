/* Ordinary baseline files are decoded by region.c; all others, and whatever that does not take, by libjpeg-turbo. */
#include "decode.h"

#include <stdarg.h>
#include <stdlib.h>
#include <time.h>

#include <jerror.h>

#include "region.h"

#define MARGIN 4  /* columns beyond the box: see decode_by_libjpeg */
#define ROWS 16   /* of pixels, that are decoded before they are resized */
#define TAIL 4096 /* bytes at the end in which a complete file has its last marker */

/* Frame markers: baseline, extended, progressive, and the last two with arithmetic coding. */
enum { SOF0 = 0xC0, SOF1 = 0xC1, SOF2 = 0xC2, SOF9 = 0xC9, SOF10 = 0xCA };

/* Of this thread: most files have the tables of the one before. */
static _Thread_local pst_region kept;

/* Whether the end-of-image marker is among the last bytes: what is missing below a box would not be noticed. */
static int is_complete(const uint8_t *data, size_t size)
{
    const size_t stop = size > TAIL ? size - TAIL : 0;
    for (size_t i = size; i >= stop + 2; i--)
        if (data[i - 2] == 0xFF && data[i - 1] == 0xD9)
            return 1;
    return 0;
}

static int64_t nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

__attribute__((format(printf, 3, 4))) static enum pst_outcome fail(pst_request *req, enum pst_outcome outcome,
                                                                   const char *format, ...)
{
    va_list values;
    va_start(values, format);
    vsnprintf(req->message, sizeof req->message, format, values);
    va_end(values);
    return outcome;
}

/* What is decoded of an image: at 1 / scale of its size the box (left, top, right, bottom), whose pixels are the source
 * of `job`. */
typedef struct {
    int scale;
    long box[4];
    pst_resize_job job;
} decoding;

/* Check the size that a header says, and find out what is decoded. */
static enum pst_outcome plan(decoding *d, pst_request *req, long width, long height)
{
    const pst_resize_job *asked = &req->job;
    pst_resize_job *job = &d->job;
    int x, y;
    if ((unsigned long long)width * (unsigned long long)height > req->max_pixels)
        return fail(req, PST_LIMITED, "%ld x %ld pixels, more than the limit of %llu", width, height, req->max_pixels);
    if (req->expected_width > 0 && (req->expected_width != width || req->expected_height != height))
        return fail(req, PST_DAMAGED, "ambiguous header: %ld x %ld pixels, or %ld x %ld", req->expected_width,
                    req->expected_height, width, height);
    if (asked->right > (double)width || asked->bottom > (double)height)
        return fail(req, PST_OUTSIDE, "%ld x %ld", width, height);
    d->scale = req->scale ? req->scale : 1;
    while (!req->scale && d->scale < 8 && asked->right - asked->left >= 2.0 * d->scale * asked->out_width &&
           asked->bottom - asked->top >= 2.0 * d->scale * asked->out_height)
        d->scale *= 2;
    *job = *asked;
    job->left /= d->scale;
    job->top /= d->scale;
    job->right /= d->scale;
    job->bottom /= d->scale;
    pst_resize_cut(job, &x, &y);
    if (req->scale) {
        job->left = job->top = 0;
        job->right = job->width;
        job->bottom = job->height;
    }
    d->box[0] = x;
    d->box[1] = y;
    d->box[2] = x + job->width;
    d->box[3] = y + job->height;
    return pst_resize_valid(job) ? PST_DONE : fail(req, PST_OUTSIDE, "%ld x %ld", width, height);
}

static void resize_rows(pst_request *req, pst_resize_plan *resizing, const uint8_t *rows, size_t stride, int count)
{
    const int64_t begun = nanoseconds();
    pst_resize_rows(resizing, rows, (ptrdiff_t)stride, count);
    req->resizing += nanoseconds() - begun;
}

/* By our own decoder: PST_UNSUPPORTED where libjpeg has to decode. */
static enum pst_outcome decode_region(pst_request *req)
{
    pst_frame frame;
    decoding d;
    /* The end of a thumbnail in front of the scan is not that of the scan. */
    if (!pst_frame_read(&frame, req->data, req->size) || !is_complete(req->data + frame.scan, req->size - frame.scan))
        return PST_UNSUPPORTED;
    const enum pst_outcome outcome = plan(&d, req, frame.width, frame.height);
    if (outcome != PST_DONE)
        return outcome;
    pst_region *region = &kept;
    if (!pst_region_open(region, &frame, req->data, req->size, req->entries, req->entries_size, d.job.channels, d.scale,
                         d.box, d.job.simd))
        return PST_UNSUPPORTED;
    uint8_t *scratch = malloc(region->scratch + pst_resize_scratch(&d.job));
    if (!scratch)
        return PST_NO_MEMORY;
    pst_resize_plan resizing;
    pst_region_begin(region, scratch);
    pst_resize_begin(&resizing, &d.job, scratch + region->scratch);
    int count;
    while ((count = pst_region_rows(region)) > 0)
        resize_rows(req, &resizing, region->rows, region->stride, count);
    free(scratch);
    return count == 0 && resizing.row == d.job.height ? PST_DONE : PST_UNSUPPORTED;
}

/* Progressive, arithmetic-coded and multi-scan files are decoded whole: there is nothing to gain, or the skipping of
 * rows is not to be trusted. So are shrunken ones with rare sampling factors, whose components libjpeg shrinks by
 * different factors, and then upsamples the wrong rows and columns after a crop. */
static int can_crop(j_decompress_ptr cinfo)
{
    if (jpeg_has_multiple_scans(cinfo) || cinfo->arith_code || cinfo->restart_interval)
        return 0;
    return cinfo->scale_denom == 1 || (cinfo->max_h_samp_factor <= 2 && cinfo->max_v_samp_factor <= 2);
}

/* Decode some rows, `stride` bytes apart; with a stride of 0 one over the other. */
static void read_rows(j_decompress_ptr cinfo, uint8_t *rows, size_t stride, long count)
{
    while (count > 0) {
        JDIMENSION got = jpeg_read_scanlines(cinfo, &rows, 1);
        if (got == 0)
            ERREXIT(cinfo, JERR_CANT_SUSPEND); /* a source in memory never waits */
        rows += stride;
        count--;
    }
}

/* By libjpeg. That upsamples colour without its neighbours at the edge of a cropped row, and in another way if a row
 * has only two samples of a colour, so some columns more than asked for are decoded on either side. */
static enum pst_outcome decode_by_libjpeg(j_decompress_ptr cinfo, void *argument)
{
    pst_request *req = argument;
    decoding d;
    jpeg_mem_src(cinfo, req->data, (unsigned long)req->size);
    jpeg_read_header(cinfo, TRUE);
    /* libjpeg-turbo 3 also reads lossless files and ones of more bits, whose rows it does not give by these functions,
     * or not in the size that is asked for. */
    const int frame = ((const pst_libjpeg *)cinfo->err)->frame;
    if (cinfo->data_precision != 8 ||
        (frame != SOF0 && frame != SOF1 && frame != SOF2 && frame != SOF9 && frame != SOF10))
        return fail(req, PST_UNSUPPORTED, "lossless, or not of 8 bits: frame marker 0x%02x, %d bits", (unsigned)frame,
                    cinfo->data_precision);
    const enum pst_outcome outcome = plan(&d, req, (long)cinfo->image_width, (long)cinfo->image_height);
    if (outcome != PST_DONE)
        return outcome;
    if (cinfo->jpeg_color_space != JCS_YCbCr && cinfo->jpeg_color_space != JCS_GRAYSCALE &&
        cinfo->jpeg_color_space != JCS_RGB)
        return fail(req, PST_UNSUPPORTED, "colours that are neither grey, RGB nor YCbCr");
    cinfo->scale_num = 1;
    cinfo->scale_denom = (unsigned)d.scale;
    cinfo->out_color_space = d.job.channels == 1 ? JCS_GRAYSCALE : JCS_EXT_RGB;
    cinfo->dct_method = JDCT_ISLOW;
    cinfo->do_fancy_upsampling = TRUE;
    jpeg_start_decompress(cinfo);
    const int crop = can_crop(cinfo);
    JDIMENSION x = 0;
    if (crop && (d.box[0] > 0 || d.box[2] < (long)cinfo->output_width)) {
        const long end = d.box[2] + MARGIN;
        x = (JDIMENSION)(d.box[0] > MARGIN ? d.box[0] - MARGIN : 0);
        JDIMENSION width = (end < (long)cinfo->output_width ? (JDIMENSION)end : cinfo->output_width) - x;
        jpeg_crop_scanline(cinfo, &x, &width);
    }
    const size_t pixel = (size_t)d.job.channels, stride = (size_t)cinfo->output_width * pixel;
    const size_t skipped = (size_t)(d.box[0] - (long)x) * pixel; /* bytes of a row in front of the box */
    if (cinfo->output_components != d.job.channels || (long)x > d.box[0] || d.box[3] > (long)cinfo->output_height ||
        skipped + (size_t)d.job.width * pixel > stride)
        return fail(req, PST_DAMAGED, "libjpeg gives rows of %zu bytes, which were not announced", stride);

    pst_resize_plan resizing;
    struct jpeg_memory_mgr *memory = cinfo->mem;
    pst_resize_begin(&resizing, &d.job,
                     memory->alloc_large((j_common_ptr)cinfo, JPOOL_IMAGE, pst_resize_scratch(&d.job)));
    uint8_t *rows = memory->alloc_large((j_common_ptr)cinfo, JPOOL_IMAGE, stride * ROWS);
    if (crop && d.box[1] > 0)
        jpeg_skip_scanlines(cinfo, (JDIMENSION)d.box[1]);
    read_rows(cinfo, rows, 0, d.box[1] - (long)cinfo->output_scanline);
    for (int left = d.job.height; left > 0; left -= ROWS) {
        const int count = left < ROWS ? left : ROWS;
        read_rows(cinfo, rows, stride, count);
        resize_rows(req, &resizing, rows + skipped, stride, count);
    }
    return PST_DONE; /* the rows below are never looked at */
}

enum pst_outcome pst_draw(pst_request *req)
{
    if (req->rows)
        return pst_resize(&req->job, req->rows, req->stride) ? PST_DONE : PST_NO_MEMORY;
    if (!req->partial && !is_complete(req->data, req->size))
        return fail(req, PST_DAMAGED, "premature end: no end-of-image marker");
    if (req->own && !req->partial) {
        const enum pst_outcome outcome = decode_region(req);
        if (outcome != PST_UNSUPPORTED)
            return outcome;
    }
    pst_libjpeg lib = {.message = req->message, .tolerant = req->partial};
    return pst_libjpeg_run(&lib, decode_by_libjpeg, req);
}

enum pst_outcome pst_entries(const uint8_t *data, size_t size, long step, uint8_t **out, size_t *out_size)
{
    pst_frame frame;
    if (step < 1 || step > PST_MAX_INTERVAL)
        return PST_OUTSIDE;
    if (!pst_frame_read(&frame, data, size) || !is_complete(data + frame.scan, size - frame.scan) ||
        !pst_entries_write(&kept.scan, &frame, data, size, step, out, out_size))
        return PST_UNSUPPORTED;
    return *out ? PST_DONE : PST_NO_MEMORY;
}

void pst_size(const uint8_t *data, size_t size, int32_t found[2])
{
    pst_frame frame;
    const int taken = pst_frame_read(&frame, data, size);
    found[0] = taken ? (int32_t)frame.width : 0;
    found[1] = taken ? (int32_t)frame.height : 0;
}

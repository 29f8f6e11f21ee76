/* JPEG: the pixels of a box, at 1/1, 1/2, 1/4 or 1/8 of their size, into memory of the caller. See decode.h.
 *
 * Ordinary baseline files are decoded by region.c, all others, and whatever that does not take, by libjpeg-turbo.
 */
#include "decode.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <jerror.h>

#include "region.h"

#define MARGIN 2      /* columns: what upsampling by two looks at beyond the box */
#define MAX_SCANS 200 /* a small file can ask for thousands of passes over a large picture */
#define ROWS 16       /* pointers for one call; libjpeg gives at most an iMCU row a call */
#define TAIL 4096     /* bytes at the end in which a complete file has its last marker */

/* Frame markers: baseline, extended, progressive, and the last two with arithmetic coding. */
enum { SOF0 = 0xC0, SOF1 = 0xC1, SOF2 = 0xC2, SOF9 = 0xC9, SOF10 = 0xCA };

/* Of this thread. */
static _Thread_local pst_region kept;

/* Whether the end-of-image marker is among the last bytes: what is missing below a box would not be noticed. */
static int complete(const pst_request *req)
{
    size_t stop = req->size > TAIL ? req->size - TAIL : 0;
    for (size_t i = req->size; i >= stop + 2; i--)
        if (req->data[i - 2] == 0xFF && req->data[i - 1] == 0xD9)
            return 1;
    return 0;
}

static long floor_div(double value, int by)
{
    return (long)(value / by);
}

static long ceil_div(double value, int by)
{
    long low = (long)(value / by);
    return (double)low * by < value ? low + 1 : low;
}

static void configure(j_decompress_ptr cinfo, const pst_request *req)
{
    cinfo->scale_num = 1;
    cinfo->scale_denom = (unsigned int)req->scale;
    cinfo->out_color_space = req->channels == 1 ? JCS_GRAYSCALE : JCS_EXT_RGB;
    cinfo->dct_method = JDCT_ISLOW;
    cinfo->do_fancy_upsampling = TRUE;
    jpeg_calc_output_dimensions(cinfo);
}

/* Read the header, of the frames that consist of 8 x 8 blocks of 8 bits: libjpeg-turbo 3 also reads lossless files and
 * ones of more bits, whose rows it does not give by the functions that are called here, or not in the size that is
 * asked for. */
static void read_header(j_decompress_ptr cinfo, pst_request *req)
{
    jpeg_mem_src(cinfo, req->data, (unsigned long)req->size);
    jpeg_read_header(cinfo, TRUE);
    const int frame = pst_libjpeg_frame(cinfo);
    if (cinfo->data_precision == 8 &&
        (frame == SOF0 || frame == SOF1 || frame == SOF2 || frame == SOF9 || frame == SOF10))
        return;
    pst_libjpeg_fail(cinfo, PST_UNSUPPORTED, "lossless, or not of 8 bits: frame marker 0x%02x, %d bits",
                     (unsigned int)frame, cinfo->data_precision);
}

/* After the header: limits, colours, the scale, and the box in whole pixels of the scaled image. */
static void plan(j_decompress_ptr cinfo, pst_request *req, long *right, long *bottom)
{
    req->image_width = (long)cinfo->image_width;
    req->image_height = (long)cinfo->image_height;
    if ((unsigned long long)cinfo->image_width * cinfo->image_height > req->max_pixels)
        pst_libjpeg_fail(cinfo, PST_LIMITED, "%ld x %ld pixels, more than the limit of %llu", req->image_width,
                         req->image_height, req->max_pixels);
    if (req->expected_width > 0 &&
        (req->expected_width != req->image_width || req->expected_height != req->image_height))
        pst_libjpeg_fail(cinfo, PST_DAMAGED, "ambiguous header: %ld x %ld pixels, or %ld x %ld", req->expected_width,
                         req->expected_height, req->image_width, req->image_height);
    if (cinfo->jpeg_color_space != JCS_YCbCr && cinfo->jpeg_color_space != JCS_GRAYSCALE &&
        cinfo->jpeg_color_space != JCS_RGB)
        pst_libjpeg_fail(cinfo, PST_UNSUPPORTED, "colours that are neither grey, RGB nor YCbCr");
    if (req->right <= 0) {
        req->left = req->top = 0;
        req->right = (double)req->image_width;
        req->bottom = (double)req->image_height;
    }
    if (req->right > (double)req->image_width || req->bottom > (double)req->image_height)
        pst_libjpeg_fail(cinfo, PST_OUTSIDE, "%ld x %ld", req->image_width, req->image_height);

    double width = req->right - req->left, height = req->bottom - req->top;
    req->scale = 1;
    while (req->target_width > 0 && req->scale < 8 && width >= 2.0 * req->scale * (double)req->target_width &&
           height >= 2.0 * req->scale * (double)req->target_height)
        req->scale *= 2;
    configure(cinfo, req);
    req->x = floor_div(req->left, req->scale);
    req->y = floor_div(req->top, req->scale);
    *right = ceil_div(req->right, req->scale);
    *bottom = ceil_div(req->bottom, req->scale);
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

/* Pass over the rows above the box. */
static void pass_rows(j_decompress_ptr cinfo, long count, int skip)
{
    if (skip)
        jpeg_skip_scanlines(cinfo, (JDIMENSION)count);
    size_t stride = (size_t)cinfo->output_width * (size_t)cinfo->output_components;
    JSAMPROW row = cinfo->mem->alloc_large((j_common_ptr)cinfo, JPOOL_IMAGE, stride);
    while (cinfo->output_scanline < (JDIMENSION)count)
        if (jpeg_read_scanlines(cinfo, &row, 1) == 0)
            ERREXIT(cinfo, JERR_CANT_SUSPEND); /* a source in memory never waits */
}

static int64_t nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Begin a drawing of the box, `width` x `height` whole pixels in the shrunken image: 0 if that is none. */
static int begin_drawing(j_decompress_ptr cinfo, pst_request *req, pst_resize_plan *plan, long width, long height)
{
    pst_resize_job *job = req->job;
    job->width = (int)width;
    job->height = (int)height;
    double first_x = (double)(long)(req->left / req->scale), first_y = (double)(long)(req->top / req->scale);
    job->left = req->left / req->scale - first_x;
    job->top = req->top / req->scale - first_y;
    job->right = req->right / req->scale - first_x;
    job->bottom = req->bottom / req->scale - first_y;
    if (!pst_resize_valid(job))
        return 0;
    pst_resize_begin(plan, job, cinfo->mem->alloc_large((j_common_ptr)cinfo, JPOOL_IMAGE, pst_resize_scratch(job)));
    return 1;
}

static void draw_rows(pst_request *req, pst_resize_plan *plan, const uint8_t *rows, size_t stride, int count)
{
    int64_t begun = nanoseconds();
    pst_resize_rows(plan, rows, (ptrdiff_t)stride, count);
    req->resizing += nanoseconds() - begun;
}

/* The box, (left, top, right, bottom) in the shrunken image, by our own decoder: PST_UNSUPPORTED where libjpeg has to
 * decode. */
static enum pst_outcome decode_here(j_decompress_ptr cinfo, pst_request *req, const long box[4])
{
    pst_region *b = &kept;
    pst_frame frame;
    const long width = box[2] - box[0], height = box[3] - box[1];
    size_t row = (size_t)(width * req->channels);
    if (!pst_frame_read(&frame, req->data, req->size) ||
        !pst_region_open(b, &frame, req->data, req->size, req->entries, req->entries_size, req->channels, req->scale,
                         box, req->simd))
        return PST_UNSUPPORTED;
    pst_resize_plan plan;
    if (req->job && !begin_drawing(cinfo, req, &plan, width, height))
        return PST_OUTSIDE;
    pst_region_begin(b, cinfo->mem->alloc_large((j_common_ptr)cinfo, JPOOL_IMAGE, pst_region_scratch(b)));
    uint8_t *out = req->out;
    int count;
    long done = 0;
    for (; (count = pst_region_rows(b)) > 0; done += count) {
        if (req->job)
            draw_rows(req, &plan, b->rows, b->stride, count);
        for (int i = 0; i < count && !req->job; i++, out += row)
            memcpy(out, b->rows + (size_t)i * b->stride, row);
    }
    if (count < 0 || done != height)
        return PST_UNSUPPORTED;
    req->x = box[0];
    req->y = box[1];
    req->width = width;
    req->height = height;
    return PST_DONE;
}

/* Decode the box, a few rows at a time, into a drawing of another size. `x` is its first pixel in what is decoded, in
 * which rows above have been passed; (right, bottom) is where it ends. */
static enum pst_outcome draw_box(j_decompress_ptr cinfo, pst_request *req, long x, long y, long right, long bottom)
{
    pst_resize_plan plan;
    size_t pixel = (size_t)cinfo->output_components, stride = (size_t)cinfo->output_width * pixel;
    if (!begin_drawing(cinfo, req, &plan, right - x, bottom - y))
        return PST_OUTSIDE;
    uint8_t *block = cinfo->mem->alloc_large((j_common_ptr)cinfo, JPOOL_IMAGE, stride * ROWS);
    for (long done = 0; done < bottom - y;) {
        long most = bottom - y - done < ROWS ? bottom - y - done : ROWS, count = 0;
        while (count < most) {
            JSAMPROW row = block + stride * (size_t)count;
            JDIMENSION got = jpeg_read_scanlines(cinfo, &row, 1);
            if (got == 0)
                ERREXIT(cinfo, JERR_CANT_SUSPEND);
            count += (long)got;
        }
        draw_rows(req, &plan, block + (size_t)x * pixel, stride, (int)count);
        done += count;
    }
    return PST_DONE;
}

static void read_rows(j_decompress_ptr cinfo, pst_request *req, size_t stride)
{
    for (long done = 0; done < req->height;) {
        JSAMPROW rows[ROWS];
        long count = req->height - done < ROWS ? req->height - done : ROWS;
        for (long i = 0; i < count; i++)
            rows[i] = req->out + stride * (size_t)(done + i);
        JDIMENSION got = jpeg_read_scanlines(cinfo, rows, (JDIMENSION)count);
        if (got == 0)
            ERREXIT(cinfo, JERR_CANT_SUSPEND);
        done += (long)got;
    }
}

/* Everything between header and last row. Errors leave by longjmp. */
static enum pst_outcome decode_box(j_decompress_ptr cinfo, void *argument)
{
    pst_request *req = argument;
    long right = 0, bottom = 0;
    if (!req->partial && !complete(req)) {
        snprintf(req->message, JMSG_LENGTH_MAX, "premature end: no end-of-image marker");
        return PST_DAMAGED;
    }
    read_header(cinfo, req);
    plan(cinfo, req, &right, &bottom);
    int crop = can_crop(cinfo);
    /* Before anything is decoded: is the memory large enough for the widest row that cropping can leave? */
    long align = cinfo->max_h_samp_factor * DCTSIZE + MARGIN;
    long from = req->x > align ? req->x - align : 0;
    long to = right + MARGIN < (long)cinfo->output_width ? right + MARGIN : (long)cinfo->output_width;
    long top = req->y, left = req->x, end = bottom;
    if (!crop) {
        from = req->y = 0;
        to = (long)cinfo->output_width;
        bottom = (long)cinfo->output_height;
    }
    req->height = bottom - req->y;
    req->needed = (size_t)(to - from) * (size_t)req->height * (size_t)req->channels;
    if (!req->job && req->needed > req->capacity)
        return PST_TOO_SMALL;
    const long box[4] = {left, top, right, end};
    enum pst_outcome outcome = req->partial || !req->own ? PST_UNSUPPORTED : decode_here(cinfo, req, box);
    if (outcome != PST_UNSUPPORTED)
        return outcome;

    jpeg_start_decompress(cinfo);
    JDIMENSION x = 0, width = cinfo->output_width;
    if (crop && (req->x > 0 || right < (long)width)) {
        x = (JDIMENSION)(req->x > MARGIN ? req->x - MARGIN : 0);
        width = (JDIMENSION)to - x;
        jpeg_crop_scanline(cinfo, &x, &width);
    }
    req->width = (long)cinfo->output_width;
    size_t stride = (size_t)cinfo->output_width * (size_t)cinfo->output_components;
    if (cinfo->output_components != req->channels || (!req->job && stride * (size_t)req->height > req->capacity)) {
        snprintf(req->message, JMSG_LENGTH_MAX, "libjpeg gives rows of %lu bytes, which were not announced",
                 (unsigned long)stride);
        return PST_DAMAGED;
    }
    if (req->job) {
        if (top > 0)
            pass_rows(cinfo, top, crop);
        return draw_box(cinfo, req, left - (long)x, top, right - (long)x, end);
    }
    if (req->y > 0)
        pass_rows(cinfo, req->y, 1);
    read_rows(cinfo, req, stride);
    req->x = (long)x;
    return PST_DONE; /* the rows below are never looked at */
}

/* The entries of a file. */
static enum pst_outcome find_entries(j_decompress_ptr cinfo, void *argument)
{
    pst_request *req = argument;
    if (!complete(req))
        return PST_DAMAGED;
    read_header(cinfo, req);
    pst_frame frame;
    if (!pst_frame_read(&frame, req->data, req->size))
        return PST_UNSUPPORTED;
    req->needed = pst_entries_write(&kept, &frame, req->data, req->size, req->step, req->out, req->capacity);
    return req->needed == 0 ? PST_UNSUPPORTED : req->needed > req->capacity ? PST_TOO_SMALL : PST_DONE;
}

static enum pst_outcome run(pst_request *req, pst_libjpeg_work *work)
{
    pst_libjpeg lib;
    memset(&lib, 0, sizeof lib);
    lib.message = req->message;
    lib.max_scans = MAX_SCANS;
    lib.tolerant = req->partial;
    return pst_libjpeg_run(&lib, work, req);
}

enum pst_outcome pst_decode(pst_request *req)
{
    return run(req, decode_box);
}

enum pst_outcome pst_entries(pst_request *req)
{
    return run(req, find_entries);
}

static enum pst_outcome read_size(j_decompress_ptr cinfo, void *argument)
{
    pst_request *req = argument;
    read_header(cinfo, req);
    req->image_width = (long)cinfo->image_width;
    req->image_height = (long)cinfo->image_height;
    return is_sequential(cinfo) ? PST_DONE : PST_UNSUPPORTED;
}

void pst_size(const uint8_t *data, size_t size, int32_t found[2])
{
    pst_request req = {0};
    req.data = data;
    req.size = size;
    const int taken = run(&req, read_size) == PST_DONE;
    found[0] = taken ? (int32_t)req.image_width : 0;
    found[1] = taken ? (int32_t)req.image_height : 0;
}

/* JPEG: the pixels of a box, at 1/1, 1/2, 1/4 or 1/8 of their size, into memory of the caller.
 *
 * Ordinary baseline files are decoded by region.c, all others, and whatever that does not take, by libjpeg-turbo.
 *
 * `decode` is called by penstock/images/native.py, which says what it means; so are `draw`, which resizes rows as they
 * are decoded, `entries` (restart.c) and `remark` (transcode.c). `resize` is that of resize.c, for
 * penstock/images/resize.py. Promises:
 *
 * - Pixels are those of a full decode by libjpeg. That upsamples colour without its neighbours at the edge of a cropped
 *   row, so two columns more than asked for are decoded on either side, and the caller cuts them off.
 * - Nothing is written outside the caller's memory: its size is checked against the size that libjpeg announces.
 * - No error ends the process: libjpeg's error exit jumps back to `run`. All that was allocated is libjpeg's own and is
 *   freed by jpeg_destroy_decompress on every way out.
 * - The GIL is released from the header to the last row. What a thread keeps between calls (`kept`) is memory and
 *   tables that are made again where they differ, so threads need no locks.
 * - Memory: a few rows and tables (some 200 KB at ordinary widths); of a file in several scans (progressive) all
 *   coefficients, 2 bytes each. Pixels and the number of scans are limited.
 */
#include "cpython.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <jpeglib.h>

#include <jerror.h>

#include "region.h"
#include "transcode.h"
#include "resize.h"
#include "cpu.h"

#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 2000000
#error "the scanline API of libjpeg-turbo 2 or newer is needed (jpeg_crop_scanline, jpeg_skip_scanlines)"
#endif

#define MARGIN 2          /* columns: what upsampling by two looks at beyond the box */
#define MAX_SCANS 200     /* a small file can ask for thousands of passes over a large picture */
#define ROWS 16           /* pointers for one call; libjpeg gives at most an iMCU row a call */
#define TAIL 4096         /* bytes at the end in which a complete file has its last marker */

/* Frame markers: baseline, extended, progressive, and the last two with arithmetic coding. */
enum frame { SOF0 = 0xC0, SOF1 = 0xC1, SOF2 = 0xC2, SOF9 = 0xC9, SOF10 = 0xCA };

enum outcome { DONE, TOO_SMALL, DAMAGED, UNSUPPORTED, LIMITED, OUTSIDE, NO_MEMORY };

/* What is asked for and what came of it. */
typedef struct {
    const unsigned char *data;
    size_t size;
    unsigned char *out;
    size_t capacity;
    double left, top, right, bottom; /* in pixels of the stored image; right <= 0 is all of it */
    long target_height, target_width;
    int channels;
    int simd;    /* use AVX2 where there is some; the result is the same */
    int partial; /* damage and missing data are forgiven where libjpeg can go on */
    unsigned long long max_pixels;
    long expected_width, expected_height; /* what the caller has read in the header; 0 is nothing */
    const unsigned char *entries; /* of this file, see restart.c; NULL is none */
    size_t entries_size;
    long long resizing; /* nanoseconds of drawing that went into other than decoding */
    resize_job *job; /* where the box is to be drawn; NULL: pixels are wanted as they are */
    long step; /* MCUs from one entry of a row to the next */

    size_t needed;
    long image_width, image_height;
    long width, height;  /* of what lies in `out` */
    long x, y;           /* its first pixel in the (scaled) image */
    int scale;           /* 1, 2, 4 or 8 */
    char message[JMSG_LENGTH_MAX];
} request;

/* libjpeg's error manager with what the callbacks need; `base` comes first, so that one pointer is both. */
typedef struct {
    struct jpeg_error_mgr base;
    jmp_buf jump;
    enum outcome outcome;
    int frame; /* the marker of the frame header that libjpeg has read */
    request *request;
} errors;

/* What must survive a longjmp: it lives in the frame of `decode`, not in that of the setjmp. */
typedef struct {
    struct jpeg_decompress_struct cinfo;
    struct jpeg_progress_mgr progress;
    errors err;
} decoder;

/* Of this thread. */
static _Thread_local box_decoder kept;

static void fail(j_common_ptr cinfo, enum outcome outcome)
{
    errors *err = (errors *)cinfo->err;
    err->outcome = outcome;
    longjmp(err->jump, 1);
}

static void on_error(j_common_ptr cinfo)
{
    errors *err = (errors *)cinfo->err;
    (*err->base.format_message)(cinfo, err->request->message);
    fail(cinfo, err->base.msg_code == JERR_OUT_OF_MEMORY ? NO_MEMORY : DAMAGED);
}

/* Warnings (-1) mean missing or wrong pixels, but for those after which the picture is whole. That libjpeg has read a frame
 * header is a message, too. */
static void on_message(j_common_ptr cinfo, int level)
{
    errors *err = (errors *)cinfo->err;
    if (err->base.msg_code == JTRC_SOF)
        err->frame = err->base.msg_parm.i[0];
    if (level >= 0 || err->request->partial)
        return;
    switch (err->base.msg_code) {
    case JWRN_EXTRANEOUS_DATA:
    case JWRN_JFIF_MAJOR:
    case JWRN_ADOBE_XFORM:
    case JWRN_BOGUS_PROGRESSION:
        return;
    default:
        on_error(cinfo);
    }
}

static void on_progress(j_common_ptr cinfo)
{
    if (cinfo->is_decompressor && ((j_decompress_ptr)cinfo)->input_scan_number > MAX_SCANS) {
        snprintf(((errors *)cinfo->err)->request->message, JMSG_LENGTH_MAX, "more than %d scans", MAX_SCANS);
        fail(cinfo, LIMITED);
    }
}

/* Whether the end-of-image marker is among the last bytes: what is missing below a box would not be noticed. */
static int complete(const request *req)
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

static void configure(j_decompress_ptr cinfo, const request *req)
{
    cinfo->scale_num = 1;
    cinfo->scale_denom = (unsigned int)req->scale;
    cinfo->out_color_space = req->channels == 1 ? JCS_GRAYSCALE : JCS_EXT_RGB;
    cinfo->dct_method = JDCT_ISLOW;
    cinfo->do_fancy_upsampling = TRUE;
    jpeg_calc_output_dimensions(cinfo);
}

/* Read the header, of the frames that consist of 8 x 8 blocks of 8 bits: libjpeg-turbo 3 also reads lossless files and ones
 * of more bits, whose rows it does not give by the functions that are called here, or not in the size that is asked for. */
static void read_header(j_decompress_ptr cinfo, request *req)
{
    jpeg_mem_src(cinfo, req->data, (unsigned long)req->size);
    jpeg_read_header(cinfo, TRUE);
    const int frame = ((errors *)cinfo->err)->frame;
    if (cinfo->data_precision == 8 &&
        (frame == SOF0 || frame == SOF1 || frame == SOF2 || frame == SOF9 || frame == SOF10))
        return;
    snprintf(req->message, JMSG_LENGTH_MAX, "lossless, or not of 8 bits: frame marker 0x%02x, %d bits",
             (unsigned int)frame, cinfo->data_precision);
    fail((j_common_ptr)cinfo, UNSUPPORTED);
}

/* Whether our own decoder may have a look at the scan. */
static int is_sequential(j_decompress_ptr cinfo)
{
    const int frame = ((errors *)cinfo->err)->frame;
    return (frame == SOF0 || frame == SOF1) && !jpeg_has_multiple_scans(cinfo);
}

/* After the header: limits, colours, the scale, and the box in whole pixels of the scaled image. */
static void plan(j_decompress_ptr cinfo, request *req, long *right, long *bottom)
{
    req->image_width = (long)cinfo->image_width;
    req->image_height = (long)cinfo->image_height;
    if ((unsigned long long)cinfo->image_width * cinfo->image_height > req->max_pixels) {
        snprintf(req->message, JMSG_LENGTH_MAX, "%ld x %ld pixels, more than the limit of %llu", req->image_width,
                 req->image_height, req->max_pixels);
        fail((j_common_ptr)cinfo, LIMITED);
    }
    if (req->expected_width > 0 &&
        (req->expected_width != req->image_width || req->expected_height != req->image_height)) {
        snprintf(req->message, JMSG_LENGTH_MAX, "ambiguous header: %ld x %ld pixels, or %ld x %ld", req->expected_width,
                 req->expected_height, req->image_width, req->image_height);
        fail((j_common_ptr)cinfo, DAMAGED);
    }
    if (cinfo->jpeg_color_space != JCS_YCbCr && cinfo->jpeg_color_space != JCS_GRAYSCALE &&
        cinfo->jpeg_color_space != JCS_RGB) {
        snprintf(req->message, JMSG_LENGTH_MAX, "colours that are neither grey, RGB nor YCbCr");
        fail((j_common_ptr)cinfo, UNSUPPORTED);
    }
    if (req->right <= 0) {
        req->left = req->top = 0;
        req->right = (double)req->image_width;
        req->bottom = (double)req->image_height;
    }
    if (req->right > (double)req->image_width || req->bottom > (double)req->image_height)
        fail((j_common_ptr)cinfo, OUTSIDE);

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

static long long nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (long long)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Begin a drawing of the box, `width` x `height` whole pixels in the shrunken image: 0 if that is none. */
static int begin_drawing(j_decompress_ptr cinfo, request *req, resize_plan *plan, long width, long height)
{
    resize_job *job = req->job;
    job->width = (int)width;
    job->height = (int)height;
    double first_x = (double)(long)(req->left / req->scale), first_y = (double)(long)(req->top / req->scale);
    job->left = req->left / req->scale - first_x;
    job->top = req->top / req->scale - first_y;
    job->right = req->right / req->scale - first_x;
    job->bottom = req->bottom / req->scale - first_y;
    if (!resize_valid(job))
        return 0;
    resize_begin(plan, job, cinfo->mem->alloc_large((j_common_ptr)cinfo, JPOOL_IMAGE, resize_scratch(job)));
    return 1;
}

static void draw_rows(request *req, resize_plan *plan, const unsigned char *rows, size_t stride, int count)
{
    long long begun = nanoseconds();
    resize_rows(plan, rows, (ptrdiff_t)stride, count);
    req->resizing += nanoseconds() - begun;
}

/* The box, (left, top, right, bottom) in the shrunken image, by our own decoder: UNSUPPORTED where libjpeg has to decode. */
static enum outcome decode_here(j_decompress_ptr cinfo, request *req, const long box[4])
{
    if (!is_sequential(cinfo))
        return UNSUPPORTED;
    box_decoder *b = &kept;
    const long width = box[2] - box[0], height = box[3] - box[1];
    size_t begins = (size_t)(cinfo->src->next_input_byte - req->data), row = (size_t)(width * req->channels);
    if (!box_open(b, cinfo, req->data, req->size, begins, req->entries, req->entries_size, req->channels, box,
                  req->simd))
        return UNSUPPORTED;
    resize_plan plan;
    if (req->job && !begin_drawing(cinfo, req, &plan, width, height))
        return OUTSIDE;
    box_begin(b, cinfo->mem->alloc_large((j_common_ptr)cinfo, JPOOL_IMAGE, box_scratch(b)));
    unsigned char *out = req->out;
    int count;
    long done = 0;
    for (; (count = box_rows(b)) > 0; done += count) {
        if (req->job)
            draw_rows(req, &plan, b->rows, b->stride, count);
        for (int i = 0; i < count && !req->job; i++, out += row)
            memcpy(out, b->rows + (size_t)i * b->stride, row);
    }
    if (count < 0 || done != height)
        return UNSUPPORTED;
    req->x = box[0];
    req->y = box[1];
    req->width = width;
    req->height = height;
    return DONE;
}

/* Decode the box, a few rows at a time, into a drawing of another size. `x` is its first pixel in what is decoded, in which
 * rows above have been passed; (right, bottom) is where it ends. */
static enum outcome draw_box(j_decompress_ptr cinfo, request *req, long x, long y, long right, long bottom)
{
    resize_plan plan;
    size_t pixel = (size_t)cinfo->output_components, stride = (size_t)cinfo->output_width * pixel;
    if (!begin_drawing(cinfo, req, &plan, right - x, bottom - y))
        return OUTSIDE;
    unsigned char *block = cinfo->mem->alloc_large((j_common_ptr)cinfo, JPOOL_IMAGE, stride * ROWS);
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
    return DONE;
}

static void read_rows(j_decompress_ptr cinfo, request *req, size_t stride)
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
static enum outcome decode_box(j_decompress_ptr cinfo, request *req)
{
    long right = 0, bottom = 0;
    if (!req->partial && !complete(req)) {
        snprintf(req->message, JMSG_LENGTH_MAX, "premature end: no end-of-image marker");
        return DAMAGED;
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
        return TOO_SMALL;
    const long box[4] = {left, top, right, end};
    enum outcome outcome = req->partial ? UNSUPPORTED : decode_here(cinfo, req, box);
    if (outcome != UNSUPPORTED)
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
    if (cinfo->output_components != req->channels ||
        (!req->job && stride * (size_t)req->height > req->capacity)) {
        snprintf(req->message, JMSG_LENGTH_MAX, "libjpeg gives rows of %lu bytes, which were not announced",
                 (unsigned long)stride);
        return DAMAGED;
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
    return DONE; /* the rows below are never looked at */
}

/* The entries of a file. */
static enum outcome find_entries(j_decompress_ptr cinfo, request *req)
{
    if (!complete(req))
        return DAMAGED;
    read_header(cinfo, req);
    if (!is_sequential(cinfo))
        return UNSUPPORTED;
    size_t begins = (size_t)(cinfo->src->next_input_byte - req->data);
    if (cinfo->restart_interval || !open_scan(&kept.scan, &kept.tables, cinfo))
        return UNSUPPORTED;
    req->needed =
        make_entries(&kept.track, &kept.scan, req->data, req->size, begins, req->step, req->out, req->capacity);
    return req->needed == 0 ? UNSUPPORTED : req->needed > req->capacity ? TOO_SMALL : DONE;
}

/* Without the GIL. The only function with a setjmp. `all` is zeroed, so that destroying is right at any point. */
static enum outcome run(decoder *all, request *req, enum outcome (*work)(j_decompress_ptr, request *))
{
    all->cinfo.err = jpeg_std_error(&all->err.base);
    all->err.base.error_exit = on_error;
    all->err.base.emit_message = on_message;
    all->err.request = req;
    if (setjmp(all->err.jump) == 0) {
        jpeg_create_decompress(&all->cinfo);
        all->progress.progress_monitor = on_progress;
        all->cinfo.progress = &all->progress;
        all->err.outcome = work(&all->cinfo, req);
    }
    jpeg_destroy_decompress(&all->cinfo);
    return all->err.outcome;
}

static PyObject *raised(enum outcome outcome, const request *req)
{
    switch (outcome) {
    case UNSUPPORTED:
        PyErr_SetString(PyExc_NotImplementedError, req->message);
        break;
    case LIMITED:
        PyErr_SetString(PyExc_OverflowError, req->message);
        break;
    case OUTSIDE:
        PyErr_Format(PyExc_IndexError, "%ld x %ld", req->image_width, req->image_height);
        break;
    case NO_MEMORY:
        PyErr_SetString(PyExc_MemoryError, req->message);
        break;
    default: /* the text may hold bytes of the file */
        for (const char *c = req->message; *c; c++)
            if ((unsigned char)*c > 126) {
                PyErr_SetString(PyExc_ValueError, "damaged");
                return NULL;
            }
        PyErr_SetString(PyExc_ValueError, req->message);
    }
    return NULL;
}

static int is_box(const request *req)
{
    return req->left >= 0 && req->left < req->right && req->right < 65536 && req->top >= 0 && req->top < req->bottom &&
           req->bottom < 65536;
}

/* The file, and what is known of it. */
static void take_data(request *req, const Py_buffer *data, const Py_buffer *entries)
{
    req->data = data->buf;
    req->size = (size_t)data->len;
    req->entries = entries ? entries->buf : NULL;
    req->entries_size = entries ? (size_t)entries->len : 0;
}

PyDoc_STRVAR(decode_doc,
             "decode(data, out, left, top, right, bottom, target_height, target_width, channels, max_pixels, partial, "
             "width, height, entries, simd)\n"
             "--\n\n"
             "Decode into `out`; (width, height, x, y, scale, image_width, image_height), or the bytes that are needed.");

static PyObject *decode(PyObject *module, PyObject *args)
{
    Py_buffer data, out, entries;
    request req;
    decoder all;
    memset(&req, 0, sizeof req);
    memset(&all, 0, sizeof all);
    (void)module;
    if (!PyArg_ParseTuple(args, "y*w*ddddlliKpllz*p", &data, &out, &req.left, &req.top, &req.right, &req.bottom,
                          &req.target_height, &req.target_width, &req.channels, &req.max_pixels, &req.partial,
                          &req.expected_width, &req.expected_height, &entries, &req.simd))
        return NULL;
    PyObject *result = NULL;
    if ((req.channels != 1 && req.channels != 3) || !(req.right <= 0 || is_box(&req))) {
        PyErr_SetString(PyExc_IndexError, "channels or box");
    } else {
        enum outcome outcome;
        take_data(&req, &data, &entries);
        req.out = out.buf;
        req.capacity = (size_t)out.len;
        Py_BEGIN_ALLOW_THREADS
        outcome = run(&all, &req, decode_box);
        Py_END_ALLOW_THREADS
        if (outcome == DONE)
            result = Py_BuildValue("lllllll", req.width, req.height, req.x, req.y, (long)req.scale, req.image_width,
                                   req.image_height);
        else if (outcome == TOO_SMALL)
            result = PyLong_FromSize_t(req.needed);
        else
            result = raised(outcome, &req);
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&out);
    PyBuffer_Release(&entries);
    return result;
}

PyDoc_STRVAR(entries_doc, "entries(data, out, step)\n"
                          "--\n\n"
                          "Write the entries of a file into `out`, every `step` MCUs of a row: their size, which may be "
                          "more than there is room for; 0 for a file that has none.");

static PyObject *entries(PyObject *module, PyObject *args)
{
    Py_buffer data, out;
    request req;
    decoder all;
    memset(&req, 0, sizeof req);
    memset(&all, 0, sizeof all);
    (void)module;
    if (!PyArg_ParseTuple(args, "y*w*l", &data, &out, &req.step))
        return NULL;
    PyObject *result = NULL;
    if (req.step < 1 || req.step > 65535)
        PyErr_SetString(PyExc_IndexError, "step");
    else {
        enum outcome outcome;
        take_data(&req, &data, NULL);
        req.out = out.buf;
        req.capacity = (size_t)out.len;
        Py_BEGIN_ALLOW_THREADS
        outcome = run(&all, &req, find_entries);
        Py_END_ALLOW_THREADS
        result = outcome == NO_MEMORY ? raised(outcome, &req)
                                      : PyLong_FromSize_t(outcome == DONE || outcome == TOO_SMALL ? req.needed : 0);
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&out);
    return result;
}

/* Whether a buffer has so many dimensions, of these sizes. */
static int has_shape(const Py_buffer *view, int dimensions, const Py_ssize_t *shape)
{
    if (view->ndim != dimensions)
        return 0;
    for (int i = 0; i < dimensions; i++)
        if (view->shape[i] != shape[i])
            return 0;
    return 1;
}

/* How many entries lie from one index of a dimension to the next: at least so many, whole ones; 0 where that is not so. */
static size_t entries_between(const Py_buffer *view, int dimension, Py_ssize_t least)
{
    Py_ssize_t bytes = view->strides[dimension];
    if (view->shape[dimension] == 1)
        return (size_t)least;
    return bytes % view->itemsize == 0 && bytes / view->itemsize >= least ? (size_t)(bytes / view->itemsize) : 0;
}

/* What a job says of its result, from what holds that; 0 if it does not go together. Rows and planes may be apart. */
static int fill_result(resize_job *job, const Py_buffer *out, const Py_buffer *table)
{
    int at = job->planar ? 1 : 0, pixel = job->planar ? 1 : job->channels;
    if (out->ndim != 3 || out->shape[at] < 1 || out->shape[at] > RESIZE_MOST || out->shape[at + 1] < 1 ||
        out->shape[at + 1] > RESIZE_MOST || out->itemsize < 1 || out->shape[job->planar ? 0 : 2] != job->channels)
        return 0;
    job->out_height = (int)out->shape[at];
    job->out_width = (int)out->shape[at + 1];
    job->entry = (int)out->itemsize;
    job->out = out->buf;
    job->row = entries_between(out, at, job->out_width * pixel);
    job->plane = job->planar ? entries_between(out, 0, (Py_ssize_t)job->row * job->out_height) : 1;
    job->table = table ? table->buf : NULL;
    Py_ssize_t entries[] = {job->channels, 256};
    int adjacent = entries_between(out, at + 1, pixel) == (size_t)pixel && entries_between(out, 2, 1) == 1;
    return job->row && job->plane && adjacent && (uintptr_t)out->buf % (size_t)job->entry == 0 && (uintptr_t)job->table % (size_t)job->entry == 0 &&
           (!table || (has_shape(table, 2, entries) && table->itemsize == job->entry));
}

/* The sizes of a job, from what holds its pixels; 0 if these do not go together. */
static int fill_job(resize_job *job, const Py_buffer *source, const Py_buffer *out, const Py_buffer *table)
{
    if (source->ndim != 3 || source->itemsize != 1 || source->shape[0] > RESIZE_MOST ||
        source->shape[1] > RESIZE_MOST || source->shape[2] > 4)
        return 0;
    job->height = (int)source->shape[0];
    job->width = (int)source->shape[1];
    job->pixel = (int)source->shape[2];
    job->channels = job->pixel == 4 ? 3 : job->pixel;
    return fill_result(job, out, table) && resize_valid(job) && source->strides[2] == 1 &&
           source->strides[1] == job->pixel;
}

/* Without the GIL; 0 if there is no memory. */
static int resized(const resize_job *job, const Py_buffer *source)
{
    void *scratch = malloc(resize_scratch(job));
    if (!scratch)
        return 0;
    resize_plan plan;
    resize_begin(&plan, job, scratch);
    resize_rows(&plan, source->buf, source->strides[0], job->height);
    free(scratch);
    return 1;
}

PyDoc_STRVAR(resize_doc, "resize(source, out, left, top, right, bottom, bicubic, antialias, flip_x, flip_y, table, planar, "
                         "simd)\n"
                         "--\n\n"
                         "Resize a box of `source` into `out`; a ValueError if their shapes and types do not go together.");

static PyObject *resize(PyObject *module, PyObject *args)
{
    PyObject *from, *to, *entries;
    Py_buffer source, out, table;
    resize_job job;
    (void)module;
    memset(&job, 0, sizeof job);
    if (!PyArg_ParseTuple(args, "OOddddppppOpp", &from, &to, &job.left, &job.top, &job.right, &job.bottom, &job.bicubic,
                          &job.antialias, &job.flip_x, &job.flip_y, &entries, &job.planar, &job.simd))
        return NULL;
    if (PyObject_GetBuffer(from, &source, PyBUF_STRIDED_RO) < 0)
        return NULL;
    PyObject *result = NULL;
    int looked_up = entries != Py_None;
    if (PyObject_GetBuffer(to, &out, PyBUF_STRIDED) == 0) {
        if (!looked_up || PyObject_GetBuffer(entries, &table, PyBUF_C_CONTIGUOUS) == 0) {
            if (fill_job(&job, &source, &out, looked_up ? &table : NULL)) {
                int done;
                Py_BEGIN_ALLOW_THREADS
                done = resized(&job, &source);
                Py_END_ALLOW_THREADS
                result = done ? Py_NewRef(Py_None) : PyErr_NoMemory();
            } else {
                PyErr_SetString(PyExc_ValueError, "source, box, table and result do not go together");
            }
            if (looked_up)
                PyBuffer_Release(&table);
        }
        PyBuffer_Release(&out);
    }
    PyBuffer_Release(&source);
    return result;
}

PyDoc_STRVAR(draw_doc, "draw(data, out, left, top, right, bottom, bicubic, antialias, flip_x, flip_y, table, planar, "
                       "max_pixels, width, height, entries, simd)\n"
                       "--\n\n"
                       "Decode a box and resize it into `out`, as `decode` and `resize` do it: nanoseconds of resizing.");

static PyObject *draw(PyObject *module, PyObject *args)
{
    PyObject *to, *looked_up;
    Py_buffer data, out, table, entries;
    request req;
    resize_job job;
    decoder all;
    (void)module;
    memset(&req, 0, sizeof req);
    memset(&job, 0, sizeof job);
    memset(&all, 0, sizeof all);
    if (!PyArg_ParseTuple(args, "y*OddddppppOpKllz*p", &data, &to, &req.left, &req.top, &req.right, &req.bottom,
                          &job.bicubic, &job.antialias, &job.flip_x, &job.flip_y, &looked_up, &job.planar,
                          &req.max_pixels, &req.expected_width, &req.expected_height, &entries, &req.simd))
        return NULL;
    PyObject *result = NULL;
    int has_table = looked_up != Py_None;
    if (PyObject_GetBuffer(to, &out, PyBUF_STRIDED) == 0) {
        if (!has_table || PyObject_GetBuffer(looked_up, &table, PyBUF_C_CONTIGUOUS) == 0) {
            job.simd = req.simd;
            req.channels = job.channels = job.pixel =
                out.ndim == 3 && out.shape[job.planar ? 0 : 2] == 1 ? 1 : 3;
            if (!is_box(&req) || !fill_result(&job, &out, has_table ? &table : NULL))
                PyErr_SetString(PyExc_IndexError, "box, table and result do not go together");
            else {
                enum outcome outcome;
                take_data(&req, &data, &entries);
                req.target_height = job.out_height;
                req.target_width = job.out_width;
                req.job = &job;
                Py_BEGIN_ALLOW_THREADS
                outcome = run(&all, &req, decode_box);
                Py_END_ALLOW_THREADS
                result = outcome == DONE ? PyLong_FromLongLong(req.resizing) : raised(outcome, &req);
            }
            if (has_table)
                PyBuffer_Release(&table);
        }
        PyBuffer_Release(&out);
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&entries);
    return result;
}

static PyMethodDef methods[] = {{"decode", decode, METH_VARARGS, decode_doc},
                                {"draw", draw, METH_VARARGS, draw_doc},
                                {"entries", entries, METH_VARARGS, entries_doc},
                                {"remark", remark, METH_VARARGS, remark_doc},
                                {"resize", resize, METH_VARARGS, resize_doc},
                                {NULL, NULL, 0, NULL}};

static int fill(PyObject *module)
{
    look_for_avx2();
    if (PyModule_AddIntConstant(module, "AVX2", has_avx2()) < 0)
        return -1;
    return PyModule_AddIntConstant(module, "LIBJPEG_TURBO_VERSION", LIBJPEG_TURBO_VERSION_NUMBER);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)fill},
#ifdef Py_GIL_DISABLED
                                   /* Threads share nothing but what `look_for_avx2` has found. */
                                   {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
                                   {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_jpeg", "Region decode of JPEG over libjpeg-turbo.", 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__jpeg(void)
{
    return PyModuleDef_Init(&definition);
}

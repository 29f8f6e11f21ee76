/* A JPEG with other restart markers: coefficients are read, and written again with Huffman tables of their own.
 *
 * penstock/images/native.py says what it is for. Promises:
 *
 * - Coefficients, quantisation tables, sampling factors, colours and components' names are those of the file. So are all
 *   APPn and COM segments, byte for byte and in their order, and what follows the end of the image.
 * - A file that is not read to its end without a warning, or that libjpeg would write otherwise (several scans,
 *   progressive, arithmetic coding, lossless, more than 8 bits), gives nothing.
 * - No error ends the process: libjpeg's error exit jumps back to `run`. All that was allocated is libjpeg's own and is
 *   freed on every way out; what is written goes to memory of the caller, within its bounds.
 * - The GIL is released; there is no shared state. Memory: all coefficients, 2 bytes each. Pixels are limited.
 */
#include "transcode.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h>

#include <jerror.h>

#define SEGMENT 0xFFFF /* bytes of a segment that are kept: more than one can have */
#define SPARE 4096     /* bytes for what there is no room for: it is counted, and lost */
#define WISHED 8       /* MCUs between markers, as near as the width allows: a crop uses fewer of longer segments. */
#define FEWEST 4       /* Shorter ones cost too many bytes: 4 add 2 % to photographs, 2 add 4 %. */

enum outcome { DONE, LEFT, NO_MEMORY };

typedef struct {
    const unsigned char *data;
    size_t size;
    unsigned char *out;
    size_t capacity;
    long interval; /* MCUs from one marker to the next; 0 for none, less for a choice by the width */
    unsigned long long max_pixels;
    size_t needed; /* bytes that were written, or would have been */
} request;

typedef struct {
    struct jpeg_error_mgr base; /* first, so that one pointer is both */
    jmp_buf jump;
    enum outcome outcome;
} errors;

typedef struct {
    struct jpeg_destination_mgr base; /* first, too */
    request *request;
    int spare_used;
    JOCTET spare[SPARE];
} destination;

/* What must survive a longjmp. */
typedef struct {
    struct jpeg_decompress_struct from;
    struct jpeg_compress_struct to;
    struct jpeg_progress_mgr progress;
    destination destination;
    errors err;
} work;

static void leave(j_common_ptr cinfo, enum outcome outcome)
{
    errors *err = (errors *)cinfo->err;
    err->outcome = outcome;
    longjmp(err->jump, 1);
}

static void on_error(j_common_ptr cinfo)
{
    leave(cinfo, cinfo->err->msg_code == JERR_OUT_OF_MEMORY ? NO_MEMORY : LEFT);
}

/* Warnings (-1) mean missing or wrong coefficients, but for those after which the picture is whole. */
static void on_message(j_common_ptr cinfo, int level)
{
    int code = cinfo->err->msg_code;
    if (level < 0 && code != JWRN_EXTRANEOUS_DATA && code != JWRN_JFIF_MAJOR && code != JWRN_ADOBE_XFORM)
        leave(cinfo, LEFT);
}

/* A second scan, which the header did not announce. Decoders never come to it. */
static void on_progress(j_common_ptr cinfo)
{
    if (cinfo->is_decompressor && ((j_decompress_ptr)cinfo)->input_scan_number > 1)
        leave(cinfo, LEFT);
}

/* libjpeg's destination. */

static void to_spare(destination *d)
{
    d->spare_used = 1;
    d->base.next_output_byte = d->spare;
    d->base.free_in_buffer = SPARE;
}

static void begin(j_compress_ptr cinfo)
{
    destination *d = (destination *)cinfo->dest;
    d->request->needed = 0;
    d->base.next_output_byte = d->request->out;
    d->base.free_in_buffer = d->request->capacity;
    d->spare_used = 0;
    if (!d->request->capacity)
        to_spare(d);
}

static boolean flush(j_compress_ptr cinfo)
{
    destination *d = (destination *)cinfo->dest;
    d->request->needed += d->spare_used ? SPARE : d->request->capacity;
    to_spare(d);
    return TRUE;
}

static void end(j_compress_ptr cinfo)
{
    destination *d = (destination *)cinfo->dest;
    d->request->needed += (d->spare_used ? SPARE : d->request->capacity) - d->base.free_in_buffer;
}

/* Which interval. */

/* MCUs of a row. */
static long row_of(j_decompress_ptr from)
{
    long wide = from->num_components == 1 ? DCTSIZE : from->max_h_samp_factor * DCTSIZE;
    return ((long)from->image_width + wide - 1) / wide;
}

/* The divisor of a row that is nearest to the wish; a whole row where that is short. */
static long choose(long row)
{
    long found = row;
    for (long by = FEWEST; by < row; by++)
        if (row % by == 0 && labs(by - WISHED) <= labs(found - WISHED))
            found = by;
    return found;
}

static enum outcome convert(work *w, request *req)
{
    j_decompress_ptr from = &w->from;
    j_compress_ptr to = &w->to;
    jpeg_mem_src(from, req->data, (unsigned long)req->size);
    jpeg_save_markers(from, JPEG_COM, SEGMENT);
    for (int i = 0; i < 16; i++)
        jpeg_save_markers(from, JPEG_APP0 + i, SEGMENT);
    jpeg_read_header(from, TRUE);
    if (jpeg_has_multiple_scans(from) || from->arith_code || from->data_precision != 8 ||
        (unsigned long long)from->image_width * from->image_height > req->max_pixels)
        return LEFT;
    jvirt_barray_ptr *coefficients = jpeg_read_coefficients(from);

    to->dest = &w->destination.base;
    jpeg_copy_critical_parameters(from, to);
    to->optimize_coding = TRUE;
    to->restart_interval = (unsigned int)(req->interval < 0 ? choose(row_of(from)) : req->interval);
    /* Those of the file are written, as they are. */
    to->write_JFIF_header = FALSE;
    to->write_Adobe_marker = FALSE;
    jpeg_write_coefficients(to, coefficients);
    for (jpeg_saved_marker_ptr marker = from->marker_list; marker; marker = marker->next)
        jpeg_write_marker(to, marker->marker, marker->data, marker->data_length);
    jpeg_finish_compress(to);

    const unsigned char *rest = from->src->next_input_byte;
    size_t size = (size_t)(req->data + req->size - rest);
    if (req->needed + size <= req->capacity)
        memcpy(req->out + req->needed, rest, size);
    req->needed += size;
    jpeg_finish_decompress(from);
    return DONE;
}

/* Without the GIL. `w` is zeroed, so that destroying is right at any point. */
static enum outcome run(work *w, request *req)
{
    w->from.err = w->to.err = jpeg_std_error(&w->err.base);
    w->err.base.error_exit = on_error;
    w->err.base.emit_message = on_message;
    w->destination.base.init_destination = begin;
    w->destination.base.empty_output_buffer = flush;
    w->destination.base.term_destination = end;
    w->destination.request = req;
    if (setjmp(w->err.jump) == 0) {
        jpeg_create_decompress(&w->from);
        jpeg_create_compress(&w->to);
        w->progress.progress_monitor = on_progress;
        w->from.progress = &w->progress;
        w->err.outcome = convert(w, req);
    }
    jpeg_destroy_compress(&w->to);
    jpeg_destroy_decompress(&w->from);
    return w->err.outcome;
}

const char remark_doc[] = "remark(data, out, interval, max_pixels)\n"
                          "--\n\n"
                          "Write a JPEG with a restart marker every `interval` MCUs into `out` (0: none; -1: as many as "
                          "suit its width): its size, which may be more than there is room for; 0 for what stays as it "
                          "is.";

PyObject *remark(PyObject *module, PyObject *args)
{
    Py_buffer data, out;
    request req;
    work w;
    (void)module;
    memset(&req, 0, sizeof req);
    memset(&w, 0, sizeof w);
    if (!PyArg_ParseTuple(args, "y*w*lK", &data, &out, &req.interval, &req.max_pixels))
        return NULL;
    PyObject *result = NULL;
    if (req.interval < -1 || req.interval > 65535)
        PyErr_SetString(PyExc_IndexError, "interval");
    else {
        enum outcome outcome;
        req.data = data.buf;
        req.size = (size_t)data.len;
        req.out = out.buf;
        req.capacity = (size_t)out.len;
        Py_BEGIN_ALLOW_THREADS
        outcome = run(&w, &req);
        Py_END_ALLOW_THREADS
        result = outcome == NO_MEMORY ? PyErr_NoMemory() : PyLong_FromSize_t(outcome == DONE ? req.needed : 0);
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&out);
    return result;
}

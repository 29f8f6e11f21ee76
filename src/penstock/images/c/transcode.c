/* A JPEG with other restart markers: coefficients are read, and written again with Huffman tables of their own.
 *
 * penstock/images/native.py says what it is for. Promises:
 *
 * - Coefficients, quantisation tables, sampling factors, colours and components' names are those of the file. So are
 * all APPn and COM segments, byte for byte and in their order, and what follows the end of the image.
 * - A file that is not read to its end without a warning, or that libjpeg would write otherwise (several scans,
 *   progressive, arithmetic coding, lossless, more than 8 bits), gives nothing.
 * - No error ends the process (libjpeg.c). All that was allocated is libjpeg's own and is freed on every way out; what
 * is written goes to memory of the caller, within its bounds.
 * - There is no shared state. Memory: all coefficients, 2 bytes each. Pixels are limited.
 */
#include "transcode.h"

#include <stdlib.h>
#include <string.h>

#define SEGMENT 0xFFFF /* bytes of a segment that are kept: more than one can have */
#define SPARE 4096     /* bytes for what there is no room for: it is counted, and lost */
#define WISHED 8       /* MCUs between markers, as near as the width allows: a crop uses fewer of longer segments. */
#define FEWEST 4       /* Shorter ones cost too many bytes: 4 add 2 % to photographs, 2 add 4 %. */

typedef struct {
    struct jpeg_destination_mgr base; /* first: libjpeg's pointer to it is a pointer to all of it */
    pst_transcoding *request;
    int spare_used;
    JOCTET spare[SPARE];
} destination;

/* What must survive a longjmp. */
typedef struct {
    pst_libjpeg lib;
    struct jpeg_compress_struct to;
    destination destination;
} work;

/* libjpeg's destination. */

static void to_spare(destination *d)
{
    d->spare_used = 1;
    d->base.next_output_byte = d->spare;
    d->base.free_in_buffer = SPARE;
}

static void init_destination(j_compress_ptr cinfo)
{
    destination *d = (destination *)cinfo->dest;
    d->request->needed = 0;
    d->base.next_output_byte = d->request->out;
    d->base.free_in_buffer = d->request->capacity;
    d->spare_used = 0;
    if (!d->request->capacity)
        to_spare(d);
}

static boolean empty_output_buffer(j_compress_ptr cinfo)
{
    destination *d = (destination *)cinfo->dest;
    d->request->needed += d->spare_used ? SPARE : d->request->capacity;
    to_spare(d);
    return TRUE;
}

static void term_destination(j_compress_ptr cinfo)
{
    destination *d = (destination *)cinfo->dest;
    d->request->needed += (d->spare_used ? SPARE : d->request->capacity) - d->base.free_in_buffer;
}

/* The divisor of the MCUs of a row that is nearest to the wish; a whole row where that is short. */
static long choose_interval(j_decompress_ptr from)
{
    long mcu = from->num_components == 1 ? DCTSIZE : from->max_h_samp_factor * DCTSIZE;
    long row = ((long)from->image_width + mcu - 1) / mcu, found = row;
    for (long by = FEWEST; by < row; by++)
        if (row % by == 0 && labs(by - WISHED) <= labs(found - WISHED))
            found = by;
    return found;
}

static enum pst_outcome convert(j_decompress_ptr from, void *argument)
{
    work *w = argument;
    pst_transcoding *req = w->destination.request;
    j_compress_ptr to = &w->to;
    jpeg_create_compress(to);
    jpeg_mem_src(from, req->data, (unsigned long)req->size);
    jpeg_save_markers(from, JPEG_COM, SEGMENT);
    for (int i = 0; i < 16; i++)
        jpeg_save_markers(from, JPEG_APP0 + i, SEGMENT);
    jpeg_read_header(from, TRUE);
    if (jpeg_has_multiple_scans(from) || from->arith_code || from->data_precision != 8)
        return PST_UNSUPPORTED;
    if ((unsigned long long)from->image_width * from->image_height > req->max_pixels)
        return PST_LIMITED;
    jvirt_barray_ptr *coefficients = jpeg_read_coefficients(from);

    to->dest = &w->destination.base;
    jpeg_copy_critical_parameters(from, to);
    to->optimize_coding = TRUE;
    to->restart_interval = (unsigned int)(req->interval < 0 ? choose_interval(from) : req->interval);
    /* Those of the file are written, as they are. */
    to->write_JFIF_header = FALSE;
    to->write_Adobe_marker = FALSE;
    jpeg_write_coefficients(to, coefficients);
    for (jpeg_saved_marker_ptr marker = from->marker_list; marker; marker = marker->next)
        jpeg_write_marker(to, marker->marker, marker->data, marker->data_length);
    jpeg_finish_compress(to);

    const uint8_t *rest = from->src->next_input_byte;
    size_t size = (size_t)(req->data + req->size - rest);
    if (req->needed + size <= req->capacity)
        memcpy(req->out + req->needed, rest, size);
    req->needed += size;
    jpeg_finish_decompress(from);
    return PST_DONE;
}

enum pst_outcome pst_transcode(pst_transcoding *req)
{
    work w;
    memset(&w, 0, sizeof w); /* so that destroying is right at any point */
    w.lib.message = req->message;
    w.lib.max_scans = 1; /* decoders never come to a second scan that the header did not announce */
    w.to.err = &w.lib.manager;
    w.destination.base.init_destination = init_destination;
    w.destination.base.empty_output_buffer = empty_output_buffer;
    w.destination.base.term_destination = term_destination;
    w.destination.request = req;
    enum pst_outcome outcome = pst_libjpeg_run(&w.lib, convert, &w);
    jpeg_destroy_compress(&w.to);
    return outcome;
}

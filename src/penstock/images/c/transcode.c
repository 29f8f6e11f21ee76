/* A JPEG with other restart markers: coefficients are read, and written again with Huffman tables of their own.
 *
 * - Coefficients, quantisation tables, sampling factors, colours and components' names are those of the file. So are
 * all APPn and COM segments, byte for byte and in their order, and what follows the end of the image.
 * - A file that is not read to its end without a warning, or that libjpeg would write otherwise (several scans,
 *   progressive, arithmetic coding, lossless, more than 8 bits, APPn or COM segments behind the scan), gives nothing.
 * - Memory: the result, and all coefficients, 2 bytes each. Pixels are limited.
 */
#include "decode.h"

#include <stdlib.h>
#include <string.h>

#define MAX_SEGMENT 0xFFFF /* bytes of a segment that are kept: more than one can have */
#define WANTED_INTERVAL 8  /* MCUs, as near as the width allows: a crop uses fewer of longer segments. */
#define LEAST_INTERVAL 4   /* Shorter ones cost too many bytes: 4 add 2 % to photographs, 2 add 4 %. */

/* What must survive a longjmp. */
typedef struct {
    pst_libjpeg lib;
    struct jpeg_compress_struct to;
    const uint8_t *data;
    size_t size;
    long interval;
    unsigned long long max_pixels;
    const uint8_t *rest; /* of the file, behind the image */
    uint8_t *out;
    unsigned long out_size;
} transcoding;

/* The divisor of the MCUs of a row that is nearest to the wanted one; a whole row where that is short. */
static long choose_interval(j_decompress_ptr from)
{
    long mcu = from->num_components == 1 ? DCTSIZE : from->max_h_samp_factor * DCTSIZE;
    long row = ((long)from->image_width + mcu - 1) / mcu, found = row;
    for (long by = LEAST_INTERVAL; by < row; by++)
        if (row % by == 0 && labs(by - WANTED_INTERVAL) <= labs(found - WANTED_INTERVAL))
            found = by;
    return found;
}

static enum pst_outcome convert(j_decompress_ptr from, void *argument)
{
    transcoding *t = argument;
    j_compress_ptr to = &t->to;
    jpeg_mem_src(from, t->data, (unsigned long)t->size);
    jpeg_save_markers(from, JPEG_COM, MAX_SEGMENT);
    for (int i = 0; i < 16; i++)
        jpeg_save_markers(from, JPEG_APP0 + i, MAX_SEGMENT);
    jpeg_read_header(from, TRUE);
    if (jpeg_has_multiple_scans(from) || from->arith_code || from->data_precision != 8)
        return PST_UNSUPPORTED;
    if ((unsigned long long)from->image_width * from->image_height > t->max_pixels)
        return PST_LIMITED;
    jpeg_saved_marker_ptr last = from->marker_list;
    while (last && last->next)
        last = last->next;
    jvirt_barray_ptr *coefficients = jpeg_read_coefficients(from);
    /* In front of the scan, a segment that stood behind it would say what the colours are. */
    if (last ? last->next : from->marker_list)
        return PST_UNSUPPORTED;

    jpeg_create_compress(to);
    jpeg_mem_dest(to, &t->out, &t->out_size);
    jpeg_copy_critical_parameters(from, to);
    to->optimize_coding = TRUE;
    to->restart_interval = (unsigned)(t->interval < 0 ? choose_interval(from) : t->interval);
    /* Those of the file are written, as they are. */
    to->write_JFIF_header = FALSE;
    to->write_Adobe_marker = FALSE;
    jpeg_write_coefficients(to, coefficients);
    for (jpeg_saved_marker_ptr marker = from->marker_list; marker; marker = marker->next)
        jpeg_write_marker(to, marker->marker, marker->data, marker->data_length);
    jpeg_finish_compress(to);

    t->rest = from->src->next_input_byte;
    jpeg_finish_decompress(from);
    return PST_DONE;
}

enum pst_outcome pst_transcode(const uint8_t *data, size_t size, long interval, unsigned long long max_pixels,
                               uint8_t **out, size_t *out_size)
{
    char message[JMSG_LENGTH_MAX];
    if (interval < -1 || interval > PST_MAX_INTERVAL)
        return PST_OUTSIDE;
    transcoding t = {
        .lib = {.message = message}, .data = data, .size = size, .interval = interval, .max_pixels = max_pixels};
    t.to.err = &t.lib.manager;
    const enum pst_outcome outcome = pst_libjpeg_run(&t.lib, convert, &t);
    if (t.out)
        t.to.dest->term_destination(&t.to); /* behind an error, too: only this sets `out` after it has grown */
    jpeg_destroy_compress(&t.to);           /* right at any point, as it was zeroed */
    const size_t rest = outcome == PST_DONE ? (size_t)(data + size - t.rest) : 0;
    *out = outcome == PST_DONE ? realloc(t.out, t.out_size + rest) : NULL;
    if (!*out) {
        free(t.out);
        return outcome == PST_DONE ? PST_NO_MEMORY : outcome;
    }
    memcpy(*out + t.out_size, t.rest, rest);
    *out_size = t.out_size + rest;
    return PST_DONE;
}

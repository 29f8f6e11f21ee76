/* libjpeg decodes all blocks from the first row of the image to the last one of a box, and all columns of these. Here
 * only blocks that the box needs are decoded. Others are skipped, or not looked at where an index or restart markers
 * tell where to go on. Rows of pixels come out as soon as a row of MCUs is there, so memory is that of one.
 *
 * Samples beyond the edges of the image are copies of those at the edges, so that upsampling is one formula.
 */
#include "region.h"

#include <string.h>

#include "cpu.h"
#include "samples.h"

#define PADDING 32        /* bytes in front of a row of samples */
#define MAX_DC_ALONE 4091 /* of a DC value that is a pixel: beyond it libjpeg does not clamp */
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

static size_t padded(long samples)
{
    return (size_t)(PADDING + samples + PST_SLACK + 31) / 32 * 32;
}

static long ceil_div(long value, long divisor)
{
    return (value + divisor - 1) / divisor;
}

int pst_region_open(pst_region *region, const pst_frame *frame, const uint8_t *data, size_t size,
                    const uint8_t *entries, size_t entries_size, int channels, int scale, const long box[4], int simd)
{
    const pst_frame_component *luma = frame->component;
    /* In a shrunken image of 4:2:0, libjpeg shrinks colours less, so that there is nothing to upsample. */
    const int full_chroma = scale > 1 && luma->v == 2;
    region->channels = channels;
    region->components = channels == 1 ? 1 : frame->components;
    region->avx2 = simd && pst_cpu_has_avx2();
    region->mcu_width = frame->mcu_width / scale;
    region->mcu_height = frame->mcu_height / scale;
    region->h2 = region->components == 3 && luma->h == 2 && !full_chroma;
    region->v2 = region->h2 && luma->v == 2;
    region->left = box[0];
    region->top = box[1];
    region->right = box[2];
    region->bottom = box[3];
    /* With the column and the row around the box that upsampling looks at. */
    region->mcu_left = MAX(region->left - region->h2, 0) / region->mcu_width;
    region->mcu_right = MIN(ceil_div(region->right + region->h2, region->mcu_width), frame->mcus_per_row);
    region->mcu_row = MAX(region->top - region->v2, 0) / region->mcu_height;
    region->mcu_bottom = MIN(ceil_div(region->bottom + region->v2, region->mcu_height), frame->mcu_rows);
    region->stride = (size_t)((region->right - region->left) * channels) + PST_SLACK;
    region->scratch = (size_t)(region->mcu_height + 1) * region->stride;
    for (int i = 0; i < frame->components; i++) {
        const pst_frame_component *component = &frame->component[i];
        pst_plane *plane = &region->planes[i];
        plane->block_size = 8 / scale * (i > 0 && full_chroma ? 2 : 1);
        plane->mcu_width = component->h * plane->block_size;
        plane->mcu_height = component->v * plane->block_size;
        plane->width = ceil_div(frame->width * plane->mcu_width, frame->mcu_width);
        plane->height = ceil_div(frame->height * plane->mcu_height, frame->mcu_height);
        memcpy(plane->factors, frame->factors[component->quantisation], 64);
        memset(plane->factors + 64, 0, sizeof plane->factors - 64);
        const long mcus = region->mcu_right - region->mcu_left;
        plane->stride = padded(mcus * plane->mcu_width);
        plane->bytes = (size_t)(plane->mcu_height + 2) * plane->stride + padded(mcus * region->mcu_width);
        region->scratch += i < region->components ? plane->bytes : 0;
    }
    /* Without neighbours to look at, libjpeg upsamples in another way. */
    if (region->h2 && (region->planes[1].width <= 2 || scale == 8))
        return 0;
    return pst_scan_open(&region->scan, frame, data, size, entries, entries_size);
}

void pst_region_begin(pst_region *region, uint8_t *scratch)
{
    for (int i = 0; i < region->components; i++) {
        pst_plane *plane = &region->planes[i];
        plane->samples = scratch + PADDING;
        plane->upsampled = scratch + (size_t)(plane->mcu_height + 2) * plane->stride;
        scratch += plane->bytes;
    }
    region->rows = scratch;
}

/* Decode the next block, of a component, to the samples at an offset. */
static int decode_block(pst_region *region, int component, size_t offset)
{
    const pst_plane *plane = &region->planes[component];
    pst_block_decoder *decoder = &region->scan.decoders[component];
    pst_bit_reader *reader = &region->scan.reader;
    if (component >= region->components)
        return pst_block_skip(decoder, reader);
    uint8_t *out = plane->samples + offset;
    const ptrdiff_t stride = (ptrdiff_t)plane->stride;
    if (plane->block_size == 1) {
        const int is_whole = pst_block_skip(decoder, reader);
        const int dc = decoder->prediction * plane->factors[0];
        pst_idct_dc(dc, 1, out, stride);
        return is_whole && dc >= -MAX_DC_ALONE && dc <= MAX_DC_ALONE;
    }
    _Alignas(32) int16_t block[72];
    memset(block, 0, 64 * sizeof *block);
    const enum pst_block kind = pst_block_decode(decoder, reader, plane->factors, block);
    if (kind == PST_BLOCK_DC)
        pst_idct_dc(block[0], plane->block_size, out, stride);
    else if (kind == PST_BLOCK_FULL)
        pst_idct(block, plane->block_size, out, stride, region->avx2);
    return kind != PST_BLOCK_DAMAGED;
}

/* Decode the next MCU row to the planes. 0 where the data is not as it should be. */
static int decode_mcu_row(pst_region *region)
{
    pst_scan *scan = &region->scan;
    if (!pst_scan_seek(scan, region->mcu_row, region->mcu_left, region->mcu_right))
        return 0;
    for (long column = 0; column < region->mcu_right - region->mcu_left; column++, scan->mcu++) {
        if (!pst_scan_restart(scan))
            return 0;
        for (int i = 0; i < scan->components; i++) {
            const pst_plane *plane = &region->planes[i];
            for (int y = 0; y < plane->mcu_height; y += plane->block_size)
                for (int x = 0; x < plane->mcu_width; x += plane->block_size)
                    if (!decode_block(region, i,
                                      (size_t)(y + 1) * plane->stride + (size_t)(column * plane->mcu_width + x)))
                        return 0;
        }
    }
    return 1;
}

/* Copy the samples at the edges of the image beyond them. */
static void extend_edges(const pst_region *region, pst_plane *plane)
{
    uint8_t *rows = plane->samples + plane->stride; /* of the MCUs */
    const long width = plane->width - region->mcu_left * plane->mcu_width;
    const long height = plane->height - region->mcu_row * plane->mcu_height;
    for (int y = 0; y < plane->mcu_height; y++) {
        uint8_t *row = rows + (size_t)y * plane->stride;
        if (region->mcu_left == 0)
            row[-1] = row[0];
        if (region->mcu_right == region->scan.mcus_per_row)
            row[width] = row[width - 1];
    }
    const size_t size = plane->stride - PADDING;
    if (region->mcu_row == 0)
        memcpy(rows - plane->stride - 1, rows - 1, size);
    if (height <= plane->mcu_height) {
        uint8_t *below = rows + (size_t)height * plane->stride;
        memcpy(below - 1, below - plane->stride - 1, size);
    }
}

/* The colours of a row of pixels, counted from the first row of the MCUs, from the pixel at `x` on. */
static const uint8_t *chroma_row(const pst_region *region, const pst_plane *plane, int row, long x)
{
    const long odd = x & 1, count = (odd + region->right - region->left + 1) / 2;
    const uint8_t *samples = plane->samples + (size_t)((region->v2 ? row >> 1 : row) + 1) * plane->stride;
    if (!region->h2)
        return samples + x;
    samples += x / 2;
    if (region->v2)
        pst_upsample_h2v2(samples, row & 1 ? samples + plane->stride : samples - plane->stride, count,
                          plane->upsampled);
    else
        pst_upsample_h2v1(samples, count, plane->upsampled);
    return plane->upsampled + odd;
}

static void make_pixels(const pst_region *region, int row, uint8_t *out)
{
    const pst_plane *planes = region->planes;
    const long x = region->left - region->mcu_left * region->mcu_width, width = region->right - region->left;
    const uint8_t *y = planes[0].samples + (size_t)(row + 1) * planes[0].stride + x;
    if (region->channels == 1)
        memcpy(out, y, (size_t)width);
    else if (region->components == 1)
        pst_gray_to_rgb(y, width, out);
    else
        pst_ycc_to_rgb(y, chroma_row(region, &planes[1], row, x), chroma_row(region, &planes[2], row, x), width, out,
                       region->avx2);
}

int pst_region_rows(pst_region *region)
{
    int count = 0;
    while (count == 0 && region->mcu_row < region->mcu_bottom) {
        if (!decode_mcu_row(region))
            return -1;
        for (int i = 1; i < region->components && region->h2; i++)
            extend_edges(region, &region->planes[i]);
        /* The last row waits for the samples below, where these count. */
        const long top = region->mcu_row * region->mcu_height;
        const int is_last = region->mcu_row + 1 == region->scan.mcu_rows;
        const long first = MAX(top - region->v2, region->top);
        const long end = MIN(top + region->mcu_height - (is_last ? 0 : region->v2), region->bottom);
        for (long y = first; y < end; y++, count++)
            make_pixels(region, (int)(y - top), region->rows + (size_t)count * region->stride);
        for (int i = 0; i < region->components && region->v2; i++) {
            pst_plane *plane = &region->planes[i];
            memcpy(plane->samples - 1, plane->samples - 1 + (size_t)plane->mcu_height * plane->stride,
                   plane->stride - PADDING);
        }
        region->mcu_row++;
    }
    return count;
}

/* libjpeg decodes all blocks from the first row of the image to the last one of a box, and all columns of these. Here only
 * blocks that the box needs are decoded. Others are passed over, or not looked at where an index or restart markers tell
 * where to go on. Rows of pixels come out as soon as a row of MCUs is there, so memory is that of one.
 *
 * Samples beyond the edges of the image are copies of those at the edges, so that upsampling is one formula.
 */
#include "region.h"

#include <string.h>

#include "idct.h"
#include "upsample.h"
#include "cpu.h"

#define BEFORE 32 /* bytes in front of a row of samples */

static size_t padded(long samples)
{
    return (size_t)(BEFORE + samples + PIXELS_SLACK + 31) / 32 * 32;
}

static long ceil_div(long value, long by)
{
    return (value + by - 1) / by;
}

/* The samples of a component, as libjpeg would have them: 0 where it upsamples in another way than here. */
static int open_component(component *c, const pst_region *b, const pst_frame *frame, int number, int scale)
{
    const pst_frame_component *from = &frame->component[number];
    c->size = 8 / scale;
    c->across = from->h;
    c->down = from->v;
    /* libjpeg shrinks colours of half the size less, where that makes upsampling unnecessary. */
    if (scale > 1 && b->width == 2 * c->size * c->across && b->height == 2 * c->size * c->down)
        c->size *= 2;
    c->columns = c->across * c->size;
    c->rows = c->down * c->size;
    c->width = ceil_div(frame->width * c->columns, frame->mcu_width);
    c->height = ceil_div(frame->height * c->rows, frame->mcu_height);
    c->twice_across = b->width == 2 * c->columns;
    c->twice_down = b->height == 2 * c->rows;
    make_quantiser(&c->by, frame->factors[from->quantisation]);
    /* Without neighbours to look at, libjpeg upsamples in other ways. */
    return !c->twice_across || (c->width > 2 && scale < 8);
}

int pst_region_open(pst_region *b, const pst_frame *frame, const uint8_t *data, size_t size, const uint8_t *entries,
                    size_t entries_size, int channels, int scale, const long box[4], int simd)
{
    if ((channels != 1 && channels != 3) || (scale != 1 && scale != 2 && scale != 4 && scale != 8) || box[0] < 0 ||
        box[1] < 0 || box[0] >= box[2] || box[1] >= box[3] || box[2] > ceil_div(frame->width, scale) ||
        box[3] > ceil_div(frame->height, scale))
        return 0;
    open_scan(&b->scan, &b->tables, frame);
    int context = 0;
    b->channels = channels;
    b->avx2 = simd && pst_cpu_has_avx2();
    b->width = frame->mcu_width / scale;
    b->height = frame->mcu_height / scale;
    b->late = 0;
    for (int i = 0; i < b->scan.components; i++) {
        component *c = &b->components[i];
        c->wanted = i == 0 || channels == 3;
        if (!open_component(c, b, frame, i, scale))
            return 0;
        b->late |= c->wanted && c->twice_down;
        context |= c->wanted && c->twice_across;
    }
    b->image_height = ceil_div(frame->height, scale);
    b->x = box[0];
    b->y = box[1];
    b->right = box[2];
    b->bottom = box[3];
    b->left = (b->x > context ? b->x - context : 0) / b->width;
    b->top = (b->y > b->late ? b->y - b->late : 0) / b->height;
    b->end = (b->right + context + b->width - 1) / b->width;
    b->end = b->end < b->scan.wide ? b->end : b->scan.wide;
    b->below = (b->bottom + b->late + b->height - 1) / b->height;
    b->below = b->below < b->scan.high ? b->below : b->scan.high;
    b->row = b->top;
    b->stride = (size_t)(b->right - b->x) * (size_t)channels + PIXELS_SLACK;
    return open_track(&b->track, &b->scan, data, size, frame->scan, frame->restart_interval, entries, entries_size);
}

size_t pst_entries_write(pst_region *b, const pst_frame *frame, const uint8_t *data, size_t size, long step, uint8_t *out,
                         size_t capacity)
{
    if (frame->restart_interval || step < 1 || step > 65535)
        return 0;
    open_scan(&b->scan, &b->tables, frame);
    return make_entries(&b->track, &b->scan, data, size, frame->scan, step, out, capacity);
}

/* Rows of the plane of a component. */
static size_t plane_rows(const component *c)
{
    return (size_t)c->rows + 2;
}

size_t pst_region_scratch(const pst_region *b)
{
    const long wide = b->end - b->left;
    size_t size = b->stride * (size_t)(b->height + 1) + 2 * padded(wide * b->width);
    for (int i = 0; i < b->scan.components; i++)
        size += b->components[i].wanted ? plane_rows(&b->components[i]) * padded(wide * b->components[i].columns) : 0;
    return size;
}

void pst_region_begin(pst_region *b, uint8_t *scratch)
{
    const long wide = b->end - b->left;
    for (int i = 0; i < b->scan.components; i++) {
        component *c = &b->components[i];
        if (!c->wanted)
            continue;
        c->stride = padded(wide * c->columns);
        c->plane = scratch + BEFORE;
        scratch += plane_rows(c) * c->stride;
    }
    for (int i = 0; i < 2; i++, scratch += padded(wide * b->width))
        b->colours[i] = scratch;
    b->rows = scratch;
}

/* Decode the next MCU to a column of the planes. */
static int decode_mcu(pst_region *b, long column)
{
    track *t = &b->track;
    _Alignas(32) int16_t block[72];
    for (int i = 0; i < b->scan.components; i++) {
        const component *c = &b->components[i];
        uint8_t *out = c->plane + c->stride + column * c->columns;
        for (int k = 0; k < c->across * c->down; k++) {
            uint8_t *to = out + (size_t)(k / c->across * c->size) * c->stride + k % c->across * c->size;
            int last = 1;
            ensure(&t->reader, BLOCK_BYTES);
            if (!c->wanted || c->size == 1) {
                if (!read_dc(&b->scan, &t->reader, i, &c->by, &t->dc[i], block))
                    return 0;
            } else {
                memset(block, 0, 64 * sizeof *block);
                last = read_block(&b->scan, &t->reader, i, &c->by, &t->dc[i], block);
                if (!last)
                    return 0;
            }
            if (c->wanted)
                idct(block, last - 1, c->size, to, (ptrdiff_t)c->stride, b->avx2);
        }
    }
    t->at++;
    return 1;
}

/* Copy what is at the edges of the image beyond them. */
static void extend(const pst_region *b, component *c)
{
    const long from = b->left * c->columns, left = c->width - from, rows = c->height - b->row * c->rows;
    for (int y = 1; y <= c->rows; y++) {
        uint8_t *row = c->plane + (size_t)y * c->stride;
        if (b->left == 0)
            row[-1] = row[0];
        if (b->end == b->scan.wide)
            row[left] = row[left - 1];
    }
    uint8_t *first = c->plane - 1;
    const size_t size = c->stride - BEFORE;
    if (b->row == 0)
        memcpy(first, first + c->stride, size);
    if (rows <= c->rows)
        memcpy(first + (size_t)(rows + 1) * c->stride, first + (size_t)rows * c->stride, size);
}

/* The colours of a row of pixels, counted from the first row of the MCUs, from the pixel at `from` on. */
static const uint8_t *colours_of(const pst_region *b, const component *c, int row, long from, uint8_t *out)
{
    const long width = b->right - b->x, skipped = from & 1;
    if (!c->twice_across)
        return c->plane + (size_t)(row + 1) * c->stride + from;
    const long count = (skipped + width + 1) / 2;
    const uint8_t *near = c->plane + (size_t)((c->twice_down ? row >> 1 : row) + 1) * c->stride + from / 2;
    if (!c->twice_down)
        upsample_across(near, count, out, b->avx2);
    else
        upsample_both(near, row & 1 ? near + c->stride : near - c->stride, count, out, b->avx2);
    return out + skipped;
}

static void make_pixels(const pst_region *b, int row, uint8_t *out)
{
    const component *y = b->components;
    const long from = b->x - b->left * b->width, width = b->right - b->x;
    const uint8_t *grey = y->plane + (ptrdiff_t)(row + 1) * (ptrdiff_t)y->stride + from;
    if (b->channels == 1)
        memcpy(out, grey, (size_t)width);
    else if (b->scan.components == 1)
        grey_to_rgb(grey, width, out);
    else
        to_rgb(grey, colours_of(b, y + 1, row, from, b->colours[0]), colours_of(b, y + 2, row, from, b->colours[1]), width,
               out, b->avx2);
}

int pst_region_rows(pst_region *b)
{
    int count = 0;
    while (count == 0 && b->row < b->below) {
        if (!go_to(&b->track, b->row, b->left, b->end))
            return -1;
        for (long column = 0; column < b->end - b->left; column++)
            if (!next_segment(&b->track) || !decode_mcu(b, column))
                return -1;
        for (int i = 0; i < b->scan.components; i++)
            if (b->components[i].wanted)
                extend(b, &b->components[i]);
        const long top = b->row * b->height;
        long from = top - b->late, to = b->row + 1 < b->scan.high ? top + b->height - b->late : b->image_height;
        from = from > b->y ? from : b->y;
        to = to < b->bottom ? to : b->bottom;
        if (to - from > b->height + b->late) /* more than there is room for: not the geometry that was opened */
            return -1;
        for (long y = from; y < to; y++, count++)
            make_pixels(b, (int)(y - top), b->rows + (size_t)count * b->stride);
        for (int i = 0; i < b->scan.components; i++) {
            component *c = &b->components[i];
            if (c->wanted)
                memcpy(c->plane - 1, c->plane - 1 + (size_t)c->rows * c->stride, c->stride - BEFORE);
        }
        b->row++;
    }
    return count;
}

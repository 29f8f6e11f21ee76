#include "decode.h"

#include <string.h>

/* Repeat an item, each time as often as it is there already. */
static void fill_items(uint8_t *out, const uint8_t *fill, size_t size, size_t bytes)
{
    if (bytes)
        memcpy(out, fill, size);
    for (size_t done = size; done < bytes; done *= 2)
        memcpy(out + done, out, done < bytes - done ? done : bytes - done);
}

static void fill_around(const pst_resize_job *whole, const int inside[4], const uint8_t *fill, uint8_t *out)
{
    const size_t item = (size_t)whole->item_size, pixel = whole->planar ? item : item * (size_t)whole->channels;
    const size_t width = (size_t)whole->out_width * pixel, right = (size_t)inside[2] * pixel;
    for (int plane = 0; plane < (whole->planar ? whole->channels : 1); plane++, fill += item) {
        for (int y = 0; y < whole->out_height; y++) {
            uint8_t *row = out + ((size_t)plane * whole->plane_stride + (size_t)y * whole->row_stride) * item;
            if (y < inside[1] || y >= inside[3]) {
                fill_items(row, fill, pixel, width);
            } else {
                fill_items(row, fill, pixel, (size_t)inside[0] * pixel);
                fill_items(row + right, fill, pixel, width - right);
            }
        }
    }
}

int64_t pst_batch_draw(const pst_resize_job *whole, size_t stride, const uint8_t *fill, pst_batch_image *images,
                       size_t count, char *status)
{
    int64_t resizing = 0;
    uint8_t *out = whole->out;
    for (size_t i = 0; i < count; i++, out += stride * (size_t)whole->item_size) {
        pst_request *req = &images[i].request;
        status[i] = req->job.out_width < 1 || req->job.out_height < 1 || pst_draw(req) != PST_DONE;
        resizing += req->resizing;
        if (fill)
            fill_around(whole, images[i].inside, fill, out);
    }
    return resizing;
}

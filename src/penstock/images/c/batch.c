#include "batch.h"

#include <string.h>

#include "decode.h"

static void fill_entries(uint8_t *out, const uint8_t *fill, size_t pattern, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += pattern)
        memcpy(out + i, fill, pattern);
}

/* What is outside of `inside`. */
static void fill_around(const pst_batch *batch, const int inside[4], uint8_t *out)
{
    const pst_resize_job *job = &batch->job;
    const size_t entry = (size_t)job->item_size, pixel = entry * (size_t)(job->planar ? 1 : job->channels);
    const size_t width = (size_t)job->out_width * pixel;
    for (int c = 0; c < (job->planar ? job->channels : 1); c++) {
        const uint8_t *fill = batch->fill + (size_t)c * entry;
        for (int y = 0; y < job->out_height; y++) {
            uint8_t *row = out + ((size_t)c * job->plane_stride + (size_t)y * job->row_stride) * entry;
            const int outside = y < inside[0] || y >= inside[2];
            const size_t left = outside ? width : (size_t)inside[1] * pixel, right = (size_t)inside[3] * pixel;
            fill_entries(row, fill, pixel, left);
            if (!outside)
                fill_entries(row + right, fill, pixel, width - right);
        }
    }
}

static int draw(pst_batch *batch, const pst_batch_image *image, uint8_t *out)
{
    const int *inside = image->inside;
    pst_resize_job job = batch->job;
    const size_t pixel = (size_t)(job.planar ? 1 : job.channels);
    job.out = out + ((size_t)inside[0] * job.row_stride + (size_t)inside[1] * pixel) * (size_t)job.item_size;
    job.out_height = inside[2] - inside[0];
    job.out_width = inside[3] - inside[1];
    job.flip_x = image->flip_x;
    job.flip_y = image->flip_y;
    if (job.out_height < 1 || job.out_width < 1)
        return 0;
    if (!batch->files) {
        job.left = image->box[0];
        job.top = image->box[1];
        job.right = image->box[2];
        job.bottom = image->box[3];
        job.width = image->width;
        job.height = image->height;
        return pst_resize_valid(&job) && pst_resize(&job, image->data, batch->stride);
    }
    pst_request req = {0};
    req.data = image->data;
    req.size = image->size;
    req.left = image->box[0];
    req.top = image->box[1];
    req.right = image->box[2];
    req.bottom = image->box[3];
    req.max_pixels = batch->max_pixels;
    req.expected_width = image->width;
    req.expected_height = image->height;
    req.own = 1;
    req.job = &job;
    enum pst_outcome outcome = pst_decode(&req);
    batch->resizing += req.resizing;
    return outcome == PST_DONE;
}

void pst_batch_draw(pst_batch *batch, const pst_batch_image *images, size_t count, char *status)
{
    uint8_t *out = batch->job.out;
    for (size_t i = 0; i < count; i++, out += batch->result * (size_t)batch->job.item_size) {
        status[i] = (char)!draw(batch, &images[i], out);
        if (batch->fill)
            fill_around(batch, images[i].inside, out);
    }
}

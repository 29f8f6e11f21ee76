/* The mutator keeps a file's structure: libFuzzer's own changes seldom get past the lengths of segments. A part of the
 * file is changed by libFuzzer, a segment with its content and length, the data of a scan, or the tail; or segments are
 * repeated, swapped or left out. */
#include "input.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_PARTS 64

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed);

int fuzz_open(fuzz_input *in, const uint8_t *data, size_t size)
{
    if (size < TAIL)
        return 0;
    in->size = size - TAIL;
    in->data = malloc(in->size ? in->size : 1);
    memcpy(in->data, data, in->size);
    memcpy(in->tail, data + in->size, TAIL);
    in->taken = 0;
    return 1;
}

void fuzz_close(fuzz_input *in)
{
    free(in->data);
}

int fuzz_number(fuzz_input *in, int most)
{
    EXPECT(in->taken < TAIL, "the tail has not enough bytes");
    return in->tail[in->taken++] % (most + 1);
}

static void interval(fuzz_input *in, long length, double *from, double *to)
{
    int edges = fuzz_number(in, 3), first = fuzz_number(in, 255), part = fuzz_number(in, 255);
    *from = edges & 1 ? 0 : (double)length * first / 256;
    *to = edges & 2 ? (double)length : *from + ((double)length - *from) * (part + 1) / 256;
}

fuzz_box fuzz_take_box(fuzz_input *in, fuzz_size size)
{
    fuzz_box box;
    interval(in, size.width, &box.left, &box.right);
    interval(in, size.height, &box.top, &box.bottom);
    return box;
}

pst_request fuzz_request(const fuzz_input *in, const pst_resize_job *job, int scale)
{
    pst_request req;
    memset(&req, 0, sizeof req);
    req.data = in->data;
    req.size = in->size;
    req.job = *job;
    req.scale = scale;
    req.max_pixels = MAX_PIXELS;
    return req;
}

long fuzz_up(double value, int scale)
{
    const long low = (long)(value / scale);
    return low + ((double)low * scale < value);
}

pst_resize_job fuzz_pixels(const fuzz_box *box, int scale, int channels)
{
    pst_resize_job job;
    memset(&job, 0, sizeof job);
    job.left = box->left;
    job.top = box->top;
    job.right = box->right;
    job.bottom = box->bottom;
    job.channels = channels;
    job.item_size = 1;
    job.out_width = (int)(fuzz_up(box->right, scale) - (long)(box->left / scale));
    job.out_height = (int)(fuzz_up(box->bottom, scale) - (long)(box->top / scale));
    job.row_stride = (size_t)(job.out_width * channels);
    job.plane_stride = 1;
    job.out = malloc(job.row_stride * (size_t)job.out_height);
    return job;
}

fuzz_size fuzz_size_of(const uint8_t *data, size_t size, int own)
{
    /* No image is as large as this box: the error says how large it is. */
    const pst_resize_job job = {.right = 65535.5, .bottom = 65535.5, .out_width = 1, .out_height = 1, .channels = 1};
    pst_request req = fuzz_request(&(fuzz_input){.data = (uint8_t *)data, .size = size}, &job, 0);
    fuzz_size found = {PST_DONE, 0, 0};
    req.own = own;
    found.outcome = pst_draw(&req);
    if (found.outcome == PST_OUTSIDE)
        EXPECT(sscanf(req.message, "%ld x %ld", &found.width, &found.height) == 2, "no size: %s", req.message);
    return found;
}

void fuzz_fail(const char *file, int line, const char *condition, const char *format, ...)
{
    va_list arguments;
    fprintf(stderr, "%s:%d: not so: %s: ", file, line, condition);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    abort();
}

/* The mutator. */

/* Where the segments of a file begin, the data of a scan being a part of its own, and behind the last one, where the
 * tail begins: how many parts. */
static int cut(const uint8_t *data, size_t size, size_t starts[MAX_PARTS + 1])
{
    int count = 0;
    for (size_t at = 0; at < size && count < MAX_PARTS;) {
        starts[count++] = at;
        const int marker = at + 4 <= size && data[at] == 0xFF ? data[at + 1] : 0;
        size_t length = 0;
        if (marker >= 0xC0 && (marker < 0xD0 || marker > 0xD9))
            length = 2 + (size_t)(data[at + 2] << 8 | data[at + 3]);
        else if (marker == 0xD8)
            length = 2;
        if (length && length < size - at) {
            at += length;
            continue;
        }
        /* To the next marker that has a meaning between scans. */
        for (at += length ? 4 : 1; at + 1 < size; at++)
            if (data[at] == 0xFF && data[at + 1] >= 0xC0 && (data[at + 1] < 0xD0 || data[at + 1] > 0xD8))
                break;
        if (at + 1 >= size)
            at = size;
    }
    starts[count] = size;
    return count;
}

/* Replace `old` bytes at `at` by others; the new size, or 0 if there is no room. */
static size_t replace(uint8_t *data, size_t size, size_t max_size, size_t at, size_t old, const uint8_t *by, size_t new)
{
    if (size - old + new > max_size)
        return 0;
    uint8_t *copy = malloc(new + 1);
    memcpy(copy, by, new);
    memmove(data + at + new, data + at + old, size - at - old);
    memcpy(data + at, copy, new);
    free(copy);
    return size - old + new;
}

/* Let libFuzzer change a part from `skipped` bytes behind its beginning on, and correct its length. */
static size_t mutate_part(uint8_t *data, size_t size, size_t max_size, size_t start, size_t length, size_t skipped)
{
    uint8_t part[4096];
    const size_t old = length - skipped;
    if (old > sizeof part / 2)
        return 0;
    memcpy(part, data + start + skipped, old);
    const size_t new = LLVMFuzzerMutate(part, old, sizeof part);
    if (skipped == 4) {
        data[start + 2] = (uint8_t)((new + 2) >> 8);
        data[start + 3] = (uint8_t)(new + 2);
    }
    return replace(data, size, max_size, start + skipped, old, part, new);
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed)
{
    size_t starts[MAX_PARTS + 1], changed = 0;
    if (size <= TAIL + 4 || seed % 8 == 0)
        return LLVMFuzzerMutate(data, size, max_size);
    if (seed % 8 == 1) {
        LLVMFuzzerMutate(data + size - TAIL, TAIL, TAIL);
        return size;
    }
    const int count = cut(data, size - TAIL, starts), at = (int)(seed / 8 % (unsigned)count);
    const int other = (int)(seed / 512 % (unsigned)count);
    const size_t start = starts[at], length = starts[at + 1] - start;
    const int is_segment = length > 4 && data[start] == 0xFF && data[start + 1] >= 0xC0;
    switch (seed / 32768 % 8) {
    case 0: /* one more, elsewhere */
        changed = replace(data, size, max_size, starts[other], 0, data + start, length);
        break;
    case 1: /* in the place of another one */
        changed = replace(data, size, max_size, starts[other], starts[other + 1] - starts[other], data + start, length);
        break;
    case 2: /* left out */
        changed = replace(data, size, max_size, start, length, data, 0);
        break;
    default:
        changed = mutate_part(data, size, max_size, start, length, is_segment ? 4 : 0);
    }
    return changed ? changed : LLVMFuzzerMutate(data, size, max_size);
}

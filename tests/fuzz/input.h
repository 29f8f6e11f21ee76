/* What the fuzz targets have in common.
 *
 * An input is a JPEG and, behind it, TAIL bytes from which a target takes its arguments: the box, the size of the
 * drawing and so on. They stand at the end so that a change of the file's length does not change them. */
#ifndef PENSTOCK_FUZZ_INPUT_H
#define PENSTOCK_FUZZ_INPUT_H

#include <stddef.h>
#include <stdint.h>

#include "decode.h"

#define TAIL 48
#define MAX_PIXELS (1 << 16)

typedef struct {
    uint8_t *data; /* the JPEG, in memory of its own, so that reading beyond it is noticed */
    size_t size;
    uint8_t tail[TAIL];
    int taken; /* bytes of the tail */
} fuzz_input;

/* 0 for an input that is too short. */
int fuzz_open(fuzz_input *in, const uint8_t *data, size_t size);
void fuzz_close(fuzz_input *in);

/* The next byte of the tail, as a number from 0 to `most`. */
int fuzz_number(fuzz_input *in, int most);

/* In pixels of the image. */
typedef struct {
    double left, top, right, bottom;
} fuzz_box;

typedef struct {
    enum pst_outcome outcome; /* PST_OUTSIDE where the header is read */
    long width, height;
} fuzz_size;

/* The size of a file, by our own decoder where that takes it, or by libjpeg alone. */
fuzz_size fuzz_size_of(const uint8_t *data, size_t size, int own);

/* A box of the image, with each edge at the image's own in half of all cases. */
fuzz_box fuzz_take_box(fuzz_input *in, fuzz_size size);

/* A request for what `job` says, of the input. */
pst_request fuzz_request(const fuzz_input *in, const pst_resize_job *job, int scale);

/* A job for the pixels of a box, into new memory of exactly their size. */
pst_resize_job fuzz_pixels(const fuzz_box *box, int scale, int channels);

long fuzz_up(double value, int scale);

/* End the process, with what was expected, where it is not so. */
#define EXPECT(condition, ...)                                                                                         \
    do                                                                                                                 \
        if (!(condition))                                                                                              \
            fuzz_fail(__FILE__, __LINE__, #condition, __VA_ARGS__);                                                    \
    while (0)
_Noreturn void fuzz_fail(const char *file, int line, const char *condition, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

#endif

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

/* A box of the image, with an edge at the image's own in half of all cases. */
void fuzz_box(fuzz_input *in, pst_request *req, long width, long height);

/* Decode into new memory at `req->out`, which the caller frees: of the size that is needed, and no byte more. */
enum pst_outcome fuzz_decode(pst_request *req);

/* End the process, with what was expected, where it is not so. */
#define EXPECT(condition, ...) \
    do \
        if (!(condition)) \
            fuzz_fail(__FILE__, __LINE__, #condition, __VA_ARGS__); \
    while (0)
_Noreturn void fuzz_fail(const char *file, int line, const char *condition, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

#endif

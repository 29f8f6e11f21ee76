/* A JPEG with other restart markers. */
#ifndef PENSTOCK_TRANSCODE_H
#define PENSTOCK_TRANSCODE_H

#include <stddef.h>
#include <stdint.h>

#include "libjpeg.h"

typedef struct {
    const uint8_t *data;
    size_t size;
    long interval; /* MCUs from one marker to the next; 0 for none, -1 for a choice by the width */
    unsigned long long max_pixels;
    uint8_t *out;
    size_t capacity;

    size_t needed; /* bytes that were written, or would have been */
    char message[JMSG_LENGTH_MAX];
} pst_transcoding;

/* PST_DONE with `needed` bytes in `out`, or as many as there is room for; anything else for a file that stays as it is.
 */
enum pst_outcome pst_transcode(pst_transcoding *t);

#endif

/* Calls of libjpeg-turbo. None of its errors ends the process: each becomes an outcome with a message. */
#ifndef PENSTOCK_LIBJPEG_H
#define PENSTOCK_LIBJPEG_H

#include <setjmp.h>
#include <stdio.h>

#include <jpeglib.h>

#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 2000000
#error "the scanline API of libjpeg-turbo 2 or newer is needed (jpeg_crop_scanline, jpeg_skip_scanlines)"
#endif

enum pst_outcome {
    PST_DONE,
    PST_DAMAGED,     /* or truncated */
    PST_UNSUPPORTED, /* a kind of JPEG that is not decoded here */
    PST_LIMITED,     /* too many pixels or scans */
    PST_OUTSIDE,     /* the box is not inside the image, or a number is out of range */
    PST_NO_MEMORY
};

/* An error manager for objects of libjpeg: zeroed by the caller, who sets `message` and what is below it. It must not
 * live in the function that calls setjmp. */
typedef struct {
    struct jpeg_error_mgr manager; /* first: libjpeg's pointer to it is a pointer to all of it */
    struct jpeg_progress_mgr progress;
    struct jpeg_decompress_struct cinfo;
    jmp_buf jump;
    enum pst_outcome outcome;
    int frame;     /* the marker of the frame header that libjpeg has read: SOF0 .. SOF15 */
    char *message; /* JMSG_LENGTH_MAX bytes */
    int tolerant;  /* warnings are no errors */
} pst_libjpeg;

typedef enum pst_outcome pst_libjpeg_work(j_decompress_ptr cinfo, void *argument);

/* Call `work` with a new object for decompression, and free that. */
enum pst_outcome pst_libjpeg_run(pst_libjpeg *lib, pst_libjpeg_work *work, void *argument);

#endif

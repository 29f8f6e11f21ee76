#include "libjpeg.h"

#include <string.h>

#include <jerror.h>

#define MAX_SCANS 200 /* as in jpeg.py: a small file can ask for thousands of passes over a large picture */

static _Noreturn void leave(pst_libjpeg *lib, enum pst_outcome outcome)
{
    lib->outcome = outcome;
    longjmp(lib->jump, 1);
}

static void on_error(j_common_ptr cinfo)
{
    pst_libjpeg *lib = (pst_libjpeg *)cinfo->err;
    lib->manager.format_message(cinfo, lib->message);
    leave(lib, lib->manager.msg_code == JERR_OUT_OF_MEMORY ? PST_NO_MEMORY : PST_DAMAGED);
}

/* Warnings (-1) mean missing or wrong pixels, but for those after which the picture is whole. That libjpeg has read a
 * frame header is a message, too. */
static void on_message(j_common_ptr cinfo, int level)
{
    pst_libjpeg *lib = (pst_libjpeg *)cinfo->err;
    if (lib->manager.msg_code == JTRC_SOF)
        lib->frame = lib->manager.msg_parm.i[0];
    if (level >= 0 || lib->tolerant)
        return;
    switch (lib->manager.msg_code) {
    case JWRN_EXTRANEOUS_DATA:
    case JWRN_JFIF_MAJOR:
    case JWRN_ADOBE_XFORM:
    case JWRN_BOGUS_PROGRESSION:
        return;
    default:
        on_error(cinfo);
    }
}

static void on_progress(j_common_ptr cinfo)
{
    pst_libjpeg *lib = (pst_libjpeg *)cinfo->err;
    if (cinfo->is_decompressor && ((j_decompress_ptr)cinfo)->input_scan_number > MAX_SCANS) {
        snprintf(lib->message, JMSG_LENGTH_MAX, "more than %d scans", MAX_SCANS);
        leave(lib, PST_LIMITED);
    }
}

/* The only function with a setjmp. `lib` is zeroed, so that destroying the object is right at any point. */
enum pst_outcome pst_libjpeg_run(pst_libjpeg *lib, pst_libjpeg_work *work, void *argument)
{
    lib->cinfo.err = jpeg_std_error(&lib->manager);
    lib->manager.error_exit = on_error;
    lib->manager.emit_message = on_message;
    if (setjmp(lib->jump) == 0) {
        jpeg_create_decompress(&lib->cinfo);
        lib->progress.progress_monitor = on_progress;
        lib->cinfo.progress = &lib->progress;
        lib->outcome = work(&lib->cinfo, argument);
    }
    jpeg_destroy_decompress(&lib->cinfo);
    return lib->outcome;
}

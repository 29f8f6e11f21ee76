/* The extension module: what the functions mean is said in penstock/images/native.py and resize.py.
 *
 * Sizes, shapes, strides and boxes are checked here, before anything is written. The GIL is released while pixels are
 * made.
 */
#include "cpython.h"

#include <string.h>

#include "batch.h"
#include "decode.h"
#include "random.h"
#include "transcode.h"
#include "resize.h"
#include "cpu.h"

static PyObject *raised(enum pst_outcome outcome, const pst_request *req)
{
    switch (outcome) {
    case PST_UNSUPPORTED:
        PyErr_SetString(PyExc_NotImplementedError, req->message);
        break;
    case PST_LIMITED:
        PyErr_SetString(PyExc_OverflowError, req->message);
        break;
    case PST_OUTSIDE:
        PyErr_SetString(PyExc_IndexError, req->message);
        break;
    case PST_NO_MEMORY:
        PyErr_SetString(PyExc_MemoryError, req->message);
        break;
    default: /* the text may hold bytes of the file */
        for (const char *c = req->message; *c; c++)
            if ((unsigned char)*c > 126) {
                PyErr_SetString(PyExc_ValueError, "damaged");
                return NULL;
            }
        PyErr_SetString(PyExc_ValueError, req->message);
    }
    return NULL;
}

/* Whether this can be a box of an image; nothing that is not a number is. */
static int is_box(double left, double top, double right, double bottom)
{
    return left >= 0 && left < right && right < 65536 && top >= 0 && top < bottom && bottom < 65536;
}

/* Get a buffer; None is one without memory. */
static int get_view(PyObject *object, Py_buffer *view, int flags)
{
    return object == Py_None || PyObject_GetBuffer(object, view, flags) == 0;
}

static void release_views(Py_buffer *views, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++)
        PyBuffer_Release(&views[i]);
}

/* How many entries lie from one index of a dimension to the next: at least so many, whole ones; 0 where that is not so.
 */
static size_t item_stride(const Py_buffer *view, int dimension, Py_ssize_t least)
{
    Py_ssize_t bytes = view->strides[dimension];
    if (view->shape[dimension] == 1)
        return (size_t)least;
    return bytes % view->itemsize == 0 && bytes / view->itemsize >= least ? (size_t)(bytes / view->itemsize) : 0;
}

/* What a job says of its result, from what holds that and its table; 0 if these do not go together. Rows and planes may
 * be apart. With `first` 1 the buffer holds the results of a batch. */
static int set_result(pst_resize_job *job, const Py_buffer *out, int first, const Py_buffer *table)
{
    const int down = job->planar ? first + 1 : first, across = down + 1;
    if (out->ndim != first + 3 || out->itemsize < 1)
        return 0;
    const Py_ssize_t channels = out->shape[job->planar ? first : first + 2], pixel = job->planar ? 1 : channels;
    if ((channels != 1 && channels != 3) || out->shape[down] < 1 || out->shape[down] > PST_RESIZE_MAX_SIDE ||
        out->shape[across] < 1 || out->shape[across] > PST_RESIZE_MAX_SIDE)
        return 0;
    job->channels = (int)channels;
    job->out_height = (int)out->shape[down];
    job->out_width = (int)out->shape[across];
    job->item_size = (int)out->itemsize;
    job->out = out->buf;
    job->table = table->buf;
    job->row_stride = item_stride(out, down, job->out_width * pixel);
    job->plane_stride = job->planar ? item_stride(out, first, (Py_ssize_t)job->row_stride * job->out_height) : 1;
    if (!job->row_stride || !job->plane_stride || item_stride(out, across, pixel) != (size_t)pixel ||
        item_stride(out, first + 2, 1) != 1 || (uintptr_t)job->out % (size_t)job->item_size)
        return 0;
    if (!table->buf)
        return job->item_size == 1;
    return table->ndim == 2 && table->shape[0] == channels && table->shape[1] == 256 &&
           table->itemsize == out->itemsize && (uintptr_t)job->table % (size_t)job->item_size == 0 &&
           (job->item_size == 1 || job->item_size == 2 || job->item_size == 4 || job->item_size == 8);
}

/* The sizes of a job's source, from what holds its pixels; 0 if these do not go together. */
static int set_source(pst_resize_job *job, const Py_buffer *source, int first)
{
    if (source->ndim != first + 3 || source->itemsize != 1)
        return 0;
    const Py_ssize_t height = source->shape[first], width = source->shape[first + 1], pixel = source->shape[first + 2];
    if (height < 1 || height > PST_RESIZE_MAX_SIDE || width < 1 || width > PST_RESIZE_MAX_SIDE ||
        (pixel != job->channels && (pixel != 4 || job->channels != 3)))
        return 0;
    job->height = (int)height;
    job->width = (int)width;
    job->pixel_size = (int)pixel;
    return source->strides[first + 2] == 1 && source->strides[first + 1] == pixel;
}

PyDoc_STRVAR(resize_doc,
             "resize(source, out, left, top, right, bottom, bicubic, antialias, flip_x, flip_y, table, planar, "
             "simd)\n"
             "--\n\n"
             "Resize a box of `source` into `out`; a ValueError if their shapes and types do not go together.");

static PyObject *resize(PyObject *module, PyObject *args)
{
    enum { SOURCE, OUT, TABLE, VIEWS };
    PyObject *from, *to, *lookup, *result = NULL;
    Py_buffer views[VIEWS] = {{0}};
    pst_resize_job job = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "OOddddppppOpp", &from, &to, &job.left, &job.top, &job.right, &job.bottom, &job.bicubic,
                          &job.antialias, &job.flip_x, &job.flip_y, &lookup, &job.planar, &job.simd))
        return NULL;
    if (get_view(from, &views[SOURCE], PyBUF_STRIDED_RO) && get_view(to, &views[OUT], PyBUF_STRIDED) &&
        get_view(lookup, &views[TABLE], PyBUF_C_CONTIGUOUS)) {
        if (set_result(&job, &views[OUT], 0, &views[TABLE]) && set_source(&job, &views[SOURCE], 0) &&
            pst_resize_valid(&job)) {
            int done;
            Py_BEGIN_ALLOW_THREADS
                done = pst_resize(&job, views[SOURCE].buf, views[SOURCE].strides[0]);
            Py_END_ALLOW_THREADS
            result = done ? Py_NewRef(Py_None) : PyErr_NoMemory();
        } else {
            PyErr_SetString(PyExc_ValueError, "source, box, table and result do not go together");
        }
    }
    release_views(views, VIEWS);
    return result;
}

PyDoc_STRVAR(draw_doc, "draw(data, out, left, top, right, bottom, bicubic, antialias, flip_x, flip_y, table, planar, "
                       "max_pixels, width, height, entries, scale, own, partial, simd)\n"
                       "--\n\n"
                       "Decode a box and resize it into `out`: nanoseconds of resizing.");

static PyObject *draw(PyObject *module, PyObject *args)
{
    enum { DATA, ENTRIES, OUT, TABLE, VIEWS };
    PyObject *to, *lookup, *result = NULL;
    Py_buffer views[VIEWS] = {{0}};
    pst_request req = {0};
    pst_resize_job job = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "y*OddddppppOpKllz*ippp", &views[DATA], &to, &req.left, &req.top, &req.right,
                          &req.bottom, &job.bicubic, &job.antialias, &job.flip_x, &job.flip_y, &lookup, &job.planar,
                          &req.max_pixels, &req.expected_width, &req.expected_height, &views[ENTRIES], &req.scale,
                          &req.own, &req.partial, &job.simd))
        return NULL;
    if (get_view(to, &views[OUT], PyBUF_STRIDED) && get_view(lookup, &views[TABLE], PyBUF_C_CONTIGUOUS)) {
        const int is_scale = req.scale == 0 || req.scale == 1 || req.scale == 2 || req.scale == 4 || req.scale == 8;
        if (is_scale && is_box(req.left, req.top, req.right, req.bottom) &&
            set_result(&job, &views[OUT], 0, &views[TABLE])) {
            enum pst_outcome outcome;
            req.data = views[DATA].buf;
            req.size = (size_t)views[DATA].len;
            req.entries = views[ENTRIES].buf;
            req.entries_size = (size_t)views[ENTRIES].len;
            req.job = &job;
            Py_BEGIN_ALLOW_THREADS
                outcome = pst_decode(&req);
            Py_END_ALLOW_THREADS
            result = outcome == PST_DONE ? PyLong_FromLongLong(req.resizing) : raised(outcome, &req);
        } else {
            PyErr_SetString(PyExc_IndexError, "box, scale, table and result do not go together");
        }
    }
    release_views(views, VIEWS);
    return result;
}

/* Batches. */

/* Whether a buffer is an array (rows, columns), or (rows,) with columns -1, of a type, aligned; it is in C order. */
static int is_array(const Py_buffer *view, const char *formats, size_t itemsize, Py_ssize_t rows, Py_ssize_t columns)
{
    return view->ndim == (columns < 0 ? 1 : 2) && view->shape[0] == rows &&
           (columns < 0 || view->shape[1] == columns) && view->itemsize == (Py_ssize_t)itemsize &&
           (uintptr_t)view->buf % itemsize == 0 && view->format && view->format[0] && !view->format[1] &&
           strchr(formats, view->format[0]);
}

/* The buffers of a sequence of bytes-like objects, to be released and freed. */
static Py_buffer *get_files(PyObject *sources, Py_ssize_t *count)
{
    PyObject *items = PySequence_Tuple(sources);
    if (!items)
        return NULL;
    *count = PyTuple_Size(items);
    Py_buffer *files = PyMem_Calloc((size_t)*count + 1, sizeof *files);
    if (!files)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; files && i < *count; i++)
        if (PyObject_GetBuffer(PyTuple_GetItem(items, i), &files[i], PyBUF_SIMPLE) < 0) {
            release_views(files, i);
            PyMem_Free(files);
            files = NULL;
        }
    Py_DECREF(items);
    return files;
}

/* The arguments of `draw_batch` that are arrays. */
enum { OUT, BOXES, FLIPS, INSIDE, FILL, TABLE, SIZES, PIXELS, VIEWS };

/* What is said of each image; 0 if that is out of range. It is copied, since other threads may change it. */
static int set_images(pst_batch_image *images, Py_ssize_t count, const pst_batch *batch, const Py_buffer *views,
                      const Py_buffer *files)
{
    const double *box = views[BOXES].buf;
    const uint8_t *flips = views[FLIPS].buf;
    const int32_t *inside = views[INSIDE].buf, *size = views[SIZES].buf;
    const pst_resize_job *job = &batch->job;
    for (Py_ssize_t i = 0; i < count; i++) {
        pst_batch_image *image = &images[i];
        memcpy(image->box, box + 4 * i, sizeof image->box);
        if (!is_box(image->box[0], image->box[1], image->box[2], image->box[3]))
            return 0;
        image->inside[2] = job->out_height;
        image->inside[3] = job->out_width;
        if (inside)
            memcpy(image->inside, inside + 4 * i, sizeof image->inside);
        if (image->inside[0] < 0 || image->inside[0] > image->inside[2] || image->inside[2] > job->out_height ||
            image->inside[1] < 0 || image->inside[1] > image->inside[3] || image->inside[3] > job->out_width)
            return 0;
        image->flip_x = flips && flips[2 * i];
        image->flip_y = flips && flips[2 * i + 1];
        image->width = size ? size[2 * i] : job->width;
        image->height = size ? size[2 * i + 1] : job->height;
        if (image->width < 0 || image->height < 0)
            return 0;
        if (files) {
            image->data = files[i].buf;
            image->size = (size_t)files[i].len;
        } else {
            image->data = (const uint8_t *)views[PIXELS].buf + i * views[PIXELS].strides[0];
            if (image->width != job->width || image->height != job->height || image->box[2] > job->width ||
                image->box[3] > job->height)
                return 0;
        }
    }
    return 1;
}

/* Whether the arguments go together: shapes, types and strides. */
static int set_batch(pst_batch *batch, const Py_buffer *views, Py_ssize_t *count)
{
    const Py_buffer *out = &views[OUT], *fill = &views[FILL], *pixels = &views[PIXELS];
    if (!set_result(&batch->job, out, 1, &views[TABLE]) || (!batch->files && !set_source(&batch->job, pixels, 1)))
        return 0;
    *count = out->shape[0];
    batch->stride = batch->files ? 0 : pixels->strides[1];
    batch->fill = fill->buf;
    batch->result = item_stride(out, 0,
                                batch->job.planar ? (Py_ssize_t)batch->job.plane_stride * batch->job.channels
                                                  : (Py_ssize_t)batch->job.row_stride * batch->job.out_height);
    return (batch->result || *count == 0) && (batch->files || pixels->shape[0] == *count) &&
           is_array(&views[BOXES], "d", sizeof(double), *count, 4) &&
           (!views[FLIPS].buf || is_array(&views[FLIPS], "B?", 1, *count, 2)) &&
           (!views[INSIDE].buf || is_array(&views[INSIDE], "il", sizeof(int32_t), *count, 4)) &&
           (!views[SIZES].buf || is_array(&views[SIZES], "il", sizeof(int32_t), *count, 2)) &&
           (views[INSIDE].buf != NULL) == (fill->buf != NULL) &&
           (!fill->buf ||
            (fill->ndim == 1 && fill->shape[0] == batch->job.channels && fill->itemsize == out->itemsize));
}

PyDoc_STRVAR(draw_batch_doc, "draw_batch(sources, out, boxes, flips, inside, fill, table, bicubic, antialias, planar, "
                             "max_pixels, sizes, simd)\n"
                             "--\n\n"
                             "Draw an image of each source into its place in `out`: (a byte for each, which is 0 where "
                             "that is done, nanoseconds of resizing).");

static PyObject *draw_batch(PyObject *module, PyObject *args)
{
    PyObject *sources, *objects[VIEWS] = {NULL}, *result = NULL;
    Py_buffer views[VIEWS] = {{0}}, *files = NULL;
    Py_ssize_t count = 0, given = 0;
    pst_batch batch = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOOOOpppKOp", &sources, &objects[OUT], &objects[BOXES], &objects[FLIPS],
                          &objects[INSIDE], &objects[FILL], &objects[TABLE], &batch.job.bicubic, &batch.job.antialias,
                          &batch.job.planar, &batch.max_pixels, &objects[SIZES], &batch.job.simd))
        return NULL;
    batch.files = !PyObject_CheckBuffer(sources);
    objects[PIXELS] = batch.files ? Py_None : sources;
    if (batch.files && !(files = get_files(sources, &given)))
        return NULL;
    int got = 1;
    for (int i = 0; got && i < VIEWS; i++)
        got = get_view(objects[i], &views[i],
                       i == OUT      ? PyBUF_STRIDED
                       : i == PIXELS ? PyBUF_STRIDED_RO
                                     : PyBUF_C_CONTIGUOUS | PyBUF_FORMAT);
    if (got && set_batch(&batch, views, &count) && (!files || given == count)) {
        pst_batch_image *images = PyMem_Calloc((size_t)count + 1, sizeof *images);
        PyObject *status = PyBytes_FromStringAndSize(NULL, count);
        if (!images || !status) {
            PyErr_NoMemory();
        } else if (set_images(images, count, &batch, views, files)) {
            char *states = PyBytes_AsString(status);
            Py_BEGIN_ALLOW_THREADS
                pst_batch_draw(&batch, images, (size_t)count, states);
            Py_END_ALLOW_THREADS
            result = Py_BuildValue("OL", status, (long long)batch.resizing);
        } else {
            PyErr_SetString(PyExc_ValueError, "a box, a size or a place in the result is out of range");
        }
        Py_XDECREF(status);
        PyMem_Free(images);
    } else if (got) {
        PyErr_SetString(PyExc_ValueError, "the shapes and types of the arrays do not go together");
    }
    release_views(views, VIEWS);
    release_views(files, given);
    PyMem_Free(files);
    return result;
}

PyDoc_STRVAR(sizes_doc,
             "sizes(sources, out)\n"
             "--\n\n"
             "Write the width and height of each JPEG file into `out`, int32 (n, 2); 0 x 0 for files that the "
             "extension's own decoder does not take.");

static PyObject *sizes(PyObject *module, PyObject *args)
{
    PyObject *sources, *to, *result = NULL;
    Py_buffer out = {0}, *files;
    Py_ssize_t count;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO", &sources, &to) || !(files = get_files(sources, &count)))
        return NULL;
    if (get_view(to, &out, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | PyBUF_WRITABLE)) {
        if (is_array(&out, "il", sizeof(int32_t), count, 2)) {
            int32_t *size = out.buf;
            for (Py_ssize_t i = 0; i < count; i++, size += 2)
                pst_size(files[i].buf, (size_t)files[i].len, size);
            result = Py_NewRef(Py_None);
        } else {
            PyErr_SetString(PyExc_ValueError, "out must be int32 (n, 2), for n files");
        }
    }
    PyBuffer_Release(&out);
    release_views(files, count);
    PyMem_Free(files);
    return result;
}

PyDoc_STRVAR(uniform_doc,
             "uniform(keys, out)\n"
             "--\n\n"
             "Write the first k random numbers of each of n keys, uint64 (n,), into `out`, float64 (n, k).");

static PyObject *uniform(PyObject *module, PyObject *args)
{
    PyObject *from, *to, *result = NULL;
    Py_buffer keys = {0}, out = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "OO", &from, &to))
        return NULL;
    if (get_view(from, &keys, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) &&
        get_view(to, &out, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | PyBUF_WRITABLE)) {
        const Py_ssize_t rows = keys.ndim == 1 ? keys.shape[0] : 0, columns = out.ndim == 2 ? out.shape[1] : 0;
        if (is_array(&keys, "LQ", sizeof(uint64_t), rows, -1) && is_array(&out, "d", sizeof(double), rows, columns)) {
            for (Py_ssize_t i = 0; i < rows; i++)
                pst_uniform(((const uint64_t *)keys.buf)[i], (double *)out.buf + i * columns, (size_t)columns);
            result = Py_NewRef(Py_None);
        } else {
            PyErr_SetString(PyExc_ValueError, "keys must be uint64 (n,), and out float64 (n, k)");
        }
    }
    PyBuffer_Release(&keys);
    PyBuffer_Release(&out);
    return result;
}

PyDoc_STRVAR(entries_doc,
             "entries(data, out, step)\n"
             "--\n\n"
             "Write the entries of a file into `out`, every `step` MCUs of a row: their size, which may be "
             "more than there is room for; 0 for a file that has none.");

static PyObject *entries(PyObject *module, PyObject *args)
{
    Py_buffer data, out;
    long step;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*w*l", &data, &out, &step))
        return NULL;
    PyObject *result = NULL;
    if (step < 1 || step > 65535) {
        PyErr_SetString(PyExc_IndexError, "step");
    } else {
        size_t size;
        Py_BEGIN_ALLOW_THREADS
            size = pst_entries(data.buf, (size_t)data.len, step, out.buf, (size_t)out.len);
        Py_END_ALLOW_THREADS
        result = PyLong_FromSize_t(size);
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&out);
    return result;
}

PyDoc_STRVAR(transcode_doc,
             "transcode(data, out, interval, max_pixels)\n"
             "--\n\n"
             "Write a JPEG with a restart marker every `interval` MCUs into `out` (0: none; -1: as many as "
             "suit its width): its size, which may be more than there is room for; 0 for what stays as it "
             "is.");

static PyObject *transcode(PyObject *module, PyObject *args)
{
    Py_buffer data, out;
    pst_transcoding req;
    (void)module;
    memset(&req, 0, sizeof req);
    if (!PyArg_ParseTuple(args, "y*w*lK", &data, &out, &req.interval, &req.max_pixels))
        return NULL;
    PyObject *result = NULL;
    if (req.interval < -1 || req.interval > 65535)
        PyErr_SetString(PyExc_IndexError, "interval");
    else {
        enum pst_outcome outcome;
        req.data = data.buf;
        req.size = (size_t)data.len;
        req.out = out.buf;
        req.capacity = (size_t)out.len;
        Py_BEGIN_ALLOW_THREADS
            outcome = pst_transcode(&req);
        Py_END_ALLOW_THREADS
        result = outcome == PST_NO_MEMORY ? PyErr_NoMemory() : PyLong_FromSize_t(outcome == PST_DONE ? req.needed : 0);
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&out);
    return result;
}

static PyMethodDef methods[] = {
    {"draw", draw, METH_VARARGS, draw_doc},          {"draw_batch", draw_batch, METH_VARARGS, draw_batch_doc},
    {"sizes", sizes, METH_VARARGS, sizes_doc},       {"uniform", uniform, METH_VARARGS, uniform_doc},
    {"entries", entries, METH_VARARGS, entries_doc}, {"transcode", transcode, METH_VARARGS, transcode_doc},
    {"resize", resize, METH_VARARGS, resize_doc},    {NULL, NULL, 0, NULL}};

static int fill(PyObject *module)
{
    pst_cpu_detect();
    if (PyModule_AddIntConstant(module, "AVX2", pst_cpu_has_avx2()) < 0)
        return -1;
    return PyModule_AddIntConstant(module, "LIBJPEG_TURBO_VERSION", LIBJPEG_TURBO_VERSION_NUMBER);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)fill},
#ifdef Py_GIL_DISABLED
                                   /* Threads share nothing but what `pst_cpu_detect` has found. */
                                   {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
                                   {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_jpeg", "Region decode of JPEG over libjpeg-turbo.", 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__jpeg(void)
{
    return PyModuleDef_Init(&definition);
}

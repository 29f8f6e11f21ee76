/* The extension module. What its functions mean is said in _jpeg.pyi and native.py.
 *
 * Sizes, shapes, strides and boxes are checked here, before anything is written. The GIL is released while pixels are
 * made.
 */
#define PY_SSIZE_T_CLEAN
#include <pyconfig.h>

/* One build for all versions from 3.11 on. Python without the GIL has no stable ABI in 3.13 and 3.14. */
#ifndef Py_GIL_DISABLED
#define Py_LIMITED_API 0x030b0000
#endif
#include <Python.h>

#include <stdlib.h>
#include <string.h>

#include "cpu.h"
#include "decode.h"
#include "random.h"

static PyObject *raise(enum pst_outcome outcome, const char *message)
{
    PyObject *type = outcome == PST_UNSUPPORTED ? PyExc_NotImplementedError
                     : outcome == PST_LIMITED   ? PyExc_OverflowError
                     : outcome == PST_OUTSIDE   ? PyExc_IndexError
                     : outcome == PST_NO_MEMORY ? PyExc_MemoryError
                                                : PyExc_ValueError;
    int readable = 1; /* or with bytes of the file */
    for (const char *c = message; *c; c++)
        readable = readable && (unsigned char)*c <= 126;
    PyErr_SetString(type, readable ? message : "damaged");
    return NULL;
}

/* Buffers. */

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

/* Items from one index of a dimension to the next: at least so many, whole ones; 0 where that is not so. */
static size_t item_stride(const Py_buffer *view, int dimension, Py_ssize_t least)
{
    Py_ssize_t bytes = view->strides[dimension];
    if (view->shape[dimension] == 1)
        return (size_t)least;
    return bytes % view->itemsize == 0 && bytes / view->itemsize >= least ? (size_t)(bytes / view->itemsize) : 0;
}

/* Set what a job says of its result, from the buffers of that and of its table; 0 if these do not go together. Rows and
 * planes may be apart. With `first` 1 there is a dimension more in front. */
static int set_result(pst_resize_job *job, const Py_buffer *out, int first, const Py_buffer *table)
{
    const int down = job->planar ? first + 1 : first, across = down + 1;
    if (out->ndim != first + 3 || out->itemsize < 1 || out->shape[down] < 1 || out->shape[across] < 1 ||
        out->shape[down] > PST_RESIZE_MAX_SIDE || out->shape[across] > PST_RESIZE_MAX_SIDE)
        return 0;
    const Py_ssize_t channels = out->shape[job->planar ? first : first + 2], pixel = job->planar ? 1 : channels;
    if (channels != 1 && channels != 3)
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
    return (job->item_size == 1 || job->item_size == 2 || job->item_size == 4 || job->item_size == 8) &&
           table->ndim == 2 && table->shape[0] == channels && table->shape[1] == 256 &&
           table->itemsize == out->itemsize && (uintptr_t)job->table % (size_t)job->item_size == 0;
}

/* Set the source of a request, from the buffer of its pixels; 0 if these do not go together. */
static int set_source(pst_request *req, const Py_buffer *source, int first)
{
    if (source->ndim != first + 3 || source->itemsize != 1)
        return 0;
    const Py_ssize_t height = source->shape[first], width = source->shape[first + 1], pixel = source->shape[first + 2];
    if (height > PST_RESIZE_MAX_SIDE || width > PST_RESIZE_MAX_SIDE || pixel != req->job.channels)
        return 0;
    req->job.height = (int)height;
    req->job.width = (int)width;
    req->rows = source->buf;
    req->stride = source->strides[first];
    return source->strides[first + 2] == 1 && source->strides[first + 1] == pixel;
}

/* Whether the box of a job can be one of a JPEG; nothing that is not a number can. */
static int is_box(const pst_resize_job *job)
{
    return job->left >= 0 && job->left < job->right && job->right < 65536 && job->top >= 0 && job->top < job->bottom &&
           job->bottom < 65536;
}

/* One image. */

/* The result of drawing, without the GIL. */
static PyObject *drawn(pst_request *req)
{
    enum pst_outcome outcome;
    Py_BEGIN_ALLOW_THREADS
        outcome = pst_draw(req);
    Py_END_ALLOW_THREADS
    return outcome == PST_DONE ? PyLong_FromLongLong(req->resizing) : raise(outcome, req->message);
}

static PyObject *draw(PyObject *Py_UNUSED(module), PyObject *args)
{
    enum { SOURCE, OUT, TABLE, ENTRIES, VIEWS };
    PyObject *from, *to, *lookup, *index = Py_None, *result = NULL;
    Py_buffer views[VIEWS] = {{0}};
    pst_request req = {.own = 1};
    pst_resize_job *job = &req.job;
    if (!PyArg_ParseTuple(args, "OO(dddd)pp(pp)Opp|K(ll)Oipp", &from, &to, &job->left, &job->top, &job->right,
                          &job->bottom, &job->bicubic, &job->antialias, &job->flip_x, &job->flip_y, &lookup,
                          &job->planar, &job->simd, &req.max_pixels, &req.expected_width, &req.expected_height, &index,
                          &req.scale, &req.own, &req.partial))
        return NULL;
    if (get_view(from, &views[SOURCE], PyBUF_STRIDED_RO) && get_view(to, &views[OUT], PyBUF_STRIDED) &&
        get_view(lookup, &views[TABLE], PyBUF_C_CONTIGUOUS) && get_view(index, &views[ENTRIES], PyBUF_SIMPLE)) {
        const Py_buffer *source = &views[SOURCE];
        const int is_file = source->ndim == 1 && source->itemsize == 1 && source->strides[0] == 1;
        const int is_scale = req.scale == 0 || req.scale == 1 || req.scale == 2 || req.scale == 4 || req.scale == 8;
        req.data = source->buf;
        req.size = (size_t)source->len;
        req.entries = views[ENTRIES].buf;
        req.entries_size = (size_t)views[ENTRIES].len;
        if (set_result(job, &views[OUT], 0, &views[TABLE]) &&
            (is_file ? is_scale && is_box(job) : set_source(&req, source, 0) && pst_resize_valid(job)))
            result = drawn(&req);
        else
            PyErr_SetString(is_file ? PyExc_IndexError : PyExc_ValueError,
                            "source, box, scale, table and result do not go together");
    }
    release_views(views, VIEWS);
    return result;
}

/* Memory that was made from a file, and is freed, as bytes; None where none was. `number` is an argument's name. */
static PyObject *made(enum pst_outcome outcome, uint8_t *memory, size_t size, const char *number)
{
    if (outcome != PST_DONE)
        return outcome == PST_OUTSIDE     ? raise(outcome, number)
               : outcome == PST_NO_MEMORY ? PyErr_NoMemory()
                                          : Py_NewRef(Py_None);
    PyObject *result = PyBytes_FromStringAndSize((const char *)memory, (Py_ssize_t)size);
    free(memory);
    return result;
}

static PyObject *entries(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer data;
    long step;
    enum pst_outcome outcome;
    uint8_t *out;
    size_t size;
    if (!PyArg_ParseTuple(args, "y*l", &data, &step))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
        outcome = pst_entries(data.buf, (size_t)data.len, step, &out, &size);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return made(outcome, out, size, "step");
}

static PyObject *transcode(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer data;
    long interval;
    unsigned long long max_pixels;
    enum pst_outcome outcome;
    uint8_t *out;
    size_t size;
    if (!PyArg_ParseTuple(args, "y*lK", &data, &interval, &max_pixels))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
        outcome = pst_transcode(data.buf, (size_t)data.len, interval, max_pixels, &out, &size);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return made(outcome, out, size, "interval");
}

/* Batches. */

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
enum { OUT, PLANS, FILL, TABLE, PIXELS, VIEWS };

/* An item of `native.PLAN`. */
typedef struct {
    double box[4];
    int32_t inside[4], size[2];
    uint8_t flips[2], padding[6];
} image_plan;
_Static_assert(sizeof(image_plan) == 64, "native.PLAN has items of 64 bytes");

/* Whether `count` sources and the arrays go together: shapes, sizes of items and strides. `whole` and `stride` are set
 * to what says where the results are. */
static int set_batch(pst_request *whole, size_t *stride, const Py_buffer *views, Py_ssize_t count)
{
    pst_resize_job *job = &whole->job;
    const Py_buffer *out = &views[OUT], *plans = &views[PLANS], *fill = &views[FILL];
    if (!set_result(job, out, 1, &views[TABLE]) || out->shape[0] != count ||
        (views[PIXELS].buf && !set_source(whole, &views[PIXELS], 1)))
        return 0;
    *stride = item_stride(out, 0,
                          job->planar ? (Py_ssize_t)job->plane_stride * job->channels
                                      : (Py_ssize_t)job->row_stride * job->out_height);
    return (*stride || count == 0) && plans->ndim == 1 && plans->shape[0] == count &&
           plans->itemsize == (Py_ssize_t)sizeof(image_plan) &&
           (!fill->buf || (fill->ndim == 1 && fill->shape[0] == job->channels && fill->itemsize == out->itemsize));
}

/* Set what image `i` is; 0 if a number is out of range. Its plan is copied before it is checked, since other threads
 * may change it. */
static int set_image(pst_batch_image *image, Py_ssize_t i, const pst_request *whole, size_t stride,
                     const Py_buffer *views, const Py_buffer *files)
{
    pst_request *req = &image->request;
    pst_resize_job *job = &req->job;
    image_plan plan;
    *req = *whole;
    memcpy(&plan, (const image_plan *)views[PLANS].buf + i, sizeof plan);
    const int32_t *inside = plan.inside, *size = plan.size;
    job->left = plan.box[0];
    job->top = plan.box[1];
    job->right = plan.box[2];
    job->bottom = plan.box[3];
    if (!is_box(job) || size[0] < 0 || size[1] < 0 || inside[0] < 0 || inside[0] > inside[2] ||
        inside[2] > job->out_width || inside[1] < 0 || inside[1] > inside[3] || inside[3] > job->out_height)
        return 0;
    memcpy(image->inside, inside, sizeof plan.inside);
    const size_t pixel = job->planar ? 1 : (size_t)job->channels;
    const size_t first = (size_t)i * stride + (size_t)inside[1] * job->row_stride + (size_t)inside[0] * pixel;
    job->out = (uint8_t *)job->out + first * (size_t)job->item_size;
    job->out_width = inside[2] - inside[0];
    job->out_height = inside[3] - inside[1];
    job->flip_x = plan.flips[0];
    job->flip_y = plan.flips[1];
    if (files) {
        req->data = files[i].buf;
        req->size = (size_t)files[i].len;
        req->expected_width = size[0];
        req->expected_height = size[1];
    } else if (job->out_width > 0 && job->out_height > 0) {
        if (!pst_resize_valid(job))
            return 0;
        /* Pixels beside the box do not count, as where only that part of a file is decoded. */
        int x, y;
        pst_resize_cut(job, &x, &y);
        req->rows += i * views[PIXELS].strides[0] + y * req->stride + (ptrdiff_t)x * job->channels;
    }
    return 1;
}

/* The result of a batch whose arrays go together. */
static PyObject *draw_images(const pst_request *whole, size_t stride, Py_ssize_t count, const Py_buffer *views,
                             const Py_buffer *files)
{
    PyObject *result = NULL, *status = PyBytes_FromStringAndSize(NULL, count);
    pst_batch_image *images = PyMem_Calloc((size_t)count + 1, sizeof *images);
    int ready = status && images;
    if (!ready)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; ready && i < count; i++) {
        ready = set_image(&images[i], i, whole, stride, views, files);
        if (!ready)
            PyErr_SetString(PyExc_ValueError, "a box, a size or a place in the result is out of range");
    }
    if (ready) {
        char *bytes = PyBytes_AsString(status);
        int64_t resizing;
        Py_BEGIN_ALLOW_THREADS
            resizing = pst_batch_draw(&whole->job, stride, views[FILL].buf, images, (size_t)count, bytes);
        Py_END_ALLOW_THREADS
        result = Py_BuildValue("OL", status, (long long)resizing);
    }
    Py_XDECREF(status);
    PyMem_Free(images);
    return result;
}

static PyObject *draw_batch(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *sources, *objects[VIEWS] = {NULL}, *result = NULL;
    Py_buffer views[VIEWS] = {{0}}, *files = NULL;
    Py_ssize_t count = 0;
    size_t stride;
    pst_request whole = {.own = 1};
    if (!PyArg_ParseTuple(args, "OOOOOpppKp", &sources, &objects[OUT], &objects[PLANS], &objects[FILL], &objects[TABLE],
                          &whole.job.bicubic, &whole.job.antialias, &whole.job.planar, &whole.max_pixels,
                          &whole.job.simd))
        return NULL;
    const int is_pixels = PyObject_CheckBuffer(sources);
    objects[PIXELS] = is_pixels ? sources : Py_None;
    if (!is_pixels && !(files = get_files(sources, &count)))
        return NULL;
    int got = get_view(objects[OUT], &views[OUT], PyBUF_STRIDED) &&
              get_view(objects[PIXELS], &views[PIXELS], PyBUF_STRIDED_RO);
    for (int i = PLANS; got && i <= TABLE; i++)
        got = get_view(objects[i], &views[i], PyBUF_C_CONTIGUOUS);
    if (is_pixels)
        count = views[PIXELS].ndim > 0 ? views[PIXELS].shape[0] : -1;
    if (got && set_batch(&whole, &stride, views, count))
        result = draw_images(&whole, stride, count, views, files);
    else if (got)
        PyErr_SetString(PyExc_ValueError, "the shapes and types of the arrays do not go together");
    release_views(views, VIEWS);
    release_views(files, files ? count : 0);
    PyMem_Free(files);
    return result;
}

static PyObject *sizes(PyObject *Py_UNUSED(module), PyObject *sources)
{
    Py_ssize_t count;
    Py_buffer *files = get_files(sources, &count);
    if (!files)
        return NULL;
    PyObject *result = PyByteArray_FromStringAndSize(NULL, count * 2 * (Py_ssize_t)sizeof(int32_t));
    for (Py_ssize_t i = 0; result && i < count; i++)
        pst_size(files[i].buf, (size_t)files[i].len, (int32_t *)(void *)PyByteArray_AsString(result) + 2 * i);
    release_views(files, count);
    PyMem_Free(files);
    return result;
}

static PyObject *uniform(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer keys;
    Py_ssize_t columns;
    if (!PyArg_ParseTuple(args, "y*n", &keys, &columns))
        return NULL;
    const Py_ssize_t rows = keys.len / (Py_ssize_t)sizeof(uint64_t), item = (Py_ssize_t)sizeof(double);
    PyObject *result = NULL;
    if (columns < 0 || columns > PY_SSIZE_T_MAX / item / (rows + 1))
        PyErr_SetString(PyExc_ValueError, "the number of random numbers is out of range");
    else
        result = PyByteArray_FromStringAndSize(NULL, rows * columns * item);
    for (Py_ssize_t i = 0; result && i < rows; i++) {
        uint64_t key;
        memcpy(&key, (const uint64_t *)keys.buf + i, sizeof key);
        pst_uniform(key, (double *)(void *)PyByteArray_AsString(result) + i * columns, (size_t)columns);
    }
    PyBuffer_Release(&keys);
    return result;
}

static PyMethodDef methods[] = {{"draw", draw, METH_VARARGS, NULL},
                                {"draw_batch", draw_batch, METH_VARARGS, NULL},
                                {"entries", entries, METH_VARARGS, NULL},
                                {"sizes", sizes, METH_O, NULL},
                                {"transcode", transcode, METH_VARARGS, NULL},
                                {"uniform", uniform, METH_VARARGS, NULL},
                                {NULL, NULL, 0, NULL}};

static int fill(PyObject *module)
{
    if (PyModule_AddIntConstant(module, "AVX2", pst_cpu_has_avx2()) < 0)
        return -1;
    return PyModule_AddIntConstant(module, "LIBJPEG_TURBO_VERSION", LIBJPEG_TURBO_VERSION_NUMBER);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)fill},
#ifdef Py_GIL_DISABLED
                                   /* Threads share nothing but what cpu.c has found. */
                                   {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
                                   {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_jpeg", "Region decode of JPEG over libjpeg-turbo.", 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__jpeg(void)
{
    return PyModuleDef_Init(&definition);
}

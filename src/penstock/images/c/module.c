/* The extension module: what the functions mean is said in penstock/images/native.py and resize.py.
 *
 * Sizes, shapes, strides and boxes are checked here, before anything is written. The GIL is released while pixels are
 * made.
 */
#include "cpython.h"

#include <stdlib.h>
#include <string.h>

#include "decode.h"
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

static int is_box(const pst_request *req)
{
    return req->left >= 0 && req->left < req->right && req->right < 65536 && req->top >= 0 && req->top < req->bottom &&
           req->bottom < 65536;
}

/* The file, and what is known of it. */
static void take_data(pst_request *req, const Py_buffer *data, const Py_buffer *entries)
{
    req->data = data->buf;
    req->size = (size_t)data->len;
    req->entries = entries ? entries->buf : NULL;
    req->entries_size = entries ? (size_t)entries->len : 0;
    req->own = 1;
}

PyDoc_STRVAR(
    decode_doc,
    "decode(data, out, left, top, right, bottom, target_height, target_width, channels, max_pixels, partial, "
    "width, height, entries, simd)\n"
    "--\n\n"
    "Decode into `out`; (width, height, x, y, scale, image_width, image_height), or the bytes that are needed.");

static PyObject *decode(PyObject *module, PyObject *args)
{
    Py_buffer data, out, entries;
    pst_request req;
    memset(&req, 0, sizeof req);
    (void)module;
    if (!PyArg_ParseTuple(args, "y*w*ddddlliKpllz*p", &data, &out, &req.left, &req.top, &req.right, &req.bottom,
                          &req.target_height, &req.target_width, &req.channels, &req.max_pixels, &req.partial,
                          &req.expected_width, &req.expected_height, &entries, &req.simd))
        return NULL;
    PyObject *result = NULL;
    if ((req.channels != 1 && req.channels != 3) || !(req.right <= 0 || is_box(&req))) {
        PyErr_SetString(PyExc_IndexError, "channels or box");
    } else {
        enum pst_outcome outcome;
        take_data(&req, &data, &entries);
        req.out = out.buf;
        req.capacity = (size_t)out.len;
        Py_BEGIN_ALLOW_THREADS outcome = pst_decode(&req);
        Py_END_ALLOW_THREADS if (outcome == PST_DONE) result = Py_BuildValue(
            "lllllll", req.width, req.height, req.x, req.y, (long)req.scale, req.image_width, req.image_height);
        else if (outcome == PST_TOO_SMALL) result = PyLong_FromSize_t(req.needed);
        else result = raised(outcome, &req);
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&out);
    PyBuffer_Release(&entries);
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
    pst_request req;
    memset(&req, 0, sizeof req);
    (void)module;
    if (!PyArg_ParseTuple(args, "y*w*l", &data, &out, &req.step))
        return NULL;
    PyObject *result = NULL;
    if (req.step < 1 || req.step > 65535)
        PyErr_SetString(PyExc_IndexError, "step");
    else {
        enum pst_outcome outcome;
        take_data(&req, &data, NULL);
        req.out = out.buf;
        req.capacity = (size_t)out.len;
        Py_BEGIN_ALLOW_THREADS outcome = pst_entries(&req);
        Py_END_ALLOW_THREADS result =
            outcome == PST_NO_MEMORY
                ? raised(outcome, &req)
                : PyLong_FromSize_t(outcome == PST_DONE || outcome == PST_TOO_SMALL ? req.needed : 0);
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&out);
    return result;
}

/* Whether a buffer has so many dimensions, of these sizes. */
static int has_shape(const Py_buffer *view, int dimensions, const Py_ssize_t *shape)
{
    if (view->ndim != dimensions)
        return 0;
    for (int i = 0; i < dimensions; i++)
        if (view->shape[i] != shape[i])
            return 0;
    return 1;
}

/* How many entries lie from one index of a dimension to the next: at least so many, whole ones; 0 where that is not so.
 */
static size_t entries_between(const Py_buffer *view, int dimension, Py_ssize_t least)
{
    Py_ssize_t bytes = view->strides[dimension];
    if (view->shape[dimension] == 1)
        return (size_t)least;
    return bytes % view->itemsize == 0 && bytes / view->itemsize >= least ? (size_t)(bytes / view->itemsize) : 0;
}

/* What a job says of its result, from what holds that; 0 if it does not go together. Rows and planes may be apart. */
static int fill_result(pst_resize_job *job, const Py_buffer *out, const Py_buffer *table)
{
    int at = job->planar ? 1 : 0, pixel = job->planar ? 1 : job->channels;
    if (out->ndim != 3 || out->shape[at] < 1 || out->shape[at] > RESIZE_MOST || out->shape[at + 1] < 1 ||
        out->shape[at + 1] > RESIZE_MOST || out->itemsize < 1 || out->shape[job->planar ? 0 : 2] != job->channels)
        return 0;
    job->out_height = (int)out->shape[at];
    job->out_width = (int)out->shape[at + 1];
    job->entry = (int)out->itemsize;
    job->out = out->buf;
    job->row = entries_between(out, at, job->out_width * pixel);
    job->plane = job->planar ? entries_between(out, 0, (Py_ssize_t)job->row * job->out_height) : 1;
    job->table = table ? table->buf : NULL;
    Py_ssize_t entries[] = {job->channels, 256};
    int adjacent = entries_between(out, at + 1, pixel) == (size_t)pixel && entries_between(out, 2, 1) == 1;
    return job->row && job->plane && adjacent && (uintptr_t)out->buf % (size_t)job->entry == 0 &&
           (uintptr_t)job->table % (size_t)job->entry == 0 &&
           (!table || (has_shape(table, 2, entries) && table->itemsize == job->entry));
}

/* The sizes of a job, from what holds its pixels; 0 if these do not go together. */
static int fill_job(pst_resize_job *job, const Py_buffer *source, const Py_buffer *out, const Py_buffer *table)
{
    if (source->ndim != 3 || source->itemsize != 1 || source->shape[0] > RESIZE_MOST ||
        source->shape[1] > RESIZE_MOST || source->shape[2] > 4)
        return 0;
    job->height = (int)source->shape[0];
    job->width = (int)source->shape[1];
    job->pixel = (int)source->shape[2];
    job->channels = job->pixel == 4 ? 3 : job->pixel;
    return fill_result(job, out, table) && pst_resize_valid(job) && source->strides[2] == 1 &&
           source->strides[1] == job->pixel;
}

/* Without the GIL; 0 if there is no memory. */
static int resized(const pst_resize_job *job, const Py_buffer *source)
{
    void *scratch = malloc(pst_resize_scratch(job));
    if (!scratch)
        return 0;
    pst_resize_plan plan;
    pst_resize_begin(&plan, job, scratch);
    pst_resize_rows(&plan, source->buf, source->strides[0], job->height);
    free(scratch);
    return 1;
}

PyDoc_STRVAR(resize_doc,
             "resize(source, out, left, top, right, bottom, bicubic, antialias, flip_x, flip_y, table, planar, "
             "simd)\n"
             "--\n\n"
             "Resize a box of `source` into `out`; a ValueError if their shapes and types do not go together.");

static PyObject *resize(PyObject *module, PyObject *args)
{
    PyObject *from, *to, *entries;
    Py_buffer source, out, table;
    pst_resize_job job;
    (void)module;
    memset(&job, 0, sizeof job);
    if (!PyArg_ParseTuple(args, "OOddddppppOpp", &from, &to, &job.left, &job.top, &job.right, &job.bottom, &job.bicubic,
                          &job.antialias, &job.flip_x, &job.flip_y, &entries, &job.planar, &job.simd))
        return NULL;
    if (PyObject_GetBuffer(from, &source, PyBUF_STRIDED_RO) < 0)
        return NULL;
    PyObject *result = NULL;
    int looked_up = entries != Py_None;
    if (PyObject_GetBuffer(to, &out, PyBUF_STRIDED) == 0) {
        if (!looked_up || PyObject_GetBuffer(entries, &table, PyBUF_C_CONTIGUOUS) == 0) {
            if (fill_job(&job, &source, &out, looked_up ? &table : NULL)) {
                int done;
                Py_BEGIN_ALLOW_THREADS done = resized(&job, &source);
                Py_END_ALLOW_THREADS result = done ? Py_NewRef(Py_None) : PyErr_NoMemory();
            } else {
                PyErr_SetString(PyExc_ValueError, "source, box, table and result do not go together");
            }
            if (looked_up)
                PyBuffer_Release(&table);
        }
        PyBuffer_Release(&out);
    }
    PyBuffer_Release(&source);
    return result;
}

PyDoc_STRVAR(draw_doc,
             "draw(data, out, left, top, right, bottom, bicubic, antialias, flip_x, flip_y, table, planar, "
             "max_pixels, width, height, entries, simd)\n"
             "--\n\n"
             "Decode a box and resize it into `out`, as `decode` and `resize` do it: nanoseconds of resizing.");

static PyObject *draw(PyObject *module, PyObject *args)
{
    PyObject *to, *looked_up;
    Py_buffer data, out, table, entries;
    pst_request req;
    pst_resize_job job;
    (void)module;
    memset(&req, 0, sizeof req);
    memset(&job, 0, sizeof job);
    if (!PyArg_ParseTuple(args, "y*OddddppppOpKllz*p", &data, &to, &req.left, &req.top, &req.right, &req.bottom,
                          &job.bicubic, &job.antialias, &job.flip_x, &job.flip_y, &looked_up, &job.planar,
                          &req.max_pixels, &req.expected_width, &req.expected_height, &entries, &req.simd))
        return NULL;
    PyObject *result = NULL;
    int has_table = looked_up != Py_None;
    if (PyObject_GetBuffer(to, &out, PyBUF_STRIDED) == 0) {
        if (!has_table || PyObject_GetBuffer(looked_up, &table, PyBUF_C_CONTIGUOUS) == 0) {
            job.simd = req.simd;
            req.channels = job.channels = job.pixel = out.ndim == 3 && out.shape[job.planar ? 0 : 2] == 1 ? 1 : 3;
            if (!is_box(&req) || !fill_result(&job, &out, has_table ? &table : NULL))
                PyErr_SetString(PyExc_IndexError, "box, table and result do not go together");
            else {
                enum pst_outcome outcome;
                take_data(&req, &data, &entries);
                req.target_height = job.out_height;
                req.target_width = job.out_width;
                req.job = &job;
                Py_BEGIN_ALLOW_THREADS outcome = pst_decode(&req);
                Py_END_ALLOW_THREADS result =
                    outcome == PST_DONE ? PyLong_FromLongLong(req.resizing) : raised(outcome, &req);
            }
            if (has_table)
                PyBuffer_Release(&table);
        }
        PyBuffer_Release(&out);
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&entries);
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
        Py_BEGIN_ALLOW_THREADS outcome = pst_transcode(&req);
        Py_END_ALLOW_THREADS result =
            outcome == PST_NO_MEMORY ? PyErr_NoMemory() : PyLong_FromSize_t(outcome == PST_DONE ? req.needed : 0);
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&out);
    return result;
}

static PyMethodDef methods[] = {
    {"decode", decode, METH_VARARGS, decode_doc},    {"draw", draw, METH_VARARGS, draw_doc},
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

/* The method `remark` of the extension module: a JPEG with other restart markers. See remark.c. */
#ifndef PENSTOCK_REMARK_H
#define PENSTOCK_REMARK_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030b0000
#endif
#include <Python.h>

extern const char remark_doc[];
PyObject *remark(PyObject *module, PyObject *args);

#endif

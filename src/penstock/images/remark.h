/* The method `remark` of the extension module: a JPEG with other restart markers. See remark.c. */
#ifndef PENSTOCK_REMARK_H
#define PENSTOCK_REMARK_H

#include "cpython.h"

extern const char remark_doc[];
PyObject *remark(PyObject *module, PyObject *args);

#endif

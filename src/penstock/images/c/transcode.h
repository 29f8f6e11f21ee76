/* The method `remark` of the extension module: a JPEG with other restart markers. See transcode.c. */
#ifndef PENSTOCK_TRANSCODE_H
#define PENSTOCK_TRANSCODE_H

#include "cpython.h"

extern const char remark_doc[];
PyObject *remark(PyObject *module, PyObject *args);

#endif

/* Python's C API: one build for all versions from 3.11 on. Python without the GIL has no stable ABI in 3.13 and 3.14.
 */
#ifndef PENSTOCK_CPYTHON_H
#define PENSTOCK_CPYTHON_H

#define PY_SSIZE_T_CLEAN
#include <pyconfig.h>

#ifndef Py_GIL_DISABLED
#define Py_LIMITED_API 0x030b0000
#endif
#include <Python.h>

#endif

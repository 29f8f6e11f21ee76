"""Classes that programs use in place of those of other libraries; each module imports the library that it is for."""

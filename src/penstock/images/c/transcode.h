/* A JPEG with other restart markers. */
#ifndef PENSTOCK_TRANSCODE_H
#define PENSTOCK_TRANSCODE_H

#include <stddef.h>
#include <stdint.h>

#include "libjpeg.h"

/* Write a JPEG with a restart marker every `interval` MCUs (0: none; -1: as many as suit its width) into new memory,
 * which the caller frees. PST_DONE; PST_NO_MEMORY; or anything else for a file that stays as it is: then there is no
 * memory. */
enum pst_outcome pst_transcode(const uint8_t *data, size_t size, long interval, unsigned long long max_pixels,
                               uint8_t **out, size_t *out_size);

#endif

/* A small JPEG of the MCUs that a box needs, made of the coded data of a large one, as a source for libjpeg. */
#ifndef PENSTOCK_SPLICE_H
#define PENSTOCK_SPLICE_H

#include "scan.h"

#define SPLICED (1 << 16) /* bytes that libjpeg gets at once: at the end of each it decodes more slowly */

/* A part of the image, in MCUs. */
typedef struct {
    long left, top, right, bottom;
} mcus;

typedef struct {
    struct jpeg_source_mgr source; /* comes first, so that one pointer is both */
    scan scan;
    reader reader;
    const uint8_t *data;           /* the file */
    size_t size;
    struct jpeg_decompress_struct *cinfo;

    mcus part;
    const uint8_t *entries;        /* of an index; NULL: restart markers are the entries */
    long step, groups;             /* MCUs of a segment of the file, and segments of a row */
    int interval;                  /* MCUs between restart markers in the small JPEG; 0 for none */

    long row, group, made;         /* the next segment, and how many there were */
    const uint8_t *mark;           /* behind the marker in front of segment `marked` */
    long marked;
    int open, ended;
    int before[MAX_COMPS_IN_SCAN]; /* DC values at the end of the segment before */
    int tail;                      /* bits of the segment's last byte that belong to it; 0 for all */
    uint64_t bits;                 /* to be written, the first in front */
    int count;                     /* how many: fewer than 8 */
    uint8_t *out;
    uint8_t buffer[SPLICED + 8192]; /* the first MCU of a segment is written in one go */
} splice;

/* What a thread keeps, which is no state: code tables that are made again where they differ, and memory. */
typedef struct {
    code_tables tables;
    splice splice;
} splicer;

int find_part(splicer *kept, struct jpeg_decompress_struct *cinfo, const uint8_t *data, size_t size, size_t scan_begins,
              const uint8_t *entries, size_t entries_size, double box[4]);
void splice_source(splicer *kept);
size_t make_entries(splicer *kept, const struct jpeg_decompress_struct *cinfo, const uint8_t *data, size_t size,
                    size_t scan_begins, long step, uint8_t *out, size_t capacity);

#endif

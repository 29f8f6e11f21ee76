/* Where the reader is among the MCUs of a scan, and ways to get elsewhere: entries of an index, restart markers, a walk. */
#ifndef PENSTOCK_RESTART_H
#define PENSTOCK_RESTART_H

#include "huffman.h"

typedef struct {
    const scan *scan;
    const uint8_t *data;           /* the file */
    size_t size;
    long at;                       /* the MCU that comes next, counted by rows */
    int dc[PST_COMPONENTS];     /* what its DC values are differences to */

    const uint8_t *entries;        /* of an index; NULL is none */
    long step, groups;             /* MCUs from one entry of a row to the next, and entries of a row */

    long interval, segment;        /* MCUs between restart markers, 0 for none; behind which of them the reader is */
    const uint8_t *mark;           /* behind the marker in front of segment `marked` */
    long marked;
    reader reader;
} track;

int open_track(track *t, const scan *s, const uint8_t *data, size_t size, size_t scan_begins, long interval,
               const uint8_t *entries, size_t entries_size);
int go_to(track *t, long row, long left, long right);
int next_segment(track *t);
size_t make_entries(track *t, const scan *s, const uint8_t *data, size_t size, size_t scan_begins, long step,
                    uint8_t *out, size_t capacity);

#endif

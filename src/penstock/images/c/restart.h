/* The entropy-coded data of a scan, and places in it where decoding can begin: the first MCU, a restart segment, an
 * entry.
 *
 * An entry is a bit of the file, and the DC values that the next ones are differences to. An index of entries has one
 * for every few MCUs of each row. Restart markers are entries that a file brings along: the values are zero behind
 * them, and a byte begins. Where a file has neither, the MCUs in front of a box are skipped one by one.
 */
#ifndef PENSTOCK_RESTART_H
#define PENSTOCK_RESTART_H

#include "huffman.h"

typedef struct {
    const uint8_t *data; /* the file */
    size_t size;
    int components;
    int blocks[PST_COMPONENTS]; /* of an MCU */
    long mcus_per_row, mcu_rows;
    long mcu; /* that comes next, counted by rows */

    const uint8_t *entries; /* of an index; NULL is none */
    long step;              /* MCUs from one entry of a row to the next */
    long entries_per_row;

    long restart_interval, segment; /* MCUs between restart markers, 0 for none; the segment that is read */
    const uint8_t *found;           /* where the segment `found_segment` begins: the last one that was looked for */
    long found_segment;

    pst_block_decoder decoders[PST_COMPONENTS];
    pst_bit_reader reader;
    pst_huffman_table dc_tables[PST_TABLES], ac_tables[PST_TABLES]; /* of the last files: most have the same */
} pst_scan;

/* Begin in front of the first MCU. Entries that cannot be those of this file are not used. 0 for data without an end.
 */
int pst_scan_open(pst_scan *scan, const pst_frame *frame, const uint8_t *data, size_t size, const uint8_t *entries,
                  size_t entries_size);

/* Go to a column of an MCU row, never back, to read MCUs up to the column `right`. 0 where the data is not as it should
 * be. */
int pst_scan_seek(pst_scan *scan, long row, long left, long right);

/* Pass the restart marker in front of the next MCU, if there must be one: 0 if it is not there. */
int pst_scan_restart(pst_scan *scan);

/* Write the entries of a file, every `step` MCUs of a row, into new memory; `*out` is NULL where there is none. 0 for
 * data that has no entries. */
int pst_entries_write(pst_scan *scan, const pst_frame *frame, const uint8_t *data, size_t size, long step,
                      uint8_t **out, size_t *out_size);

#endif

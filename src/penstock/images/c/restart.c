#include "restart.h"

#include <stdlib.h>
#include <string.h>

/* Entries, in memory: version, step, MCUs of a row and MCU rows, 32 bits each; one entry for each group of `step` MCUs
 * of a row, and one behind the last: the bit in 32 bits, and 16 bits for the DC value of each component. Little-endian.
 */
#define HEADER_BYTES 16
#define VERSION 1
#define MAX_SIZE (1u << 29) /* of a file whose bits 32 bits count */
#define RST0 0xD0

static uint32_t load32(const uint8_t *p)
{
    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static uint8_t *store(uint8_t *p, uint32_t value, int bytes)
{
    for (int i = 0; i < bytes; i++)
        *p++ = (uint8_t)(value >> 8 * i);
    return p;
}

static size_t entry_bytes(const pst_scan *scan)
{
    return 4 + 2 * (size_t)scan->components;
}

/* Bytes of the entries, one every `step` MCUs. */
static size_t set_step(pst_scan *scan, long step)
{
    scan->step = step;
    scan->entries_per_row = (scan->mcus_per_row + step - 1) / step;
    return HEADER_BYTES + (size_t)(scan->entries_per_row * scan->mcu_rows + 1) * entry_bytes(scan);
}

static void use_entries(pst_scan *scan, const uint8_t *entries, size_t size)
{
    scan->entries = NULL;
    if (!entries || size < HEADER_BYTES || load32(entries) != VERSION || load32(entries + 4) < 1 ||
        load32(entries + 8) != (uint32_t)scan->mcus_per_row || load32(entries + 12) != (uint32_t)scan->mcu_rows)
        return;
    if (size == set_step(scan, (long)load32(entries + 4)))
        scan->entries = entries;
}

/* Begin at an entry, and end at another one. 0 for entries of another file. */
static int start_at_entry(pst_scan *scan, long number, long end)
{
    const uint8_t *from = scan->entries + HEADER_BYTES + (size_t)number * entry_bytes(scan);
    const uint8_t *to = scan->entries + HEADER_BYTES + (size_t)end * entry_bytes(scan);
    const size_t first = load32(from) >> 3;
    size_t behind = (load32(to) + 7) >> 3;
    if (behind > scan->size || first >= behind)
        return 0;
    behind += behind < scan->size && scan->data[behind - 1] == 0xFF; /* with the zero that is stuffed */
    pst_bit_reader_start(&scan->reader, scan->data + first, (int)(load32(from) & 7), scan->data + behind);
    for (int i = 0; i < scan->components; i++)
        scan->decoders[i].prediction = (int16_t)(from[4 + 2 * i] | from[5 + 2 * i] << 8);
    return 1;
}

/* Begin behind the marker in front of a segment, which is not before the last one: 0 if there is none. */
static int start_segment(pst_scan *scan, long segment)
{
    const uint8_t *end = scan->data + scan->size;
    while (scan->found_segment < segment) {
        const uint8_t *marker = memchr(scan->found, 0xFF, (size_t)(end - scan->found));
        if (!marker || marker + 1 >= end || (marker[1] != 0 && marker[1] != RST0 + (scan->found_segment & 7)))
            return 0;
        scan->found = marker + 2;
        scan->found_segment += marker[1] != 0;
    }
    pst_bit_reader_start(&scan->reader, scan->found, 0, end);
    for (int i = 0; i < scan->components; i++)
        scan->decoders[i].prediction = 0;
    scan->segment = segment;
    scan->mcu = segment * scan->restart_interval;
    return 1;
}

static int skip_mcus(pst_scan *scan, long count)
{
    for (scan->mcu += count; count > 0; count--)
        for (int i = 0; i < scan->components; i++)
            for (int k = 0; k < scan->blocks[i]; k++)
                if (!pst_block_skip(&scan->decoders[i], &scan->reader))
                    return 0;
    return 1;
}

int pst_scan_open(pst_scan *scan, const pst_frame *frame, const uint8_t *data, size_t size, const uint8_t *entries,
                  size_t entries_size)
{
    scan->data = data;
    scan->size = size;
    scan->components = frame->components;
    scan->mcus_per_row = frame->mcus_per_row;
    scan->mcu_rows = frame->mcu_rows;
    for (int i = 0; i < frame->components; i++) {
        const pst_frame_component *component = &frame->component[i];
        pst_huffman_table *dc = &scan->dc_tables[component->dc], *ac = &scan->ac_tables[component->ac];
        pst_huffman_build(dc, &frame->dc[component->dc]);
        pst_huffman_build(ac, &frame->ac[component->ac]);
        scan->decoders[i] = (pst_block_decoder){dc, ac, 0};
        scan->blocks[i] = component->h * component->v;
    }
    scan->restart_interval = frame->restart_interval;
    scan->found = data + frame->scan;
    scan->found_segment = 0;
    use_entries(scan, frame->restart_interval ? NULL : entries, entries_size);
    return scan->entries || start_segment(scan, 0);
}

int pst_scan_restart(pst_scan *scan)
{
    return !scan->restart_interval || scan->mcu / scan->restart_interval == scan->segment ||
           start_segment(scan, scan->segment + 1);
}

int pst_scan_seek(pst_scan *scan, long row, long left, long right)
{
    const long mcu = row * scan->mcus_per_row + left;
    if (scan->entries) {
        const long first = row * scan->entries_per_row, step = scan->step;
        if (!start_at_entry(scan, first + left / step, first + (right + step - 1) / step))
            return 0;
        scan->mcu = mcu - left % step;
    } else if (scan->restart_interval && mcu / scan->restart_interval != scan->segment &&
               !start_segment(scan, mcu / scan->restart_interval))
        return 0;
    return skip_mcus(scan, mcu - scan->mcu);
}

int pst_entries_write(pst_scan *scan, const pst_frame *frame, const uint8_t *data, size_t size, long step,
                      uint8_t **out, size_t *out_size)
{
    if (frame->restart_interval || size >= MAX_SIZE || !pst_scan_open(scan, frame, data, size, NULL, 0))
        return 0;
    *out_size = set_step(scan, step);
    uint8_t *to = *out = malloc(*out_size);
    if (!to)
        return 1;
    to = store(store(to, VERSION, 4), (uint32_t)step, 4);
    to = store(store(to, (uint32_t)scan->mcus_per_row, 4), (uint32_t)scan->mcu_rows, 4);
    const long count = scan->entries_per_row * scan->mcu_rows;
    for (long number = 0; number <= count; number++) {
        int bit;
        const uint8_t *byte = pst_bit_reader_position(&scan->reader, &bit);
        to = store(to, (uint32_t)(byte - data) << 3 | (uint32_t)bit, 4);
        for (int i = 0; i < scan->components; i++)
            to = store(to, (uint32_t)scan->decoders[i].prediction, 2);
        const long left = scan->mcus_per_row - number % scan->entries_per_row * step;
        if (number < count && !skip_mcus(scan, left < step ? left : step)) {
            free(*out);
            return 0;
        }
    }
    return 1;
}

/* An entry is a bit of the file, and the DC values that the next ones are differences to: decoding can begin there. An
 * index has one for every few MCUs of each row. Restart markers are entries that a file brings along: differences begin at
 * zero behind them, and bytes begin. Where there is neither, the rows above a box are walked over.
 */
#include "restart.h"

#include <string.h>

#define ENTRIES_HEAD 16
#define RST0 0xD0
#define MOST_BYTES (1u << 29) /* of a file whose bits 32 bits count */

static uint32_t load32(const uint8_t *p)
{
    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static uint8_t *store32(uint8_t *p, uint32_t value)
{
    for (int i = 0; i < 4; i++)
        *p++ = (uint8_t)(value >> 8 * i);
    return p;
}

static size_t entry_bytes(const scan *s)
{
    return 4 + 2 * (size_t)s->components;
}

/* Bytes of the entries of an image: a head, one entry for each group of `step` MCUs of a row, and one behind the last. */
static size_t entries_size(const scan *s, long step)
{
    size_t groups = (size_t)((s->wide + step - 1) / step);
    return ENTRIES_HEAD + (groups * (size_t)s->high + 1) * entry_bytes(s);
}

/* Begin at an entry, and end at another one. 0 for entries of another file. */
static int start_at_entry(track *t, long number, long end)
{
    const uint8_t *from = t->entries + ENTRIES_HEAD + (size_t)number * entry_bytes(t->scan);
    const uint8_t *to = t->entries + ENTRIES_HEAD + (size_t)end * entry_bytes(t->scan);
    size_t first = load32(from) >> 3, behind = (load32(to) + 7) >> 3;
    if (behind > t->size || first >= behind)
        return 0;
    /* A byte of ones is followed by one of zeros. */
    behind += behind < t->size && t->data[behind - 1] == 0xFF;
    start_reader(&t->reader, t->data, behind, first, (int)(load32(from) & 7));
    for (int i = 0; i < t->scan->components; i++)
        t->dc[i] = (int16_t)(from[4 + 2 * i] | from[5 + 2 * i] << 8);
    return 1;
}

/* Find what is behind the marker in front of a segment: 0 if there is none. */
static int find_marker(track *t, long segment)
{
    const uint8_t *end = t->data + t->size;
    while (t->marked < segment) {
        const uint8_t *found = memchr(t->mark, 0xFF, (size_t)(end - t->mark));
        if (!found || found + 1 >= end)
            return 0;
        t->mark = found + 2;
        if (found[1] == 0)
            continue;
        if (found[1] != RST0 + (t->marked & 7))
            return 0;
        t->marked++;
    }
    return 1;
}

static int start_segment(track *t, long segment)
{
    if (!find_marker(t, segment))
        return 0;
    start_reader(&t->reader, t->data, t->size, (size_t)(t->mark - t->data), 0);
    memset(t->dc, 0, sizeof t->dc);
    t->segment = segment;
    t->at = segment * t->interval;
    return 1;
}

/* Go on behind a restart marker, if there must be one in front of the next MCU: 0 if it is not there. */
int next_segment(track *t)
{
    if (!t->interval || t->at / t->interval == t->segment)
        return 1;
    return start_segment(t, t->segment + 1);
}

/* Go to an MCU, never back, with the data up to `right`, which is not decoded, behind it. 0 where it cannot be found. */
int go_to(track *t, long row, long left, long right)
{
    long target = row * t->scan->wide + left;
    if (t->entries) {
        long number = row * t->groups + left / t->step;
        if (!start_at_entry(t, number, row * t->groups + (right + t->step - 1) / t->step))
            return 0;
        t->at = row * t->scan->wide + left / t->step * t->step;
    } else if (t->interval && target / t->interval != t->segment && !start_segment(t, target / t->interval))
        return 0;
    long count = target - t->at;
    t->at = target;
    return walk(t->scan, &t->reader, t->dc, count);
}

static int use_entries(track *t, const uint8_t *entries, size_t size)
{
    if (!entries || size < ENTRIES_HEAD)
        return 0;
    const scan *s = t->scan;
    long step = (long)load32(entries + 4);
    if (load32(entries) != 1 || step < 1 || load32(entries + 8) != (uint32_t)s->wide ||
        load32(entries + 12) != (uint32_t)s->high || size != entries_size(s, step))
        return 0;
    t->entries = entries;
    t->step = step;
    t->groups = (s->wide + step - 1) / step;
    return 1;
}

/* Begin in front of the first MCU. The data begins at `scan_begins`; entries that cannot be those of this file are not
 * used. */
int open_track(track *t, const scan *s, const uint8_t *data, size_t size, size_t scan_begins, long interval,
               const uint8_t *entries, size_t entries_size)
{
    t->scan = s;
    t->data = data;
    t->size = size;
    t->at = 0;
    t->entries = NULL;
    t->interval = interval;
    t->mark = data + scan_begins;
    t->marked = 0;
    if (interval)
        return start_segment(t, 0);
    memset(t->dc, 0, sizeof t->dc);
    if (!use_entries(t, entries, entries_size))
        start_reader(&t->reader, data, size, scan_begins, 0);
    return 1;
}

/* The entries of an image: their size, or 0 for data that has none. Nothing is written where that is more than
 * `capacity`. */
size_t make_entries(track *t, const scan *s, const uint8_t *data, size_t size, size_t scan_begins, long step,
                    uint8_t *out, size_t capacity)
{
    size_t needed = entries_size(s, step);
    if (size >= MOST_BYTES)
        return 0;
    if (needed > capacity)
        return needed;
    open_track(t, s, data, size, scan_begins, 0, NULL, 0);
    out = store32(store32(store32(store32(out, 1), (uint32_t)step), (uint32_t)s->wide), (uint32_t)s->high);
    long groups = (s->wide + step - 1) / step, count = groups * s->high;
    for (long number = 0; number <= count; number++) {
        int bit;
        size_t byte = raw_place(&t->reader, data, &bit);
        out = store32(out, (uint32_t)(byte << 3) | (uint32_t)bit);
        for (int i = 0; i < s->components; i++) {
            *out++ = (uint8_t)t->dc[i];
            *out++ = (uint8_t)(t->dc[i] >> 8);
        }
        long left = s->wide - number % groups * step;
        if (number < count && !walk(s, &t->reader, t->dc, left < step ? left : step))
            return 0;
    }
    return needed;
}

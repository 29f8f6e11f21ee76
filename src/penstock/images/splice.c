/* The coded data of a box begins at an entry: a bit of the file, and the DC values that the next ones are differences
 * to. A segment from there on continues another one once the DC values of its first MCU are written anew; all other bits
 * are the file's, shifted. Entries are those of an index, which has them for every few columns of each row of MCUs, or
 * restart markers, where differences are to zero and bytes begin. These stay in the small JPEG, and libjpeg decodes what
 * has restart markers more slowly.
 *
 * libjpeg decodes the small JPEG, so pixels are libjpeg's. Without entries there is nothing to gain: to walk over the
 * rows above a box takes as long as libjpeg takes to skip them.
 */
#include "splice.h"

#include <string.h>

#include <jerror.h>

#define WORTH 16        /* a part that leaves out less than a sixteenth saves no time */
#define SIZES 12        /* of DC values: 0 to 11 bits */
#define ENTRIES_HEAD 16
#define MOST_BYTES (1u << 29) /* of a file whose bits 32 bits count */

/* Writing. */

static void put_byte(splice *s, int byte)
{
    *s->out++ = (uint8_t)byte;
    if (byte == 0xFF)
        *s->out++ = 0;
}

/* Up to 56 bits, the first in front. */
static void put(splice *s, uint64_t bits, int count)
{
    s->bits |= (count ? bits >> (64 - count) << (64 - count) : 0) >> s->count;
    for (s->count += count; s->count >= 8; s->count -= 8) {
        put_byte(s, (int)(s->bits >> 56));
        s->bits <<= 8;
    }
}

/* Bits of the chunk. */
static void put_again(splice *s, size_t from, size_t to)
{
    while (from < to) {
        int count = to - from < 48 ? (int)(to - from) : 48;
        put(s, load64(s->reader.chunk + (from >> 3)) << (from & 7), count);
        from += (size_t)count;
    }
}

/* Give a table a code for each size of a DC value; those that it has stay what they are. 0 if there is no room. */
static int complete_codes(JHUFF_TBL *table)
{
    int known[SIZES] = {0}, total = 0, missing = 0, longest = 0, next = 0;
    for (int length = 1; length <= 16; length++) {
        total += table->bits[length];
        longest = table->bits[length] ? length : longest;
    }
    for (int i = 0; i < total && i < 256; i++)
        if (table->huffval[i] < SIZES)
            known[table->huffval[i]] = 1;
    for (int size = 0; size < SIZES; size++)
        missing += !known[size];
    if (total + missing > 256)
        return 0;
    long room = 1;
    for (int length = 1; length <= 16 && missing; length++) {
        room = 2 * room - table->bits[length];
        if (length < longest)
            continue;
        /* One code of each length stays free: none is all ones. */
        for (; missing && room > 1; room--, missing--) {
            while (known[next])
                next++;
            known[next] = 1;
            table->huffval[total++] = (UINT8)next;
            table->bits[length]++;
        }
    }
    return !missing;
}

static void put_dc(splice *s, const JHUFF_TBL *table, int value)
{
    int size = 0, at = 0;
    for (int left = value < 0 ? -value : value; left; left >>= 1)
        size++;
    uint32_t code = 0;
    for (int length = 1; length <= 16; length++, code <<= 1)
        for (int i = 0; i < table->bits[length]; i++, code++, at++)
            if (table->huffval[at] == size) {
                uint64_t bits = (uint64_t)(value < 0 ? value + (1 << size) - 1 : value);
                put(s, (uint64_t)code << (64 - length), length);
                if (size)
                    put(s, bits << (64 - size), size);
                return;
            }
}

/* Segments. */

static uint32_t load32(const uint8_t *p)
{
    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static size_t entry_bytes(const scan *s)
{
    return 4 + 2 * (size_t)s->components;
}

static entry read_entry(const splice *s, long number)
{
    entry found = {0};
    const uint8_t *p = s->entries + ENTRIES_HEAD + (size_t)number * entry_bytes(&s->scan);
    found.byte = load32(p) >> 3;
    found.bit = (int)(load32(p) & 7);
    for (int i = 0; i < s->scan.components; i++)
        found.dc[i] = (int16_t)(p[4 + 2 * i] | p[5 + 2 * i] << 8);
    return found;
}

/* Behind the marker in front of a segment: 0 if there is none. */
static int find_marker(splice *s, long segment)
{
    const uint8_t *end = s->data + s->size;
    while (s->marked < segment) {
        const uint8_t *found = memchr(s->mark, 0xFF, (size_t)(end - s->mark));
        if (!found || found + 1 >= end)
            return 0;
        s->mark = found + 2;
        if (found[1] == 0)
            continue;
        if (found[1] != JPEG_RST0 + (s->marked & 7))
            return 0;
        s->marked++;
    }
    return 1;
}

/* Write the first MCU of a segment with DC values as differences to those of the segment before. 0 for data that is not
 * as it should be. */
static int rewrite(splice *s, const entry *from)
{
    reader *r = &s->reader;
    int dc[MAX_COMPS_IN_SCAN], seen[MAX_COMPS_IN_SCAN] = {0};
    memcpy(dc, from->dc, sizeof dc);
    ensure(r, D_MAX_BLOCKS_IN_MCU * BLOCK_BYTES);
    for (int block = 0; block < s->scan.blocks; block++) {
        int component = s->scan.component[block], difference;
        size_t begin = place(r), behind_dc;
        if (!pass_block(&s->scan, r, component, &difference, &behind_dc))
            return 0;
        if (!seen[component]) {
            int value = dc[component] + difference - s->before[component];
            if (value < -MOST_DC || value > MOST_DC)
                return 0;
            put_dc(s, s->cinfo->dc_huff_tbl_ptrs[s->cinfo->comp_info[component].dc_tbl_no], value);
            begin = behind_dc;
            seen[component] = 1;
        }
        put_again(s, begin, place(r));
    }
    return 1;
}

/* How many bits of the reader's next byte belong to the segment. */
static int bits_of_next(const splice *s)
{
    return s->tail && s->reader.last && s->reader.next + 1 == s->reader.stop ? s->tail : 8;
}

/* Give the bits that have been read back, and take those up to the next byte. */
static void align(splice *s)
{
    reader *r = &s->reader;
    size_t at = place(r);
    r->bits = 0;
    r->count = 0;
    r->next = r->chunk + (at >> 3);
    if (at & 7) {
        int bits = bits_of_next(s) - (int)(at & 7);
        put(s, (uint64_t)*r->next << (56 + (at & 7)), bits > 0 ? bits : 0);
        r->next++;
    }
}

/* Begin the next segment: 0 if there is none, or it is not where it should be. */
static int begin_segment(splice *s)
{
    entry from = {0}, behind = {0};
    size_t end = s->size;
    s->tail = 0;
    if (s->row >= s->part.bottom)
        return 0;
    if (!s->entries) {
        long rows = s->groups ? 1 : s->step / s->scan.wide;
        if (!find_marker(s, s->groups ? s->row * s->groups + s->group : s->row / rows))
            return 0;
        from.byte = (size_t)(s->mark - s->data);
        if (!s->groups || ++s->group * s->step >= s->part.right) {
            s->group = s->groups ? s->part.left / s->step : 0;
            s->row += rows;
        }
    } else {
        from = read_entry(s, s->row * s->groups + s->part.left / s->step);
        behind = read_entry(s, s->row * s->groups + (s->part.right + s->step - 1) / s->step);
        if (behind.byte >= s->size || from.byte > behind.byte)
            return 0;
        s->tail = behind.bit;
        end = behind.byte + (behind.bit ? s->data[behind.byte] == 0xFF ? 2 : 1 : 0);
        s->row++;
    }
    if (s->made && !s->entries) {
        *s->out++ = 0xFF;
        *s->out++ = (uint8_t)(JPEG_RST0 + ((s->made - 1) & 7));
    }
    s->made++;
    start_reader(&s->reader, s->data, end < s->size ? end : s->size, from.byte, from.bit);
    if (s->entries && !rewrite(s, &from))
        return 0;
    memcpy(s->before, behind.dc, sizeof s->before);
    align(s);
    return 1;
}

/* Eight bytes at a time, while there are more and there is room. */
static void pour_words(splice *s)
{
    reader *r = &s->reader;
    const uint8_t *limit = s->buffer + SPLICED;
    int count = s->count;
    uint64_t bits = s->bits;
    while (r->stop - r->next > 8 && s->out < limit) {
        uint64_t read = load64(r->next), word = bits | read >> count;
        r->next += 8;
        bits = count ? read << (64 - count) : 0;
        uint64_t inverse = ~word;
        if ((inverse - 0x0101010101010101u) & word & 0x8080808080808080u)
            for (int i = 56; i >= 0; i -= 8)
                put_byte(s, (int)(word >> i & 255));
        else {
            for (int i = 0; i < 8; i++)
                s->out[i] = (uint8_t)(word >> (56 - 8 * i));
            s->out += 8;
        }
    }
    s->bits = bits;
}

/* What libjpeg has in front of a marker: ones. */
static void fill_byte(splice *s)
{
    if (s->count)
        put(s, ~(uint64_t)0, 8 - s->count);
}

/* Write what is left of a segment, or as much as there is room for: 1 when it has ended. */
static int pour(splice *s)
{
    reader *r = &s->reader;
    while (s->out < s->buffer + SPLICED) {
        ensure(r, 64);
        if (r->stop - r->next > 8) {
            pour_words(s);
            continue;
        }
        for (; r->next < r->stop; r->next++)
            put(s, (uint64_t)*r->next << 56, bits_of_next(s));
        if (!s->entries)
            fill_byte(s);
        return 1;
    }
    return 0;
}

/* libjpeg's source. */

static void nothing(j_decompress_ptr cinfo)
{
    (void)cinfo;
}

static boolean fill(j_decompress_ptr cinfo)
{
    splice *s = (splice *)cinfo->src;
    s->out = s->buffer;
    while (!s->ended && s->out < s->buffer + SPLICED) {
        if (!s->open && !begin_segment(s))
            s->ended = 1;
        else
            s->open = !pour(s);
    }
    if (s->ended) {
        fill_byte(s);
        *s->out++ = 0xFF;
        *s->out++ = JPEG_EOI;
    }
    s->source.next_input_byte = s->buffer;
    s->source.bytes_in_buffer = (size_t)(s->out - s->buffer);
    return TRUE;
}

static void skip(j_decompress_ptr cinfo, long bytes)
{
    struct jpeg_source_mgr *source = cinfo->src;
    for (; bytes > (long)source->bytes_in_buffer; fill(cinfo))
        bytes -= (long)source->bytes_in_buffer;
    if (bytes > 0) {
        source->next_input_byte += bytes;
        source->bytes_in_buffer -= (size_t)bytes;
    }
}

static void put_two(splice *s, long value)
{
    *s->out++ = (uint8_t)(value >> 8);
    *s->out++ = (uint8_t)value;
}

/* SOI, SOF1, DRI, SOS: libjpeg has the tables still. */
static void write_header(splice *s)
{
    const j_decompress_ptr cinfo = s->cinfo;
    int n = s->scan.components;
    long width = (s->part.right - s->part.left) * s->scan.mcu_width;
    long height = (s->part.bottom - s->part.top) * s->scan.mcu_height;
    long most_wide = (long)cinfo->image_width - s->part.left * s->scan.mcu_width;
    long most_high = (long)cinfo->image_height - s->part.top * s->scan.mcu_height;
    put_two(s, 0xFFD8);
    put_two(s, 0xFFC1);
    put_two(s, 8 + 3 * n);
    *s->out++ = 8;
    put_two(s, height < most_high ? height : most_high);
    put_two(s, width < most_wide ? width : most_wide);
    *s->out++ = (uint8_t)n;
    for (int i = 0; i < n; i++) {
        const jpeg_component_info *info = &cinfo->comp_info[i];
        *s->out++ = (uint8_t)info->component_id;
        *s->out++ = (uint8_t)(n == 1 ? 0x11 : info->h_samp_factor << 4 | info->v_samp_factor);
        *s->out++ = (uint8_t)info->quant_tbl_no;
    }
    if (s->interval) {
        put_two(s, 0xFFDD);
        put_two(s, 4);
        put_two(s, s->interval);
    }
    put_two(s, 0xFFDA);
    put_two(s, 6 + 2 * n);
    *s->out++ = (uint8_t)n;
    for (int i = 0; i < n; i++) {
        *s->out++ = (uint8_t)cinfo->comp_info[i].component_id;
        *s->out++ = (uint8_t)(cinfo->comp_info[i].dc_tbl_no << 4 | cinfo->comp_info[i].ac_tbl_no);
    }
    put_two(s, 0x003F);
    *s->out++ = 0;
}

/* Make the small JPEG libjpeg's source. After `find_part`, and jpeg_abort_decompress. */
void splice_source(splicer *kept)
{
    splice *s = &kept->splice;
    s->source.init_source = nothing;
    s->source.fill_input_buffer = fill;
    s->source.skip_input_data = skip;
    s->source.resync_to_restart = jpeg_resync_to_restart;
    s->source.term_source = nothing;
    s->source.next_input_byte = s->buffer;
    s->source.bytes_in_buffer = (size_t)(s->out - s->buffer);
    s->cinfo->src = &s->source;
}

/* Which part. */

/* Bytes of the entries of an image: a head, one entry for each group of `step` MCUs of a row, and one behind the last. */
static size_t entries_size(const scan *s, long step)
{
    size_t groups = (size_t)((s->wide + step - 1) / step);
    return ENTRIES_HEAD + (groups * (size_t)s->high + 1) * entry_bytes(s);
}

static int use_entries(splice *s, const uint8_t *entries, size_t size)
{
    if (size < ENTRIES_HEAD)
        return 0;
    long step = (long)load32(entries + 4);
    if (load32(entries) != 1 || step < 1 || load32(entries + 8) != (uint32_t)s->scan.wide ||
        load32(entries + 12) != (uint32_t)s->scan.high || size != entries_size(&s->scan, step))
        return 0;
    s->entries = entries;
    s->step = step;
    s->groups = (s->scan.wide + step - 1) / step;
    s->part.left = s->part.left / step * step;
    long right = (s->part.right + step - 1) / step * step;
    s->part.right = right < s->scan.wide ? right : s->scan.wide;
    s->interval = 0;
    return 1;
}

static int use_markers(splice *s, long interval, size_t scan_begins)
{
    s->interval = (int)interval;
    s->step = interval;
    s->mark = s->data + scan_begins;
    s->marked = 0;
    if (s->scan.wide % interval == 0) {
        s->groups = s->scan.wide / interval;
        s->part.left = s->part.left / interval * interval;
        s->part.right = (s->part.right + interval - 1) / interval * interval;
    } else if (interval % s->scan.wide == 0) {
        long rows = interval / s->scan.wide;
        s->groups = 0;
        s->part.left = 0;
        s->part.right = s->scan.wide;
        s->part.top = s->part.top / rows * rows;
    } else
        return 0;
    s->group = s->groups ? s->part.left / s->step : 0;
    return find_marker(s, s->groups ? s->part.top * s->groups + s->group : s->part.top * s->scan.wide / interval);
}

/* Look for the part of an image that has a box, (left, top, right, bottom) in pixels: 1 if a small JPEG of it can be
 * made and is worth it. `box` becomes that of the part. The header has been read, and the data begins at `scan_begins`.
 */
int find_part(splicer *kept, struct jpeg_decompress_struct *cinfo, const uint8_t *data, size_t size, size_t scan_begins,
              const uint8_t *entries, size_t entries_size, double box[4])
{
    splice *s = &kept->splice;
    if ((!entries && !cinfo->restart_interval) || !open_scan(&s->scan, &kept->tables, cinfo, 0))
        return 0;
    s->data = data;
    s->size = size;
    s->cinfo = cinfo;
    s->entries = NULL;
    s->step = s->groups = s->group = s->made = 0;
    s->open = s->ended = 0;
    s->bits = 0;
    s->count = 0;
    memset(s->before, 0, sizeof s->before);
    s->part.left = (long)(box[0] / s->scan.mcu_width);
    s->part.top = (long)(box[1] / s->scan.mcu_height);
    s->part.right = (long)((box[2] + s->scan.mcu_width - 1) / s->scan.mcu_width);
    s->part.bottom = (long)((box[3] + s->scan.mcu_height - 1) / s->scan.mcu_height);
    s->part.right = s->part.right < s->scan.wide ? s->part.right : s->scan.wide;
    s->part.bottom = s->part.bottom < s->scan.high ? s->part.bottom : s->scan.high;
    /* Colours of two columns or fewer libjpeg upsamples in another way: a part has more, where the image has. */
    if (s->part.left > 0 && (long)cinfo->image_width - s->part.left * s->scan.mcu_width < s->scan.mcu_width)
        s->part.left--;
    long all = s->scan.wide * s->scan.high;
    if (!(cinfo->restart_interval ? use_markers(s, (long)cinfo->restart_interval, scan_begins)
                                  : use_entries(s, entries, entries_size)) ||
        (s->part.right - s->part.left) * (s->part.bottom - s->part.top) * WORTH > all * (WORTH - 1))
        return 0;
    s->row = s->part.top;
    for (int i = 0; i < s->scan.components; i++)
        if (s->entries && !complete_codes(cinfo->dc_huff_tbl_ptrs[cinfo->comp_info[i].dc_tbl_no]))
            return 0;
    box[0] = (double)(s->part.left * s->scan.mcu_width);
    box[1] = (double)(s->part.top * s->scan.mcu_height);
    box[2] = (double)(s->part.right * s->scan.mcu_width);
    box[3] = (double)(s->part.bottom * s->scan.mcu_height);
    s->out = s->buffer;
    write_header(s);
    return 1;
}

/* Entries. */

static uint8_t *store32(uint8_t *p, uint32_t value)
{
    for (int i = 0; i < 4; i++)
        *p++ = (uint8_t)(value >> 8 * i);
    return p;
}

/* The entries of an image, of which the header has been read: their size, or 0 for data that has none. Nothing is
 * written where that is more than `capacity`. */
size_t make_entries(splicer *kept, const struct jpeg_decompress_struct *cinfo, const uint8_t *data, size_t size,
                    size_t scan_begins, long step, uint8_t *out, size_t capacity)
{
    reader *r = &kept->splice.reader;
    scan *s = &kept->splice.scan;
    int dc[MAX_COMPS_IN_SCAN] = {0};
    if (cinfo->restart_interval || size >= MOST_BYTES || !open_scan(s, &kept->tables, cinfo, 1))
        return 0;
    size_t needed = entries_size(s, step);
    if (needed > capacity)
        return needed;
    out = store32(store32(store32(store32(out, 1), (uint32_t)step), (uint32_t)s->wide), (uint32_t)s->high);
    start_reader(r, data, size, scan_begins, 0);
    long groups = (s->wide + step - 1) / step, count = groups * s->high;
    for (long number = 0; number <= count; number++) {
        int bit;
        size_t byte = raw_place(r, data, &bit);
        out = store32(out, (uint32_t)(byte << 3) | (uint32_t)bit);
        for (int i = 0; i < s->components; i++) {
            *out++ = (uint8_t)dc[i];
            *out++ = (uint8_t)(dc[i] >> 8);
        }
        long left = s->wide - number % groups * step;
        if (number < count && !walk(s, r, dc, left < step ? left : step))
            return 0;
    }
    return needed;
}

/* Decoding takes a table look-up for each coefficient: codes and the bits behind them are looked up together. Passing over
 * coded data takes one for each group of symbols, and nothing is written: two fifths of the time. All that is not as it
 * should be ends either, and the caller lets libjpeg decide.
 */
#include "huffman.h"

#include <string.h>

#define MOST_AT_ONCE (LOOK + 15) /* bits of a group: one symbol may end behind the bits that were looked up */
#define END_OF_BLOCK 128 /* added to the coefficients that a group passes */

/* Reading. */

/* Unstuff as much as the chunk has room for. */
static void unstuff(reader *r)
{
    uint8_t *out = r->chunk + (r->stop - r->chunk), *limit = r->chunk + CHUNK;
    while (out < limit && !r->last) {
        size_t room = (size_t)(limit - out), left = (size_t)(r->end - r->raw);
        size_t most = room < left ? room : left;
        const uint8_t *found = memchr(r->raw, 0xFF, most);
        size_t plain = found ? (size_t)(found - r->raw) : most;
        memcpy(out, r->raw, plain);
        out += plain;
        r->raw += plain;
        if (found && r->raw + 1 < r->end && r->raw[1] == 0) {
            *out++ = 0xFF;
            r->raw += 2;
        } else if (found || r->raw == r->end)
            r->last = 1;
    }
    r->stop = out;
    memset(out, 0, BLOCK_BYTES + 16);
}

/* Where a byte of the chunk stands in the file. Asked for in ascending order. Stuffed bytes are looked for a second time,
 * and another thread may have changed the file: nothing is looked at behind what has been unstuffed. */
static const uint8_t *raw_of(reader *r, size_t at)
{
    while (r->known < at && r->known_raw < r->raw) {
        size_t most = at - r->known, left = (size_t)(r->raw - r->known_raw);
        most = most < left ? most : left;
        const uint8_t *found = memchr(r->known_raw, 0xFF, most);
        size_t plain = found ? (size_t)(found - r->known_raw) : most;
        r->known += plain + (found != NULL);
        r->known_raw += plain + (found ? 2 : 0);
    }
    r->known_raw = r->known_raw < r->raw ? r->known_raw : r->raw;
    return r->known_raw;
}

/* Have so many bytes behind the next one in the chunk, or all that there are; zeros behind these. */
void ensure(reader *r, size_t bytes)
{
    if ((size_t)(r->stop - r->next) >= bytes || r->last)
        return;
    /* Bits that have been read are still to be found in the chunk. */
    size_t from = (size_t)(r->next - r->chunk) - (size_t)(r->count + 7) / 8;
    size_t size = (size_t)(r->stop - r->chunk) - from;
    r->known_raw = raw_of(r, from);
    r->known = 0;
    memmove(r->chunk, r->chunk + from, size);
    r->next -= from;
    r->stop = r->chunk + size;
    unstuff(r);
}

/* Begin at a bit of the file. */
void start_reader(reader *r, const uint8_t *data, size_t size, size_t byte, int bit)
{
    r->raw = r->known_raw = data + byte;
    r->end = data + size;
    r->known = 0;
    r->last = 0;
    r->next = r->stop = r->chunk;
    r->bits = 0;
    r->count = 0;
    unstuff(r);
    if (bit) {
        r->bits = (uint64_t)*r->next++ << (56 + bit);
        r->count = 8 - bit;
    }
}

/* The next bits alone, which stay in registers. */
typedef struct {
    const uint8_t *next;
    uint64_t bits;
    int count;
} cursor;

/* At least 56 bits. What is read behind the end are zeros, and `pass_block` sees that it was too much. */
static inline void refill(cursor *c)
{
    c->bits |= load64(c->next) >> c->count;
    int bytes = (63 - c->count) >> 3;
    c->next += bytes;
    c->count += bytes << 3;
}

static inline void drop(cursor *c, int count)
{
    c->bits <<= count;
    c->count -= count;
}

/* The next bit, counted from the beginning of the chunk. */
static size_t place(const reader *r)
{
    return (size_t)(r->next - r->chunk) * 8 - (size_t)r->count;
}

/* The next bit as a byte of the file, and a bit in it. */
size_t raw_place(reader *r, const uint8_t *data, int *bit)
{
    size_t at = place(r);
    *bit = (int)(at & 7);
    return (size_t)(raw_of(r, at >> 3) - data);
}

/* Codes. */

/* Length | symbol << 8 of the code in front of 16 bits; 0 if there is none. */
static inline uint32_t symbol_of(const codes *c, uint32_t bits)
{
    int length = 1;
    while (length <= 16 && bits >= c->beyond[length])
        length++;
    if (length > 16)
        return 0;
    int at = (int)(bits >> (16 - length)) + c->offset[length];
    return (uint32_t)length | (uint32_t)c->made_of.symbols[at & 255] << 8;
}

/* The number that so many bits stand for. */
static inline int extended(uint32_t bits, int size)
{
    return size && !(bits >> (size - 1)) ? (int)bits - (1 << size) + 1 : (int)bits;
}

/* Bits | coefficients << 8 of as many symbols as fit; END_OF_BLOCK more where the last one ends the block. Where the first
 * does not fit, more coefficients than a block has. */
static uint32_t group_of(const codes *c, uint32_t bits)
{
    int used = 0, passed = 0;
    for (;;) {
        uint32_t found = c->first[bits << used & ((1 << LOOK) - 1)];
        int length = found & 255, size = found >> 8 & 15, run = found >> 12;
        if (!length || used + length > LOOK)
            break;
        if (size == 0 && run != 15)
            return (uint32_t)(used + length) | (uint32_t)(passed + END_OF_BLOCK) << 8;
        /* One symbol may end behind the bits: nobody looks at the value. */
        if (used + length + size > LOOK && used)
            break;
        used += length + size;
        passed += run + 1;
        if (used >= LOOK || passed > 63)
            break;
    }
    return used ? (uint32_t)used | (uint32_t)passed << 8 : 64 << 8;
}

/* Bits | places << 8 | value << 16 of one coefficient: it belongs to the last of these places. END_OF_BLOCK places end the
 * block. 0 where code and value have more bits than were looked up. */
static int32_t value_of(const codes *c, uint32_t bits)
{
    int found = c->first[bits], length = found & 255, size = found >> 8 & 15, run = found >> 12;
    if (!length || length + size > LOOK)
        return 0;
    int places = size == 0 && run != 15 ? END_OF_BLOCK : run + 1;
    int value = extended(bits >> (LOOK - length - size) & ((1u << size) - 1), size);
    return (int32_t)((uint32_t)value << 16 | (uint32_t)places << 8 | (uint32_t)(length + size));
}

static void make_codes(codes *c, const pst_huffman_definition *table, int ac)
{
    if (c->made_of.size == table->size && !memcmp(c->made_of.counts, table->counts, 16) &&
        !memcmp(c->made_of.symbols, table->symbols, (size_t)table->size))
        return;
    c->made_of = *table;
    memset(c->first, 0, sizeof c->first);
    uint32_t code = 0;
    int at = 0;
    c->beyond[0] = 0;
    for (int length = 1; length <= 16; length++) {
        const uint32_t count = table->counts[length - 1];
        c->offset[length] = at - (int)code;
        for (uint32_t i = 0; i < count; i++, at++, code++)
            for (uint32_t k = 0; length <= LOOK && k < 1u << (LOOK - length); k++)
                c->first[(code << (LOOK - length)) + k] = (uint16_t)((unsigned)length | (unsigned)table->symbols[at] << 8);
        c->beyond[length] = count ? code << (16 - length) : c->beyond[length - 1];
        code <<= 1;
    }
    for (uint32_t bits = 0; bits < 1 << LOOK && ac; bits++) {
        c->groups[bits] = 0;
        c->values[bits] = value_of(c, bits);
    }
}

/* Passing over. */

/* Length | symbol << 8 of the next code; 0 if there is none. */
static inline uint32_t next_symbol(const codes *c, const cursor *at)
{
    uint32_t found = c->first[at->bits >> (64 - LOOK)];
    return found ? found : symbol_of(c, (uint32_t)(at->bits >> 48));
}

/* A DC code and its bits. 0 if there is no such code. */
static inline int pass_dc(const codes *dc, cursor *c, int *difference)
{
    refill(c);
    uint32_t symbol = next_symbol(dc, c);
    int size = (int)(symbol >> 8);
    drop(c, (int)(symbol & 255));
    *difference = size ? extended((uint32_t)(c->bits >> (64 - size)), size) : 0;
    drop(c, size);
    return symbol != 0;
}

/* An AC symbol and its bits; `k` becomes the next coefficient, 64 at the end of the block. 0 for what is none. */
static inline int pass_symbol(const codes *ac, cursor *c, unsigned *k)
{
    refill(c);
    uint32_t symbol = next_symbol(ac, c);
    int size = (int)(symbol >> 8 & 15), run = (int)(symbol >> 12);
    drop(c, (int)(symbol & 255) + size);
    *k = size == 0 && run != 15 ? 64 : *k + (unsigned)run + 1;
    return symbol && *k <= 64;
}

/* A coefficient whose code and bits are too long to be looked up; `k` as in `pass_symbol`. 0 for what is none. */
static int long_value(const codes *ac, cursor *c, unsigned *k, int *value)
{
    refill(c);
    uint32_t symbol = next_symbol(ac, c);
    int size = (int)(symbol >> 8 & 15), run = (int)(symbol >> 12);
    drop(c, (int)(symbol & 255));
    *value = size ? extended((uint32_t)(c->bits >> (64 - size)), size) : 0;
    drop(c, size);
    *k += size == 0 && run != 15 ? END_OF_BLOCK : (unsigned)run + 1;
    return symbol != 0;
}

/* The rest of a block, by groups. 0 for what is no block. */
static inline int pass_groups(codes *ac, cursor *c)
{
    unsigned k = 1;
    for (;; refill(c))
        while (c->count >= MOST_AT_ONCE) {
            uint32_t *group = &ac->groups[c->bits >> (64 - LOOK)];
            if (!*group)
                *group = group_of(ac, (uint32_t)(c->bits >> (64 - LOOK)));
            uint32_t found = *group;
            unsigned after = k + (found >> 8);
            /* Coefficients that reach beyond the block are no end of it, however many they are. */
            int ends = after == 64 || (found >> 8 >= END_OF_BLOCK && after < END_OF_BLOCK + 64);
            if (ends || after < 64) {
                drop(c, (int)(found & 255));
                if (ends)
                    return 1;
                k = after;
                continue;
            }
            /* A long code, or a group that goes beyond the block. */
            if (!pass_symbol(ac, c, &k))
                return 0;
            if (k == 64)
                return 1;
        }
}

static inline cursor cursor_of(const reader *r)
{
    return (cursor){r->next, r->bits, r->count};
}

/* Go to a cursor: 0 if that is behind the data. */
static inline int go(reader *r, const cursor *c)
{
    r->next = c->next;
    r->bits = c->bits;
    r->count = c->count;
    return place(r) <= (size_t)(r->stop - r->chunk) * 8;
}

/* The DC value of a block, dequantised, and the rest passed over. 0 where the data is not as it should be. */
int read_dc(const scan *s, reader *r, int component, const quantiser *by, int *dc, int16_t *value)
{
    int difference;
    cursor c = cursor_of(r);
    if (!pass_dc(s->dc[component], &c, &difference) || !pass_groups(s->ac[component], &c) || !go(r, &c))
        return 0;
    *dc += difference;
    int found = *dc * by->factor[0];
    *value = (int16_t)found;
    return *dc >= -MOST_DC && *dc <= MOST_DC && found >= -MOST_SUM && found <= MOST_SUM;
}

/* A block, dequantised, row by row, of which `block` has 64 zeros and a 65th place: 1 + the last coefficient that is there,
 * in the order of the file. 0 where the data is not as it should be. Blocks with a larger sum than any picture gives, of
 * which libjpeg makes this or that, are such ones. */
int read_block(const scan *s, reader *r, int component, const quantiser *by, int *dc, int16_t block[72])
{
    const codes *ac = s->ac[component];
    int difference;
    cursor c = cursor_of(r);
    if (!pass_dc(s->dc[component], &c, &difference))
        return 0;
    *dc += difference;
    int value = *dc * by->factor[0], sum = value < 0 ? -value : value;
    block[0] = (int16_t)value;
    unsigned k = 1, last = 1;
    do {
        refill(&c);
        do {
            int32_t found = ac->values[c.bits >> (64 - LOOK)];
            last = k;
            if (found) {
                drop(&c, found & 255);
                k += (uint32_t)found >> 8 & 255;
                value = found >> 16;
            } else if (!long_value(ac, &c, &k, &value))
                return 0;
            value *= by->factor[k - 1];
            sum += value < 0 ? -value : value;
            block[by->natural[k - 1]] = (int16_t)value;
        } while (k < 64 && c.count >= LOOK);
    } while (k < 64);
    int whole = k == 64 || (k >= END_OF_BLOCK && k < END_OF_BLOCK + 64);
    if (!go(r, &c) || !whole || *dc < -MOST_DC || *dc > MOST_DC || sum > MOST_SUM)
        return 0;
    return (int)(k == 64 ? 64 : last);
}

/* Pass over MCUs: 1, or 0 where the data is not as it should be. `dc` becomes that behind them. For scans that were opened
 * for it. */
int walk(const scan *s, reader *r, int dc[], long mcus)
{
    for (long n = 0; n < mcus; n++)
        for (int block = 0; block < s->blocks; block++) {
            int component = s->component[block], difference;
            ensure(r, BLOCK_BYTES);
            cursor c = cursor_of(r);
            if (!pass_dc(s->dc[component], &c, &difference) || !pass_groups(s->ac[component], &c) || !go(r, &c))
                return 0;
            dc[component] += difference;
            if (dc[component] < -MOST_DC || dc[component] > MOST_DC)
                return 0;
        }
    return 1;
}

void make_quantiser(quantiser *made, const uint8_t factors[64])
{
    static const uint8_t natural[64] = {
        0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48,
        41, 34, 27, 20, 13, 6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23,
        30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63};
    memset(made->factor, 0, sizeof made->factor);
    memset(made->natural, 64, sizeof made->natural);
    for (int i = 0; i < 64; i++) {
        made->natural[i] = natural[i];
        made->factor[i] = factors[i];
    }
}

void open_scan(scan *made, code_tables *tables, const pst_frame *frame)
{
    made->components = frame->components;
    made->blocks = 0;
    for (int i = 0; i < made->components; i++) {
        const pst_frame_component *from = &frame->component[i];
        made->dc[i] = &tables->dc[from->dc];
        made->ac[i] = &tables->ac[from->ac];
        make_codes(made->dc[i], &frame->dc[from->dc], 0);
        make_codes(made->ac[i], &frame->ac[from->ac], 1);
        for (int k = 0; k < from->h * from->v; k++)
            made->component[made->blocks++] = i;
    }
    made->wide = frame->mcus_per_row;
    made->high = frame->mcu_rows;
}

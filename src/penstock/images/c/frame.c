/* What is accepted means here what it means to libjpeg-turbo, 2.0 to 3.2 (jdmarker.c, jdinput.c, jdapimin.c, jdhuff.c).
 * All else is refused, however libjpeg takes it: stray bytes between segments, segments whose lengths do not add up,
 * markers that ordinary files do not have. A table that is defined again counts as it was last defined before the scan.
 *
 * Another thread may change the data meanwhile: what is relied on later is copied first, and the copy is checked.
 */
#include "frame.h"

#include <string.h>

#define MAX_DIMENSION 65500 /* libjpeg's JPEG_MAX_DIMENSION */
#define MAX_SAMPLING 4
#define MAX_DC_SYMBOL 15 /* bits of a value */

enum { SOF0 = 0xC0, SOF1 = 0xC1, DHT = 0xC4, SOI = 0xD8, SOS = 0xDA, DQT = 0xDB, DRI = 0xDD };
enum { APP0 = 0xE0, APP14 = 0xEE, APP15 = 0xEF, COM = 0xFE };

static int load16(const uint8_t *p)
{
    return p[0] << 8 | p[1];
}

/* Whether the codes are those of a prefix code, of which none is all ones. */
static int is_huffman_table(const pst_huffman_definition *table, int max_symbol)
{
    int codes = 0; /* of a length, in use by this length and shorter ones */
    for (int i = 0; i < 16; i++) {
        codes = 2 * codes + table->counts[i];
        if (codes >= 2 << i)
            return 0;
    }
    for (int i = 0; i < table->size; i++)
        if (table->symbols[i] > max_symbol)
            return 0;
    return table->size > 0;
}

static int has_tables(const pst_frame *frame, const pst_frame_component *component)
{
    return component->quantisation < PST_TABLES && (frame->quantisation_defined >> component->quantisation & 1) &&
           component->dc < PST_TABLES && is_huffman_table(&frame->dc[component->dc], MAX_DC_SYMBOL) &&
           component->ac < PST_TABLES && is_huffman_table(&frame->ac[component->ac], 255);
}

/* libjpeg's rules: JFIF is YCbCr, else Adobe's marker tells, else the names of the components do. */
static int is_ycbcr(const pst_frame *frame)
{
    const pst_frame_component *c = frame->component;
    if (frame->jfif || frame->adobe >= 0)
        return frame->jfif || frame->adobe == 1;
    return !(c[0].id == 'R' && c[1].id == 'G' && c[2].id == 'B');
}

/* Whether the decoder accepts what the headers say. The readers of segments have seen to: baseline or extended
 * sequential, Huffman codes, 8 bits a sample and a factor of quantisation, one or three components, one scan of them.
 */
static int is_accepted(const pst_frame *frame)
{
    const pst_frame_component *c = frame->component;
    if (frame->width < 1 || frame->width > MAX_DIMENSION || frame->height < 1 || frame->height > MAX_DIMENSION)
        return 0;
    /* The blocks of a single component come one by one, whatever its sampling factors are. */
    if (frame->components == 1)
        return c->h >= 1 && c->h <= MAX_SAMPLING && c->v >= 1 && c->v <= MAX_SAMPLING && has_tables(frame, c);
    const int is_444 = c[0].h == 1 && c[0].v == 1, is_422 = c[0].h == 2 && c[0].v == 1;
    const int is_420 = c[0].h == 2 && c[0].v == 2;
    return (is_444 || is_422 || is_420) && c[1].h == 1 && c[1].v == 1 && c[2].h == 1 && c[2].v == 1 &&
           is_ycbcr(frame) && has_tables(frame, c) && has_tables(frame, c + 1) && has_tables(frame, c + 2);
}

static int read_dqt(pst_frame *frame, const uint8_t *p, size_t size)
{
    for (; size >= 65; p += 65, size -= 65) {
        const int number = p[0]; /* with the precision of the factors above it, 0 for 8 bits */
        if (number >= PST_TABLES)
            return 0;
        memcpy(frame->factors[number], p + 1, 64);
        frame->quantisation_defined |= 1u << number;
    }
    return size == 0;
}

static int read_dht(pst_frame *frame, const uint8_t *p, size_t size)
{
    while (size >= 17) {
        const int class = p[0] >> 4, number = p[0] & 15;
        if (class > 1 || number >= PST_TABLES)
            return 0;
        pst_huffman_definition *table = class ? &frame->ac[number] : &frame->dc[number];
        memcpy(table->counts, p + 1, 16);
        table->size = 0;
        for (int i = 0; i < 16; i++)
            table->size += table->counts[i];
        const size_t symbols = (size_t)table->size;
        if (symbols > 256 || symbols > size - 17)
            return 0;
        memcpy(table->symbols, p + 17, symbols);
        p += 17 + symbols;
        size -= 17 + symbols;
    }
    return size == 0;
}

static int read_sof(pst_frame *frame, const uint8_t *p, size_t size)
{
    if (frame->components || size < 6 || p[0] != 8)
        return 0;
    const int components = p[5];
    if ((components != 1 && components != 3) || size != 6 + 3 * (size_t)components)
        return 0;
    frame->height = load16(p + 1);
    frame->width = load16(p + 3);
    frame->components = components;
    for (int i = 0; i < components; i++) {
        const uint8_t *from = p + 6 + 3 * i;
        frame->component[i] = (pst_frame_component){from[0], from[1] >> 4, from[1] & 15, from[2], 0, 0};
    }
    return 1;
}

/* One scan of all components in their order. */
static int read_sos(pst_frame *frame, const uint8_t *p, size_t size)
{
    const int components = frame->components;
    if (!components || size != 4 + 2 * (size_t)components || p[0] != components)
        return 0;
    for (int i = 0; i < components; i++) {
        pst_frame_component *component = &frame->component[i];
        if (p[1 + 2 * i] != component->id)
            return 0;
        component->dc = p[2 + 2 * i] >> 4;
        component->ac = p[2 + 2 * i] & 15;
    }
    const uint8_t *spectrum = p + 1 + 2 * components; /* first and last coefficient, bits of approximation */
    return spectrum[0] == 0 && spectrum[1] == 63 && spectrum[2] == 0;
}

static void derive_geometry(pst_frame *frame)
{
    if (frame->components == 1)
        frame->component[0].h = frame->component[0].v = 1;
    frame->mcu_width = 8 * frame->component[0].h;
    frame->mcu_height = 8 * frame->component[0].v;
    frame->mcus_per_row = (frame->width + frame->mcu_width - 1) / frame->mcu_width;
    frame->mcu_rows = (frame->height + frame->mcu_height - 1) / frame->mcu_height;
}

int pst_frame_read(pst_frame *frame, const uint8_t *data, size_t size)
{
    frame->components = frame->jfif = 0;
    frame->adobe = -1;
    frame->restart_interval = 0;
    frame->quantisation_defined = 0;
    for (int i = 0; i < PST_TABLES; i++)
        frame->dc[i].size = frame->ac[i].size = 0;
    if (size < 2 || data[0] != 0xFF || data[1] != SOI)
        return 0;
    for (size_t at = 2;;) {
        const size_t start = at;
        while (at < size && data[at] == 0xFF) /* more than one is filling */
            at++;
        if (at == start || size - at < 3)
            return 0;
        const int marker = data[at];
        const size_t length = (size_t)load16(data + at + 1);
        if (length < 2 || length > size - at - 1)
            return 0;
        const uint8_t *content = data + at + 3;
        const size_t rest = length - 2;
        int known = 1;
        at += 1 + length;
        if (marker == SOF0 || marker == SOF1)
            known = read_sof(frame, content, rest);
        else if (marker == DQT)
            known = read_dqt(frame, content, rest);
        else if (marker == DHT)
            known = read_dht(frame, content, rest);
        else if (marker == DRI && rest == 2)
            frame->restart_interval = load16(content);
        else if (marker == APP0 && rest >= 14 && !memcmp(content, "JFIF", 5))
            frame->jfif = 1;
        else if (marker == APP14 && rest >= 12 && !memcmp(content, "Adobe", 5))
            frame->adobe = content[11];
        else if (marker == SOS) {
            frame->scan = at;
            if (!read_sos(frame, content, rest) || !is_accepted(frame))
                return 0;
            derive_geometry(frame);
            return 1;
        } else
            known = marker == COM || (marker >= APP0 && marker <= APP15);
        if (!known)
            return 0;
    }
}

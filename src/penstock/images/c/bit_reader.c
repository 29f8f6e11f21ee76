#include "bit_reader.h"

#include <string.h>

/* Unstuff as much as the chunk has room for: FF 00 is a byte of ones, and FF before another byte is a marker. */
static void unstuff(pst_bit_reader *reader)
{
    uint8_t *out = reader->chunk + (reader->chunk_end - reader->chunk), *limit = reader->chunk + PST_CHUNK;
    while (out < limit && !reader->exhausted) {
        const size_t room = (size_t)(limit - out), left = (size_t)(reader->raw_end - reader->raw);
        const size_t most = room < left ? room : left;
        const uint8_t *ones = memchr(reader->raw, 0xFF, most);
        const size_t plain = ones ? (size_t)(ones - reader->raw) : most;
        memcpy(out, reader->raw, plain);
        out += plain;
        reader->raw += plain;
        if (ones && reader->raw + 1 < reader->raw_end && reader->raw[1] == 0) {
            *out++ = 0xFF;
            reader->raw += 2;
        } else if (ones || reader->raw == reader->raw_end)
            reader->exhausted = 1;
    }
    reader->chunk_end = out;
    memset(out, 0, PST_BLOCK_BYTES + 16);
}

/* Bytes of ones, behind each of which a zero was stuffed. */
static ptrdiff_t count_ones(const uint8_t *from, const uint8_t *end)
{
    ptrdiff_t count = 0;
    for (; from < end; from++)
        count += *from == 0xFF;
    return count;
}

void pst_bit_reader_start(pst_bit_reader *reader, const uint8_t *byte, int bit, const uint8_t *end)
{
    reader->raw = reader->known_raw = byte;
    reader->raw_end = end;
    reader->exhausted = 0;
    reader->chunk_end = reader->known = reader->chunk;
    unstuff(reader);
    reader->bits = (pst_bits){reader->chunk, 0, 0};
    pst_bits_refill(&reader->bits);
    pst_bits_drop(&reader->bits, bit);
}

void pst_bit_reader_unstuff(pst_bit_reader *reader)
{
    const uint8_t *kept = reader->bits.next - (reader->bits.count + 7) / 8;
    const size_t size = (size_t)(reader->chunk_end - kept);
    reader->known_raw = reader->raw - size - count_ones(kept, reader->chunk_end);
    reader->known = reader->chunk;
    reader->bits.next -= kept - reader->chunk;
    memmove(reader->chunk, kept, size);
    reader->chunk_end = reader->chunk + size;
    unstuff(reader);
}

const uint8_t *pst_bit_reader_position(pst_bit_reader *reader, int *bit)
{
    const uint8_t *byte = reader->bits.next - (reader->bits.count + 7) / 8;
    *bit = -reader->bits.count & 7;
    reader->known_raw += byte - reader->known + count_ones(reader->known, byte);
    reader->known = byte;
    return reader->known_raw;
}

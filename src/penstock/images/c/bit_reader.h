/* The bits of entropy-coded data. Bytes are unstuffed a chunk at a time, and fill a buffer of 64 bits, which stays in
 * registers while a block is decoded.
 */
#ifndef PENSTOCK_BIT_READER_H
#define PENSTOCK_BIT_READER_H

#include <stddef.h>
#include <stdint.h>

#ifndef PST_CHUNK
#define PST_CHUNK 8192 /* bytes that are unstuffed at once; tests/fuzz has less, since its files are small */
#endif
#define PST_BLOCK_BYTES 256 /* no block takes more: 64 codes of 16 bits, each with 15 bits behind it, are 248 bytes */

/* The next bits: `count` of them, from the top of the buffer; `next` is the byte of the chunk that follows. */
typedef struct {
    const uint8_t *next;
    uint64_t buffer;
    int count;
} pst_bits;

typedef struct {
    pst_bits bits;
    const uint8_t *chunk_end;
    const uint8_t *raw, *raw_end; /* of the file, what has not been unstuffed */
    int exhausted;                /* nothing follows the chunk: the file ends, or a marker comes */
    const uint8_t *known_raw;     /* where the byte `known` of the chunk stands in the file */
    const uint8_t *known;
    uint8_t chunk[PST_CHUNK + PST_BLOCK_BYTES + 16];
} pst_bit_reader;

/* Have at least 56 bits. Behind the end of the data they are zeros: see `pst_bit_reader_store`. */
static inline void pst_bits_refill(pst_bits *bits)
{
    const uint8_t *p = bits->next;
    const uint64_t bytes = (uint64_t)p[0] << 56 | (uint64_t)p[1] << 48 | (uint64_t)p[2] << 40 | (uint64_t)p[3] << 32 |
                           (uint64_t)p[4] << 24 | (uint64_t)p[5] << 16 | (uint64_t)p[6] << 8 | p[7];
    const int added = (63 - bits->count) >> 3;
    bits->buffer |= bytes >> bits->count;
    bits->next += added;
    bits->count += added << 3;
}

/* The next bits, of which there are enough; `count` is not 0. */
static inline uint32_t pst_bits_peek(const pst_bits *bits, int count)
{
    return (uint32_t)(bits->buffer >> (64 - count));
}

static inline void pst_bits_drop(pst_bits *bits, int count)
{
    bits->buffer <<= count;
    bits->count -= count;
}

/* Begin at a bit of a byte, in data that ends at `end`. */
void pst_bit_reader_start(pst_bit_reader *reader, const uint8_t *byte, int bit, const uint8_t *end);

/* Unstuff more bytes, behind those of which bits are still to be read. */
void pst_bit_reader_unstuff(pst_bit_reader *reader);

/* Have the bytes of a block in the chunk, or all that there are, and zeros behind them. */
static inline void pst_bit_reader_fill(pst_bit_reader *reader)
{
    if (!reader->exhausted && reader->chunk_end - reader->bits.next < PST_BLOCK_BYTES)
        pst_bit_reader_unstuff(reader);
}

/* Where the next bit is: the byte of the file, and the bit in it. */
const uint8_t *pst_bit_reader_position(pst_bit_reader *reader, int *bit);

/* Go on behind the bits that a decoder has read: 0 if these are more than there were. */
static inline int pst_bit_reader_store(pst_bit_reader *reader, const pst_bits *bits)
{
    reader->bits = *bits;
    return (bits->next - reader->chunk_end) * 8 <= bits->count;
}

#endif

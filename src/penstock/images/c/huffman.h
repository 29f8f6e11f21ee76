/* The coded data of a baseline JPEG: decoded block by block, or passed over several symbols at a time. */
#ifndef PENSTOCK_HUFFMAN_H
#define PENSTOCK_HUFFMAN_H

#include <stddef.h>
#include <stdint.h>

#include "frame.h"

#define LOOK 10          /* bits that are looked up at once */
#define CHUNK 8192       /* bytes that are read at once */
#define MOST_DC 2047     /* of 8 bits */
#define PLACES 192       /* of coefficients: a symbol that ends a block goes 128 beyond it */
#define MOST_SUM 5800    /* of a block's absolute coefficients: below it no sum of libjpeg's transform leaves 16 bits */
#define BLOCK_BYTES 256  /* no block takes more: 64 codes of 16 bits, each with 15 bits behind it, are 248 bytes */

/* Huffman codes, and what they say about the next LOOK bits. */
typedef struct {
    pst_huffman_definition made_of;
    uint32_t beyond[18];           /* by length: the first 16 bits behind all codes of it */
    int32_t offset[18];            /* by length: what makes a code the place of its symbol */
    uint16_t first[1 << LOOK];     /* length | symbol << 8 of the code in front; 0 where it is longer */
    uint32_t groups[1 << LOOK];    /* of AC codes, what can be passed at once, see `group_of`; 0 is not made yet */
    int32_t values[1 << LOOK];     /* of an AC code and the bits behind it, see `value_of`; 0 where these are more */
} codes;

/* The codes of the last files of a thread: most files have the same. */
typedef struct {
    codes dc[PST_TABLES], ac[PST_TABLES];
} code_tables;

/* Unstuffed bytes of the coded data, and the next bits of them. */
typedef struct {
    const uint8_t *raw, *end;      /* of the file, what has not been unstuffed */
    const uint8_t *known_raw;      /* where the byte `known` of the chunk stands in the file */
    size_t known;
    int last;                      /* nothing comes behind the chunk: the file ends, or a marker follows */
    const uint8_t *next, *stop;    /* in the chunk */
    uint64_t bits;                 /* the next ones, the first in front */
    int count;                     /* how many of them */
    uint8_t chunk[CHUNK + BLOCK_BYTES + 16];
} reader;

/* What coefficients are multiplied by, and where they belong, in the order of the file. */
typedef struct {
    uint16_t factor[PLACES];
    uint8_t natural[PLACES];       /* what comes behind the block goes to a 65th place */
} quantiser;

/* What a scan is made of. */
typedef struct {
    int components, blocks;        /* blocks of an MCU */
    int component[PST_MCU_BLOCKS];
    codes *dc[PST_COMPONENTS], *ac[PST_COMPONENTS];
    long wide, high;               /* MCUs */
} scan;

/* Eight bytes, the first one in front; one instruction or two. */
static inline uint64_t load64(const uint8_t *p)
{
    return (uint64_t)p[0] << 56 | (uint64_t)p[1] << 48 | (uint64_t)p[2] << 40 | (uint64_t)p[3] << 32 |
           (uint64_t)p[4] << 24 | (uint64_t)p[5] << 16 | (uint64_t)p[6] << 8 | p[7];
}

void open_scan(scan *made, code_tables *tables, const pst_frame *frame);
void make_quantiser(quantiser *made, const uint8_t factors[64]);
void start_reader(reader *r, const uint8_t *data, size_t size, size_t byte, int bit);
void ensure(reader *r, size_t bytes);
int walk(const scan *s, reader *r, int dc[], long mcus);
int read_block(const scan *s, reader *r, int component, const quantiser *by, int *dc, int16_t block[72]);
int read_dc(const scan *s, reader *r, int component, const quantiser *by, int *dc, int16_t *value);
size_t raw_place(reader *r, const uint8_t *data, int *bit);

#endif

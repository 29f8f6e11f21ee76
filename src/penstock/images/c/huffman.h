/* Blocks of a baseline JPEG: decoded, or skipped several symbols at a time. */
#ifndef PENSTOCK_HUFFMAN_H
#define PENSTOCK_HUFFMAN_H

#include "bit_reader.h"
#include "frame.h"

#define PST_LOOKUP_BITS 10 /* bits that are looked up at once */
#define PST_PLACES 192     /* of coefficients, in zigzag order: the symbol that ends a block goes 128 beyond it */
#define PST_MAX_COEFFICIENT                                                                                            \
    5800 /* of a block's absolute sum: below it, no sum of libjpeg's transform leaves 16 bits                          \
          */

/* A Huffman table, and what it says about the next PST_LOOKUP_BITS bits. */
typedef struct {
    pst_huffman_definition definition;
    uint32_t limit[17];                   /* by length: the first 16 bits behind all codes of it and of shorter ones */
    int32_t offset[17];                   /* by length: what makes a code the index of its symbol */
    uint16_t codes[1 << PST_LOOKUP_BITS]; /* length | symbol << 8 of the first code; 0 where it is longer */
    int32_t values[1 << PST_LOOKUP_BITS]; /* bits | advance << 8 | value << 16 of the first symbol; 0 where these are
                                             more bits */
    uint32_t runs[1 << PST_LOOKUP_BITS];  /* see `find_run`; 0: not known yet */
} pst_huffman_table;

/* What a component of a scan is decoded by. */
typedef struct {
    pst_huffman_table *dc, *ac;
    int prediction; /* of the next DC value: the last one */
} pst_block_decoder;

/* Make the table of a definition, which `pst_frame_read` has found valid. Nothing is done where it is there already. */
void pst_huffman_build(pst_huffman_table *table, const pst_huffman_definition *definition);

enum pst_block { PST_BLOCK_DAMAGED, PST_BLOCK_DC, PST_BLOCK_FULL };

/* Decode the next block. `block` has 64 zeros and a 65th place: the coefficients, times `factors`, which are 0 from the
 * 65th on, go there row by row. PST_BLOCK_DC has a DC value only. PST_BLOCK_DAMAGED: the data is not as it should be,
 * or the sum is larger than any picture gives, of which decoders make this or that. */
enum pst_block pst_block_decode(pst_block_decoder *decoder, pst_bit_reader *reader, const uint8_t factors[PST_PLACES],
                                int16_t *block);

/* Skip the next block, whose DC value is the prediction then. 0 where the data is not as it should be. */
int pst_block_skip(pst_block_decoder *decoder, pst_bit_reader *reader);

#endif

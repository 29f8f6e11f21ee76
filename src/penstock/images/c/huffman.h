/* Blocks of a baseline JPEG: decoded or skipped. */
#ifndef PENSTOCK_HUFFMAN_H
#define PENSTOCK_HUFFMAN_H

#include "bit_reader.h"
#include "frame.h"

#define PST_LOOKUP_BITS 10 /* bits that are looked up at once */
#define PST_PLACES 192     /* of coefficients, in zigzag order: the symbol that ends a block goes 128 beyond it */

/* A Huffman table, and the next symbol by the next PST_LOOKUP_BITS bits: where code and value are within these, bits |
 * coefficients that it goes on by << 8 | value << 16; where only the code is, length of the code << 8 | symbol << 16.
 */
typedef struct {
    pst_huffman_definition definition;
    uint32_t lookup[1 << PST_LOOKUP_BITS];
    uint32_t skips[1 << PST_LOOKUP_BITS]; /* bits | coefficients << 8 of all symbols within the next bits; 0: unknown */
    uint32_t limit[17];                   /* by length: the first 16 bits behind all codes of it and of shorter ones */
    int32_t offset[17];                   /* by length: what makes a code the index of its symbol */
} pst_huffman_table;

/* What a component of a scan is decoded by. */
typedef struct {
    pst_huffman_table *dc, *ac;
    int prediction; /* of the next DC value: the last one */
} pst_block_decoder;

/* Make the table of a definition, which `pst_frame_read` has found valid. Nothing is done where it is there already. */
void pst_huffman_build(pst_huffman_table *table, const pst_huffman_definition *definition);

enum pst_block { PST_BLOCK_DAMAGED, PST_BLOCK_DC, PST_BLOCK_FULL };

/* Decode the next block to `block`, which has 64 zeros and a 65th place: the coefficients, times `factors`, which are 0
 * from the 65th on, go there row by row. PST_BLOCK_DC has a DC value only. PST_BLOCK_DAMAGED: the data is not as it
 * should be, or the coefficients have a larger sum than those of any picture, of which decoders make this or that. */
enum pst_block pst_block_decode(pst_block_decoder *decoder, pst_bit_reader *reader, const uint8_t *factors,
                                int16_t *block);

/* Skip the next block: its DC value is the prediction then. 0 where the data is not as it should be. */
int pst_block_skip(pst_block_decoder *decoder, pst_bit_reader *reader);

#endif

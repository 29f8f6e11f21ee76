/* Most coefficients take one table look-up: a code and the bits behind it are looked up together. Skipping takes one
 * for several coefficients.
 */
#include "huffman.h"

#include <stdlib.h>
#include <string.h>

#define END_OF_BLOCK 128 /* coefficients that the symbol EOB counts for, and more than those of a block */
#define MAX_SKIP_BITS (PST_LOOKUP_BITS + 15) /* the value of one symbol may end behind the bits that are looked up */
#define MAX_DC 2047                          /* of 8 bits a sample */
#define MAX_SUM 5800 /* of a block's coefficients: below it, no sum of libjpeg's transform leaves 16 bits */

/* The number that so many bits stand for. */
static inline int extend(uint32_t bits, int size)
{
    return size && !(bits >> (size - 1)) ? (int)bits - (1 << size) + 1 : (int)bits;
}

/* Coefficients that an AC symbol goes on by: zeros and the value behind them, or the end of the block. */
static inline unsigned advance_of(unsigned symbol)
{
    const unsigned size = symbol & 15, run = symbol >> 4;
    return size == 0 && run != 15 ? END_OF_BLOCK : run + 1;
}

/* Decode the next symbol and its value, for which there are enough bits or, if they are not within a look-up, more are
 * read. `*k`, a coefficient, goes on behind it. 0 if there is no such code. */
static inline int decode_symbol(const pst_huffman_table *table, pst_bits *bits, unsigned *k, int *value)
{
    const uint32_t found = table->lookup[pst_bits_peek(bits, PST_LOOKUP_BITS)];
    if (found & 255) {
        pst_bits_drop(bits, (int)(found & 255));
        *k += found >> 8 & 255;
        *value = (int32_t)found >> 16;
        return 1;
    }
    pst_bits_refill(bits);
    unsigned length = found >> 8 & 255, symbol = found >> 16;
    if (!length) {
        const uint32_t ahead = pst_bits_peek(bits, 16);
        length = PST_LOOKUP_BITS + 1;
        while (length <= 16 && ahead >= table->limit[length])
            length++;
        if (length > 16)
            return 0;
        symbol = table->definition.symbols[((int)(ahead >> (16 - length)) + table->offset[length]) & 255];
    }
    const int size = (int)(symbol & 15);
    pst_bits_drop(bits, (int)length);
    *value = size ? extend(pst_bits_peek(bits, size), size) : 0;
    pst_bits_drop(bits, size);
    *k += advance_of(symbol);
    return 1;
}

/* Decode the next DC value. 0 if there is no such code. */
static inline int decode_dc(pst_block_decoder *decoder, pst_bits *bits)
{
    unsigned unused = 0;
    int difference;
    pst_bits_refill(bits);
    if (!decode_symbol(decoder->dc, bits, &unused, &difference))
        return 0;
    decoder->prediction += difference;
    return decoder->prediction >= -MAX_DC && decoder->prediction <= MAX_DC;
}

/* Fill the look-ups that begin with a code. */
static void fill_lookup(pst_huffman_table *table, unsigned code, unsigned length, unsigned symbol)
{
    const unsigned behind = PST_LOOKUP_BITS - length, size = symbol & 15;
    for (unsigned k = 0; k < 1u << behind; k++) {
        uint32_t found = symbol << 16 | length << 8;
        if (size <= behind) {
            const int value = extend(k >> (behind - size), (int)size);
            found = (uint32_t)value << 16 | advance_of(symbol) << 8 | (length + size);
        }
        table->lookup[(code << behind) + k] = found;
    }
}

void pst_huffman_build(pst_huffman_table *table, const pst_huffman_definition *definition)
{
    const size_t size = (size_t)definition->size;
    if (table->definition.size == definition->size && !memcmp(table->definition.counts, definition->counts, 16) &&
        !memcmp(table->definition.symbols, definition->symbols, size))
        return;
    table->definition.size = definition->size;
    memcpy(table->definition.counts, definition->counts, 16);
    memcpy(table->definition.symbols, definition->symbols, size);
    memset(table->lookup, 0, sizeof table->lookup);
    memset(table->skips, 0, sizeof table->skips);
    unsigned code = 0, index = 0;
    for (unsigned length = 1; length <= 16; length++, code <<= 1) {
        table->offset[length] = (int32_t)index - (int32_t)code;
        for (unsigned i = 0; i < definition->counts[length - 1]; i++, code++, index++)
            if (length <= PST_LOOKUP_BITS)
                fill_lookup(table, code, length, definition->symbols[index]);
        table->limit[length] = code << (16 - length);
    }
}

/* The entry of `skips` for the next bits; no bits, where the first code does not end within them. */
static uint32_t find_skip(const pst_huffman_table *table, uint32_t ahead)
{
    unsigned used = 0, coefficients = 0;
    while (used < PST_LOOKUP_BITS && coefficients < END_OF_BLOCK) {
        const uint32_t found = table->lookup[ahead << used & ((1 << PST_LOOKUP_BITS) - 1)];
        unsigned count = found & 255, advance = found >> 8 & 255;
        if (!count && advance && !used) {
            const unsigned symbol = found >> 16;
            count = advance + (symbol & 15);
            advance = advance_of(symbol);
        }
        if (!count || (used && used + count > PST_LOOKUP_BITS))
            break;
        /* Without an EOB, fewer coefficients than it counts for, wherever the group begins. */
        if (advance < END_OF_BLOCK && coefficients + advance > 63)
            break;
        used += count;
        coefficients += advance;
    }
    return used ? coefficients << 8 | used : END_OF_BLOCK << 8;
}

/* Whether a block may end so: with its last coefficient, or with an EOB behind an earlier one. */
static inline int is_end(unsigned k)
{
    return k == 64 || (k >= END_OF_BLOCK && k < END_OF_BLOCK + 64);
}

enum pst_block pst_block_decode(pst_block_decoder *decoder, pst_bit_reader *reader, const uint8_t *factors,
                                int16_t *block)
{
    static const uint8_t natural_order[PST_PLACES] = {
        0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18,
        11, 4,  5,  12, 19, 26, 33, 40, 48, 41, 34, 27, 20,
        13, 6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43,
        36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45,
        38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63, [64 ... PST_PLACES - 1] = 64};
    const pst_huffman_table *ac = decoder->ac;
    pst_bit_reader_fill(reader);
    pst_bits bits = reader->bits;
    if (!decode_dc(decoder, &bits))
        return PST_BLOCK_DAMAGED;
    int value = decoder->prediction * factors[0], sum = abs(value);
    block[0] = (int16_t)value;
    unsigned k = 1;
    do {
        pst_bits_refill(&bits);
        do {
            if (!decode_symbol(ac, &bits, &k, &value))
                return PST_BLOCK_DAMAGED;
            value *= factors[k - 1];
            sum += abs(value);
            block[natural_order[k - 1]] = (int16_t)value;
        } while (k < 64 && bits.count >= PST_LOOKUP_BITS);
    } while (k < 64);
    if (!pst_bit_reader_store(reader, &bits) || !is_end(k) || sum > MAX_SUM)
        return PST_BLOCK_DAMAGED;
    return k == 1 + END_OF_BLOCK ? PST_BLOCK_DC : PST_BLOCK_FULL;
}

int pst_block_skip(pst_block_decoder *decoder, pst_bit_reader *reader)
{
    pst_huffman_table *ac = decoder->ac;
    pst_bit_reader_fill(reader);
    pst_bits bits = reader->bits;
    if (!decode_dc(decoder, &bits))
        return 0;
    int value;
    unsigned k = 1;
    do {
        pst_bits_refill(&bits);
        do {
            const uint32_t ahead = pst_bits_peek(&bits, PST_LOOKUP_BITS);
            if (!ac->skips[ahead])
                ac->skips[ahead] = find_skip(ac, ahead);
            const uint32_t found = ac->skips[ahead];
            const unsigned after = k + (found >> 8);
            if (found & 255 && (after < 64 || is_end(after))) {
                pst_bits_drop(&bits, (int)(found & 255));
                k = after;
            } else if (!decode_symbol(ac, &bits, &k, &value))
                return 0;
        } while (k < 64 && bits.count >= MAX_SKIP_BITS);
    } while (k < 64);
    return pst_bit_reader_store(reader, &bits) && is_end(k);
}

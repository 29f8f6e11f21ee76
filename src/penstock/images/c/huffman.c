/* Decoding takes one table look-up for each coefficient: codes and the bits behind them are looked up together.
 * Skipping takes one for each run of symbols, and nothing is written: two fifths of the time.
 */
#include "huffman.h"

#include <string.h>

#define END_OF_BLOCK 128 /* coefficients that the symbol EOB counts for, and more than those of a block */
#define MAX_DC 2047      /* of 8 bits a sample */
#define MAX_RUN_BITS (PST_LOOKUP_BITS + 15) /* of a run that is looked up: the last value may end behind these bits */

/* Length | symbol << 8 of the next code, of which there are 16 bits; 0 if there is none. */
static inline unsigned next_code(const pst_huffman_table *table, const pst_bits *bits)
{
    const unsigned found = table->codes[pst_bits_peek(bits, PST_LOOKUP_BITS)];
    if (found)
        return found;
    const uint32_t ahead = pst_bits_peek(bits, 16);
    unsigned length = PST_LOOKUP_BITS + 1;
    while (length <= 16 && ahead >= table->limit[length])
        length++;
    if (length > 16)
        return 0;
    const int index = (int)(ahead >> (16 - length)) + table->offset[length];
    return length | (unsigned)table->definition.symbols[index & 255] << 8;
}

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

/* Whether a block ends where the coefficient `k` would come next: with its last one, or by an EOB within it. */
static inline int is_end(unsigned k)
{
    return k == 64 || (k >= END_OF_BLOCK && k < END_OF_BLOCK + 64);
}

/* The next symbol and its value; `*k`, a coefficient, goes on behind it. 0 if there is no such code. */
static inline int decode_symbol(const pst_huffman_table *table, pst_bits *bits, unsigned *k, int *value)
{
    pst_bits_refill(bits);
    const unsigned code = next_code(table, bits);
    const int size = (int)(code >> 8 & 15);
    pst_bits_drop(bits, (int)(code & 255));
    *value = size ? extend(pst_bits_peek(bits, size), size) : 0;
    pst_bits_drop(bits, size);
    *k += advance_of(code >> 8);
    return code != 0;
}

/* The next DC value. 0 if there is no such code. */
static inline int decode_dc(pst_block_decoder *decoder, pst_bits *bits)
{
    unsigned unused = 0;
    int difference;
    pst_bits_refill(bits);
    const int32_t found = decoder->dc->values[pst_bits_peek(bits, PST_LOOKUP_BITS)];
    if (found) {
        pst_bits_drop(bits, found & 255);
        difference = found >> 16;
    } else if (!decode_symbol(decoder->dc, bits, &unused, &difference))
        return 0;
    decoder->prediction += difference;
    return decoder->prediction >= -MAX_DC && decoder->prediction <= MAX_DC;
}

/* Bits | advance << 8 of as many AC symbols as fit, of which only the first may end behind the bits looked up. Where
 * not even that fits, the advance is more than any block has. */
static uint32_t find_run(const pst_huffman_table *ac, uint32_t ahead)
{
    unsigned used = 0, passed = 0;
    while (used < PST_LOOKUP_BITS && passed < END_OF_BLOCK) {
        const unsigned code = ac->codes[ahead << used & ((1u << PST_LOOKUP_BITS) - 1)];
        const unsigned length = code & 255, size = code >> 8 & 15, advance = advance_of(code >> 8);
        if (!length || used + length > PST_LOOKUP_BITS || (used && used + length + size > PST_LOOKUP_BITS) ||
            (advance < END_OF_BLOCK && passed + advance > 64))
            break;
        used += length + size;
        passed += advance;
    }
    return used ? used | passed << 8 : 64 << 8;
}

/* Fill the look-ups that begin with a code. */
static void fill_lookups(pst_huffman_table *table, unsigned code, unsigned length, unsigned symbol)
{
    const unsigned behind = PST_LOOKUP_BITS - length, size = symbol & 15;
    for (unsigned k = 0; k < 1u << behind; k++) {
        const unsigned ahead = (code << behind) + k;
        table->codes[ahead] = (uint16_t)(length | symbol << 8);
        if (size <= behind) {
            const int value = extend(k >> (behind - size), (int)size);
            table->values[ahead] = (int32_t)((uint32_t)value << 16 | advance_of(symbol) << 8 | (length + size));
        }
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
    memset(table->codes, 0, sizeof table->codes);
    memset(table->values, 0, sizeof table->values);
    memset(table->runs, 0, sizeof table->runs);
    unsigned code = 0, index = 0;
    for (unsigned length = 1; length <= 16; length++, code <<= 1) {
        table->offset[length] = (int32_t)index - (int32_t)code;
        for (unsigned i = 0; i < definition->counts[length - 1]; i++, code++, index++)
            if (length <= PST_LOOKUP_BITS)
                fill_lookups(table, code, length, definition->symbols[index]);
        table->limit[length] = code << (16 - length);
    }
}

enum pst_block pst_block_decode(pst_block_decoder *decoder, pst_bit_reader *reader, const uint8_t factors[PST_PLACES],
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
    int value = decoder->prediction * factors[0], sum = value < 0 ? -value : value;
    block[0] = (int16_t)value;
    unsigned k = 1;
    do {
        pst_bits_refill(&bits);
        do {
            const int32_t found = ac->values[pst_bits_peek(&bits, PST_LOOKUP_BITS)];
            if (found) {
                pst_bits_drop(&bits, found & 255);
                k += (uint32_t)found >> 8 & 255;
                value = found >> 16;
            } else if (!decode_symbol(ac, &bits, &k, &value))
                return PST_BLOCK_DAMAGED;
            value *= factors[k - 1];
            sum += value < 0 ? -value : value;
            block[natural_order[k - 1]] = (int16_t)value;
        } while (k < 64 && bits.count >= PST_LOOKUP_BITS);
    } while (k < 64);
    if (!pst_bit_reader_store(reader, &bits) || !is_end(k) || sum > PST_MAX_COEFFICIENT)
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
    for (unsigned k = 1; k < 64;) {
        if (bits.count < MAX_RUN_BITS)
            pst_bits_refill(&bits);
        const uint32_t ahead = pst_bits_peek(&bits, PST_LOOKUP_BITS);
        uint32_t run = ac->runs[ahead];
        if (!run)
            run = ac->runs[ahead] = find_run(ac, ahead);
        int value;
        if (k + (run >> 8) < 64 || is_end(k + (run >> 8))) {
            pst_bits_drop(&bits, (int)(run & 255));
            k += run >> 8;
        } else if (!decode_symbol(ac, &bits, &k, &value) ||
                   (k > 64 && !is_end(k))) /* a long code, or the block ends in the run */
            return 0;
    }
    return pst_bit_reader_store(reader, &bits);
}

/* The transform is that of Loeffler, Ligtenberg and Moschytz (ICASSP 1989) as libjpeg rounds it: constants of 13 bits,
 * 2 more bits between the passes, one rounding at the end of each. All else is exact, so each output is a sum of inputs
 * times whole numbers, in whatever order, and vectors make these sums two products at a time. A block of half, a
 * quarter or an eighth of the size is that of libjpeg's reduced transforms.
 */
#include "samples.h"

#include <string.h>

#include "cpu.h"

#define CONST_BITS 13
#define PASS1_BITS 2
#define COLUMN_BITS (CONST_BITS - PASS1_BITS)  /* that the pass over columns drops */
#define ROW_BITS (CONST_BITS + PASS1_BITS + 3) /* that the pass over rows drops */

static inline uint8_t to_sample(int value)
{
    value += 128;
    return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
}

static inline int descale(int value, int bits)
{
    return (value + (1 << (bits - 1))) >> bits;
}

/* One pass of a transform: eight values, `step` apart, into eight others, four or two. */

static inline void pass8(const int *in, int *out, int step, int bits)
{
    const int i0 = in[0], i1 = in[step], i2 = in[2 * step], i3 = in[3 * step], i4 = in[4 * step], i5 = in[5 * step],
              i6 = in[6 * step], i7 = in[7 * step];
    const int sum = (i0 + i4) * (1 << CONST_BITS), difference = (i0 - i4) * (1 << CONST_BITS);
    const int wide = 10703 * i2 + 4433 * i6, narrow = 4433 * i2 - 10704 * i6;
    const int even[4] = {sum + wide, difference + narrow, difference - narrow, sum - wide};
    const int odd[4] = {11363 * i1 + 9633 * i3 + 6437 * i5 + 2260 * i7, 9633 * i1 - 2259 * i3 - 11362 * i5 - 6436 * i7,
                        6437 * i1 - 11362 * i3 + 2261 * i5 + 9633 * i7, 2260 * i1 - 6436 * i3 + 9633 * i5 - 11363 * i7};
    for (int k = 0; k < 4; k++) {
        out[k * step] = descale(even[k] + odd[k], bits);
        out[(7 - k) * step] = descale(even[k] - odd[k], bits);
    }
}

static inline void pass4(const int *in, int *out, int step, int bits)
{
    const int i1 = in[step], i3 = in[3 * step], i5 = in[5 * step], i7 = in[7 * step];
    const int first = in[0] * (1 << (CONST_BITS + 1)), even = 15137 * in[2 * step] - 6270 * in[6 * step];
    const int outer = 20995 * i1 + 7373 * i3 - 4926 * i5 - 4176 * i7;
    const int inner = 8697 * i1 - 17799 * i3 + 11893 * i5 - 1730 * i7;
    out[0] = descale(first + even + outer, bits + 1);
    out[step] = descale(first - even + inner, bits + 1);
    out[2 * step] = descale(first - even - inner, bits + 1);
    out[3 * step] = descale(first + even - outer, bits + 1);
}

static inline void pass2(const int *in, int *out, int step, int bits)
{
    const int first = in[0] * (1 << (CONST_BITS + 2));
    const int odd = 29692 * in[step] - 10426 * in[3 * step] + 6967 * in[5 * step] - 5906 * in[7 * step];
    out[0] = descale(first + odd, bits + 2);
    out[step] = descale(first - odd, bits + 2);
}

static inline void idct(const int16_t *block, int size, uint8_t *out, ptrdiff_t stride,
                        void (*pass)(const int *, int *, int, int))
{
    int coefficients[64], columns[64] = {0}, row[8];
    for (int i = 0; i < 64; i++)
        coefficients[i] = block[i];
    for (int x = 0; x < 8; x++)
        pass(coefficients + x, columns + x, 8, COLUMN_BITS);
    for (int y = 0; y < size; y++) {
        pass(columns + 8 * y, row, 1, ROW_BITS);
        for (int x = 0; x < size; x++)
            out[y * stride + x] = to_sample(row[x]);
    }
}

#if PST_AVX2_COMPILED

#define ADD _mm256_add_epi32
#define SUB _mm256_sub_epi32
#define PACK _mm256_packs_epi32
#define MADD(pairs, a, b) _mm256_madd_epi16(pairs, pst_pair(a, b))

/* One pass over eight columns: 32 bits each, from pairs of rows. */
PST_AVX2_INLINE void pass8_avx2(__m256i p04, __m256i p15, __m256i p26, __m256i p37, const int bits, __m256i out[8])
{
    const __m256i half = _mm256_set1_epi32(1 << (bits - 1));
    const __m256i sum = ADD(MADD(p04, 8192, 8192), half);
    const __m256i difference = ADD(MADD(p04, 8192, -8192), half);
    const __m256i wide = MADD(p26, 10703, 4433), narrow = MADD(p26, 4433, -10704);
    const __m256i even[4] = {ADD(sum, wide), ADD(difference, narrow), SUB(difference, narrow), SUB(sum, wide)};
    const __m256i odd[4] = {
        ADD(MADD(p15, 11363, 6437), MADD(p37, 9633, 2260)), ADD(MADD(p15, 9633, -11362), MADD(p37, -2259, -6436)),
        ADD(MADD(p15, 6437, 2261), MADD(p37, -11362, 9633)), ADD(MADD(p15, 2260, 9633), MADD(p37, -6436, -11363))};
    for (int k = 0; k < 4; k++) {
        out[k] = _mm256_srai_epi32(ADD(even[k], odd[k]), bits);
        out[7 - k] = _mm256_srai_epi32(SUB(even[k], odd[k]), bits);
    }
}

PST_AVX2_INLINE __m256i interleave(__m128i a, __m128i b)
{
    return _mm256_set_m128i(_mm_unpackhi_epi16(a, b), _mm_unpacklo_epi16(a, b));
}

/* What comes out of the pass over rows is columns, 32 bits each. */
PST_AVX2_INLINE void store_block(const __m256i columns[8], uint8_t *out, ptrdiff_t stride)
{
    const __m256i transpose = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12, 1, 5,
                                               9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m256i middle = _mm256_set1_epi8((char)128);
    __m256i left = _mm256_packs_epi16(PACK(columns[0], columns[1]), PACK(columns[2], columns[3]));
    __m256i right = _mm256_packs_epi16(PACK(columns[4], columns[5]), PACK(columns[6], columns[7]));
    left = _mm256_shuffle_epi8(_mm256_xor_si256(left, middle), transpose);
    right = _mm256_shuffle_epi8(_mm256_xor_si256(right, middle), transpose);
    const __m256i upper = _mm256_unpacklo_epi32(left, right), lower = _mm256_unpackhi_epi32(left, right);
    const __m128i rows[4] = {_mm256_castsi256_si128(upper), _mm256_castsi256_si128(lower),
                             _mm256_extracti128_si256(upper, 1), _mm256_extracti128_si256(lower, 1)};
    for (int i = 0; i < 4; i++) {
        _mm_storel_epi64((__m128i *)(void *)(out + 2 * i * stride), rows[i]);
        _mm_storeh_pd((double *)(void *)(out + (2 * i + 1) * stride), _mm_castsi128_pd(rows[i]));
    }
}

PST_AVX2 static void idct8_avx2(const int16_t *block, uint8_t *out, ptrdiff_t stride)
{
    __m128i r[8];
    __m256i sums[8];
    for (int i = 0; i < 8; i++)
        r[i] = _mm_load_si128((const __m128i *)(const void *)(block + 8 * i));
    pass8_avx2(interleave(r[0], r[4]), interleave(r[1], r[5]), interleave(r[2], r[6]), interleave(r[3], r[7]),
               COLUMN_BITS, sums);
    /* Rows 0 and 1, 2 and 3, 4 and 5, 6 and 7: columns 0 to 3 in the lower half, 4 to 7 in the upper one. */
    const __m256i a = PACK(sums[0], sums[1]), b = PACK(sums[2], sums[3]), c = PACK(sums[4], sums[5]),
                  d = PACK(sums[6], sums[7]);
    const __m256i ab = _mm256_unpacklo_epi16(a, b), ba = _mm256_unpackhi_epi16(a, b), cd = _mm256_unpacklo_epi16(c, d),
                  dc = _mm256_unpackhi_epi16(c, d);
    const __m256i first = _mm256_unpacklo_epi16(ab, ba), second = _mm256_unpackhi_epi16(ab, ba),
                  third = _mm256_unpacklo_epi16(cd, dc), fourth = _mm256_unpackhi_epi16(cd, dc);
    const __m256i c01 = _mm256_permute2x128_si256(first, third, 0x20),
                  c45 = _mm256_permute2x128_si256(first, third, 0x31),
                  c23 = _mm256_permute2x128_si256(second, fourth, 0x20),
                  c67 = _mm256_permute2x128_si256(second, fourth, 0x31);
    pass8_avx2(_mm256_unpacklo_epi16(c01, c45), _mm256_unpackhi_epi16(c01, c45), _mm256_unpacklo_epi16(c23, c67),
               _mm256_unpackhi_epi16(c23, c67), ROW_BITS, sums);
    store_block(sums, out, stride);
}

#else
#define idct8_avx2(block, out, stride) idct(block, 8, out, stride, pass8)
#endif

void pst_idct_dc(int dc, int size, uint8_t *out, ptrdiff_t stride)
{
    for (int y = 0; y < size; y++)
        memset(out + y * stride, to_sample(descale(dc, 3)), (size_t)size);
}

void pst_idct(const int16_t *block, int size, uint8_t *out, ptrdiff_t stride, int avx2)
{
    if (size == 2)
        idct(block, 2, out, stride, pass2);
    else if (size == 4)
        idct(block, 4, out, stride, pass4);
    else if (avx2)
        idct8_avx2(block, out, stride);
    else
        idct(block, 8, out, stride, pass8);
}

#include "samples.h"

#include "cpu.h"

/* Loops that a compiler makes vectors of. */

void pst_upsample_h2v1(const uint8_t *restrict samples, long count, uint8_t *restrict out)
{
    for (long i = 0; i < count; i++) {
        const int three = 3 * samples[i];
        out[2 * i] = (uint8_t)((three + samples[i - 1] + 1) >> 2);
        out[2 * i + 1] = (uint8_t)((three + samples[i + 1] + 2) >> 2);
    }
}

void pst_upsample_h2v2(const uint8_t *restrict near, const uint8_t *restrict far, long count, uint8_t *restrict out)
{
    for (long i = 0; i < count; i++) {
        const int left = 3 * near[i - 1] + far[i - 1], here = 3 * near[i] + far[i];
        const int right = 3 * near[i + 1] + far[i + 1];
        out[2 * i] = (uint8_t)((3 * here + left + 8) >> 4);
        out[2 * i + 1] = (uint8_t)((3 * here + right + 7) >> 4);
    }
}

/* Factors of the conversion, times 65536. */
#define CR_TO_R 91881
#define CB_TO_G (-22554)
#define CR_TO_G (-46802)
#define CB_TO_B 116130

static inline uint8_t clamp(int value)
{
    return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
}

static void ycc_to_rgb(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, long count, uint8_t *out)
{
    for (long i = 0; i < count; i++) {
        const int blue = cb[i] - 128, red = cr[i] - 128;
        out[3 * i] = clamp(y[i] + ((CR_TO_R * red + 32768) >> 16));
        out[3 * i + 1] = clamp(y[i] + ((CB_TO_G * blue + CR_TO_G * red + 32768) >> 16));
        out[3 * i + 2] = clamp(y[i] + ((CB_TO_B * blue + 32768) >> 16));
    }
}

#if PST_AVX2_COMPILED

#define ADD _mm256_add_epi16
#define SUB _mm256_sub_epi16

/* Factors that have more than 16 bits are split into a whole part and a rest, which does not change the sums. */

/* (value * factor + 32768) >> 16, of small values. */
PST_AVX2_INLINE __m256i scale(__m256i value, int factor)
{
    const __m256i twice = _mm256_mulhi_epi16(ADD(value, value), _mm256_set1_epi16((short)factor));
    return _mm256_srai_epi16(ADD(twice, _mm256_set1_epi16(1)), 1);
}

/* (a * factor_a + b * factor_b + 32768) >> 16 */
PST_AVX2_INLINE __m256i scale_sum(__m256i a, __m256i b, int factor_a, int factor_b)
{
    const __m256i factors = pst_pair(factor_a, factor_b), half = _mm256_set1_epi32(32768);
    const __m256i low = _mm256_add_epi32(_mm256_madd_epi16(_mm256_unpacklo_epi16(a, b), factors), half);
    const __m256i high = _mm256_add_epi32(_mm256_madd_epi16(_mm256_unpackhi_epi16(a, b), factors), half);
    return _mm256_packs_epi32(_mm256_srai_epi32(low, 16), _mm256_srai_epi32(high, 16));
}

PST_AVX2_INLINE __m256i load16(const uint8_t *samples)
{
    return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(const void *)samples));
}

/* Sixteen pixels at a time: 52 bytes are written for 48. */
PST_AVX2 static void ycc_to_rgb_avx2(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, long count, uint8_t *out)
{
    const __m256i middle = _mm256_set1_epi16(128);
    const __m128i pack = _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
    for (long i = 0; i < count; i += 16, out += 48) {
        const __m256i gray = load16(y + i), blue = SUB(load16(cb + i), middle), red = SUB(load16(cr + i), middle);
        const __m256i r = ADD(ADD(gray, red), scale(red, CR_TO_R - 65536));
        const __m256i g = ADD(SUB(gray, red), scale_sum(blue, red, CB_TO_G, CR_TO_G + 65536));
        const __m256i b = ADD(ADD(gray, ADD(blue, blue)), scale(blue, CB_TO_B - 2 * 65536));
        /* Pixels 0 to 7 in the lower halves, 8 to 15 in the upper ones: red and green, then blue and nothing. */
        const __m256i rb = _mm256_packus_epi16(r, b), g0 = _mm256_packus_epi16(g, g);
        const __m256i rg = _mm256_unpacklo_epi8(rb, g0), b0 = _mm256_unpackhi_epi8(rb, g0);
        const __m256i first = _mm256_unpacklo_epi16(rg, b0), second = _mm256_unpackhi_epi16(rg, b0);
        _mm_storeu_si128((__m128i *)(void *)out, _mm_shuffle_epi8(_mm256_castsi256_si128(first), pack));
        _mm_storeu_si128((__m128i *)(void *)(out + 12), _mm_shuffle_epi8(_mm256_castsi256_si128(second), pack));
        _mm_storeu_si128((__m128i *)(void *)(out + 24), _mm_shuffle_epi8(_mm256_extracti128_si256(first, 1), pack));
        _mm_storeu_si128((__m128i *)(void *)(out + 36), _mm_shuffle_epi8(_mm256_extracti128_si256(second, 1), pack));
    }
}

#else
#define ycc_to_rgb_avx2 ycc_to_rgb
#endif

void pst_ycc_to_rgb(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, long count, uint8_t *out, int avx2)
{
    if (avx2)
        ycc_to_rgb_avx2(y, cb, cr, count, out);
    else
        ycc_to_rgb(y, cb, cr, count, out);
}

void pst_gray_to_rgb(const uint8_t *y, long count, uint8_t *out)
{
    for (long i = 0; i < count; i++)
        out[3 * i] = out[3 * i + 1] = out[3 * i + 2] = y[i];
}

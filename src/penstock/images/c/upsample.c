/* Rounding is libjpeg's. Products of colours that have more than 16 bits are made of ones that have fewer: a factor is
 * split into a whole part and a rest, and sums are the same.
 */
#include "upsample.h"

#include "cpu.h"

/* Loops that a compiler makes vectors of, for any processor and for one with AVX2. */

static inline __attribute__((always_inline)) void across(const uint8_t *restrict from, long count, uint8_t *restrict out)
{
    for (long i = 0; i < count; i++) {
        const int three = 3 * from[i];
        out[2 * i] = (uint8_t)((three + from[i - 1] + 1) >> 2);
        out[2 * i + 1] = (uint8_t)((three + from[i + 1] + 2) >> 2);
    }
}

static inline __attribute__((always_inline)) void both(const uint8_t *restrict near, const uint8_t *restrict far,
                                                       long count, uint8_t *restrict out)
{
    for (long i = 0; i < count; i++) {
        const int before = 3 * near[i - 1] + far[i - 1], here = 3 * near[i] + far[i],
                  behind = 3 * near[i + 1] + far[i + 1];
        out[2 * i] = (uint8_t)((3 * here + before + 8) >> 4);
        out[2 * i + 1] = (uint8_t)((3 * here + behind + 7) >> 4);
    }
}

static inline uint8_t clamped(int value)
{
    return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
}

static inline void plain_to_rgb(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, long count, uint8_t *out)
{
    for (long i = 0; i < count; i++) {
        const int blue = cb[i] - 128, red = cr[i] - 128;
        out[3 * i] = clamped(y[i] + ((91881 * red + 32768) >> 16));
        out[3 * i + 1] = clamped(y[i] + ((-22554 * blue - 46802 * red + 32768) >> 16));
        out[3 * i + 2] = clamped(y[i] + ((116130 * blue + 32768) >> 16));
    }
}

#if PST_AVX2_COMPILED

PST_AVX2 static void across_avx2(const uint8_t *from, long count, uint8_t *out)
{
    across(from, count, out);
}

PST_AVX2 static void both_avx2(const uint8_t *near, const uint8_t *far, long count, uint8_t *out)
{
    both(near, far, count, out);
}

/* (value * factor + 32768) >> 16, of small values. */
PST_AVX2_INLINE __m256i share(__m256i value, int factor)
{
    const __m256i twice = _mm256_mulhi_epi16(_mm256_add_epi16(value, value), _mm256_set1_epi16((short)factor));
    return _mm256_srai_epi16(_mm256_add_epi16(twice, _mm256_set1_epi16(1)), 1);
}

/* The same of two values and two factors. */
PST_AVX2_INLINE __m256i share_of_two(__m256i a, __m256i b, int factor_a, int factor_b)
{
    const __m256i factors =
        _mm256_set1_epi32((int)((uint32_t)(uint16_t)(int16_t)factor_a | (uint32_t)(uint16_t)(int16_t)factor_b << 16));
    const __m256i half = _mm256_set1_epi32(32768);
    const __m256i low = _mm256_add_epi32(_mm256_madd_epi16(_mm256_unpacklo_epi16(a, b), factors), half);
    const __m256i high = _mm256_add_epi32(_mm256_madd_epi16(_mm256_unpackhi_epi16(a, b), factors), half);
    return _mm256_packs_epi32(_mm256_srai_epi32(low, 16), _mm256_srai_epi32(high, 16));
}

PST_AVX2_INLINE __m256i widened(const uint8_t *samples)
{
    return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(const void *)samples));
}

/* Sixteen pixels at a time: 52 bytes are written for 48. */
PST_AVX2 static void to_rgb_avx2(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, long count, uint8_t *out)
{
    const __m256i middle = _mm256_set1_epi16(128);
    const __m128i close = _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
    for (long i = 0; i < count; i += 16, out += 48) {
        const __m256i grey = widened(y + i), blue = _mm256_sub_epi16(widened(cb + i), middle),
                      red = _mm256_sub_epi16(widened(cr + i), middle);
        const __m256i r = _mm256_add_epi16(_mm256_add_epi16(grey, red), share(red, 91881 - 65536));
        const __m256i g =
            _mm256_add_epi16(_mm256_sub_epi16(grey, red), share_of_two(blue, red, -22554, 65536 - 46802));
        const __m256i b =
            _mm256_add_epi16(_mm256_add_epi16(grey, _mm256_add_epi16(blue, blue)), share(blue, 116130 - 2 * 65536));
        /* Pixels 0 to 7 in the lower halves, 8 to 15 in the upper ones: red and green, then blue and nothing. */
        const __m256i rb = _mm256_packus_epi16(r, b), g0 = _mm256_packus_epi16(g, g);
        const __m256i rg = _mm256_unpacklo_epi8(rb, g0), b0 = _mm256_unpackhi_epi8(rb, g0);
        const __m256i first = _mm256_unpacklo_epi16(rg, b0), second = _mm256_unpackhi_epi16(rg, b0);
        _mm_storeu_si128((__m128i *)(void *)out, _mm_shuffle_epi8(_mm256_castsi256_si128(first), close));
        _mm_storeu_si128((__m128i *)(void *)(out + 12), _mm_shuffle_epi8(_mm256_castsi256_si128(second), close));
        _mm_storeu_si128((__m128i *)(void *)(out + 24), _mm_shuffle_epi8(_mm256_extracti128_si256(first, 1), close));
        _mm_storeu_si128((__m128i *)(void *)(out + 36), _mm_shuffle_epi8(_mm256_extracti128_si256(second, 1), close));
    }
}

#endif

/* Twice as many samples of a row. There is one before the first, and one behind the last. */
void upsample_across(const uint8_t *samples, long count, uint8_t *out, int avx2)
{
#if PST_AVX2_COMPILED
    if (avx2) {
        across_avx2(samples, count, out);
        return;
    }
#endif
    (void)avx2;
    across(samples, count, out);
}

/* Twice as many samples of a row that lies between two, nearer to one. */
void upsample_both(const uint8_t *near, const uint8_t *far, long count, uint8_t *out, int avx2)
{
#if PST_AVX2_COMPILED
    if (avx2) {
        both_avx2(near, far, count, out);
        return;
    }
#endif
    (void)avx2;
    both(near, far, count, out);
}

void to_rgb(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, long count, uint8_t *out, int avx2)
{
#if PST_AVX2_COMPILED
    if (avx2) {
        to_rgb_avx2(y, cb, cr, count, out);
        return;
    }
#endif
    (void)avx2;
    plain_to_rgb(y, cb, cr, count, out);
}

void grey_to_rgb(const uint8_t *y, long count, uint8_t *out)
{
    for (long i = 0; i < count; i++)
        out[3 * i] = out[3 * i + 1] = out[3 * i + 2] = y[i];
}

#include "upsample.h"

#include "cpu.h"

/* Loops that a compiler makes vectors of, for any processor and for one with AVX2. */

static inline __attribute__((always_inline)) void h2v1(const uint8_t *restrict samples, long count,
                                                       uint8_t *restrict out)
{
    for (long i = 0; i < count; i++) {
        const int three = 3 * samples[i];
        out[2 * i] = (uint8_t)((three + samples[i - 1] + 1) >> 2);
        out[2 * i + 1] = (uint8_t)((three + samples[i + 1] + 2) >> 2);
    }
}

static inline __attribute__((always_inline)) void h2v2(const uint8_t *restrict near, const uint8_t *restrict far,
                                                       long count, uint8_t *restrict out)
{
    for (long i = 0; i < count; i++) {
        const int left = 3 * near[i - 1] + far[i - 1], here = 3 * near[i] + far[i],
                  right = 3 * near[i + 1] + far[i + 1];
        out[2 * i] = (uint8_t)((3 * here + left + 8) >> 4);
        out[2 * i + 1] = (uint8_t)((3 * here + right + 7) >> 4);
    }
}

PST_AVX2 static void h2v1_avx2(const uint8_t *samples, long count, uint8_t *out)
{
    h2v1(samples, count, out);
}

PST_AVX2 static void h2v2_avx2(const uint8_t *near, const uint8_t *far, long count, uint8_t *out)
{
    h2v2(near, far, count, out);
}

void pst_upsample_h2v1(const uint8_t *samples, long count, uint8_t *out, int avx2)
{
    if (avx2)
        h2v1_avx2(samples, count, out);
    else
        h2v1(samples, count, out);
}

void pst_upsample_h2v2(const uint8_t *near, const uint8_t *far, long count, uint8_t *out, int avx2)
{
    if (avx2)
        h2v2_avx2(near, far, count, out);
    else
        h2v2(near, far, count, out);
}

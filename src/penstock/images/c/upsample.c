#include "upsample.h"

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

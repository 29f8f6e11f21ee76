/* Two passes over 8-bit images, as Pillow makes them: columns first, rounded to 8 bits, then rows.
 *
 * Weights are those of Pillow, rounded to 16 bits so that they add up to exactly one; sums have 32 bits. Results are
 * within one level of Pillow's, because one pass has all of Pillow's 22 bits: of bilinear weights the second, which is
 * the shorter one; of bicubic ones the first, as they overshoot, and so would what that has rounded otherwise. All
 * arithmetic is in integers, so AVX2 and plain loops give the same bits. Other processors have what their compiler
 * makes of the plain loops: vectors in the second pass, few in the first.
 *
 * Between the passes two rows lie interleaved, value by value (a0 b0 a1 b1 ...), 16 bits each, so that one multiply-add
 * of pairs is two taps of the second pass. A ring holds as many of these pairs of rows as one row of the result needs.
 */
#include "resize.h"

#include <stdlib.h>
#include <string.h>

#include "cpu.h"

#define ALIGN 64
#define LOAD 16      /* bytes that the first pass loads at once */
#define CHUNK 32     /* values that the second pass makes at once */
#define FINE_BITS 22 /* of Pillow's weights: 255 << 22, and what negative weights add, fit into 32 bits */
#define LOW_BITS 8   /* of these, that are multiplied apart where 16 bits are multiplied at once */

int pst_resize_valid(const pst_resize_job *job)
{
    return 0 <= job->left && job->left < job->right && job->right <= job->width && 0 <= job->top &&
           job->top < job->bottom && job->bottom <= job->height;
}

/* Whether each pixel of the result is one of the source. */
static int is_copy(const pst_resize_job *job)
{
    return job->left == (int)job->left && job->right - job->left == job->out_width && job->top == (int)job->top &&
           job->bottom - job->top == job->out_height;
}

void pst_resize_cut(pst_resize_job *job, int *x, int *y)
{
    *x = (int)job->left;
    *y = (int)job->top;
    job->left -= *x;
    job->right -= *x;
    job->top -= *y;
    job->bottom -= *y;
    job->width = (int)job->right + (job->right > (int)job->right);
    job->height = (int)job->bottom + (job->bottom > (int)job->bottom);
}

/* Filters. */

static double support_of(const pst_resize_job *job, double box, int out)
{
    double scale = box / out;
    return (job->bicubic ? 2 : 1) * (job->antialias && scale > 1 ? scale : 1);
}

/* Room for the weights of one output: an even number of pairs, one weight more than there are taps. */
static size_t room(const pst_resize_job *job, double box, int out, int size)
{
    int taps = 2 * ((int)support_of(job, box, out) + 1) + 1;
    taps = taps < size ? taps : size;
    return (size_t)((taps + 1 + 3) / 4 * 4);
}

static double filter(const pst_resize_job *job, double x)
{
    x = x < 0 ? -x : x;
    if (!job->bicubic)
        return x < 1 ? 1 - x : 0;
    if (x < 1)
        return (1.5 * x - 2.5) * x * x + 1;
    return x < 2 ? (((x - 5) * x + 8) * x - 4) * -0.5 : 0;
}

/* Real weights of the output around `center`, which add up to 1. Those at the ends that are 0 are left out if `trim`
 * says so. From one output to the next neither end may go back: the ring would have lost a row, or miss one at the end.
 * Of a cubic, which is 0 in its middle too, this is so only where all outputs have the same weights. */
static int weigh(double *k, const pst_resize_job *job, double center, double support, int size, int trim, int *first)
{
    double narrow = (job->bicubic ? 2 : 1) / support, sum = 0, low = center - support + 0.5;
    int from = low > 0 ? (int)low : 0, to = (int)(center + support + 0.5), count = 0;
    to = to < size ? to : size;
    for (int i = from; i < to; i++) {
        double w = filter(job, (i - center + 0.5) * narrow);
        if (w == 0 && count == 0 && trim)
            continue;
        if (count == 0)
            *first = i;
        k[count++] = w;
        sum += w;
    }
    while (trim && k[count - 1] == 0)
        count--;
    sum = 1 / sum;
    for (int i = 0; i < count; i++)
        k[i] *= sum;
    return count;
}

/* Real weights to integers, whose running sum is the rounded running sum, so that all of them add up to `unit`. */
static void quantize(int32_t *weight, const double *k, int count, double unit)
{
    const int offset = 1 << 24; /* keeps what is truncated positive */
    double sum = 0;
    int done = 0;
    for (int i = 0; i < count; i++) {
        sum += k[i];
        int now = (int)(sum * unit + offset + 0.5) - offset;
        weight[i] = now - done;
        done = now;
    }
}

/* One direction: `even` lets all outputs begin at even pixels; `k` is scratch for all real weights. */
static void plan_axis(pst_resize_axis *axis, const pst_resize_job *job, double *k, double from, double to, int size,
                      int out, int flip, int even, int fine)
{
    double scale = (to - from) / out, support = support_of(job, to - from, out), largest = 0;
    int trim = !job->bicubic || (scale == 1 && from == (int)from);
    for (int i = 0; i < out; i++) {
        int at = flip ? out - 1 - i : i, first = 0;
        double *here = k + (ptrdiff_t)at * axis->stride;
        int count = weigh(here, job, from + (i + 0.5) * scale, support, size, trim, &first);
        axis->first[at] = first;
        axis->pairs[at] = count;
        for (int t = 0; t < count; t++)
            largest = here[t] > largest ? here[t] : largest;
    }
    axis->shift = FINE_BITS;
    while (!fine && largest * (double)(1 << axis->shift) > 32766)
        axis->shift--;
    axis->max_pairs = 0;
    memset(axis->weight, 0, (size_t)out * (size_t)axis->stride * sizeof *axis->weight);
    for (int i = 0; i < out; i++) {
        int skip = even ? axis->first[i] & 1 : 0;
        const double *here = k + (ptrdiff_t)i * axis->stride;
        int32_t *weight = axis->weight + (ptrdiff_t)i * axis->stride + skip;
        if (!fine)
            quantize(weight, here, axis->pairs[i], (double)(1 << axis->shift));
        for (int t = 0; fine && t < axis->pairs[i]; t++) /* each by itself, as in Pillow */
            weight[t] = (int32_t)(here[t] * (1 << FINE_BITS) + (here[t] < 0 ? -0.5 : 0.5));
        axis->first[i] -= skip;
        axis->pairs[i] = (axis->pairs[i] + skip + 1) / 2;
        axis->max_pairs = axis->pairs[i] > axis->max_pairs ? axis->pairs[i] : axis->max_pairs;
    }
}

/* Plan. */

#if PST_AVX2_COMPILED

/* The first pass makes two outputs at once, from 4 pairs of weights for each: lanes[i / 2][pair][i % 2][4][2]. Of fine
 * weights there are two vectors, high bits and low ones: lanes[i / 2][pair][2][i % 2][4][2]. It loads 16 bytes for two
 * pairs of taps, and so reads beyond the end of a row, where the weights are 0. */
static void plan_lanes(pst_resize_plan *plan)
{
    const pst_resize_job *job = &plan->job;
    pst_resize_axis *x = &plan->x;
    x->max_pairs += x->max_pairs > 3 ? x->max_pairs & 1 : 0; /* from 4 on they are even */
    const int parts = job->bicubic ? 2 : 1, low_bits = job->bicubic ? LOW_BITS : 0, pairs = x->max_pairs;
    int last = 0;
    memset(plan->lanes, 0, (size_t)((job->out_width + 1) / 2) * (size_t)(pairs * parts) * 32);
    for (int i = 0; i < job->out_width; i++) {
        int16_t *lane = plan->lanes + ((ptrdiff_t)(i / 2) * pairs * parts * 2 + (i & 1)) * 8;
        const int32_t *weight = x->weight + (ptrdiff_t)i * x->stride;
        plan->offset[i] = x->first[i] * job->channels;
        last = plan->offset[i] > last ? plan->offset[i] : last;
        for (int t = 0; t < 2 * x->pairs[i]; t++) {
            int16_t *to = lane + t / 2 * parts * 16 + (t & 1);
            for (int c = 0; c < 8; c += 2) {
                to[c] = (int16_t)(weight[t] >> low_bits);
                if (low_bits)
                    to[16 + c] = (int16_t)(weight[t] & ((1 << LOW_BITS) - 1));
            }
        }
    }
    plan->offset[job->out_width] = last; /* of the second of two where that is none */
    plan->overrun = last + (pairs - 1) / 2 * 4 * job->channels + LOAD - job->width * job->channels;
    plan->overrun = plan->overrun > 0 ? plan->overrun : 0;
}

#endif

static size_t rounded(size_t size)
{
    return (size + ALIGN - 1) / ALIGN * ALIGN;
}

/* Where each part of the scratch lies, and how large all of it is; without `at` the size alone. */
static size_t lay_out(pst_resize_plan *plan, const pst_resize_job *job, uint8_t *at, double **k)
{
    size_t used = 0, wide = (size_t)job->out_width, high = (size_t)job->out_height;
    size_t xs = room(job, job->right - job->left, job->out_width, job->width);
    size_t ys = room(job, job->bottom - job->top, job->out_height, job->height);
    size_t values = (wide * (size_t)job->channels + CHUNK - 1) / CHUNK * CHUNK;
    size_t padded = ((size_t)job->width + xs) * (size_t)job->channels + LOAD;
    plan->x.stride = (int)xs;
    plan->y.stride = (int)ys;
    plan->ring_stride = 2 * values + 2 * LOAD;
#define PART(pointer, size) (pointer) = at ? (void *)(at + used) : NULL, used += rounded(size)
    PART(*k, (wide * xs > high * ys ? wide * xs : high * ys) * sizeof(double));
    PART(plan->x.first, wide * sizeof(int32_t));
    PART(plan->x.pairs, wide * sizeof(int32_t));
    PART(plan->x.weight, wide * xs * sizeof(int32_t));
    PART(plan->y.first, high * sizeof(int32_t));
    PART(plan->y.pairs, high * sizeof(int32_t));
    PART(plan->y.weight, high * ys * sizeof(int32_t));
    PART(plan->offset, (wide + 1) * sizeof(int32_t));
    PART(plan->lanes, (wide + 1) / 2 * (xs / 2) * 32 * (job->bicubic ? 2 : 1));
    PART(plan->ring, ys / 2 * plan->ring_stride * sizeof(uint16_t));
    PART(plan->sums, values * sizeof(int32_t));
    PART(plan->line, values);
    PART(plan->padded[0], padded);
    PART(plan->padded[1], padded);
#undef PART
    return used;
}

size_t pst_resize_scratch(const pst_resize_job *job)
{
    pst_resize_plan plan;
    double *k;
    return is_copy(job) ? 1 : lay_out(&plan, job, NULL, &k) + ALIGN;
}

void pst_resize_begin(pst_resize_plan *plan, const pst_resize_job *job, void *scratch)
{
    memset(plan, 0, sizeof *plan);
    plan->job = *job;
    plan->copy = is_copy(job);
    if (plan->copy) {
        plan->first_row = (int)job->top;
        plan->last_row = (int)job->bottom;
        return;
    }
    double *k;
    lay_out(plan, job, (uint8_t *)scratch + (ALIGN - (uintptr_t)scratch % ALIGN) % ALIGN, &k);
    plan->values = job->out_width * job->channels;
    plan_axis(&plan->x, job, k, job->left, job->right, job->width, job->out_width, job->flip_x, 0, job->bicubic);
    plan_axis(&plan->y, job, k, job->top, job->bottom, job->height, job->out_height, 0, 1, !job->bicubic);
    plan->first_row = plan->y.first[0];
    plan->last_row = plan->y.first[job->out_height - 1] + 2 * plan->y.pairs[job->out_height - 1];
    plan->last_row = plan->last_row < job->height ? plan->last_row : job->height;
    memset(plan->ring, 0, (size_t)(plan->y.stride / 2) * plan->ring_stride * sizeof *plan->ring);
#if PST_AVX2_COMPILED
    plan->avx2 = job->simd && pst_cpu_has_avx2();
    if (plan->avx2 && job->channels == 3) {
        plan_lanes(plan);
        for (int i = 0; i < 2; i++)
            memset(plan->padded[i] + (ptrdiff_t)job->width * job->channels, 0, (size_t)plan->overrun);
    }
#endif
}

/* First pass: two rows of the source to one of the ring. */

static uint8_t clipped(int32_t value)
{
    return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
}

static void horizontal(const pst_resize_plan *plan, const uint8_t *a, const uint8_t *b, uint16_t *to)
{
    const pst_resize_axis *x = &plan->x;
    int channels = plan->job.channels, width = plan->job.width;
    for (int i = 0; i < plan->job.out_width; i++) {
        const int32_t *weight = x->weight + (ptrdiff_t)i * x->stride;
        int first = x->first[i], taps = 2 * x->pairs[i];
        taps = first + taps <= width ? taps : width - first;
        for (int c = 0; c < channels; c++) {
            int32_t one = 1 << (x->shift - 1), two = one;
            for (int t = 0; t < taps; t++) {
                ptrdiff_t at = (ptrdiff_t)(first + t) * channels + c;
                one += weight[t] * a[at];
                two += weight[t] * b[at];
            }
            *to++ = clipped(one >> x->shift);
            *to++ = clipped(two >> x->shift);
        }
    }
}

#if PST_AVX2_COMPILED

/* 16 bytes of one output's taps, and 16 of the next one's. */
PST_AVX2_INLINE __m256i load_two(const uint8_t *one, const uint8_t *two)
{
    __m128i low = _mm_loadu_si128((const __m128i *)one);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), _mm_loadu_si128((const __m128i *)two), 1);
}

/* All of a row. `pairs` and `fine` are constant, or even, so that the compiler unrolls. */
PST_AVX2_INLINE void horizontal_pairs(const pst_resize_plan *plan, const uint8_t *a, const uint8_t *b,
                                      uint16_t *restrict row, const int pairs, const int fine)
{
    /* Two pixels of three channels, or the two behind, as pairs of 16-bit numbers: R R G G B B 0 0. */
    const __m256i here =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1));
    const __m256i behind =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1));
    const __m256i order =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
    const __m256i half = _mm256_set1_epi32(1 << (plan->x.shift - 1)), shift = _mm256_set1_epi32(plan->x.shift);
    const __m256i white = _mm256_set1_epi16(255);
    const int32_t *offset = plan->offset;
    const int parts = fine ? 2 : 1;
    const __m256i *lanes = (const __m256i *)plan->lanes;
    const int width = plan->job.out_width;
    for (int i = 0; i < width; i += 2, row += 12, lanes += pairs * parts) {
        int one = offset[i], two = offset[i + 1];
        __m256i sum_a = half, sum_b = half, high_a = _mm256_setzero_si256(), high_b = high_a;
        for (int k = 0; k < pairs; k += 2, one += 12, two += 12) {
            __m256i taps_a = load_two(a + one, a + two), taps_b = load_two(b + one, b + two);
            for (int n = k; n < k + 2 && (!(pairs & 1) || n < pairs); n++) {
                __m256i pair_a = _mm256_shuffle_epi8(taps_a, n == k ? here : behind);
                __m256i pair_b = _mm256_shuffle_epi8(taps_b, n == k ? here : behind), weights = lanes[n * parts];
                if (fine) {
                    high_a = _mm256_add_epi32(high_a, _mm256_madd_epi16(pair_a, weights));
                    high_b = _mm256_add_epi32(high_b, _mm256_madd_epi16(pair_b, weights));
                    weights = lanes[n * parts + 1];
                }
                sum_a = _mm256_add_epi32(sum_a, _mm256_madd_epi16(pair_a, weights));
                sum_b = _mm256_add_epi32(sum_b, _mm256_madd_epi16(pair_b, weights));
            }
        }
        if (fine) {
            sum_a = _mm256_add_epi32(sum_a, _mm256_slli_epi32(high_a, LOW_BITS));
            sum_b = _mm256_add_epi32(sum_b, _mm256_slli_epi32(high_b, LOW_BITS));
        }
        __m256i both = _mm256_packus_epi32(_mm256_srav_epi32(sum_a, shift), _mm256_srav_epi32(sum_b, shift));
        both = _mm256_shuffle_epi8(_mm256_min_epu16(both, white), order);
        /* The last four values of each are of no pixel: the next one's overwrite them. */
        _mm_storeu_si128((__m128i *)row, _mm256_castsi256_si128(both));
        _mm_storeu_si128((__m128i *)(row + 6), _mm256_extracti128_si256(both, 1));
    }
}

PST_AVX2 static void horizontal_avx2(const pst_resize_plan *plan, const uint8_t *a, const uint8_t *b, uint16_t *row)
{
    const int pairs = plan->x.max_pairs, fine = plan->job.bicubic;
    if (pairs == 1)
        fine ? horizontal_pairs(plan, a, b, row, 1, 1) : horizontal_pairs(plan, a, b, row, 1, 0);
    else if (pairs == 2)
        fine ? horizontal_pairs(plan, a, b, row, 2, 1) : horizontal_pairs(plan, a, b, row, 2, 0);
    else if (pairs == 3)
        fine ? horizontal_pairs(plan, a, b, row, 3, 1) : horizontal_pairs(plan, a, b, row, 3, 0);
    else
        fine ? horizontal_pairs(plan, a, b, row, pairs & ~1, 1) : horizontal_pairs(plan, a, b, row, pairs & ~1, 0);
}

#endif

/* Second pass: pairs of rows of the ring to one row of bytes. */

/* A pair of rows in the ring, and the one that is `k` pairs further down. */
static inline uint16_t *ring_row(const pst_resize_plan *plan, int slot, int k)
{
    const int size = plan->y.stride / 2;
    slot += k;
    return plan->ring + (size_t)(slot < size ? slot : slot - size) * plan->ring_stride;
}

static void vertical(const pst_resize_plan *plan, int y, int slot, uint8_t *restrict to)
{
    const int32_t *weight = plan->y.weight + (ptrdiff_t)y * plan->y.stride;
    int32_t *restrict sums = plan->sums;
    int values = plan->values, shift = plan->y.shift;
    for (int i = 0; i < values; i++)
        sums[i] = 1 << (shift - 1);
    for (int k = 0; k < plan->y.pairs[y]; k++) {
        const uint16_t *rows = ring_row(plan, slot, k);
        int32_t one = weight[2 * k], two = weight[2 * k + 1];
        for (int i = 0; i < values; i++)
            sums[i] += one * rows[2 * i] + two * rows[2 * i + 1];
    }
    for (int i = 0; i < values; i++)
        to[i] = clipped(sums[i] >> shift);
}

#if PST_AVX2_COMPILED

PST_AVX2_INLINE void vertical_pairs(const pst_resize_plan *plan, int y, int slot, uint8_t *restrict to, const int pairs,
                                    const int fine)
{
    const int32_t *weight = plan->y.weight + (ptrdiff_t)y * plan->y.stride;
    const __m256i half = _mm256_set1_epi32(1 << (plan->y.shift - 1)), shift = _mm256_set1_epi32(plan->y.shift);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const int values = plan->values;
    for (int i = 0; i < values; i += CHUNK) {
        __m256i sums[4] = {half, half, half, half}, high[4];
        for (int n = 0; n < 4; n++)
            high[n] = _mm256_setzero_si256();
        for (int k = 0; k < pairs; k++) {
            const __m256i *rows = (const __m256i *)(ring_row(plan, slot, k) + 2 * (size_t)i);
            int32_t one = weight[2 * k], two = weight[2 * k + 1];
            if (fine) {
                const __m256i weights = pst_pair(one >> LOW_BITS, two >> LOW_BITS);
                for (int n = 0; n < 4; n++)
                    high[n] = _mm256_add_epi32(high[n], _mm256_madd_epi16(rows[n], weights));
                one &= (1 << LOW_BITS) - 1;
                two &= (1 << LOW_BITS) - 1;
            }
            const __m256i weights = pst_pair(one, two);
            for (int n = 0; n < 4; n++)
                sums[n] = _mm256_add_epi32(sums[n], _mm256_madd_epi16(rows[n], weights));
        }
        for (int n = 0; n < 4; n++)
            sums[n] = _mm256_srav_epi32(_mm256_add_epi32(sums[n], _mm256_slli_epi32(high[n], LOW_BITS)), shift);
        __m256i low_half = _mm256_packs_epi32(sums[0], sums[1]), high_half = _mm256_packs_epi32(sums[2], sums[3]);
        __m256i made = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low_half, high_half), order);
        if (i + CHUNK <= values) {
            _mm256_storeu_si256((__m256i *)(to + i), made);
        } else {
            uint8_t last[CHUNK];
            _mm256_storeu_si256((__m256i *)last, made);
            memcpy(to + i, last, (size_t)(values - i));
        }
    }
}

PST_AVX2 static void vertical_avx2(const pst_resize_plan *plan, int y, int slot, uint8_t *to)
{
    const int pairs = plan->y.pairs[y];
    if (plan->job.bicubic)
        vertical_pairs(plan, y, slot, to, pairs, 0);
    else if (pairs == 1)
        vertical_pairs(plan, y, slot, to, 1, 1);
    else if (pairs == 2)
        vertical_pairs(plan, y, slot, to, 2, 1);
    else if (pairs == 3)
        vertical_pairs(plan, y, slot, to, 3, 1);
    else
        vertical_pairs(plan, y, slot, to, pairs, 1);
}

#endif

/* Result. */

/* Write a row of pixels, `step` bytes apart, as items of the table. A memcpy of constant size is a load and a store. */
static inline void look_up(const pst_resize_job *job, const uint8_t *pixels, ptrdiff_t step, uint8_t *restrict out,
                           const size_t size)
{
    const size_t plane = job->planar ? job->plane_stride * size : size;
    const size_t gap = job->planar ? size : (size_t)job->channels * size;
    const uint8_t *restrict table = job->table;
    if (job->channels == 1) {
        for (int i = 0; i < job->out_width; i++, pixels += step, out += size)
            memcpy(out, table + *pixels * size, size);
        return;
    }
    for (int i = 0; i < job->out_width; i++, pixels += step, out += gap)
        for (size_t c = 0; c < 3; c++)
            memcpy(out + c * plane, table + (c * 256 + pixels[c]) * size, size);
}

static void copy_bytes(const pst_resize_job *job, const uint8_t *pixels, ptrdiff_t step, uint8_t *out)
{
    const int width = job->out_width, channels = job->channels;
    if (step == 1 || (step == channels && !job->planar)) {
        memcpy(out, pixels, (size_t)width * (size_t)step);
    } else if (job->planar || channels == 1) {
        for (int c = 0; c < channels; c++)
            for (int i = 0; i < width; i++)
                out[(size_t)c * job->plane_stride + (size_t)i] = pixels[c + i * step];
    } else { /* mirrored: a fourth byte is there but of the first, and the next pixel overwrites it but that of the last
              */
        for (int i = 0; i < width; i++, out += 3, pixels += step) {
            if (i > 0 && i + 1 < width)
                memcpy(out, pixels, 4);
            else
                memcpy(out, pixels, 3);
        }
    }
}

/* Write a row of pixels into row y of the result. */
static void write_row(const pst_resize_job *job, const uint8_t *pixels, ptrdiff_t step, int y)
{
    uint8_t *out = (uint8_t *)job->out + (size_t)y * job->row_stride * (size_t)job->item_size;
    if (!job->table)
        copy_bytes(job, pixels, step, out);
    else if (job->item_size == 1)
        look_up(job, pixels, step, out, 1);
    else if (job->item_size == 2)
        look_up(job, pixels, step, out, 2);
    else if (job->item_size == 4)
        look_up(job, pixels, step, out, 4);
    else
        look_up(job, pixels, step, out, 8);
}

/* Where row y of the result belongs. */
static int turned(const pst_resize_job *job, int y)
{
    return job->flip_y ? job->out_height - 1 - y : y;
}

static void copy_row(const pst_resize_plan *plan, const uint8_t *row)
{
    const pst_resize_job *job = &plan->job;
    const int first = (int)job->left + (job->flip_x ? job->out_width - 1 : 0);
    write_row(job, row + (ptrdiff_t)first * job->channels, job->flip_x ? -job->channels : job->channels,
              turned(job, plan->row - plan->first_row));
}

static void emit(const pst_resize_plan *plan, int y)
{
    const pst_resize_job *job = &plan->job;
    const int at = turned(job, y), slot = plan->y.first[y] / 2 % (plan->y.stride / 2);
    const int direct = !job->table && (!job->planar || job->channels == 1);
    uint8_t *line = direct ? (uint8_t *)job->out + (size_t)at * job->row_stride : plan->line;
#if PST_AVX2_COMPILED
    if (plan->avx2)
        vertical_avx2(plan, y, slot, line);
    else
#endif
        vertical(plan, y, slot, line);
    if (!direct)
        write_row(job, line, job->channels, at);
}

/* Two rows of the source, of which the second may be the first once more, at the end: its weights are 0 then. */
static void take(pst_resize_plan *plan, const uint8_t *a, const uint8_t *b)
{
    const pst_resize_axis *y = &plan->y;
    const int pair = plan->row / 2;
    if (plan->done == plan->job.out_height || pair < y->first[plan->done] / 2)
        return;
    uint16_t *row = ring_row(plan, pair % (y->stride / 2), 0);
#if PST_AVX2_COMPILED
    if (plan->avx2 && plan->job.channels == 3)
        horizontal_avx2(plan, a, b, row);
    else
#endif
        horizontal(plan, a, b, row);
    while (plan->done < plan->job.out_height && y->first[plan->done] / 2 + y->pairs[plan->done] - 1 <= pair)
        emit(plan, plan->done++);
}

/* A row of which vectors can be loaded: as it is where `count` rows from it on lie one behind the other, or a copy. */
static const uint8_t *loadable(const pst_resize_plan *plan, const uint8_t *row, ptrdiff_t stride, int count, int copy)
{
    if (plan->overrun == 0 || (stride > 0 && (count - 1) * stride >= plan->overrun))
        return row;
    return memcpy(plan->padded[copy], row, (size_t)plan->job.width * (size_t)plan->job.channels);
}

void pst_resize_rows(pst_resize_plan *plan, const uint8_t *rows, ptrdiff_t stride, int count)
{
    for (; count > 0; count--, plan->row++, rows += stride) {
        if (plan->row < plan->first_row || plan->row >= plan->last_row)
            continue;
        if (plan->copy) {
            copy_row(plan, rows);
        } else if (plan->row & 1) {
            take(plan, plan->padded[0], loadable(plan, rows, stride, count, 1));
        } else if (plan->row + 1 == plan->job.height) {
            const uint8_t *row = loadable(plan, rows, stride, count, 0);
            take(plan, row, row);
        } else if (count > 1) {
            take(plan, loadable(plan, rows, stride, count, 0), loadable(plan, rows + stride, stride, count - 1, 1));
            count--, plan->row++, rows += stride;
        } else {
            memcpy(plan->padded[0], rows, (size_t)plan->job.width * (size_t)plan->job.channels);
        }
    }
}

int pst_resize(const pst_resize_job *job, const uint8_t *rows, ptrdiff_t stride)
{
    void *scratch = malloc(pst_resize_scratch(job));
    if (!scratch)
        return 0;
    pst_resize_plan plan;
    pst_resize_begin(&plan, job, scratch);
    pst_resize_rows(&plan, rows, stride, job->height);
    free(scratch);
    return 1;
}

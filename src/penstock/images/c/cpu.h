/* AVX2: functions for it are compiled where the compiler has it, and called where the processor has it, too. */
#ifndef PENSTOCK_CPU_H
#define PENSTOCK_CPU_H

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#include <stdint.h>
#define PST_AVX2_COMPILED 1
#define PST_AVX2 __attribute__((target("avx2")))
#define PST_AVX2_INLINE static inline __attribute__((always_inline, target("avx2")))

/* Two factors of 16 bits, for multiply-adds of pairs. */
PST_AVX2_INLINE __m256i pst_pair(int one, int two)
{
    return _mm256_set1_epi32((int)((uint32_t)two << 16 | ((uint32_t)one & 0xFFFF)));
}
#else
#define PST_AVX2_COMPILED 0
#endif

/* Whether this machine can run the functions for AVX2. */
int pst_cpu_has_avx2(void);

#endif

/* AVX2, where the compiler has it: functions for it are called where the processor has it, too. */
#ifndef PENSTOCK_CPU_H
#define PENSTOCK_CPU_H

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAVE_AVX2 1
#define AVX2 __attribute__((target("avx2")))
#define INLINED static inline __attribute__((always_inline, target("avx2")))
#else
#define HAVE_AVX2 0
#endif

/* Ask the processor. Called once, when the module is loaded. */
void look_for_avx2(void);

/* Whether this machine can run the functions for AVX2. */
int has_avx2(void);

#endif

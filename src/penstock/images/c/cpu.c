/* The processor is asked directly: `__builtin_cpu_supports` says "no" to everything where the compiler's runtime
 * library does not fill its table (zig). The answer is kept, since a virtual machine takes microseconds for the
 * instruction.
 */
#include "cpu.h"

static int avx2;

#if PST_AVX2_COMPILED

#include <cpuid.h>

#define XCR0_XMM_YMM 6 /* the system saves the lower and the upper halves of vector registers */

/* Before any other function: when the library is loaded. */
__attribute__((constructor)) static void detect(void)
{
    unsigned a, b, c, d, xcr0, unused;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE))
        return;
    __asm__("xgetbv" : "=a"(xcr0), "=d"(unused) : "c"(0));
    avx2 = (xcr0 & XCR0_XMM_YMM) == XCR0_XMM_YMM && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
}

#endif

int pst_cpu_has_avx2(void)
{
    return avx2;
}

/* The processor is asked directly: `__builtin_cpu_supports` says "no" to everything where the compiler's runtime library
 * does not fill its table (zig). The answer is kept, since a virtual machine takes microseconds for the instruction.
 */
#include "cpu.h"

#if HAVE_AVX2
#include <cpuid.h>
#endif

#define VECTOR_REGISTERS 6 /* in XCR0: the system saves the lower halves and the upper halves */

static int found;

void look_for_avx2(void)
{
#if HAVE_AVX2
    unsigned a, b, c, d, saved, unused;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE))
        return;
    __asm__("xgetbv" : "=a"(saved), "=d"(unused) : "c"(0));
    found = (saved & VECTOR_REGISTERS) == VECTOR_REGISTERS && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
#endif
}

int has_avx2(void)
{
    return found;
}

/* PCG64 (O'Neill, "PCG: a family of simple fast space-efficient statistically good algorithms for random number
 * generation", 2014): a linear congruential generator of 128 bits, XSL-RR output. It is seeded as NumPy does it, from
 * four words, and these are SplitMix64 in counter mode over the key (penstock/random.py).
 */
#include "random.h"

typedef struct {
    uint64_t high, low;
} uint128;

static const uint128 MULTIPLIER = {0x2360ED051FC65DA4, 0x4385DF649FCCF645};

static uint128 add(uint128 a, uint128 b)
{
    uint64_t low = a.low + b.low;
    return (uint128){a.high + b.high + (low < a.low), low};
}

/* Without a type of 128 bits, which not all compilers have. */
static uint128 multiply(uint128 a, uint128 b)
{
    const uint64_t half = 0xFFFFFFFF;
    uint64_t low = (a.low & half) * (b.low & half), cross = (a.low >> 32) * (b.low & half) + (low >> 32);
    uint64_t other = (a.low & half) * (b.low >> 32) + (cross & half);
    uint64_t high = (a.low >> 32) * (b.low >> 32) + (cross >> 32) + (other >> 32);
    return (uint128){high + a.high * b.low + a.low * b.high, a.low * b.low};
}

static uint64_t splitmix64(uint64_t x)
{
    x += 0x9E3779B97F4A7C15;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

void pst_uniform(uint64_t key, double *out, size_t count)
{
    const uint128 seed = {splitmix64(key ^ 1), splitmix64(key ^ 2)},
                  sequence = {splitmix64(key ^ 3), splitmix64(key ^ 4)};
    const uint128 increment = {sequence.high << 1 | sequence.low >> 63, sequence.low << 1 | 1};
    uint128 state = add(multiply(add(increment, seed), MULTIPLIER), increment);
    for (size_t i = 0; i < count; i++) {
        state = add(multiply(state, MULTIPLIER), increment);
        const unsigned turn = (unsigned)(state.high >> 58);
        const uint64_t mixed = state.high ^ state.low, word = mixed >> turn | mixed << (-turn & 63);
        out[i] = (double)(word >> 11) * 0x1p-53;
    }
}

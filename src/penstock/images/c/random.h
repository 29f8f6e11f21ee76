/* Random numbers of samples: those of penstock.random.generator_from_key, for many keys in one call. */
#ifndef PENSTOCK_RANDOM_H
#define PENSTOCK_RANDOM_H

#include <stddef.h>
#include <stdint.h>

/* The first `count` numbers in [0, 1) that NumPy's Generator(PCG64) of the key gives with random(). */
void pst_uniform(uint64_t key, double *out, size_t count);

#endif

"""The map-style and iterable-style datasets. Their names are in `penstock`, which imports each at its first use."""

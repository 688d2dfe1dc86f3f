"""The engine and its kernels as fractions of a GPU's limits."""

"""Device code: Triton kernels on symmetric memory. Imports triton, typing and collections.abc only."""

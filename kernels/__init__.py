"""Device code: Triton kernels on symmetric memory. Imports triton and nothing else."""

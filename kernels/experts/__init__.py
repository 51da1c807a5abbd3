"""Kernels of mixtures of experts: dispatch, combine, grouped matmuls."""

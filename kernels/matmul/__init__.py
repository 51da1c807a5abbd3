"""Kernels of matmuls that gather their input or reduce their output over ranks."""

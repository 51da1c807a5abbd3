"""Lint of compiled kernels."""

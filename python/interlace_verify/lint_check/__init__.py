"""Lint of compiled kernels, see docs/reference/lint.md."""

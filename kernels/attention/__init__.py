"""Kernels of attention over keys of other ranks, and of the exchange of heads."""

"""Kernels of the plain collectives, within a node and between nodes."""

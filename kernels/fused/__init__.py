"""Collectives inside matmuls."""

"""Matmuls fused with a gather or a reduction, dense and scaled, with norms or without."""

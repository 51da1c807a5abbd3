"""Layers whose communication runs inside their matmuls, and the functions that they are made of."""

from interlace.nn.linear_function import column_parallel_linear, row_parallel_linear
from interlace.nn.weight_gradients import DeferredWeightGradients

__all__ = ["DeferredWeightGradients", "column_parallel_linear", "row_parallel_linear"]

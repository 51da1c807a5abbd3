"""Dispatch and combine of tokens, and the grouped matmuls of experts."""

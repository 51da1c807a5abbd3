"""Rows of tokens to their experts, and back: the kernels of dispatch and combine."""

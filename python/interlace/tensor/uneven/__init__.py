"""Tensors in parts of any length, and placeholders."""

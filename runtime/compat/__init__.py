"""Internals of torch and Triton that interlace uses, and their differences between releases."""

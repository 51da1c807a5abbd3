"""Measuring and tuning on all ranks, and rows of results."""

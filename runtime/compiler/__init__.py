"""Kernels compiled for a GPU that may be absent: catalogue, worker processes, artifacts, reports."""

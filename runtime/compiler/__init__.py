"""Kernels compiled for a GPU that need not be here: catalogue, worker processes, artifacts, reports."""

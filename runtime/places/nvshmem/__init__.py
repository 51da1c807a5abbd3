"""The place ``nvshmem``: as ``cuda_processes``, over many nodes."""

"""The place ``nvshmem``: as ``processes``, over many nodes."""

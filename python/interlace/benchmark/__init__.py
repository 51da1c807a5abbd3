"""The measurements of ``python -m interlace bench``; :class:`Kernel` is for kernels of one's own."""

from interlace.benchmark.kernel import Kernel

__all__ = ["Kernel"]

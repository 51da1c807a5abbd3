"""The measurements of ``python -m interlace bench``; :class:`Kernel` is for kernels of one's own."""

from interlace.benchmark.timing.kernel import Kernel

__all__ = ["Kernel"]

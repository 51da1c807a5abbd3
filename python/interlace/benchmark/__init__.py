"""The measurements of ``python -m interlace bench``; :class:`Kernel` is for kernels of one's own."""

import sys

from interlace.benchmark.kernel import Kernel

# Programs know two files here as ``interlace.benchmark.timing.protocol`` and ``.figures``.
timing = sys.modules[f"{__name__}.timing"] = sys.modules[__name__]

__all__ = ["Kernel"]

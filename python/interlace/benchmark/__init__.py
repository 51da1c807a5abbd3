"""The measurements of ``python -m interlace bench``; :class:`Kernel` describes a user's own kernel."""

import sys

from interlace.benchmark import figures, protocol
from interlace.benchmark.kernel import Kernel

# Programs import two files here as ``interlace.benchmark.timing.figures`` and ``.protocol``.
timing = sys.modules[f"{__name__}.timing"] = sys.modules[__name__]
sys.modules[f"{__name__}.timing.figures"] = figures
sys.modules[f"{__name__}.timing.protocol"] = protocol

__all__ = ["Kernel"]

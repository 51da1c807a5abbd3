"""torch.compile with interlace: the backend, the fusion pass, and what it did and why.

>>> import torch, interlace.compile
>>> "interlace" in torch._dynamo.list_backends()
True
"""

from interlace.compile.backend import FusionPass, register
from interlace.compile.explain import Explanation, explain
from interlace.compile.fusion import fuse
from interlace.compile.prediction import CPU, GPU, Machine, calibrated
from interlace.compile.report import Candidate, Report

__all__ = [
    "CPU",
    "GPU",
    "Candidate",
    "Explanation",
    "FusionPass",
    "Machine",
    "Report",
    "calibrated",
    "explain",
    "fuse",
]

register()

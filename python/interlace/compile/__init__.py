"""torch.compile with interlace: the backend, the fusion pass, and what it did and why.

>>> import torch, interlace.compile
>>> "interlace" in torch._dynamo.list_backends()
True
"""

from interlace.compile.backend import FusionPass, register
from interlace.compile.collectives import Collective
from interlace.compile.explain import Explanation, explain
from interlace.compile.fusion import Pattern, fuse
from interlace.compile.graph_nodes import call
from interlace.compile.prediction import CPU, GPU, Machine, Prediction, calibrated, predict
from interlace.compile.report import Candidate, Report

__all__ = [
    "CPU",
    "GPU",
    "Candidate",
    "Collective",
    "Explanation",
    "FusionPass",
    "Machine",
    "Pattern",
    "Prediction",
    "Report",
    "calibrated",
    "call",
    "explain",
    "fuse",
    "predict",
]

register()

"""torch.compile with interlace: the backend, the fusion pass, and its reports.

>>> import torch, interlace.compile
>>> "interlace" in torch._dynamo.list_backends()
True
"""

from interlace.compile.backend import Explanation, FusionPass, explain, register
from interlace.compile.fusion import (
    CPU,
    GPU,
    Candidate,
    Machine,
    Pattern,
    Prediction,
    Report,
    calibrated,
    fuse,
    predict,
)
from interlace.compile.graph_nodes import Collective, call

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

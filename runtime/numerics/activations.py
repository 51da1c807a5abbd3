"""Activations of the fused ops by name: what torch calls them, and how they enter an error bound.

The kernels have their own (``kernels/epilogue.py``); algorithms that multiply with torch, and autograd,
take torch's.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from interlace.kernels.epilogue import ACTIVATIONS as NAMES

_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
assert tuple(_FUNCTIONS) == ("", *NAMES), "kernels/epilogue.py has others"

# The steepest slope of each; of gelu 1.1290, of its approximation 1.1290, of silu 1.0999.
SLOPES = {"": 1.0, "relu": 1.0, "gelu": 1.13, "gelu_tanh": 1.13, "silu": 1.1}


def activate(x: torch.Tensor, name: str) -> torch.Tensor:
    """The activation ``name`` of ``x``, by torch; "" is none."""
    return _FUNCTIONS[name](x)

"""Dispatch modes of torch, and the types that are plain tensors."""

from collections.abc import Callable

import torch

PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))

modes_active: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""The number of active dispatch modes."""

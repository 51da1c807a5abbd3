"""What stands between a call and torch's dispatcher: dispatch modes, and types other than plain tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))

modes_active: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""The number of active dispatch modes."""

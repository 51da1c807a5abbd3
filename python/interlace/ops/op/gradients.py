"""Gradients of the ops. A gradient is that of the sum of all ranks' losses, as in torch's functional ops.

Those of an op stand beside it. Of those of a fused op the one that communicates is started first, and
waited for last.
"""

from typing import Any

import torch

from interlace.ops.op.registry import Ops
from interlace.runtime.compat.torch_modes import modes_active

_ops: Any = Ops()
Tensor = torch.Tensor


def wait(tensor: Tensor) -> Tensor:
    waited: Tensor = torch.ops._c10d_functional.wait_tensor.default(tensor)
    return waited


def kept(output: Tensor) -> Tensor:
    """An output of an op, to be saved for its backward, which takes it as :func:`complete`.

    A graph waits for it in its forward: what it is used for without a gradient is moved there, and a wait
    that were left in the backward would have the op done again.
    """
    return wait(output) if modes_active() else output


def complete(saved: Tensor) -> Tensor:
    """What :func:`kept` has saved."""
    return saved if modes_active() else wait(saved)


def rows(tensor: Tensor, dim: int) -> Tensor:
    """A matrix of the last dimension, its rows in the order in which ``dim`` comes first."""
    dim = dim % tensor.dim()
    if dim == tensor.dim() - 1:
        return tensor.flatten(0, -2)
    return tensor.movedim(dim, 0).flatten(0, -2)


def padded(tensor: Tensor, dim: int, length: Any) -> Tensor:
    """``tensor`` with zeros behind it, up to ``length`` along ``dim``."""
    behind = [0, 0] * (tensor.dim() - 1 - dim) + [0, length - tensor.shape[dim]]
    return torch.nn.functional.pad(tensor, behind)


def longest(length: Any, size: int) -> Any:
    """The longest of the ``size`` parts of ``length``: all but the last ones are as long."""
    return (length + size - 1) // size

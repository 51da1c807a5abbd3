"""Tensors of any number of dimensions as the matrices that matmuls see, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def rows_of(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """``[..., k]`` as a matrix whose leading index is ``dim``; a copy only if strides demand it."""
    matrix = tensor.movedim(dim, 0).flatten(0, -2)  # reshape(-1, k) cannot tell the rows if k is 0
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


def unrows(matrix: torch.Tensor, lengths: Sequence[int], dim: int) -> torch.Tensor:
    """The inverse of :func:`rows_of` for other columns; ``lengths`` are the leading ones, dim first."""
    return matrix.view(*lengths, matrix.shape[-1]).movedim(0, dim)

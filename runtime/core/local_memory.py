"""Memory of one rank before its peers can reach it, and tensors over such memory.

``Place.new_memory`` makes it, alone; ``Place.share`` lets the peers map it, together. In between, and
without any peer, it is ordinary memory. It lives as long as anything refers to it: this object, a
tensor made by :func:`tensor_over`, or a peer's mapping.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from interlace.runtime.core.memory import DATA_ALIGNMENT

Array = npt.NDArray[np.uint8]


@dataclass(eq=False)
class LocalMemory:
    """Zeroed memory in ``parts``, one uint8 array per size asked for, each aligned for any dtype.

    ``origin`` is for the place that made it: whose memory it is and how a peer gets at it.
    """

    parts: Sequence[Array]
    origin: Any


def aligned(nbytes: int) -> Array:
    """Zeroed memory of this process, aligned as a part has to be."""
    whole: Array = np.zeros(nbytes + DATA_ALIGNMENT, dtype=np.uint8)
    shift = -whole.ctypes.data % DATA_ALIGNMENT
    return whole[shift : shift + nbytes]


def starts(sizes: Sequence[int]) -> list[int]:
    """Where parts of ``sizes`` begin that lie one after another, aligned; and where the last one ends."""
    return [0, *accumulate(-(-size // DATA_ALIGNMENT) * DATA_ALIGNMENT for size in sizes)]


def split(whole: Array, sizes: Sequence[int]) -> list[Array]:
    """Parts of ``sizes`` one after another in ``whole``, each aligned if ``whole`` is."""
    return [whole[start : start + size] for start, size in zip(starts(sizes), sizes, strict=False)]


def tensor_over(memory: Array, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor whose storage starts where ``memory`` does, and which keeps it alive.

    It is nobody's view: ``storage_offset()`` is 0, and autograd takes it for a tensor of its own. Not
    by ``set_``, which looks like a write of the memory to whoever watches torch operators.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(memory)[:nbytes].view(dtype).view(tuple(shape)).detach()

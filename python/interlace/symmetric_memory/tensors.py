"""Tensors in symmetric memory: which there are, and how ranks meet over them.

A tensor that :func:`new_tensor` made is known by the address of its storage for as long as the
storage lives, so views of it are known too. Its handles, one per group, are kept exactly as long: a
rank that has dropped its handle and asks again gets the same, without another meeting of memory, and
all ranks agree on whether there is one.

What refers to what, so that nothing lives longer than its users::

    storage -> array -> memory        the own array of the storage, which nothing else refers to
    the array's end   -> forget the allocation
    allocation -> LocalMemory, handles -> memory of all ranks
    tensors from a handle -> memory
"""

import itertools
import math
import weakref
from collections.abc import Sequence

import torch

from interlace.arguments import checks
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.memory import LocalMemory, tensor_over
from interlace.runtime.core.place import Place
from interlace.symmetric_memory.handle import SymmetricMemory

OP = "symmetric_memory.rendezvous"


class _Allocation:
    """One storage: its buffer and its signal pad, the parts of ``memory``.

    ``handles`` are kept with the numbers of the ranks' allocations that met in them.
    """

    def __init__(self, memory: LocalMemory, nbytes: int) -> None:
        self.number = next(_numbers)
        self.memory = memory
        self.nbytes = nbytes
        self.handles: dict[Communicator, tuple[SymmetricMemory, list[int]]] = {}


_numbers = itertools.count()
_allocations: dict[int, _Allocation] = {}


def new_tensor(
    place: Place, shape: Sequence[int], dtype: torch.dtype, signal_pad_bytes: int
) -> torch.Tensor:
    """A zeroed tensor in memory that can be shared. Not collective."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = place.new_memory((max(nbytes, 1), signal_pad_bytes))  # an empty one has an address too
    array = memory.parts[0][:]
    address = array.ctypes.data
    _allocations[address] = _Allocation(memory, nbytes)
    weakref.finalize(array, _allocations.pop, address, None).atexit = False
    return tensor_over(array, shape, dtype)


def is_known(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a tensor of :func:`new_tensor`, or a view of one."""
    return tensor.untyped_storage().data_ptr() in _allocations


def _allocation_of(tensor: torch.Tensor, place: Place) -> _Allocation:
    """Raises TypeError or ValueError unless it is a tensor of :func:`new_tensor` on this rank."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor must be a tensor, got {type(tensor).__name__}")
    found = _allocations.get(tensor.untyped_storage().data_ptr())
    if found is None:
        raise ValueError(
            "tensor must be one that interlace.symmetric_memory.empty made, or a view of one; got a "
            f"tensor of {tuple(tensor.shape)} in other memory on rank {place.rank}"
        )
    if not place.owns(found.memory):
        raise ValueError(
            "tensor must be one that interlace.symmetric_memory.empty made on this rank, in this "
            f"run; got another's on rank {place.rank}"
        )
    return found


def meet(tensor: torch.Tensor, communicator: Communicator, group_name: str) -> SymmetricMemory:
    """The handle of the tensor's storage in a group. Collective.

    Raises ValueError on every rank if the tensors differ, or have not met each other before.
    """
    with communicator.accepting(OP):
        mine = _allocation_of(tensor, communicator.place)
    handle, met = mine.handles.get(communicator, (None, []))
    pad_bytes = len(mine.memory.parts[1])
    ours = (tuple(tensor.shape), tensor.dtype, mine.nbytes, pad_bytes, handle is not None)
    answers = communicator.agree(OP, (mine.number, ours))
    names = (
        "shape of tensor",
        "dtype of tensor",
        "bytes in the storage of tensor",
        "bytes of the signal pad",
        "whether tensor has been here before",
    )
    for name, *values in zip(names, *(theirs for _, theirs in answers), strict=True):
        checks.equal_on_all(OP, name, values)
    numbers = [number for number, _ in answers]
    if handle is None:
        parts = communicator.place.share(mine.memory, OP)
        buffers, pads = zip(*parts, strict=True)
        handle = SymmetricMemory(communicator, group_name, buffers, pads, mine.nbytes)
        mine.handles[communicator] = handle, numbers
    elif met != numbers:  # then it is so on every rank: a storage meets once in a group
        others = [rank for rank in range(len(numbers)) if numbers[rank] != met[rank]]
        raise ValueError(
            f"{OP}: tensor has met other tensors before than those that ranks {others} pass now, on "
            f"rank {communicator.rank}"
        )
    return handle

"""The functions of torch's symmetric memory, for tensors on a CPU.

A tensor that :func:`empty` made is known by the address of its storage for as long as the storage lives, so
views of it are known too. Its handles, one per group, are kept exactly as long: a rank that has dropped its
handle and asks again gets the same, without another meeting of memory, and all ranks agree on whether there
is one.

What refers to what, so that nothing lives longer than its users::

    storage -> array -> memory        the own array of the storage, which nothing else refers to
    the array's end   -> forget the allocation
    allocation -> LocalMemory, handles -> memory of all ranks
    tensors from a handle -> memory
"""

import contextvars
import itertools
import math
import operator
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from interlace.arguments import checks
from interlace.arguments.words import Group
from interlace.groups import groups, rank_lists
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.memory import RED_ZONE, LocalMemory, tensor_over
from interlace.runtime.core.place import Place
from interlace.symmetric_memory.handle import FLAG_BYTES, SymmetricMemory

OP = "symmetric_memory.rendezvous"
DEFAULT_SIGNAL_PAD_SIZE = 9216  # that of torch 2.13

# A context variable, because the ranks of ``sim`` are in one process.
_signal_pad_size: contextvars.ContextVar[int] = contextvars.ContextVar(
    "interlace_signal_pad_size", default=DEFAULT_SIGNAL_PAD_SIZE
)


@dataclass(eq=False)
class _Allocation:
    """Buffer and signal pad of a storage; ``handles`` with the numbers of the ranks' allocations."""

    memory: LocalMemory
    nbytes: int
    number: int = field(default_factory=itertools.count().__next__)
    handles: dict[Communicator, tuple[SymmetricMemory, list[int]]] = field(default_factory=dict)


_allocations: dict[int, _Allocation] = {}


def empty(
    *size: Any, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> torch.Tensor:
    """A tensor in symmetric memory, for :func:`rendezvous`; as ``torch.empty``. Not collective.

    ``size``: ints, or one sequence of them. ``dtype``: torch's default dtype if None. ``device``: None
    or the CPU. What it contains is undefined.

    Raises TypeError or ValueError for a wrong size or device, PlaceUnavailableError in place ``cuda``,
    InterlaceError if memory is short.

    >>> interlace.run(lambda: tuple(interlace.symmetric_memory.empty(2, 3).shape), 2)
    [(2, 3), (2, 3)]
    """
    place = groups.default_group().place
    given = tuple(size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size)
    try:
        shape = tuple(operator.index(extent) for extent in given)
    except TypeError as error:
        raise TypeError(f"size must be ints, got {given} on rank {place.rank}") from error
    if any(extent < 0 for extent in shape):
        raise ValueError(f"size must not be negative, got {shape} on rank {place.rank}")
    if device is not None and place.name != "cuda" and torch.device(device).type != "cpu":
        raise ValueError(
            f"device must be None or cpu in place {place.name!r}, whose memory is the host's; got "
            f"{device} on rank {place.rank}"
        )
    dtype = torch.get_default_dtype() if dtype is None else dtype
    nbytes = math.prod(shape) * dtype.itemsize
    # one without elements has an address too
    memory = place.new_memory((max(nbytes, 1), get_signal_pad_size()))
    array = memory.parts[0][:]
    place.undefine(array)
    address = array.ctypes.data
    _allocations[address] = _Allocation(memory, nbytes)
    weakref.finalize(array, _allocations.pop, address, None).atexit = False
    return tensor_over(array, shape, dtype)


def rendezvous(tensor: torch.Tensor, group: Group = None) -> SymmetricMemory:
    """The handle by which this rank reaches the tensors of all ranks of ``group``. Collective.

    ``tensor``: from :func:`empty`, or a view of such a tensor; the handle is of the whole storage, and
    the same for all views. ``group``: None for all ranks, a group of interlace's, a torch ProcessGroup,
    or the name of one; "0" is all ranks. Calling again with the same storage and group gives the same
    handle.

    Raises ValueError on every rank if shapes, dtypes or sizes of memory differ, naming both, or if a
    rank's tensor is not from :func:`empty`.

    >>> def neighbour():
    ...     tensor = interlace.symmetric_memory.empty(4)
    ...     handle = interlace.symmetric_memory.rendezvous(tensor)
    ...     tensor.fill_(handle.rank)
    ...     handle.barrier()
    ...     return handle.get_buffer(1 - handle.rank, (4,), tensor.dtype).tolist()
    >>> interlace.run(neighbour, 2)
    [[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]
    """
    communicator = groups.resolve(group)
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
        name = _name_of(group, communicator)
        handle = SymmetricMemory(communicator, name, buffers, pads, mine.nbytes)
        mine.handles[communicator] = handle, numbers
    elif met != numbers:  # then it is so on every rank: a storage meets once in a group
        others = [rank for rank in range(len(numbers)) if numbers[rank] != met[rank]]
        raise ValueError(
            f"{OP}: tensor has met other tensors before than those that ranks {others} pass now, on "
            f"rank {communicator.rank}"
        )
    return handle


def _allocation_of(tensor: torch.Tensor, place: Place) -> _Allocation:
    """Raises TypeError or ValueError unless it is a tensor of :func:`empty` on this rank."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor must be a tensor, got {type(tensor).__name__}")
    found = _allocations.get(tensor.untyped_storage().data_ptr())
    if found is None:
        raise ValueError(
            "tensor must be one that interlace.symmetric_memory.empty made, or a view of one; got a "
            f"tensor of {tuple(tensor.shape)} in other memory"
        )
    if not place.owns(found.memory):
        raise ValueError(
            "tensor must be one that interlace.symmetric_memory.empty made on this rank, in this "
            "run; got another's"
        )
    return found


def _name_of(group: Group, communicator: Communicator) -> str:
    if isinstance(group, str):
        return group
    if isinstance(group, dist.ProcessGroup):
        return str(group.group_name)
    if communicator is groups.default_group():
        return rank_lists.DEFAULT_NAME
    return "-".join(map(str, communicator.ranks))


def handle_of(address: int) -> SymmetricMemory | None:
    """All ranks' handle of the tensor that has ``address``; None if none has, or if it has not met.

    What lies a little outside of a tensor does so on every rank; whoever accesses it there is told.
    """
    for beyond in (0, RED_ZONE):
        for base, allocation in _allocations.items():
            if base - beyond <= address < base + allocation.nbytes + beyond:
                return allocation.handles.get(groups.default_group(), (None,))[0]
    return None


def is_symm_mem_tensor(tensor: torch.Tensor) -> bool:
    """Whether ``tensor``, of any shape, is from :func:`empty`, or a view of such a tensor. Not collective.

    Raises AttributeError for what is no tensor. Semantics: the function of that name of
    ``torch.distributed._symmetric_memory``.

    >>> symm_mem = interlace.symmetric_memory
    >>> def known():
    ...     tensors = symm_mem.empty(4)[:2], torch.ones(2)
    ...     return [symm_mem.is_symm_mem_tensor(tensor) for tensor in tensors]
    >>> interlace.run(known, 1)
    [[True, False]]
    """
    return tensor.untyped_storage().data_ptr() in _allocations


def get_signal_pad_size() -> int:
    """Bytes of the signal pad of a tensor that this rank makes now; by default torch's figure.

    >>> interlace.run(interlace.symmetric_memory.get_signal_pad_size, 1)
    [9216]
    """
    return _signal_pad_size.get()


def set_signal_pad_size(size: int) -> None:
    """Set the bytes of the signal pads of tensors that this rank makes from now on.

    Raises TypeError for what is no int, ValueError for what is no positive multiple of 4. Semantics: the
    function of that name of ``torch.distributed._symmetric_memory``.

    >>> def on_rank():
    ...     interlace.symmetric_memory.set_signal_pad_size(1024)
    ...     return interlace.symmetric_memory.get_signal_pad_size()
    >>> interlace.run(on_rank, 2)
    [1024, 1024]
    """
    if checks.integer("size", size) <= 0 or size % FLAG_BYTES:
        raise ValueError(f"size must be a positive multiple of {FLAG_BYTES}, got {size}")
    _signal_pad_size.set(size)


def get_backend(device: torch.device | str) -> str | None:
    """The backend of symmetric memory on ``device``: "SIM" or "SHM", None if there is none there.

    Raises :class:`interlace.InterlaceError` outside of a group, RuntimeError for a device that torch does
    not know.

    >>> interlace.run(lambda: interlace.symmetric_memory.get_backend("cpu"), 1)
    ['SIM']
    """
    place = groups.default_group().place
    return place.name.upper() if torch.device(device).type == place.device.type == "cpu" else None


def is_nvshmem_available() -> bool:
    """False: no place of interlace's on a CPU has it. torch's function of that name asks its build.

    >>> interlace.symmetric_memory.is_nvshmem_available()
    False
    """
    return False

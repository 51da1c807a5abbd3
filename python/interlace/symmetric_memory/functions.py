"""The functions of torch's symmetric memory, for tensors on a CPU."""

import contextvars
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from interlace.groups import groups, rank_lists
from interlace.symmetric_memory import tensors
from interlace.symmetric_memory.handle import FLAG_BYTES, SymmetricMemory

DEFAULT_SIGNAL_PAD_SIZE = 9216  # that of torch 2.13

# A context variable, because the ranks of ``sim`` are in one process.
_signal_pad_size: contextvars.ContextVar[int] = contextvars.ContextVar(
    "interlace_signal_pad_size", default=DEFAULT_SIGNAL_PAD_SIZE
)


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
    return tensors.new_tensor(place, shape, dtype, get_signal_pad_size())


def rendezvous(tensor: torch.Tensor, group: Any = None) -> SymmetricMemory:
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
    if isinstance(group, str):
        communicator, name = groups.resolve(group), group
    else:
        communicator = groups.resolve(group)
        name = _name_of(group, communicator)
    return tensors.meet(tensor, communicator, name)


def _name_of(group: Any, communicator: groups.Group) -> str:
    if isinstance(group, dist.ProcessGroup):
        return str(group.group_name)
    if communicator is groups.default_group():
        return rank_lists.DEFAULT_NAME
    return "-".join(map(str, communicator.ranks))


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
    return tensors.is_known(tensor)


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
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"size must be an int, got {size!r}")
    if size <= 0 or size % FLAG_BYTES:
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

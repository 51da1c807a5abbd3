"""The functions of torch's symmetric memory, for tensors on a CPU.

A tensor that :func:`empty` made is known by the address of its storage for as long as the storage lives, so
views of it are known as well. Its handles, one per group, are kept exactly as long. A rank that has dropped
its handle and asks again gets the same handle without another exchange of memory, and all ranks agree on
whether there is one.

References are arranged so that nothing lives longer than its users::

    storage -> array -> memory        the array of the storage, which nothing else refers to
    the array's end   -> forget the allocation
    allocation -> LocalMemory, handles -> memory of all ranks
    tensors from a handle -> memory

``barrier``, ``put_signal`` and ``wait_signal`` are kernels on the caller's current stream, in the flag
protocol of ``kernels/signal.py``.

torch has the ops of its namespace ``symm_mem`` for GPUs only. :func:`register` gives them a kernel for
CPUs. ``import interlace`` calls it, in 0.3 ms (Xeon, November 2026). The first call of an op loads
``torch_ops.py``, which has the kernels. torch defines some of the ops when
``torch.distributed._symmetric_memory`` is imported. That takes 27 ms, so it happens at the first access to
one of them in ``torch.ops.symm_mem``. torch's own fake kernels ("Meta") stay.
"""

import contextvars
import importlib
import itertools
import math
import mmap
import operator
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from interlace.arguments import checks
from interlace.arguments.words import Group
from interlace.groups import groups
from interlace.groups.groups import DEFAULT_NAME
from interlace.kernels import signal
from interlace.runtime.compat import stand_ins
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.errors import CollectiveTimeoutError, InterlaceError
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.core.memory import RED_ZONE, Array, LocalMemory, tensor_over
from interlace.runtime.core.place import Place
from interlace.runtime.core.stream import Outcome

FLAG_BYTES = 4
_LARGEST = (1 << 32) - 1


def _table(addresses: Sequence[int]) -> torch.Tensor:
    """Return an int64 table in a separate mapping, which is high in the address space."""
    # A Python that is not position-independent, such as Debian's, may put small memory below 2**31.
    # Triton would type such an address int32, which cannot become a pointer.
    memory = mmap.mmap(-1, 8 * len(addresses))
    np.frombuffer(memory, np.int64)[:] = addresses
    return torch.frombuffer(memory, dtype=torch.int64)


class SymmetricMemory:
    """One rank's handle of a buffer and a signal pad on every rank of a group.

    Made by ``interlace.symmetric_memory.rendezvous``. It keeps the memory of all ranks alive, and so
    does every tensor that it returns.

    Attributes
    ----------
    rank, world_size : this rank within the group.
    group_name : torch's name of the group, or interlace's.
    buffer_ptrs, signal_pad_ptrs : base addresses by rank, in this rank's address space.
    buffer_ptrs_dev, signal_pad_ptrs_dev : addresses of int64 tables of the same, for kernels.
    buffer_size, signal_pad_size : bytes per rank.
    offset : bytes from the base to the start of the tensor's storage. Always 0, because one allocation
        holds one storage; the start of a view in the storage is its ``storage_offset()``.
    multicast_ptr : an address that ``multimem`` instructions take for all ranks' buffers, in ``sim``; 0 in
        ``shm``.

    Raises CollectiveTimeoutError or PeerDiedError in waits, naming the ranks waited for. Semantics:
    the handle of that name in ``torch.distributed._symmetric_memory``.

    >>> def on_rank():
    ...     tensor = interlace.symmetric_memory.empty(4)
    ...     handle = interlace.symmetric_memory.rendezvous(tensor)
    ...     tensor.fill_(handle.rank)
    ...     handle.barrier(timeout_ms=60_000)
    ...     peer = 1 - handle.rank
    ...     whole = handle.get_remote_tensor(peer, (4,), tensor.dtype)
    ...     assert torch.equal(whole[2:], handle.get_buffer(peer, (2,), tensor.dtype, 2))
    ...     handle.put_signal(1) if handle.rank == 0 else handle.wait_signal(0)
    ...     assert not handle.has_multicast_support("cpu")
    ...     return whole[0].item(), handle.get_signal_pad(peer, (8,)).shape
    >>> interlace.run(on_rank, 2)
    [(1.0, torch.Size([8])), (0.0, torch.Size([8]))]
    """

    offset = 0

    def __init__(
        self,
        communicator: Communicator,
        group_name: str,
        buffers: Sequence[Array],
        pads: Sequence[Array],
        buffer_size: int,
    ) -> None:
        self.rank, self.world_size = communicator.rank, communicator.world_size
        self.group_name = group_name
        self.device = communicator.place.device
        self.buffer_size, self.signal_pad_size = buffer_size, len(pads[0])
        self.buffer_ptrs = [buffer.ctypes.data for buffer in buffers]
        self.signal_pad_ptrs = [pad.ctypes.data for pad in pads]
        self.multicast_ptr = communicator.place.multicast(self, buffers)
        self._communicator = communicator
        self._buffers, self._pads = buffers, pads
        self._buffer_table, self._pad_table = map(_table, (self.buffer_ptrs, self.signal_pad_ptrs))
        for table in (self._buffer_table, self._pad_table):
            communicator.place.announce(table)

    @property
    def buffer_ptrs_dev(self) -> int:
        """Return the address of an int64 table of the ranks' buffers, for kernels."""
        return self._buffer_table.data_ptr()

    @property
    def signal_pad_ptrs_dev(self) -> int:
        """Return the address of an int64 table of the ranks' signal pads, for kernels."""
        return self._pad_table.data_ptr()

    @staticmethod
    def has_multicast_support(device_type: object = None, device_idx: int = 0) -> bool:
        """Return False: a CPU has no switch, so code must not choose the paths for GPUs with one."""
        return False

    def __repr__(self) -> str:
        return (
            f"<SymmetricMemory of group {self.group_name}: rank {self.rank} of {self.world_size}, "
            f"{self.buffer_size} bytes>"
        )

    def get_buffer(
        self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0
    ) -> torch.Tensor:
        """Return ``rank``'s buffer as a tensor, from element ``storage_offset`` on."""
        self._check_member("rank", rank)
        part = self._buffers[rank][: self.buffer_size]
        return self._view("buffer", part, sizes, dtype, storage_offset)

    def get_remote_tensor(
        self, peer: int, sizes: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return ``peer``'s tensor, from the start of its storage."""
        self._check_member("peer", peer)
        return self.get_buffer(peer, sizes, dtype)

    def get_signal_pad(
        self,
        rank: int,
        sizes: Sequence[int] = (),
        dtype: torch.dtype | None = None,
        storage_offset: int = 0,
    ) -> torch.Tensor:
        """Return ``rank``'s signal pad, uint32 by default; all of it if ``sizes`` is empty."""
        self._check_member("rank", rank)
        dtype = torch.uint32 if dtype is None else dtype
        sizes = sizes or (self.signal_pad_size // dtype.itemsize,)
        return self._view("signal pad", self._pads[rank], sizes, dtype, storage_offset)

    def _check_member(self, name: str, rank: int) -> None:
        if self._communicator.closed:
            raise InterlaceError(f"rank {self.rank}: the group of {self!r} was closed")
        with self._communicator.accepting():
            checks.check_member(name, rank, self._communicator)

    def _view(
        self, name: str, part: Array, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int
    ) -> torch.Tensor:
        shape = torch.Size(sizes)
        start = storage_offset * dtype.itemsize
        end = start + math.prod(shape) * dtype.itemsize
        with self._communicator.accepting():
            if storage_offset < 0 or any(extent < 0 for extent in shape):
                raise ValueError(
                    f"sizes and storage_offset of a {name} must not be negative, got {tuple(shape)} and "
                    f"{storage_offset}"
                )
            if end > len(part):
                raise ValueError(
                    f"the {name} has {len(part)} bytes, {tuple(shape)} of {dtype} from element "
                    f"{storage_offset} on ends at byte {end}"
                )
        return tensor_over(part[start:end], shape, dtype)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Order all that precedes it on the current stream of any rank before all that follows it.

        ``channel`` separates barriers that run at the same time. ``timeout_ms`` limits the wait; 0 means
        the group's timeout. ``sim`` has no clock; there a wait without end is reported as a deadlock.
        """
        self._run(signal.handle_barrier_kernel, "barrier", channel, timeout_ms)

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Signal ``dst_rank`` after all that precedes it; wait while the last signal is not yet taken."""
        self._check_member("dst_rank", dst_rank)
        self._run(signal.put_signal_kernel, "put_signal", channel, timeout_ms, peer=dst_rank)

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Wait for a signal of ``src_rank`` and take it; its writes before the signal are then visible."""
        self._check_member("src_rank", src_rank)
        self._run(signal.wait_signal_kernel, "wait_signal", channel, timeout_ms, peer=src_rank)

    def _run(self, kernel: Any, op: str, channel: int, timeout_ms: int, **arguments: int) -> None:
        channels = self.signal_pad_size // (FLAG_BYTES * self.world_size)
        with self._communicator.accepting():
            if not 0 <= channel < channels:
                raise ValueError(
                    f"channel must be within 0..{channels - 1} for {self.signal_pad_size} bytes of "
                    f"signal pad and {self.world_size} ranks, got {channel}"
                )
            if timeout_ms < 0:
                raise ValueError(f"timeout_ms must not be negative, got {timeout_ms}")
        place = self._communicator.place
        status = np.zeros(1, np.int64)
        launch = KernelLaunch(
            kernel,
            1,
            {
                "pads_ptr": self._pad_table,
                "status_ptr": torch.from_numpy(status),
                "rank": self.rank,
                "world_size": self.world_size,
                "channel": channel,
                "polls": place.poll_limit(),
                **arguments,
            },
            f"{op} on channel {channel}",
            num_warps=1,
        )

        def waited_for() -> list[int]:
            return [peer - 1 for peer in status.tolist() if peer]

        def run() -> Outcome:
            place.run_kernel(launch, waited_for, timeout_ms / 1000 if timeout_ms else None)
            if late := waited_for():
                raise CollectiveTimeoutError(
                    f"rank {self.rank}: {launch.op} gave up waiting for rank {late[0]} after "
                    f"{place.poll_limit()} polls",
                    tuple(late),
                )
            return Outcome(None, place.record_current())

        self._communicator.run(op, run, async_op=False)

    @staticmethod
    def memset32(tensor: torch.Tensor, offset: int, val: int, count: int = 1) -> torch.Tensor:
        """Set ``count`` elements of ``tensor``, 1-D and uint32, from element ``offset`` on; return it.

        Raises ValueError for another kind of tensor, or an element or value out of range.

        >>> words = torch.zeros(3, dtype=torch.uint32)
        >>> SymmetricMemory.memset32(words, 1, 7, count=2).tolist()
        [0, 7, 7]
        """
        _check_words(tensor, offset, val, count)
        tensor[offset : offset + count].fill_(val)
        return tensor

    @staticmethod
    def stream_write_value32(tensor: torch.Tensor, offset: int, val: int) -> torch.Tensor:
        """Set an element of ``tensor``, 1-D and uint32, after all that precedes it; return the tensor.

        A rank that reads the value with acquire sees all earlier writes. Raises ValueError like
        :meth:`memset32`.

        >>> SymmetricMemory.stream_write_value32(torch.zeros(2, dtype=torch.uint32), 0, 3).tolist()
        [3, 0]
        """
        _check_words(tensor, offset, val, 1)
        signal.write_value_kernel[(1,)](tensor[offset:], val)
        return tensor


def _check_words(tensor: torch.Tensor, offset: int, val: int, count: int) -> None:
    if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.dtype != torch.uint32:
        raise ValueError(
            "tensor must be flat, contiguous and torch.uint32, got shape "
            f"{tuple(tensor.shape)}, strides {tensor.stride()}, {tensor.dtype}"
        )
    if offset < 0 or count < 1 or offset + count > tensor.numel():
        raise ValueError(
            f"offset and count must be within the tensor's {tensor.numel()} elements, got {offset} "
            f"and {count}"
        )
    if not 0 <= val <= _LARGEST:
        raise ValueError(f"val must be within 0..{_LARGEST}, got {val}")


OP = "symmetric_memory.rendezvous"
DEFAULT_SIGNAL_PAD_SIZE = 9216  # as in torch 2.13

# A context variable, because the ranks of ``sim`` share one process.
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
    """Return a tensor in symmetric memory, for :func:`rendezvous`; like ``torch.empty``. Not collective.

    ``size``: ints, or one sequence of them. ``dtype``: torch's default dtype if None. ``device``: None
    or the CPU. The contents are undefined.

    Raises TypeError or ValueError for a wrong size or device, PlaceUnavailableError in place ``cuda``,
    InterlaceError if there is not enough memory.

    >>> interlace.run(lambda: tuple(interlace.symmetric_memory.empty(2, 3).shape), 2)
    [(2, 3), (2, 3)]
    """
    place = groups.default_group().place
    extents = tuple(size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size)
    try:
        shape = tuple(operator.index(extent) for extent in extents)
    except TypeError as error:
        raise TypeError(f"size must be ints, got {extents} on rank {place.rank}") from error
    if any(extent < 0 for extent in shape):
        raise ValueError(f"size must not be negative, got {shape} on rank {place.rank}")
    if device is not None and place.name != "cuda" and torch.device(device).type != "cpu":
        raise ValueError(
            f"device must be None or cpu in place {place.name!r}, whose memory is the host's; got "
            f"{device} on rank {place.rank}"
        )
    dtype = torch.get_default_dtype() if dtype is None else dtype
    nbytes = math.prod(shape) * dtype.itemsize
    # a tensor without elements has an address as well
    memory = place.new_memory((max(nbytes, 1), get_signal_pad_size()))
    array = memory.parts[0][:]
    place.undefine(array)
    address = array.ctypes.data
    _allocations[address] = _Allocation(memory, nbytes)
    weakref.finalize(array, _allocations.pop, address, None).atexit = False
    return tensor_over(array, shape, dtype)


def rendezvous(tensor: torch.Tensor, group: Group = None) -> SymmetricMemory:
    """Return the handle by which this rank reaches the tensors of all ranks of ``group``. Collective.

    ``tensor``: from :func:`empty`, or a view of such a tensor; the handle covers the whole storage, and
    is the same for all views. ``group``: None for all ranks, a group of interlace, a torch ProcessGroup,
    or the name of a group; "0" is all ranks. Another call with the same storage and group returns the same
    handle.

    Raises ValueError on every rank if shapes, dtypes or sizes of memory differ, with both values, or if a
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
        allocation = _allocation_of(tensor, communicator.place)
    handle, met = allocation.handles.get(communicator, (None, []))
    pad_bytes = len(allocation.memory.parts[1])
    facts = (tuple(tensor.shape), tensor.dtype, allocation.nbytes, pad_bytes, handle is not None)
    answers = communicator.agree(OP, (allocation.number, facts))
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
        parts = communicator.place.share(allocation.memory, OP)
        buffers, pads = zip(*parts, strict=True)
        name = _name_of(group, communicator)
        handle = SymmetricMemory(communicator, name, buffers, pads, allocation.nbytes)
        allocation.handles[communicator] = handle, numbers
    elif met != numbers:  # then on every rank, because a storage meets once in a group
        differing = [rank for rank in range(len(numbers)) if numbers[rank] != met[rank]]
        raise ValueError(
            f"{OP}: tensor was used before with other tensors than ranks {differing} pass now, on "
            f"rank {communicator.rank}"
        )
    return handle


def _allocation_of(tensor: torch.Tensor, place: Place) -> _Allocation:
    """Return the allocation of ``tensor``; raise TypeError or ValueError if it has none on this rank."""
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
            "run; got a tensor of another rank or run"
        )
    return found


def _name_of(group: Group, communicator: Communicator) -> str:
    if isinstance(group, str):
        return group
    if isinstance(group, dist.ProcessGroup):
        return str(group.group_name)
    if communicator is groups.default_group():
        return DEFAULT_NAME
    return "-".join(map(str, communicator.ranks))


def handle_of(address: int) -> SymmetricMemory | None:
    """Return the handle of the tensor that has ``address``; None without one, or before rendezvous.

    An address slightly outside a tensor also counts, on every rank, so that the access can be reported.
    """
    for beyond in (0, RED_ZONE):
        for base, allocation in _allocations.items():
            if base - beyond <= address < base + allocation.nbytes + beyond:
                return allocation.handles.get(groups.default_group(), (None,))[0]
    return None


def is_symm_mem_tensor(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor``, of any shape, is from :func:`empty` or a view of one. Not collective.

    Raises AttributeError if it is not a tensor. Semantics: the function of that name in
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
    """Return the bytes of the signal pad of a tensor that this rank makes now; by default as in torch.

    >>> interlace.run(interlace.symmetric_memory.get_signal_pad_size, 1)
    [9216]
    """
    return _signal_pad_size.get()


def set_signal_pad_size(size: int) -> None:
    """Set the bytes of the signal pads of tensors that this rank makes from now on.

    Raises TypeError if ``size`` is not an int, ValueError if it is not a positive multiple of 4. Semantics:
    the function of that name in ``torch.distributed._symmetric_memory``.

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
    """Return the backend of symmetric memory on ``device``: "SIM", "SHM", or None if there is none.

    Raises :class:`interlace.InterlaceError` outside a group, RuntimeError for a device that torch does
    not know.

    >>> interlace.run(lambda: interlace.symmetric_memory.get_backend("cpu"), 1)
    ['SIM']
    """
    place = groups.default_group().place
    return place.name.upper() if torch.device(device).type == place.device.type == "cpu" else None


def is_nvshmem_available() -> bool:
    """Return False: interlace has no NVSHMEM on a CPU. torch's function of that name asks its build.

    >>> interlace.symmetric_memory.is_nvshmem_available()
    False
    """
    return False


# the names of the ops that torch defines in Python begin with these
IN_PYTHON = ("fused_", "_low_contention_", "get_remote_tensors")
TAKEN_OVER = (
    "fused_all_gather_matmul",
    "fused_all_gather_scaled_matmul",
    "fused_matmul_reduce_scatter",
    "fused_scaled_matmul_reduce_scatter",
    "_low_contention_all_gather",
    "_low_contention_reduce_scatter",
)
NAMES = (
    *TAKEN_OVER,
    "one_shot_all_reduce",
    "one_shot_all_reduce_copy",
    "one_shot_all_reduce_copy_out",
    "one_shot_all_reduce_out",
    "two_shot_all_reduce_",
    "two_shot_all_reduce_out",
    "multimem_all_reduce_",
    "multimem_one_shot_all_reduce",
    "multimem_one_shot_all_reduce_out",
    "multimem_one_shot_reduce_out",
    "multimem_all_gather_out",
    "reduce_scatter_out",
)
DEFINITIONS = "torch.distributed._symmetric_memory"

_Library: Any = torch.library.Library
_library: Any = None
_taken: Any = None
_on_cpu: list[str] = []  # ops for which torch has no kernel on CPUs


class _Namespace(type(torch.ops.symm_mem)):  # type: ignore[misc]
    """``torch.ops.symm_mem``; makes torch define its ops at the first access to one of them."""

    # code that Inductor writes names the ops by this module
    __module__ = type(torch.ops.symm_mem).__module__

    def __getattr__(self, name: str) -> Any:
        if name.startswith(IN_PYTHON):
            importlib.import_module(DEFINITIONS)
        return super().__getattr__(name)


def register() -> None:
    """Register the kernels, once per process; keep existing kernels unless ``INTERLACE_SYMM_MEM`` is 1."""
    global _library
    if _library is not None:
        return
    torch.ops.symm_mem.__class__ = _Namespace
    _library = _Library("symm_mem", "IMPL")
    for name in NAMES:
        if not _has_kernel(f"symm_mem::{name}"):
            _library.impl(name, _loading(name), "CPU")
            _on_cpu.append(name)
    stand_ins.on_simulated_ranks.append(_called_directly)
    if os.environ.get("INTERLACE_SYMM_MEM", "") == "1":
        take_over_symm_mem()


def take_over_symm_mem(taken: bool = True) -> None:
    """Make interlace the implementation of torch's fused ops, on GPUs and CPUs; if False, undo that.

    The ops of ``torch.ops.symm_mem`` are ``fused_all_gather_matmul`` with any number of weights,
    ``fused_matmul_reduce_scatter``, the two with ``scaled`` in their names, ``_low_contention_all_gather``
    and ``_low_contention_reduce_scatter``. Compilers put them into graphs for a collective beside a matmul.
    Programs with these ops (Inductor's ``_micro_pipeline_tp``, torchtitan, vLLM) then run on interlace,
    unchanged. The call is for this process: make it on all ranks or on none, before the ops run.
    ``INTERLACE_SYMM_MEM=1`` in the environment makes it at ``import interlace``. Without the call GPUs use
    torch's kernels.

    Raises TypeError if ``taken`` is not a bool. Semantics: torch's ops.

    >>> interlace.take_over_symm_mem()
    >>> interlace.take_over_symm_mem(False)  # GPUs use torch's kernels again
    """
    global _taken
    checks.flag("taken", taken)
    if _taken is not None and not taken:
        _taken._destroy()  # then the kernel that was registered before counts
        _taken = None
    elif _taken is None and taken:
        importlib.import_module(DEFINITIONS)  # the last registration counts
        _taken = _Library("symm_mem", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*verriding a previously registered kernel")
            for name in TAKEN_OVER:
                for device in ("CUDA",) if name in _on_cpu else ("CUDA", "CPU"):
                    _taken.impl(name, _loading(name), device, allow_override=True)


def _called_directly() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return functions for simulated ranks: a wait inside an op is in pybind11, which cannot take turns."""
    direct = {name: stand_ins.as_op(_loading(name), f"symm_mem::{name}") for name in NAMES}
    return vars(torch.ops.symm_mem), direct


def _has_kernel(op: str) -> bool:
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(op, "CPU")
    except RuntimeError:  # not defined yet
        return False


def _loading(name: str) -> Callable[..., object]:
    def kernel(*args: object, **kwargs: object) -> object:
        from interlace.ops.matmul import torch_ops

        return getattr(torch_ops, name)(*args, **kwargs)

    kernel.__name__ = kernel.__qualname__ = name
    return kernel

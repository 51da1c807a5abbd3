"""``iris`` on a CPU: a symmetric heap, and loads, stores and atomics at peers' places in it.

Signatures as in ROCm/iris (``iris/device/triton/ops.py``); the rank whose address is given comes first,
then the rank whose memory is meant. What they do to memory is what the functions of ``tl`` of the same
name do at the peer's address::

    load, store, copy, get, put   plain: ordered with nothing
    atomic_*                      ``sem`` "acq_rel" and ``scope`` "gpu" unless told otherwise: for a peer
                                  the scope has to be "sys"; a release covers the stores of other threads
                                  of the program only up to a ``tl.debug_barrier()`` before it

Hints and cache modifiers change nothing here. Kernels for AMD's GPUs are checked by the same model, PTX's,
whose orders and scopes Triton's language has for both.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

import interlace
from interlace import symmetric_memory

HEAP_BYTES = 1 << 20  # of a rank: a check is small, and its memory has a shadow
ALIGNMENT = 1024


class Iris:
    """The host's object: a heap that is at the same offsets on every rank, handed out in order.

    ``heap_size`` bytes, but at most 1 MiB: tensors of a check are small. MemoryError when it is used up.
    Where torch has a ``device``, it is taken and ignored: the heap is the host's.
    """

    def __init__(self, heap_size: int = 1 << 30) -> None:
        self.heap_size = min(heap_size, HEAP_BYTES)
        self._heap = symmetric_memory.empty(self.heap_size, dtype=torch.uint8)
        handle = symmetric_memory.rendezvous(self._heap)
        self.cur_rank, self.num_ranks = handle.rank, handle.world_size
        self.heap_bases = torch.tensor(handle.buffer_ptrs, dtype=torch.uint64)
        self._end = 0

    def get_rank(self) -> int:
        """This rank."""
        return self.cur_rank

    def get_num_ranks(self) -> int:
        """How many ranks there are."""
        return self.num_ranks

    def get_heap_bases(self) -> torch.Tensor:
        """Where every rank's heap begins, by rank: what device functions take last."""
        return self.heap_bases

    def get_device_context(self) -> torch.Tensor:
        """What :class:`DeviceContext` begins with in a kernel: rank, number of ranks, where heaps begin."""
        head = torch.tensor([self.cur_rank, self.num_ranks], dtype=torch.uint64)
        return torch.cat([head, self.heap_bases])

    def get_device(self) -> torch.device:
        """The CPU."""
        return self._heap.device

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """What any rank has done before is before what any does after, kernels included."""
        interlace.barrier()

    def empty(self, *size: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
        """A tensor of the heap. Every rank allocates the same, in the same order."""
        given = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
        shape, dtype = tuple(given), torch.get_default_dtype() if dtype is None else dtype
        begin, nbytes = self._end, math.prod(shape) * dtype.itemsize
        self._end = -(-(begin + nbytes) // ALIGNMENT) * ALIGNMENT
        if self._end > self.heap_size:
            raise MemoryError(
                f"the heap of a check has {self.heap_size} bytes, and {nbytes} more from byte {begin} on "
                f"do not fit, on rank {self.cur_rank}"
            )
        return self._heap[begin : begin + nbytes].view(dtype).view(shape)

    def full(
        self, size: Any, fill_value: Any, *, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """As torch's, on the heap."""
        dtype = torch.tensor(fill_value).dtype if dtype is None else dtype
        return self.empty(size, dtype=dtype).fill_(fill_value)

    def zeros(self, *size: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
        """As torch's, on the heap."""
        return self.empty(*size, dtype=dtype).zero_()

    def ones(self, *size: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
        """As torch's, on the heap."""
        return self.empty(*size, dtype=dtype).fill_(1)

    def zeros_like(self, input: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """As torch's, on the heap."""
        return self.zeros(input.shape, dtype=kwargs.get("dtype") or input.dtype)

    def arange(self, *bounds: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
        """As torch's, on the heap."""
        values = torch.arange(*bounds, dtype=dtype)
        return self.empty(values.shape, dtype=values.dtype).copy_(values)

    def info(self, message: str) -> None:
        """Nothing: a check has many runs."""

    log = debug = log_debug = log_stats = warning = info


def iris(heap_size: int = 1 << 30) -> Iris:
    """The host's object of this rank. Collective."""
    return Iris(heap_size)


@triton.jit
def _at(pointer, from_rank, to_rank, heap_bases):
    """The address in ``to_rank``'s heap of what ``from_rank`` has at ``pointer``."""
    shift = tl.load(heap_bases + to_rank) - tl.load(heap_bases + from_rank)
    return (pointer.to(tl.uint64, bitcast=True) + shift).to(pointer.dtype, bitcast=True)


@triton.jit
def load(pointer, to_rank, from_rank, heap_bases, mask=None, other=None,
         cache_modifier=None, volatile=False, hint=None):  # fmt: skip
    """Load from ``from_rank``; ``pointer`` is of ``to_rank``, which calls."""
    address = _at(pointer, to_rank, from_rank, heap_bases)
    return tl.load(address, mask=mask, other=other, volatile=volatile)


@triton.jit
def store(pointer, value, from_rank, to_rank, heap_bases, mask=None,
          hint=None, cache_modifier=None):  # fmt: skip
    """Store at ``to_rank``; ``pointer`` is of ``from_rank``, which calls."""
    tl.store(_at(pointer, from_rank, to_rank, heap_bases), value, mask=mask)


@triton.jit
def copy(src_ptr, dst_ptr, from_rank, to_rank, cur_rank, heap_bases, mask=None, other=None,
         load_cache_modifier=None, store_cache_modifier=None, hint=None):  # fmt: skip
    """Load from ``from_rank``, store at ``to_rank``; both pointers are of ``cur_rank``, which calls."""
    data = tl.load(_at(src_ptr, cur_rank, from_rank, heap_bases), mask=mask, other=other)
    tl.store(_at(dst_ptr, cur_rank, to_rank, heap_bases), data, mask=mask)


@triton.jit
def get(from_ptr, to_ptr, from_rank, to_rank, heap_bases, mask=None, other=None,
        load_cache_modifier=None, store_cache_modifier=None, hint=None):  # fmt: skip
    """Load from ``to_rank``, store at home: the caller is ``from_rank``, as in Iris' code and tests."""
    data = tl.load(_at(from_ptr, from_rank, to_rank, heap_bases), mask=mask, other=other)
    tl.store(to_ptr, data, mask=mask)


@triton.jit
def put(from_ptr, to_ptr, from_rank, to_rank, heap_bases, mask=None, other=None,
        load_cache_modifier=None, store_cache_modifier=None, hint=None):  # fmt: skip
    """Load at home, store at ``to_rank``; ``from_rank`` calls."""
    data = tl.load(from_ptr, mask=mask, other=other)
    tl.store(_at(to_ptr, from_rank, to_rank, heap_bases), data, mask=mask)


@triton.jit
def atomic_cas(pointer, cmp, val, from_rank, to_rank, heap_bases, sem=None, scope=None,
               hint=None):  # fmt: skip
    """``tl.atomic_cas`` at ``to_rank``."""
    return tl.atomic_cas(
        _at(pointer, from_rank, to_rank, heap_bases), cmp, val, sem=sem, scope=scope
    )


def _atomic(name: str) -> Callable[..., Any]:
    """``tl``'s atomic of that name, at ``to_rank``; ``pointer`` is of ``from_rank``, which calls."""

    def atomic(
        pointer: Any,
        val: Any,
        from_rank: Any,
        to_rank: Any,
        heap_bases: Any,
        mask: Any = None,
        sem: Any = None,
        scope: Any = None,
        hint: Any = None,
    ) -> Any:
        address = _at(pointer, from_rank, to_rank, heap_bases)
        return getattr(tl, name)(address, val, mask=mask, sem=sem, scope=scope)

    return atomic


atomic_add, atomic_xchg = _atomic("atomic_add"), _atomic("atomic_xchg")
atomic_and, atomic_or, atomic_xor = (
    _atomic("atomic_and"),
    _atomic("atomic_or"),
    _atomic("atomic_xor"),
)
atomic_min, atomic_max = _atomic("atomic_min"), _atomic("atomic_max")


def _of_context(function: Any, places: int) -> Callable[..., Any]:
    """``function`` without the caller's rank and the heaps, which the context has.

    ``places`` are the arguments before the caller's rank; then comes the rank whose memory is meant.
    """

    def method(self: "DeviceContext", *args: Any, **named: Any) -> Any:
        peer = {name: named.pop(name) for name in ("from_rank", "to_rank") if name in named}
        head, rest = args[:places], args[places:]
        other, rest = ([*peer.values()], rest) if peer else ([rest[0]], rest[1:])
        return function(*head, self.rank, *other, self.heap_bases, *rest, **named)

    return method


class DeviceContext:
    """A kernel's rank and heaps: its loads, stores and atomics take only the rank whose memory is meant."""

    def __init__(self, rank: Any, world_size: Any, heap_bases: Any) -> None:
        self.rank, self.world_size, self.heap_bases = rank, world_size, heap_bases

    @staticmethod
    def initialize(
        context_tensor: Any, rank: Any, world_size: Any, tracing: bool = False
    ) -> "DeviceContext":
        """The context that ``get_device_context`` of the host's object describes."""
        return DeviceContext(rank, world_size, context_tensor + 2)

    load, store = _of_context(load, 1), _of_context(store, 2)
    get, put = _of_context(get, 2), _of_context(put, 2)
    atomic_cas = _of_context(atomic_cas, 3)
    atomic_add, atomic_xchg = _of_context(atomic_add, 2), _of_context(atomic_xchg, 2)
    atomic_and, atomic_or = _of_context(atomic_and, 2), _of_context(atomic_or, 2)
    atomic_xor = _of_context(atomic_xor, 2)
    atomic_min, atomic_max = _of_context(atomic_min, 2), _of_context(atomic_max, 2)


Context = DeviceContext

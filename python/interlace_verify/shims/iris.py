"""``iris`` on a CPU: a symmetric heap, with loads, stores and atomics in peers' heaps.

Signatures are as in ROCm/iris (``iris/device/triton/ops.py``): first the rank whose address is passed, then
the rank whose memory is accessed. Their effect on memory is the effect of the ``tl`` functions of the same
name at the peer's address::

    load, store, copy, get, put   plain: not ordered with other accesses
    atomic_*                      ``sem`` "acq_rel" and ``scope`` "gpu" by default; for a peer the scope
                                  must be "sys"; a release covers stores of the program's other threads
                                  only up to a ``tl.debug_barrier()`` before it

Hints and cache modifiers have no effect here. Kernels for AMD's GPUs are checked by the same model, PTX's.
Triton's language has its orders and scopes for both.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

import interlace
from interlace import symmetric_memory

HEAP_BYTES = 1 << 20  # per rank: checks are small, and their memory has shadow cells
ALIGNMENT = 1024


class Iris:
    """The host's object: a heap at the same offsets on every rank, allocated in order.

    It has ``heap_size`` bytes, but at most 1 MiB, because tensors of a check are small. MemoryError when it
    is full. A ``device`` argument is accepted and ignored: the heap is in host memory.
    """

    def __init__(self, heap_size: int = 1 << 30) -> None:
        self.heap_size = min(heap_size, HEAP_BYTES)
        self._heap = symmetric_memory.empty(self.heap_size, dtype=torch.uint8)
        handle = symmetric_memory.rendezvous(self._heap)
        self.cur_rank, self.num_ranks = handle.rank, handle.world_size
        self.heap_bases = torch.tensor(handle.buffer_ptrs, dtype=torch.uint64)
        self._end = 0

    def get_rank(self) -> int:
        return self.cur_rank

    def get_num_ranks(self) -> int:
        return self.num_ranks

    def get_heap_bases(self) -> torch.Tensor:
        """Return the addresses of all heaps by rank, the last argument of device functions."""
        return self.heap_bases

    def get_device_context(self) -> torch.Tensor:
        """Return the rank, the world size and the heap addresses, for a kernel's :class:`DeviceContext`."""
        head = torch.tensor([self.cur_rank, self.num_ranks], dtype=torch.uint64)
        return torch.cat([head, self.heap_bases])

    def get_device(self) -> torch.device:
        return self._heap.device

    def barrier(self, *args: object, **kwargs: object) -> None:
        """Order all work of all ranks before it, kernels included, before all work after it."""
        interlace.barrier()

    def empty(self, *size: Any, dtype: torch.dtype | None = None, **kwargs: object) -> torch.Tensor:
        """Return a tensor on the heap. Every rank must allocate the same, in the same order."""
        extents = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
        shape, dtype = tuple(extents), torch.get_default_dtype() if dtype is None else dtype
        begin, nbytes = self._end, math.prod(shape) * dtype.itemsize
        self._end = -(-(begin + nbytes) // ALIGNMENT) * ALIGNMENT
        if self._end > self.heap_size:
            raise MemoryError(
                f"the heap of a check has {self.heap_size} bytes, and {nbytes} more from byte {begin} on "
                f"do not fit, on rank {self.cur_rank}"
            )
        return self._heap[begin : begin + nbytes].view(dtype).view(shape)

    def full(
        self, size: Any, fill_value: Any, *, dtype: torch.dtype | None = None, **kwargs: object
    ) -> torch.Tensor:
        dtype = torch.tensor(fill_value).dtype if dtype is None else dtype
        return self.empty(size, dtype=dtype).fill_(fill_value)

    def zeros(self, *size: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
        return self.empty(*size, dtype=dtype).zero_()

    def ones(self, *size: Any, dtype: torch.dtype | None = None, **kwargs: object) -> torch.Tensor:
        return self.empty(*size, dtype=dtype).fill_(1)

    def zeros_like(self, input: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.zeros(input.shape, dtype=kwargs.get("dtype") or input.dtype)

    def arange(self, *bounds: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
        values = torch.arange(*bounds, dtype=dtype)
        return self.empty(values.shape, dtype=values.dtype).copy_(values)

    def info(self, message: str) -> None:
        """Print nothing, as a check has many runs."""

    log = debug = log_debug = log_stats = warning = info


def iris(heap_size: int = 1 << 30) -> Iris:
    return Iris(heap_size)


@triton.jit
def _at(pointer, from_rank, to_rank, heap_bases):
    """Return the address in ``to_rank``'s heap that corresponds to ``from_rank``'s ``pointer``."""
    shift = tl.load(heap_bases + to_rank) - tl.load(heap_bases + from_rank)
    return (pointer.to(tl.uint64, bitcast=True) + shift).to(pointer.dtype, bitcast=True)


@triton.jit
def load(pointer, to_rank, from_rank, heap_bases, mask=None, other=None,
         cache_modifier=None, volatile=False, hint=None):  # fmt: skip
    """Load from ``from_rank``; ``to_rank`` calls, and ``pointer`` is its address."""
    address = _at(pointer, to_rank, from_rank, heap_bases)
    return tl.load(address, mask=mask, other=other, volatile=volatile)


@triton.jit
def store(pointer, value, from_rank, to_rank, heap_bases, mask=None,
          hint=None, cache_modifier=None):  # fmt: skip
    """Store at ``to_rank``; ``from_rank`` calls, and ``pointer`` is its address."""
    tl.store(_at(pointer, from_rank, to_rank, heap_bases), value, mask=mask)


@triton.jit
def copy(src_ptr, dst_ptr, from_rank, to_rank, cur_rank, heap_bases, mask=None, other=None,
         load_cache_modifier=None, store_cache_modifier=None, hint=None):  # fmt: skip
    """Load from ``from_rank``, store at ``to_rank``; ``cur_rank`` calls, and both pointers are its own."""
    data = tl.load(_at(src_ptr, cur_rank, from_rank, heap_bases), mask=mask, other=other)
    tl.store(_at(dst_ptr, cur_rank, to_rank, heap_bases), data, mask=mask)


@triton.jit
def get(from_ptr, to_ptr, from_rank, to_rank, heap_bases, mask=None, other=None,
        load_cache_modifier=None, store_cache_modifier=None, hint=None):  # fmt: skip
    """Load from ``to_rank``, store locally; ``from_rank`` calls, as in Iris' code and tests."""
    data = tl.load(_at(from_ptr, from_rank, to_rank, heap_bases), mask=mask, other=other)
    tl.store(to_ptr, data, mask=mask)


@triton.jit
def put(from_ptr, to_ptr, from_rank, to_rank, heap_bases, mask=None, other=None,
        load_cache_modifier=None, store_cache_modifier=None, hint=None):  # fmt: skip
    """Load locally, store at ``to_rank``; ``from_rank`` calls."""
    data = tl.load(from_ptr, mask=mask, other=other)
    tl.store(_at(to_ptr, from_rank, to_rank, heap_bases), data, mask=mask)


@triton.jit
def atomic_cas(pointer, cmp, val, from_rank, to_rank, heap_bases, sem=None, scope=None,
               hint=None):  # fmt: skip
    """Do ``tl.atomic_cas`` at ``to_rank``."""
    return tl.atomic_cas(
        _at(pointer, from_rank, to_rank, heap_bases), cmp, val, sem=sem, scope=scope
    )


def _atomic(operation: object) -> Any:
    """Return ``tl``'s ``operation`` at ``to_rank``; ``from_rank`` calls, and ``pointer`` is its address."""

    @triton.jit
    def atomic(pointer, val, from_rank, to_rank, heap_bases, mask=None, sem=None, scope=None,
               hint=None):  # fmt: skip
        address = _at(pointer, from_rank, to_rank, heap_bases)
        return operation(address, val, mask=mask, sem=sem, scope=scope)

    return atomic


atomic_add, atomic_xchg = _atomic(tl.atomic_add), _atomic(tl.atomic_xchg)
atomic_and, atomic_or, atomic_xor = map(_atomic, (tl.atomic_and, tl.atomic_or, tl.atomic_xor))
atomic_min, atomic_max = _atomic(tl.atomic_min), _atomic(tl.atomic_max)


def _of_context(atomic: object) -> Any:
    @triton.jit
    def method(self, pointer, val, to_rank, mask=None, sem=None, scope=None, hint=None):
        return atomic(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope)

    return method


@tl.core._aggregate
class DeviceContext:
    """A kernel's rank and heaps. Its loads, stores and atomics take only the rank of the memory."""

    rank: tl.tensor
    world_size: tl.tensor
    heap_bases: tl.tensor

    @triton.constexpr_function
    def __init__(self, rank, world_size, heap_bases):
        self.rank, self.world_size, self.heap_bases = rank, world_size, heap_bases

    @staticmethod
    @triton.jit
    def initialize(context_tensor, rank, world_size, tracing: tl.constexpr = False):
        ranks = tl.full((), rank, tl.int32), tl.full((), world_size, tl.int32)
        return DeviceContext(ranks[0], ranks[1], context_tensor + 2)

    @triton.jit
    def load(self, pointer, from_rank, mask=None, other=None, cache_modifier=None, volatile=False,
             hint=None):  # fmt: skip
        return load(pointer, self.rank, from_rank, self.heap_bases, mask, other, volatile=volatile)

    @triton.jit
    def store(self, pointer, value, to_rank, mask=None, hint=None, cache_modifier=None):
        store(pointer, value, self.rank, to_rank, self.heap_bases, mask)

    @triton.jit
    def get(self, from_ptr, to_ptr, from_rank, mask=None, other=None, load_cache_modifier=None,
            store_cache_modifier=None, hint=None):  # fmt: skip
        get(from_ptr, to_ptr, self.rank, from_rank, self.heap_bases, mask, other)

    @triton.jit
    def put(self, from_ptr, to_ptr, to_rank, mask=None, other=None, load_cache_modifier=None,
            store_cache_modifier=None, hint=None):  # fmt: skip
        put(from_ptr, to_ptr, self.rank, to_rank, self.heap_bases, mask, other)

    @triton.jit
    def copy(self, src_ptr, dst_ptr, from_rank, to_rank, mask=None, other=None,
             load_cache_modifier=None, store_cache_modifier=None, hint=None):  # fmt: skip
        copy(src_ptr, dst_ptr, from_rank, to_rank, self.rank, self.heap_bases, mask, other)

    @triton.jit
    def atomic_cas(self, pointer, cmp, val, to_rank, sem=None, scope=None, hint=None):
        return atomic_cas(pointer, cmp, val, self.rank, to_rank, self.heap_bases, sem, scope)

    atomic_add, atomic_xchg = _of_context(atomic_add), _of_context(atomic_xchg)
    atomic_and, atomic_or = _of_context(atomic_and), _of_context(atomic_or)
    atomic_xor = _of_context(atomic_xor)
    atomic_min, atomic_max = _of_context(atomic_min), _of_context(atomic_max)


Context = DeviceContext

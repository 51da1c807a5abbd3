"""Symmetric memory: buffers that exist on every rank, and the arena that leases workspaces from them.

A *symmetric buffer* is one allocation of the same size per rank, and a table of the W base addresses
by which this rank reaches them. Kernels get the table and byte offsets, never W pointers.

An *arena* owns a few *channels*. A channel is one symmetric buffer::

    | header: epoch, abort, status, credits | signal slots (int64) ... | data ... |

Ops take channels in turn, so two ops in flight never share memory. The turn depends only on the number of
earlier ops, so every rank makes the same choice without communication. An op that uses a channel again
first waits, on the device, for the credit of every peer: "I have finished the previous op here". No call
zeroes or allocates memory: epochs only grow, a stale slot is always smaller than the awaited epoch, and
the slot region never holds data. A channel grows when an op needs more memory than it has; all ranks see
the same sizes, so their channels grow together. The outgrown buffer stays until the arena closes, because
a peer may still write its last credit into it. Sizes double, so all outgrown buffers together are smaller
than the current buffer.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from interlace.kernels import arguments
from interlace.kernels.signal import HEADER_WORDS, MAX_WORLD_SIZE, SPIN_LIMIT_WORD
from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.core.launch import KernelLaunch

WORD = 8
DATA_ALIGNMENT = 256
SMALLEST_SLOTS = 1 << 10
SMALLEST_DATA = 1 << 16
CHANNELS = 2
MOST_PASSING_TABLES = 64
RED_ZONE = 1 << 16
"""Unused bytes around symmetric memory of ``sim``, so that an access out of bounds hits no other memory."""

Array = npt.NDArray[np.uint8]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous ``tensor`` of any dtype as flat uint8, to be moved."""
    # A single element is contiguous with any stride, but can be viewed as bytes only with stride 1.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


_NOT_COPIED = {getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in range(1, 8)}


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or its bytes if torch does not copy its dtype: int1 to int7, uint1 to uint7."""
    return tensor.view(torch.uint8) if tensor.dtype in _NOT_COPIED else tensor


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor.contiguous()``, for every dtype."""
    return tensor if tensor.is_contiguous() else movable(tensor).contiguous().view(tensor.dtype)


def neighbours(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return one flat tensor over all of ``tensors``, if each begins where the previous one ends."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return None
    storage = filled[0].untyped_storage().data_ptr()
    address = filled[0].data_ptr()
    for tensor in filled:
        if tensor.data_ptr() != address or tensor.untyped_storage().data_ptr() != storage:
            return None
        address += tensor.nbytes
    return filled[0].as_strided((sum(tensor.numel() for tensor in filled),), (1,))


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two dense tensors share memory."""
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes


@dataclass
class SymmetricBuffer:
    """Memory of the same ``nbytes`` on every rank of a group.

    ``peers`` is an int64 tensor ``[world_size]`` on the device: base addresses as this rank sees them, 0 if
    the memory is not mapped. Between nodes it continues as ``kernels/collectives/node_moves.py`` says.
    ``peer_bytes[r]`` is a uint8 tensor over rank r's memory. It keeps the mapping alive, and is empty if
    the memory is not mapped. ``multicast`` is the address by which one store reaches all ranks, or 0.
    """

    rank: int
    nbytes: int
    peers: torch.Tensor
    peer_bytes: Sequence[torch.Tensor]
    multicast: int = 0
    owner: object = None

    @classmethod
    def over(cls, rank: int, parts: Sequence[torch.Tensor], **more: Any) -> "SymmetricBuffer":
        """Return the buffer over ``parts``, by rank: every rank's memory is mapped."""
        table = torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64)
        own_part = parts[rank]
        return cls(rank, own_part.nbytes, table.to(own_part.device), parts, **more)

    @functools.cached_property
    def addresses(self) -> list[int]:
        return [int(address) for address in self.peers.tolist()[: len(self.peer_bytes)]]

    def mapped(self, rank: int) -> bool:
        """Return whether this rank can address rank ``rank``'s memory."""
        return self.peer_bytes[rank].numel() > 0

    def view(
        self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a contiguous tensor of ``shape`` over rank ``rank``'s memory, from byte ``offset`` on."""
        end = offset + math.prod(shape) * dtype.itemsize
        assert self.mapped(rank), f"rank {rank}'s memory is on another node"
        assert offset >= 0 and end <= self.nbytes, (offset, end, self.nbytes)
        return self.peer_bytes[rank][offset:end].view(dtype).view(tuple(shape))


def peers_of(buffer: SymmetricBuffer, world_size: int) -> arguments.Peers:
    """Return the argument by which a kernel finds every rank's ``buffer``."""
    return arguments.Peers(buffer.peers, buffer.rank, world_size)


@dataclass
class Layout:
    """The memory that one op needs of a channel; the op's algorithm adds to it before it leases.

    ``pulled``: peers read this rank's data region. Then the region is free for the next op only when all
    ranks have finished. After an op that pushes, it is free as soon as its owner has finished.
    """

    slots: int = 0
    nbytes: int = 0
    pulled: bool = False

    def add_slots(self, count: int) -> int:
        first = self.slots
        self.slots += count
        return first

    def add_data(self, nbytes: int) -> int:
        offset = -(-self.nbytes // DATA_ALIGNMENT) * DATA_ALIGNMENT
        self.nbytes = offset + nbytes
        return offset


@dataclass
class Workspace:
    """The lease of one channel for one op. ``slot_offset`` and ``data_offset`` are bytes."""

    channel: int
    buffer: SymmetricBuffer
    slot_offset: int
    data_offset: int
    world_size: int
    op: str

    @property
    def rank(self) -> int:
        return self.buffer.rank

    def kernel_launch(
        self, kernel: object, grid: int, more: dict[str, Any], **options: Any
    ) -> KernelLaunch:
        peers = self.buffer.peers, self.buffer.rank, self.world_size
        standard = {"workspace": arguments.Workspace(*peers, self.slot_offset, self.data_offset)}
        return KernelLaunch(kernel, grid, {**standard, **more}, self.op, **options)

    def slot_byte(self, slot: int) -> int:
        return self.slot_offset + WORD * slot

    def data(
        self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        return self.buffer.view(rank, self.data_offset + offset, shape, dtype)

    def slots(self, rank: int, first: int, count: int) -> torch.Tensor:
        return self.buffer.view(rank, self.slot_byte(first), (count,), torch.int64)

    def header(self, rank: int) -> torch.Tensor:
        return self.buffer.view(rank, 0, (HEADER_WORDS,), torch.int64)


@dataclass
class _Channel:
    buffer: SymmetricBuffer
    slots: int
    nbytes: int
    retired: list[SymmetricBuffer] = field(default_factory=list)


class Arena:
    """Leases workspaces of one group, in the same order and at the same offsets on every rank.

    ``turn`` counts the ops that took a channel. ``words``: memory of
    ``kernels/collectives/low_latency.py``, if any.
    """

    def __init__(
        self,
        allocate: Callable[[int], SymmetricBuffer],
        world_size: int,
        *,
        channels: int = CHANNELS,
        spin_limit: int = 0,
        alike: bool = False,
    ) -> None:
        assert world_size <= MAX_WORLD_SIZE
        self._allocate = allocate
        self._world_size = world_size
        self._spin_limit = spin_limit
        self._alike = alike  # channels grow together: one call makes space for all similar calls
        self.channels: list[_Channel | None] = [None] * channels
        self.turn = 0
        self.words: Any = None

    def lease(self, layout: Layout, op: str) -> Workspace:
        """Return a workspace of at least ``layout``'s size. Collective when the channel has to grow."""
        index = self.turn % len(self.channels)
        self.turn += 1
        channel = self.channels[index]
        if channel is None or channel.slots < layout.slots or channel.nbytes < layout.nbytes:
            for number in range(len(self.channels)) if self._alike else (index,):
                self.channels[number] = self._grown(self.channels[number], layout)
            channel = self.channels[index]
            assert channel is not None
        slot_offset = HEADER_WORDS * WORD
        data_offset = slot_offset + channel.slots * WORD
        return Workspace(index, channel.buffer, slot_offset, data_offset, self._world_size, op)

    def multicast(self) -> bool:
        """Return whether all channels have a multicast address. Collective before the first lease."""
        if not self.buffers():
            self.channels = [self._grown(None, Layout()) for _ in self.channels]
        return all(buffer.multicast for buffer in self.buffers())

    def _grown(self, old: _Channel | None, layout: Layout) -> _Channel:
        slots, nbytes = (old.slots, old.nbytes) if old else (SMALLEST_SLOTS, SMALLEST_DATA)
        slots = max(slots, 1 << (layout.slots - 1).bit_length())
        nbytes = max(nbytes, 1 << (layout.nbytes - 1).bit_length())
        buffer = self._allocate((HEADER_WORDS + slots) * WORD + nbytes)
        header = buffer.view(buffer.rank, 0, (HEADER_WORDS,), torch.int64)
        header[SPIN_LIMIT_WORD] = self._spin_limit
        return _Channel(buffer, slots, nbytes, [*old.retired, old.buffer] if old else [])

    @property
    def nbytes(self) -> int:
        """Bytes of symmetric memory on this rank, outgrown buffers included."""
        held = self.words.nbytes if self.words else 0
        for channel in self.channels:
            if channel is not None:
                held += channel.buffer.nbytes + sum(b.nbytes for b in channel.retired)
        return held

    def buffers(self) -> list[SymmetricBuffer]:
        return [channel.buffer for channel in self.channels if channel is not None]

    def close(self) -> None:
        self.channels = [None] * len(self.channels)
        self.words = None


class Tables:
    """int64 tables for the kernels of one group, computed and moved to the device once per key."""

    def __init__(self, place: Any) -> None:
        self._place = place
        self.lasting: dict[object, torch.Tensor] = {}
        self._passing: dict[object, torch.Tensor] = {}

    def table(
        self, key: object, rows: Callable[[], Sequence[Sequence[int]]], *, passing: bool = False
    ) -> torch.Tensor:
        """Return the table of ``rows()``; drop old ``passing`` tables that no captured graph has."""
        table = self.lasting.get(key)
        if table is None and passing:
            table = self._passing.get(key)
            if table is not None and self._place.capturing:
                self.lasting[key] = table
        if table is None:
            if self._place.capturing:
                raise InterlaceError(
                    f"rank {self._place.rank}: an op needs a table that cannot be made during a graph "
                    "capture; call it once with tensors like these before the capture"
                )
            flat = [value for row in rows() for value in row] or [0]
            table = torch.tensor(flat, dtype=torch.int64).to(self._place.device)
            tables = self._passing if passing else self.lasting
            if passing and len(tables) >= MOST_PASSING_TABLES:
                del tables[next(iter(tables))]
            tables[key] = table
        return table


@dataclass(eq=False)
class LocalMemory:
    """Zeroed memory in ``parts``, one uint8 array per requested size, each aligned for any dtype.

    A single rank makes it by ``Place.new_memory``; all ranks map it together by ``Place.share``. Before
    that, and without any peer, it is ordinary memory. It lives as long as something refers to it: this
    object, a tensor made by :func:`tensor_over`, or a peer's mapping. ``origin`` is for the place that made
    it: its owner, and how a peer maps it.
    """

    parts: Sequence[Array]
    origin: Any


def aligned_memory(nbytes: int) -> Array:
    whole: Array = np.zeros(nbytes + DATA_ALIGNMENT, dtype=np.uint8)
    shift = -whole.ctypes.data % DATA_ALIGNMENT
    return whole[shift : shift + nbytes]


def starts(sizes: Sequence[int]) -> list[int]:
    """Return the offsets of aligned parts of ``sizes``, one after another, and the end of the last one."""
    return [0, *accumulate(-(-size // DATA_ALIGNMENT) * DATA_ALIGNMENT for size in sizes)]


def split(whole: Array, sizes: Sequence[int]) -> list[Array]:
    """Return parts of ``sizes``, one after another, in ``whole``; each is aligned if ``whole`` is."""
    return [whole[start : start + size] for start, size in zip(starts(sizes), sizes, strict=False)]


def tensor_over(memory: Array, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous tensor whose storage starts where ``memory`` does, and which keeps it alive.

    It is not a view of another tensor: ``storage_offset()`` is 0, and autograd treats it as a separate
    tensor. It is not made by ``set_``, which hooks on torch operators would see as a write of the memory.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(memory)[:nbytes].view(dtype).view(tuple(shape)).detach()

"""The handle of a tensor in symmetric memory: the surface of torch's, on a CPU.

Same names, same argument order, same meaning as ``torch.distributed._symmetric_memory``'s, so host
code that was written for GPUs finds what it expects. A kernel gets ``buffer_ptrs_dev`` and
``signal_pad_ptrs_dev``, the addresses of two int64 tables of base addresses, one entry per rank::

    table = hdl.buffer_ptrs_dev.to(tl.pointer_type(tl.uint64))
    peer_ptr = tl.load(table + peer).to(tl.pointer_type(tl.float32))

``barrier``, ``put_signal`` and ``wait_signal`` are kernels on the caller's current stream, in the flag
protocol of ``kernels/signal.py``. Errors are interlace's: ValueError for what is out of range, naming
both numbers; ``CollectiveTimeoutError`` and ``PeerDiedError`` naming whom the rank waited for.
"""

import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from interlace.arguments import checks
from interlace.kernels import signal
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.errors import CollectiveTimeoutError, InterlaceError
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.core.memory import Array, tensor_over
from interlace.runtime.core.stream import Outcome

FLAG_BYTES = 4
_LARGEST = (1 << 32) - 1


def _table(addresses: Sequence[int]) -> torch.Tensor:
    """An int64 table in a mapping of its own, which is high in the address space."""
    # small memory of a Python that is not position-independent, such as Debian's, may lie below 2**31:
    # Triton would type its address int32, of which no pointer can be made
    memory = mmap.mmap(-1, 8 * len(addresses))
    np.frombuffer(memory, np.int64)[:] = addresses
    return torch.frombuffer(memory, dtype=torch.int64)


class SymmetricMemory:
    """One rank's handle of a buffer and a signal pad on every rank of a group.

    Made by ``interlace.symmetric_memory.rendezvous``. Keeps the memory of all ranks alive, and so
    does every tensor that it gives out.

    Attributes
    ----------
    rank, world_size : this rank within the group.
    group_name : torch's name of the group, or interlace's.
    buffer_ptrs, signal_pad_ptrs : base addresses by rank, as this rank sees them.
    buffer_ptrs_dev, signal_pad_ptrs_dev : addresses of the same as int64 tables, for kernels.
    buffer_size, signal_pad_size : bytes per rank.
    offset : bytes from the base to the start of the tensor's storage. Always 0, as one allocation
        holds one storage; where in the storage a view starts is its ``storage_offset()``.
    multicast_ptr : an address that ``multimem`` instructions take for all ranks' buffers, in ``sim``; 0 in
        ``shm``.

    Raises CollectiveTimeoutError or PeerDiedError in what waits, naming whom it waited for. Semantics:
    ``torch.distributed._symmetric_memory``'s handle of that name.

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
        """Address of an int64 table of the ranks' buffers, for kernels."""
        return self._buffer_table.data_ptr()

    @property
    def signal_pad_ptrs_dev(self) -> int:
        """Address of an int64 table of the ranks' signal pads, for kernels."""
        return self._pad_table.data_ptr()

    @staticmethod
    def has_multicast_support(device_type: Any = None, device_idx: int = 0) -> bool:
        """False: what is chosen by it on GPUs is not chosen on a CPU, which has no switch."""
        return False

    def __repr__(self) -> str:
        return (
            f"<SymmetricMemory of group {self.group_name}: rank {self.rank} of {self.world_size}, "
            f"{self.buffer_size} bytes>"
        )

    def get_buffer(
        self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0
    ) -> torch.Tensor:
        """``rank``'s buffer as a tensor, from element ``storage_offset`` on."""
        self._check_member("rank", rank)
        part = self._buffers[rank][: self.buffer_size]
        return self._view("buffer", part, sizes, dtype, storage_offset)

    def get_remote_tensor(
        self, peer: int, sizes: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """``peer``'s tensor, from the start of its storage."""
        self._check_member("peer", peer)
        return self.get_buffer(peer, sizes, dtype)

    def get_signal_pad(
        self,
        rank: int,
        sizes: Sequence[int] = (),
        dtype: torch.dtype | None = None,
        storage_offset: int = 0,
    ) -> torch.Tensor:
        """``rank``'s signal pad, uint32 by default; all of it if ``sizes`` is empty."""
        self._check_member("rank", rank)
        dtype = torch.uint32 if dtype is None else dtype
        sizes = sizes or (self.signal_pad_size // dtype.itemsize,)
        return self._view("signal pad", self._pads[rank], sizes, dtype, storage_offset)

    def _check_member(self, name: str, rank: int) -> None:
        if self._communicator.closed:
            raise InterlaceError(f"rank {self.rank}: {self!r} is of a group that was closed")
        with self._communicator.accepting():
            checks.check_member(name, rank, self._communicator)

    def _view(
        self, what: str, part: Array, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int
    ) -> torch.Tensor:
        shape = torch.Size(sizes)
        start = storage_offset * dtype.itemsize
        end = start + math.prod(shape) * dtype.itemsize
        with self._communicator.accepting():
            if storage_offset < 0 or any(extent < 0 for extent in shape):
                raise ValueError(
                    f"sizes and storage_offset of a {what} must not be negative, got {tuple(shape)} and "
                    f"{storage_offset}"
                )
            if end > len(part):
                raise ValueError(
                    f"the {what} has {len(part)} bytes, {tuple(shape)} of {dtype} from element "
                    f"{storage_offset} on ends at byte {end}"
                )
        return tensor_over(part[start:end], shape, dtype)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """All that precedes it on the current stream of any rank is before all that follows it.

        ``channel`` keeps barriers apart that run at the same time. ``timeout_ms`` bounds it; 0 means
        the group's own timeout. In ``sim`` there is no clock, and a wait without end is a deadlock
        that is reported.
        """
        self._run(signal.handle_barrier_kernel, "barrier", channel, timeout_ms)

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Signal ``dst_rank``, after all that precedes it; waits while the last one is not taken."""
        self._check_member("dst_rank", dst_rank)
        self._run(signal.put_signal_kernel, "put_signal", channel, timeout_ms, peer=dst_rank)

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Wait for a signal of ``src_rank`` and take it; what it had done before is visible then."""
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
        """Set ``count`` elements of ``tensor``, 1-D and uint32, from element ``offset`` on; the tensor.

        Raises ValueError for another tensor, or an element or value out of range.

        >>> words = torch.zeros(3, dtype=torch.uint32)
        >>> SymmetricMemory.memset32(words, 1, 7, count=2).tolist()
        [0, 7, 7]
        """
        _check_words(tensor, offset, val, count)
        tensor[offset : offset + count].fill_(val)
        return tensor

    @staticmethod
    def stream_write_value32(tensor: torch.Tensor, offset: int, val: int) -> torch.Tensor:
        """Set an element of ``tensor``, 1-D and uint32, after all that precedes it; the tensor.

        Whoever sees the value with acquire, on any rank, sees what was written before. Raises ValueError as
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

"""Symmetric memory of processes on one node: by torch, or by CUDA IPC if torch's allocator refuses.

torch allocates with CUDA's virtual memory API and passes the allocations to the peers (file descriptors, or
fabric handles between hosts). It maps every peer's, and binds a multicast object if the hardware has one.

torch's rendezvous needs a C++ ``ProcessGroup`` with rank, size and store, registered under the name that
torch gets. It needs no backend, so a bare group is enough. The store serves as an all-gather: torch sets
one key per rank and round, and reads the keys of all ranks. :class:`ExchangeStore` does the same with
messages of the group, for three reasons. It works with every store through which the group has met. It ends
when a peer dies. And torch numbers the rounds per process, not per group, so ranks in different groups
would wait for ever for different keys.

torch's rendezvous passes file descriptors through sockets. A rank whose peer dies in it would wait for
ever, and hold the interpreter's lock. So all ranks meet before it, which makes it short. It is interrupted
after RENDEZVOUS_SECONDS (:func:`interrupted_after`); the round that follows names the missing ranks.

Several ranks on one GPU: torch refuses unless ``TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES`` is set, which
also disables multicast (a device can be bound once). The variable is set during the rendezvous only.

CUDA IPC, through CuPy: ``cudaMalloc`` on every rank, a 64-byte handle per allocation to all peers, and
there ``cudaIpcOpenMemHandle``. It works without the virtual memory API and with several ranks on one
GPU, and has no multicast. An allocation must not be freed while a peer has it open. So a group has a
board in host memory, on which a rank notes that it has closed its peers' allocations. A rank keeps its
allocations until all peers have noted this, and checks again whenever memory is made or freed. If a rank
is killed, the allocations that it had open stay until this process ends.
"""

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from interlace.runtime.compat import torch_groups as symmetric
from interlace.runtime.compat.torch_groups import Store, tensor_over
from interlace.runtime.core.errors import PlaceUnavailableError
from interlace.runtime.core.memory import WORD, SymmetricBuffer
from interlace.runtime.core.place import PlaceMemory

AGAIN_SECONDS = 1.0


@contextlib.contextmanager
def interrupted_after(seconds: float) -> Iterator[threading.Event]:
    """Interrupt the main thread's system calls with EINTR after ``seconds`` in the block; set the event.

    For C code that waits in a system call and holds the interpreter's lock: no Python thread can run
    meanwhile. A signal interrupts the call, unless its handler asks for a restart; Python's handlers do
    not. The timer repeats every second, because the signal may come just before the call.

    Signal handlers belong to the main thread. In other threads, and if a library has its own handler of
    SIGALRM, there is no bound. A timer of the user is delayed while this one is set.
    """
    passed = threading.Event()
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGALRM) is None
    ):
        yield passed
        return
    before = signal.signal(signal.SIGALRM, lambda number, frame: passed.set())
    start = time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_SECONDS)
    try:
        yield passed
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        if left:
            left = max(0.001, left - (time.monotonic() - start))
            signal.setitimer(signal.ITIMER_REAL, left, interval)


RENDEZVOUS_SECONDS = 30.0
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
VALUE, _FAILED = b"V", b"F"  # the first byte of a message for :func:`agree_on`

_lock = threading.Lock()  # torch's sockets have the process's name
_numbers = itertools.count()

Exchange = Callable[[bytes, str], list[bytes]]


class MemoryRefused(Exception):
    """A rank could not get memory of this kind; the text has rank and reason. Raised on all ranks."""


class ExchangeStore(Store):
    """A store for torch's rendezvous, by rounds of ``exchange``; see the module's docstring."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self._exchange = exchange
        self._mine: bytes | None = None
        self._values: list[bytes] = []

    def _round(self) -> list[bytes]:
        """Return every rank's value in the round that :meth:`set` has begun."""
        if self._mine is not None:
            payload, self._mine = self._mine, None
            self._values = agree_on(self._exchange, VALUE + payload)
        return self._values

    def set(self, key: str, content: Any) -> None:
        self._mine = content.encode() if isinstance(content, str) else bytes(content)

    def get(self, key: str) -> bytes:
        return self._round()[int(key.rpartition("/")[2])]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def wait(self, keys: list[str], timeout: object = None) -> None:
        self._round()

    def add(self, key: str, amount: int) -> int:
        """Do the first half of ``Store.barrier``; :meth:`wait`, the second half, then has no work left."""
        self._mine = b""
        self._round()
        return amount

    def check(self, keys: list[str]) -> bool:
        return True


def agree_on(exchange: Exchange, payload: bytes) -> list[bytes]:
    """Return every rank's message without its first byte; MemoryRefused if a rank has failed."""
    answers = exchange(payload, "an allocation of symmetric memory")
    failures = [
        f"rank {rank}: {answer[1:].decode()}"
        for rank, answer in enumerate(answers)
        if answer[:1] == _FAILED
    ]
    if failures:
        raise MemoryRefused("; ".join(failures))
    return [answer[1:] for answer in answers]


@contextlib.contextmanager
def together(exchange: Exchange) -> Iterator[None]:
    """Let all ranks fail if one fails: at the end of the block, or in any round within it."""
    try:
        yield
    except MemoryRefused:
        raise
    except Exception as error:
        with contextlib.suppress(MemoryRefused):
            agree_on(exchange, _FAILED + f"{type(error).__name__}: {error}"[:1000].encode())
        raise MemoryRefused(f"{type(error).__name__}: {error}") from error
    agree_on(exchange, VALUE)


class TorchMemory:
    """Symmetric memory of one group, by torch. Its creation is not collective; :meth:`allocate` is."""

    kind = "torch symmetric memory"

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        exchange: Exchange,
        *,
        seconds: float = RENDEZVOUS_SECONDS,
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self._device, self._exchange = device, exchange
        self._seconds = min(seconds, RENDEZVOUS_SECONDS)
        self._name = f"interlace symmetric memory {next(_numbers)}"
        # Kept here: torch's registry does not keep it, and the group does not keep a store in Python.
        self._store = ExchangeStore(exchange)
        self._group = symmetric.register_bare_group(self._name, self._store, rank, world_size)

    def allocate(self, nbytes: int, *, overlapping: bool) -> SymmetricBuffer:
        """Allocate memory of all ranks, or raise MemoryRefused on all; ``overlapping``: two share a GPU."""
        with _lock, together(self._exchange):
            with _environment(OVERLAPPING, "1") if overlapping else contextlib.nullcontext():
                memory = self._own(nbytes)
                handle = self._meet_ranks(memory)
            ranks = range(self._world_size)
            parts = [handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in ranks]
            parts[self._rank] = memory
            # A peer's handle keeps its memory mapped; a tensor over that memory does not.
            multicast = int(handle.multicast_ptr or 0)
            return SymmetricBuffer.over(self._rank, parts, multicast=multicast, owner=handle)

    def _own(self, nbytes: int) -> torch.Tensor:
        """Return zeroed memory of this rank, which peers may write once all ranks have met."""
        memory = symmetric.empty(nbytes, self._device)
        memory.zero_()
        torch.cuda.current_stream().synchronize()
        return memory

    def _meet_ranks(self, memory: torch.Tensor) -> Any:
        agree_on(self._exchange, VALUE)
        with interrupted_after(self._seconds) as passed:
            try:
                return symmetric.c10d._SymmetricMemory.rendezvous(memory, self._name)
            except RuntimeError as error:
                if not passed.is_set():
                    raise
                raise TimeoutError(
                    f"torch's rendezvous has not ended within {self._seconds:g} s: {error}"
                ) from error

    def close(self) -> None:
        """Unregister the group. Memory stays until its last tensor is freed."""
        with contextlib.suppress(RuntimeError):
            symmetric.c10d._unregister_process_group(self._name)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess

_given_up: "list[_Exported]" = []


def cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise PlaceUnavailableError(
            "sharing GPU memory by CUDA IPC needs CuPy; install cupy-cuda13x, or cupy-cuda12x for CUDA 12"
        ) from error
    return cupy


class _Exported:
    """Memory of this rank that peers have open, until ``board`` notes that they have closed it."""

    def __init__(self, address: int, device: int) -> None:
        self.address, self.device = address, device
        self.board: list[memoryview] = []

    def free_if_closed(self) -> bool:
        if not all(words[0] for words in self.board):
            return False
        module = cupy()
        with module.cuda.Device(self.device):
            module.cuda.runtime.free(self.address)
        return True


def sweep() -> None:
    """Free released memory that no peer has open any more."""
    _given_up[:] = [each for each in _given_up if not each.free_if_closed()]


class IpcMemory:
    """Symmetric memory of one group by CUDA IPC; ``place`` is its processes'. Creation is collective."""

    kind = "CUDA IPC"

    def __init__(self, place: PlaceMemory, device: torch.device, exchange: Exchange) -> None:
        self._rank, self._world_size, self._exchange = place.rank, place.world_size, exchange
        self._device, self._index = device, device.index or 0
        self._exported: list[_Exported] = []
        self._opened: list[int] = []
        board = place.allocate(WORD)  # smaller than a header: an abort does not write to it
        self._memory = [part.numpy() for part in board.peer_bytes]
        self._board = [part.data.cast("B").cast("q") for part in self._memory]

    def allocate(self, nbytes: int, *, overlapping: bool) -> SymmetricBuffer:
        """Implement ``TorchMemory.allocate`` by memory that each rank exports and its peers open."""
        sweep()
        addresses = [0] * self._world_size
        with together(self._exchange):
            module = cupy()
            runtime = module.cuda.runtime
            with module.cuda.Device(self._index):
                exported = _Exported(runtime.malloc(nbytes), self._index)
                self._exported.append(exported)
                runtime.memset(exported.address, 0, nbytes)
                runtime.deviceSynchronize()  # peers may write once all ranks have met
                handles = agree_on(
                    self._exchange, VALUE + runtime.ipcGetMemHandle(exported.address)
                )
                for rank, handle in enumerate(handles):
                    if rank == self._rank:
                        addresses[rank] = exported.address
                    else:
                        addresses[rank] = runtime.ipcOpenMemHandle(handle, LAZY_PEER_ACCESS)
                        self._opened.append(addresses[rank])
        parts = [tensor_over(address, nbytes, self._device) for address in addresses]
        return SymmetricBuffer.over(self._rank, parts)

    def close(self) -> None:
        """Close the peers' memory, and release this rank's. Waits for the GPU. Idempotent."""
        if not self._board:
            return
        module = cupy()
        with module.cuda.Device(self._index):
            module.cuda.runtime.deviceSynchronize()
            for address in self._opened:
                module.cuda.runtime.ipcCloseMemHandle(address)
        self._board[self._rank][0] = 1
        for exported in self._exported:
            exported.board = self._board
        _given_up.extend(self._exported)
        self._exported, self._opened, self._board = [], [], []
        sweep()

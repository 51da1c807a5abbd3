"""Symmetric memory of processes on one node: torch's, or by CUDA IPC where torch's allocator refuses.

torch allocates with CUDA's virtual memory API, hands the allocations over (file descriptors, or fabric
handles between hosts), maps every peer's, and binds a multicast object where the hardware has one.

What torch needs for its rendezvous: a C++ ``ProcessGroup`` registered under the name it
is given, for rank, size and store. It needs no backend, so a bare one will do. The store serves as an
all-gather: torch sets one key per rank and round, and reads those of all ranks. :class:`ExchangeStore`
does just that with messages of the group, for three reasons: it works whatever store the group has met
through; it ends when a peer dies; and torch numbers the rounds per process and not per group, so ranks
that are in different groups would look for each other under different keys for ever.

torch's rendezvous hands file descriptors over by sockets, and a rank whose peer dies in it would wait
for ever, with the interpreter's lock held. So all ranks meet before it, which makes it short, and it is
interrupted after RENDEZVOUS_SECONDS (:func:`interrupted_after`); the round that follows names who is
missing.

Several ranks on one GPU: torch refuses unless ``TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES`` is set, which
also leaves multicast out (a device can be bound once). It is set for as long as the rendezvous takes.

CUDA IPC, through CuPy: ``cudaMalloc`` on every rank, a 64-byte handle per allocation to all peers,
``cudaIpcOpenMemHandle`` there. It works without the virtual memory API and with several ranks on one
GPU, and has no multicast. An allocation must not be freed while a peer has it open. So a group has a
board in memory of the host, on which a rank notes that it has closed what it had opened; what a rank
allocated waits for the notes of all peers, and is looked at again whenever memory is made or given
back. What a rank that was killed had open stays until this process ends.
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
    """After ``seconds`` in the block the main thread's system calls fail with EINTR; the event is set.

    For C code that waits in a system call and holds the interpreter's lock: no thread of Python can run
    meanwhile. A signal interrupts the call, as long as its handler does not ask for a restart; Python's do
    not. The timer goes on every second, for the signal may come just before the call.

    Signal handlers belong to the main thread; elsewhere, and where a library has a handler of its own for
    SIGALRM, there is no bound. A timer of the user's is put off for as long as this one is set.
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
_VALUE, _FAILED = b"V", b"F"

_lock = threading.Lock()  # torch's sockets are named after the process
_numbers = itertools.count()

Exchange = Callable[[bytes, str], list[bytes]]


class MemoryRefused(Exception):
    """A rank could not have memory of this kind; the text names it and says why. Raised on all ranks."""


class ExchangeStore(Store):
    """A store for torch's rendezvous, by rounds of ``exchange``; see the module."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self._exchange = exchange
        self._mine: bytes | None = None
        self._values: list[bytes] = []

    def _round(self) -> list[bytes]:
        """Every rank's value of the round that :meth:`set` has begun."""
        if self._mine is not None:
            mine, self._mine = self._mine, None
            self._values = agreed(self._exchange, value(mine))
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
        """The first half of ``Store.barrier``; the second is :meth:`wait`, with nothing left to do."""
        self._mine = b""
        self._round()
        return amount

    def check(self, keys: list[str]) -> bool:
        return True


def agreed(exchange: Exchange, mine: bytes) -> list[bytes]:
    """Every rank's message without its first byte; MemoryRefused if a rank has failed."""
    answers = exchange(mine, "an allocation of symmetric memory")
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
    """A context in which all ranks fail if one does: at the end, or at whatever round of it they are."""
    try:
        yield
    except MemoryRefused:
        raise
    except Exception as error:
        with contextlib.suppress(MemoryRefused):
            agreed(exchange, _FAILED + f"{type(error).__name__}: {error}"[:1000].encode())
        raise MemoryRefused(f"{type(error).__name__}: {error}") from error
    agreed(exchange, value(b""))


def value(content: bytes) -> bytes:
    """The message of a rank that has not failed, for :func:`agreed`."""
    return _VALUE + content


class TorchMemory:
    """Symmetric memory of one group, by torch. Making it is not collective, :meth:`allocate` is."""

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
        # kept, for torch's registry does not, and the group does not keep a store written in Python
        self._store = ExchangeStore(exchange)
        self._group = symmetric.register_bare_group(self._name, self._store, rank, world_size)

    def allocate(self, nbytes: int, *, overlapping: bool) -> SymmetricBuffer:
        """``overlapping``: whether two ranks are on one GPU. MemoryRefused, on all ranks, if it fails."""
        with _lock, together(self._exchange):
            with _environment(OVERLAPPING, "1" if overlapping else None):
                memory = self._own(nbytes)
                handle = self._met(memory)
            parts = [
                handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(self._world_size)
            ]
            parts[self._rank] = memory
            # a tensor over a peer's memory does not keep it mapped, its handle does
            multicast = int(handle.multicast_ptr or 0)
            return SymmetricBuffer.over(self._rank, parts, multicast=multicast, owner=handle)

    def _own(self, nbytes: int) -> torch.Tensor:
        """Zeroed memory of this rank, which peers may write once they have met."""
        memory = symmetric.empty(nbytes, self._device)
        memory.zero_()
        torch.cuda.current_stream().synchronize()
        return memory

    def _met(self, memory: torch.Tensor) -> Any:
        """torch's handle of ``memory``, once all ranks are here."""
        agreed(self._exchange, value(b""))
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
        """Forget the group. Memory stays until its last tensor has gone."""
        with contextlib.suppress(RuntimeError):
            symmetric.c10d._unregister_process_group(self._name)


@contextlib.contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    """Within the block the variable is ``value``; None leaves it as it is."""
    before = os.environ.get(name)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        if value is not None:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
HANDLE_BYTES = 64

_given_up: "list[_Exported]" = []


def cupy() -> Any:
    """The module CuPy; PlaceUnavailableError where it is missing."""
    try:
        import cupy
    except ImportError as error:
        raise PlaceUnavailableError(
            "sharing GPU memory by CUDA IPC needs CuPy; install cupy-cuda13x, or cupy-cuda12x for CUDA 12"
        ) from error
    return cupy


# -- CUDA IPC ----------------------------------------------------------------------------------


class _Exported:
    """Memory of this rank that peers have open, until ``board`` says that they have closed it."""

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
    """Free what was given up and no peer has open any more."""
    _given_up[:] = [each for each in _given_up if not each.free_if_closed()]


class IpcMemory:
    """Symmetric memory of one group by CUDA IPC; ``place``: of its processes. Making it is collective."""

    kind = "CUDA IPC"

    def __init__(self, place: PlaceMemory, device: torch.device, exchange: Exchange) -> None:
        self._rank, self._world_size, self._exchange = place.rank, place.world_size, exchange
        self._device, self._index = device, device.index or 0
        self._exported: list[_Exported] = []
        self._opened: list[int] = []
        board = place.allocate(WORD)  # smaller than a header: an abort writes nothing there
        self._memory = [part.numpy() for part in board.peer_bytes]
        self._board = [part.data.cast("B").cast("q") for part in self._memory]

    def allocate(self, nbytes: int, *, overlapping: bool) -> SymmetricBuffer:
        """Implements ``TorchMemory.allocate``, by memory that each rank exports and its peers open."""
        sweep()
        addresses = [0] * self._world_size
        with together(self._exchange):
            module = cupy()
            runtime = module.cuda.runtime
            with module.cuda.Device(self._index):
                own = _Exported(runtime.malloc(nbytes), self._index)
                self._exported.append(own)
                runtime.memset(own.address, 0, nbytes)
                runtime.deviceSynchronize()  # peers may write once they have met
                handles = agreed(self._exchange, value(runtime.ipcGetMemHandle(own.address)))
                for rank, handle in enumerate(handles):
                    if rank == self._rank:
                        addresses[rank] = own.address
                    else:
                        addresses[rank] = runtime.ipcOpenMemHandle(handle, LAZY_PEER_ACCESS)
                        self._opened.append(addresses[rank])
        parts = [tensor_over(address, nbytes, self._device) for address in addresses]
        return SymmetricBuffer.over(self._rank, parts)

    def close(self) -> None:
        """Close what is open, and give up the own memory. Waits for the GPU. Idempotent."""
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

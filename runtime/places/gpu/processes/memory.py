"""Symmetric memory of processes on one node from ``torch.distributed._symmetric_memory``.

torch allocates with CUDA's virtual memory API, hands the allocations over (file descriptors, or fabric
handles between hosts), maps every peer's, and binds a multicast object where the hardware has one.

What torch needs for its rendezvous: a C++ ``ProcessGroup`` registered under the name it
is given, for rank, size and store. It needs no backend, so a bare one will do. The store serves as an
all-gather: torch sets one key per rank and round, and reads those of all ranks. :class:`ExchangeStore`
does just that with messages of the group, for three reasons: it works whatever store the group has met
through; it ends when a peer dies; and torch numbers the rounds per process and not per group, so ranks
that are in different groups would look for each other under different keys for ever.

torch's rendezvous hands file descriptors over by sockets, and a rank whose peer dies in it would wait for
ever, with the interpreter's lock held. So all ranks meet before it, which makes it short, and it is
interrupted after RENDEZVOUS_SECONDS (``interrupted.py``); the round that follows names who is missing.

Several ranks on one GPU: torch refuses unless ``TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES`` is set, which
also leaves multicast out (a device can be bound once). It is set for as long as the rendezvous takes.
"""

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from interlace.runtime.compat import torch_symmetric_memory as symmetric
from interlace.runtime.compat.torch_groups import Store
from interlace.runtime.core.memory import SymmetricBuffer
from interlace.runtime.places.gpu.processes.interrupted import interrupted_after

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

    def wait(self, keys: list[str], timeout: Any = None) -> None:
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

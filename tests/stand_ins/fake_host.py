"""Ranks that are processes with a GPU each, replaced by threads that take turns on the fake GPU.

``run(function, world_size, gpu)`` is ``interlace.run(..., place="cuda", processes=True)``: the same place
with threads for processes and the CPU's memory. Its watchdog looks only when a test calls it. With
``@gpu_ranks(world_size)`` the body of a test runs on every rank.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

import interlace
from interlace.groups import groups
from interlace.groups.groups import default_group
from interlace.runtime.core.errors import AbortedError
from interlace.runtime.core.memory import SymmetricBuffer
from interlace.runtime.places.gpu.device_place import Residency, residency
from interlace.runtime.places.gpu.plans import Plans
from interlace.runtime.places.gpu.process_place import DeviceProcessPlace, Watchdog
from interlace.runtime.places.gpu.virtual_place import Turns, run_threads
from interlace.runtime.processes import dump as record
from interlace.runtime.processes.control import CONTROL_BYTES, Control
from interlace.runtime.processes.segment import Identity, SharedSegment
from stand_ins import fake_cuda
from stand_ins.fake_cuda import FakeGpu
from stand_ins.fake_driver import installed
from stand_ins.replaced import Replacement

CPU = torch.device("cpu")


def let_others_run(turns: Turns) -> None:
    with turns._condition:
        turns._running = False
        turns._condition.notify_all()
        turns._condition.wait(0.001)
        turns._take()


class ThreadHost:
    """The ``processes`` of a ``DeviceProcessPlace``, for ranks that are threads."""

    name = "shm"
    direct_access = True
    linger = joining = 0.0
    _parent, dumped, nonce = None, False, bytes(16)

    def __init__(self, turns: Turns, rank: int, world_size: int, key: Any = "world") -> None:
        self.rank, self.world_size = rank, world_size
        self.group = self
        self.names, self.pids = range(world_size), dict.fromkeys(range(world_size), os.getpid())
        self.prefix = self.tag = str(key)
        self.control: Control | None = None
        self.turns, self._key = turns, key
        self._meetings = 0
        self.dead: Exception | None = None
        self.closed = False

    def meet(self, bring: Any, doing: str) -> list[Any]:
        self._meetings += 1
        key = (self._key, self._meetings)
        return self.turns.meet(key, self.rank, self.world_size, bring, doing)

    def known_as(self, ranks: Sequence[int]) -> None: ...

    def exchange(self, payload: bytes, doing: str) -> list[bytes]:
        return self.meet(payload, doing)

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        parts = self.meet(torch.zeros(nbytes, dtype=torch.uint8), "an allocation")
        table = torch.tensor([part.data_ptr() for part in parts])
        return SymmetricBuffer(self.rank, nbytes, table, parts)

    def wait_until(
        self, predicate: Callable[[], bool], doing: str, waited_for: Sequence[int]
    ) -> None:
        while not predicate():
            let_others_run(self.turns)
            self.check()

    def subgroup(self, ranks: tuple[int, ...], generation: int) -> ThreadHost:
        return ThreadHost(self.turns, ranks.index(self.rank), len(ranks), (ranks, generation))

    def set_timeout(self, seconds: float) -> None: ...

    def check(self) -> None:
        if self.turns.failed is not None:
            raise AbortedError(self.turns.failed)

    def trouble(self, doing: str) -> Exception | None:
        return self.dead

    def abort(self, reason: str, blamed: Sequence[int] = ()) -> None:
        if self.control is not None:
            self.control.abort(reason)
        record.dump(self, reason, blamed)
        self.turns.fail(reason)

    def close(self) -> None:
        self.closed = True


def on_hosts(function: Callable[[ThreadHost], Any], world_size: int) -> list[Any]:
    """Run ``function`` with the host of every rank, without a place; return the results by rank."""
    turns = Turns(world_size, 300.0)
    return run_threads(
        lambda rank: function(ThreadHost(turns, rank, world_size)), world_size, turns
    )


class ThreadPlace(DeviceProcessPlace):
    name = "cuda"
    processes: Any

    @functools.cached_property
    def residency(self) -> Residency:
        known = self.processes.turns.residencies  # each rank, which is a thread, has one GPU
        return residency(threading.current_thread(), self.program_limit + 1, known)

    def _allocate(self, nbytes: int) -> SymmetricBuffer:
        parts = self.processes.meet(torch.zeros(nbytes, dtype=torch.uint8), "an allocation")
        table = torch.tensor([part.data_ptr() for part in parts])
        return SymmetricBuffer(self.rank, nbytes, table, parts)

    def _start_watchdog(self) -> Watchdog:
        watchdog = super()._start_watchdog()
        watchdog.look_after = lambda: None  # type: ignore[method-assign]
        return watchdog


def own_place() -> DeviceProcessPlace:
    place = default_group().place
    assert isinstance(place, DeviceProcessPlace)
    return place


def own_plans() -> Plans:
    plans = default_group().plans
    assert isinstance(plans, Plans)
    return plans


def look() -> None:
    place = own_place()
    place._start_watchdog().look(place)


def run(
    function: Callable[[], Any],
    world_size: int,
    gpu: FakeGpu | None = None,
    *replacements: Replacement,
    timeout: float = 300.0,
) -> list[Any]:
    """Run ``function`` on every rank of ``gpu``, or of the installed one; return the results by rank."""
    if gpu is not None:
        with installed(gpu, *replacements):
            return run(function, world_size, timeout=timeout)
    turns = Turns(world_size, timeout)
    fake_cuda.gpu().let_hosts_run = lambda: let_others_run(turns)
    headers = [Identity(bytes(16), rank, world_size, CONTROL_BYTES) for rank in range(world_size)]
    mappings = [SharedSegment(header).mapping for header in headers]  # with the record of each rank

    hosts = [ThreadHost(turns, rank, world_size) for rank in range(world_size)]

    def main(rank: int) -> Any:
        host = hosts[rank]
        host.control = Control(rank, mappings)
        record.register(host)
        place = ThreadPlace(host, CPU, timeout=timeout)
        groups.install(place)
        with torch.cuda.stream(torch.cuda.Stream()):
            result = function()
            place.processes.exchange(b"", "the end")
            place.settle()
        return result

    try:
        return run_threads(main, world_size, turns)
    finally:
        for host in hosts:
            host.control = None  # whatever still keeps the host


def run_virtual(
    function: Callable[[], Any],
    world_size: int,
    gpu: FakeGpu | None = None,
    *replacements: Replacement,
) -> list[Any]:
    """Run ``function`` on ranks that share a process; return the results by rank."""
    with nullcontext() if gpu is None else installed(gpu, *replacements):
        return interlace.run(function, world_size, place="cuda")


def gpu_ranks(
    world_size: int = 1,
    *replacements: Replacement,
    raises: AbstractContextManager[Any] | None = None,
    **options: Any,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test's body on every rank of a ``FakeGpu(**options)``; it asserts there.

    ``raises`` is the result of ``pytest.raises`` for the error at the end of the run.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**given: Any) -> None:
            count = given.get("world_size", world_size)
            with raises or nullcontext():
                run(lambda: body(**given), count, FakeGpu(**options), *replacements)

        return test

    return decorate

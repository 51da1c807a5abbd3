"""Discrete events, and the ranks, GPUs, wires and flags that they happen to.

Times are microseconds, links are in GB/s (1 GB/s moves 1000 bytes per microsecond).

A *process* is a generator. It yields a number, how long it sleeps, or a :class:`Signal`, for which it
waits. Events at one time happen in the order of their requests, so a run is deterministic.

Legend of the resources:

``Link``    one direction of a wire. It serves packets one after another at its rate: it is never busy for
            longer than time has passed, and packets of several transfers that are under way alternate.
``Cores``   the SMs of one GPU. A program holds one. The work of tensor cores is counted in microseconds of
            one SM at full clock. All jobs advance at the same rate: 1 up to ``budget`` jobs, and
            ``budget / n`` for more, because the chip's power limits their sum. That is why a wave of 100
            tiles is faster than one of 132.

By default one rank stands for all. Every order in ``tiling`` is relative to the rank. So if all ranks have
equally many rows they do the same at the same time. A message from rank 0 to the peer d ahead arrives there
at the same time as the message to rank 0 from the peer d behind. A flag is named by how far its source
is behind its receiver, ``(nodes, places within the node)``, and publishing to any peer sets the flag of
that distance at rank 0. With ``everyone`` all ranks are simulated one by one, for unequal shards, for
ranks that share one GPU, and for tests that the short way gives the same.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Generator, Hashable
from dataclasses import dataclass
from typing import Any

from interlace.runtime.tuning.configuration import Configuration
from model.simulation.machines import ModelMachine

Process = Generator["float | Signal", None, None]
PACKET = 128 << 10  # bytes: fine enough for transfers to share a link, coarse enough to be quick
MOST_PACKETS = 24  # in a transfer
_LITTLE = 1e-7  # microseconds; what sums of floats may be off by


class Deadlock(RuntimeError):
    """Processes wait for signals that nobody is going to set."""


class Signal:
    """Set once; from then on nobody waits for it."""

    __slots__ = ("is_set", "waiting")

    def __init__(self) -> None:
        self.is_set = False
        self.waiting: list[tuple[Process, Signal]] = []


class Simulation:
    def __init__(self) -> None:
        self.now = 0.0
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._ready: deque[Callable[[], None]] = deque()
        self._order = 0
        self._names: dict[Process, str] = {}

    def at(self, time: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._later, (time, self._order, action))

    def soon(self, action: Callable[[], None]) -> None:
        """Call ``action`` at the present time, after what is ready already."""
        self._ready.append(action)

    def spawn(self, process: Process, name: str = "process") -> Signal:
        """Start a process; the signal is set when it ends."""
        done = Signal()
        self._names[process] = name
        self._ready.append(lambda: self._advance(process, done))
        return done

    def set(self, signal: Signal) -> None:
        """Set ``signal``; who waits for it goes on at the present time."""
        if signal.is_set:
            return
        signal.is_set = True
        for process, done in signal.waiting:
            self._ready.append(lambda process=process, done=done: self._advance(process, done))  # type: ignore[misc]
        signal.waiting.clear()

    def run(self) -> float:
        """Return the time of the last event. Raises :class:`Deadlock` naming processes that wait."""
        while True:
            while self._ready:
                self._ready.popleft()()
            if not self._later:
                break
            time, _, action = heapq.heappop(self._later)
            assert time >= self.now - _LITTLE, "time runs forward"
            self.now = max(self.now, time)
            action()
        if self._names:
            names = sorted(set(self._names.values()))
            raise Deadlock(f"{len(self._names)} processes wait for ever: {', '.join(names[:8])}")
        return self.now

    def _advance(self, process: Process, done: Signal) -> None:
        for wanted in process:
            if isinstance(wanted, Signal):
                if not wanted.is_set:
                    wanted.waiting.append((process, done))
                    return
            elif wanted > 0:
                self.at(self.now + wanted, lambda: self._advance(process, done))
                return
        del self._names[process]
        self.set(done)


class Link:
    def __init__(self, name: str, gbs: float) -> None:
        self.name = name
        self.rate = gbs * 1e3
        self.free_at = 0.0
        self.busy = 0.0

    def reserve(self, now: float, nbytes: float) -> float:
        """When a packet that comes now has passed."""
        duration = nbytes / self.rate
        self.free_at = max(now, self.free_at) + duration
        self.busy += duration
        return self.free_at


def transfer(
    simulation: Simulation,
    out: Link,
    into: Link,
    nbytes: float,
    rate: float = math.inf,
    on_packet: Callable[[int], None] | None = None,
) -> Process:
    """Move ``nbytes`` over two links in packets, at most ``rate`` GB/s; ends when the last has arrived.

    A packet begins on the second link when it begins on the first, so it takes as long as the slower or
    the busier one; the next packet begins when this one has left the first.
    """
    left, arrived = int(nbytes), simulation.now
    packet = max(PACKET, left // MOST_PACKETS)
    while left > 0:
        size = min(left, packet)
        left -= size
        issued = simulation.now
        gone = out.reserve(issued, size)
        yield gone - size / out.rate - issued
        arrived = into.reserve(simulation.now, size)
        if on_packet is not None:
            on_packet(size)
        yield max(gone, issued + size / (rate * 1e3)) - simulation.now
    yield arrived - simulation.now


class Cores:
    """The SMs of one GPU: programs hold them, and the work on them shares a budget."""

    def __init__(self, simulation: Simulation, sms: int, budget: float) -> None:
        self.sms, self.budget = sms, budget
        self._simulation = simulation
        self._free = sms
        self._queue: deque[Signal] = deque()
        self._jobs: list[tuple[float, int, Signal]] = []
        self._order = 0
        self._virtual = (
            0.0  # microseconds at full clock that a job which began at 0 would have done
        )
        self._seen = 0.0
        self._owed = 0.0  # time in which no job advances
        self._due = math.inf
        self._settling = False
        self._held_since = 0.0
        self.held = 0.0  # SM-microseconds
        self.worked = 0.0  # SM-microseconds at full clock
        self.most_at_once = 0

    def acquire(self) -> Signal:
        granted = Signal()
        if self._free:
            self._take(granted)
        else:
            self._queue.append(granted)
        return granted

    def release(self) -> None:
        self._account()
        self._free += 1
        if self._queue:
            self._take(self._queue.popleft())

    def work(self, duration: float) -> Signal:
        """``duration`` of one SM at full clock."""
        finished = Signal()
        if duration <= 0:
            finished.is_set = True
            return finished
        self._catch_up()
        self._order += 1
        heapq.heappush(self._jobs, (self._virtual + duration, self._order, finished))
        self.worked += duration
        self._settle_soon()
        return finished

    def stall(self, duration: float) -> None:
        """Something else takes what the jobs at work need, for ``duration``; nothing if none is."""
        if self._jobs:
            self._owed += duration

    def rate(self) -> float:
        return min(1.0, self.budget / max(1, len(self._jobs)))

    def _take(self, granted: Signal) -> None:
        self._account()
        self._free -= 1
        self.most_at_once = max(self.most_at_once, self.sms - self._free)
        self._simulation.set(granted)

    def _account(self) -> None:
        now = self._simulation.now
        self.held += (self.sms - self._free) * (now - self._held_since)
        self._held_since = now

    def _catch_up(self) -> None:
        now = self._simulation.now
        if not self._jobs:
            self._owed = 0.0
        else:
            passed = now - self._seen
            lost = min(self._owed, passed)
            self._owed -= lost
            self._virtual += (passed - lost) * self.rate()
        self._seen = now

    def _settle_soon(self) -> None:
        if not self._settling:
            self._settling = True
            self._simulation.soon(self._settle)

    def _settle(self) -> None:
        """Finish what is done, then come again when the next job may be."""
        self._settling = False
        self._catch_up()
        while self._jobs and self._jobs[0][0] <= self._virtual + _LITTLE:
            self._simulation.set(heapq.heappop(self._jobs)[2])
            self._settle_soon()  # after those who go on now: they may bring new work
        if self._jobs and not self._settling:
            due = self._simulation.now + self._owed
            due += (self._jobs[0][0] - self._virtual) / self.rate()
            if due < self._due - _LITTLE or self._due <= self._simulation.now:
                self._due = due
                self._simulation.at(due, self._on_due)

    def _on_due(self) -> None:
        self._due = math.inf if self._due <= self._simulation.now + _LITTLE else self._due
        self._settle()


Distance = tuple[int, int]


@dataclass
class Gpu:
    cores: Cores
    memory: Link
    sends: Link
    receives: Link
    card_sends: Link
    card_receives: Link


class Cluster:
    """``world_size`` ranks on nodes of ``per_node``; rank r is place ``r % per_node`` of its node."""

    def __init__(
        self,
        machine: ModelMachine,
        world_size: int,
        nodes: int = 1,
        *,
        everyone: bool = False,
        log: list[Any] | None = None,
    ) -> None:
        if world_size % nodes:
            raise ValueError(f"world_size {world_size} is no multiple of nodes {nodes}")
        self.machine, self.world_size, self.nodes = machine, world_size, nodes
        self.per_node = world_size // nodes
        self.everyone = everyone or machine.virtual_ranks
        self.log = log  # of spans, see kernels.py; None: not logged
        self.simulation = Simulation()
        self.ranks = range(world_size) if self.everyone else range(1)
        self._flags: dict[Hashable, Signal] = {}
        self._meetings: dict[Hashable, tuple[list[int], Signal]] = {}
        if machine.virtual_ranks:
            shared = self._gpu("0")
            self.gpus = [shared for _ in self.ranks]
        else:
            self.gpus = [self._gpu(str(rank)) for rank in self.ranks]

    def _gpu(self, name: str) -> Gpu:
        machine = self.machine
        cores = Cores(self.simulation, int(machine.sms), machine.budget)
        wires = [
            Link(f"{name} {which}", gbs)
            for which, gbs in (
                ("memory", machine.hbm_gbs),
                ("sends", machine.link_gbs),
                ("receives", machine.link_gbs),
                ("card sends", machine.nic_gbs),
                ("card receives", machine.nic_gbs),
            )
        ]
        if machine.virtual_ranks:
            wires[2] = Link(f"{name} receives", float("inf"))  # a copy passes the memory once
        return Gpu(cores, *wires)

    def gpu(self, rank: int) -> Gpu:
        """Return the GPU of ``rank``, or of the rank that stands for it."""
        return self.gpus[rank if self.everyone else 0]

    def program_limit(self) -> int:
        """``Place.program_limit`` of the cuda place: of one rank's persistent grid."""
        sharing = self.world_size if self.machine.virtual_ranks else 1
        return max(2, int(self.machine.sms) // sharing - 1)

    def resident_programs(self, configuration: Configuration, reserved: int = 0) -> int:
        """``collective_algorithms.resident_programs``: fewer than the limit if so configured."""
        limit = self.program_limit()
        return min(limit, reserved + configuration.programs) if configuration.programs else limit

    def distance(self, source: int, receiver: int) -> Distance:
        """How far ``source`` is behind ``receiver``."""
        return (
            (receiver // self.per_node - source // self.per_node) % self.nodes,
            (receiver % self.per_node - source % self.per_node) % self.per_node,
        )

    def flag(self, source: int, receiver: int, key: Hashable) -> Signal:
        at = receiver if self.everyone else 0
        name = (at, self.distance(source, receiver), key)
        if name not in self._flags:
            self._flags[name] = Signal()
        return self._flags[name]

    def publish(self, source: int, receiver: int, key: Hashable) -> None:
        """Set the flag when the peer sees it."""
        simulation = self.simulation
        delay = self.machine.signal_us if source != receiver else 0.0
        flag = self.flag(source, receiver, key)
        simulation.at(simulation.now + delay, lambda: simulation.set(flag))

    def arrive(self, source: int, receiver: int, key: Hashable) -> None:
        """Set the flag now: whatever it takes has been waited for."""
        self.simulation.set(self.flag(source, receiver, key))

    def copy(
        self, source: int, receiver: int, nbytes: float, rate: float = float("inf")
    ) -> Process:
        """Bytes from GPU to GPU of a node; both lose a little of what they compute meanwhile."""
        mine, theirs = self.gpu(source), self.gpu(receiver)
        return transfer(
            self.simulation, mine.sends, theirs.receives, nbytes, rate, self._disturb(mine, theirs)
        )

    def put(self, source: int, receiver: int, nbytes: float) -> Process:
        mine, theirs = self.gpu(source), self.gpu(receiver)
        yield from transfer(
            self.simulation,
            mine.card_sends,
            theirs.card_receives,
            nbytes,
            on_packet=self._disturb(mine, theirs),
        )
        yield self.machine.nic_us

    def barrier(self, rank: int, name: Hashable) -> Process:
        if not self.everyone:
            yield self.machine.barrier_us
            return
        here, met = self._meetings.setdefault(name, ([], Signal()))
        here.append(rank)
        if len(here) == self.world_size:
            self.simulation.set(met)
        yield met
        yield self.machine.barrier_us

    def spawn(self, process: Process, name: str) -> Signal:
        return self.simulation.spawn(process, name)

    def run(self) -> float:
        return self.simulation.run()

    def _disturb(self, *gpus: Gpu) -> Callable[[int], None] | None:
        cost = self.machine.interference_us_per_mb / 1e6
        if not cost:
            return None
        # one rank stands for all: what it sends is also what it receives
        cores = [gpu.cores for gpu in gpus]

        def on_packet(size: int) -> None:
            for core in cores:
                core.stall(cost * size)

        return on_packet

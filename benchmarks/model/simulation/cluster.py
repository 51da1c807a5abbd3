"""Ranks, their GPUs and wires, and their flags.

By default one rank stands for all. Every order in ``tiling`` is relative to the rank. So if all ranks have
equally many rows they do the same at the same time. A message from rank 0 to the peer d ahead arrives there
at the same time as the message to rank 0 from the peer d behind. A flag is named by how far its source
is behind its receiver, ``(nodes, places within the node)``, and publishing to any peer sets the flag of
that distance at rank 0. With ``everyone`` all ranks are simulated one by one, for unequal shards, for
ranks that share one GPU, and for tests that the short way gives the same.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from interlace.runtime.tuning.configuration import Configuration
from model.simulation.engine import Cores, Link, Process, Signal, Simulation, transfer
from model.simulation.machines import ModelMachine

Distance = tuple[int, int]


@dataclass
class Gpu:
    """One GPU: its SMs, its memory, its side of the node's links, its network card."""

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
        """Return the flag that ``source`` publishes to ``receiver`` under ``key``."""
        at = receiver if self.everyone else 0
        name = (at, self.distance(source, receiver), key)
        if name not in self._flags:
            self._flags[name] = Signal()
        return self._flags[name]

    def publish(self, source: int, receiver: int, key: Hashable, *, after: float = 0.0) -> None:
        """Set the flag when the peer sees it, ``after`` more microseconds."""
        machine, simulation = self.machine, self.simulation
        delay = after + (machine.signal_us if source != receiver else 0.0)
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
        """Bytes over the network cards of two GPUs."""
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
        """All ranks of the node, on the stream."""
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
            for each in cores:
                each.stall(cost * size)

        return on_packet

"""The interface of a place, for one rank: memory, control, streams, and kernels of user code.

Places differ in this and nowhere else. A place has four roles; who needs one of them takes that.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch

from interlace.kernels import node_order as order
from interlace.runtime.core.context import context_with
from interlace.runtime.core.engine import ENGINES, Engine
from interlace.runtime.core.errors import PlaceUnavailableError
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.core.memory import Array, LocalMemory, SymmetricBuffer
from interlace.runtime.core.stream import Event, Outcome, Settled, Stream

T = TypeVar("T")


DEFAULT_TIMEOUT = 300.0
MOST_SECONDS = 1e6  # what waits of the system take; eleven days


def positive_seconds(name: str, value: object) -> float:
    """``value``, a number of seconds or a timedelta, if it can bound a wait: more than 0, and finite."""
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise TypeError(f"{name} must be a number of seconds or a timedelta, got {value!r}")
    if not number > 0:
        raise ValueError(f"{name} must be positive, got {value}")
    if number > MOST_SECONDS:
        raise ValueError(f"{name} must be at most {MOST_SECONDS:g} seconds, got {value}")
    return float(number)


@contextmanager
def timeout(seconds: timedelta | float) -> Iterator[None]:
    """Within, each wait of the ops that the caller starts is bounded by ``seconds``, or a timedelta.

    Of every op, asynchronous ones and messages too. It goes before the group's own timeout
    (:meth:`Group.set_timeout`); torch's of one op, and the ``timeout`` of an op that takes one, go before
    it. When it passes the group is over, as with the group's own: some ranks may have done what others have
    not. Only ``Work.wait(timeout)`` may be tried again. In ``sim``, which has no clock, it does nothing: a
    wait that cannot end is a DeadlockError at once. On a GPU it bounds the host alone.

    Raises ValueError for what is not positive or more than a million seconds, TypeError for no number.

    >>> def on_rank():
    ...     with interlace.timeout(60):
    ...         return interlace.all_gather_object(found := [None, None], interlace.get_rank()) or found
    >>> interlace.run(on_rank, 2)[0]
    [0, 1]
    """
    with context_with(bound_seconds=positive_seconds("seconds", seconds)):
        yield


PUTS = ("nvshmem", "stores", "late")


@dataclass(frozen=True)
class Nodes:
    """``of[r]``: node of r; ``put``: see ``kernels/node_puts.py``; ``options`` link its library."""

    of: tuple[int, ...]
    put: str
    options: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.put in PUTS, self.put

    def members(self, rank: int) -> list[int]:
        return list(order.members(self.of, self.of[rank]))

    def names(self) -> list[int]:
        """The nodes, in the order in which sums are taken."""
        return sorted(set(self.of))

    def partners(self, rank: int) -> list[int]:
        """The ranks of other nodes that put to ``rank`` or to which it puts, in any op."""
        puts = order.put_targets(rank, self.of)
        return sorted({*puts, *order.put_sources(rank, self.of)})


def table(mapped: Sequence[int], reached: Sequence[int]) -> torch.Tensor:
    """The table of peers: base addresses, 0 where there is none, then how to put to each rank."""
    return torch.tensor([*mapped, *reached], dtype=torch.int64)


class PlaceRank:
    """The rank that a place is of.

    Attributes
    ----------
    name : "sim", "shm", "hosts", "cuda" or "nvshmem".
    rank, world_size : this rank within the group.
    address : at which the other ranks' processes reach this one's.
    device : where tensors of this rank live.
    simulated : True where all ranks are tasks of one scheduler, in one process and in its own time.
    virtual : True where ranks share one process and its GPU.
    """

    name: str
    rank: int
    world_size: int
    device: torch.device
    address = "127.0.0.1"
    simulated = False
    virtual = False


class PlaceMemory(PlaceRank, ABC):
    """Memory that all ranks of a group reach.

    Attributes
    ----------
    direct_access : True where torch operators may read and write a peer's memory at full speed.
    mapped : whether ranks have symmetric memory, which those on CPUs of several hosts have not.
    nodes : which ranks share a node, where not all memory is mapped; None on one node.
    """

    direct_access: bool
    mapped = True
    nodes: Nodes | None = None

    @property
    def all_mapped(self) -> bool:
        """Whether every rank's memory is mapped by all: not between nodes, nor hosts without any of it."""
        return self.mapped and self.nodes is None

    @abstractmethod
    def allocate(self, nbytes: int) -> SymmetricBuffer:
        """Zeroed symmetric memory of ``nbytes`` on every rank. Collective."""


class PlaceControl(PlaceRank, ABC):
    """Messages between the hosts of the ranks, groups of some of them, and how a group fails and ends.

    Attributes
    ----------
    joining : seconds that it took to meet the other processes.
    linger : seconds for which :meth:`close` waits for rank 0 to close, too; see ``HostGroup.close``.
    calls : how many this rank has made, where ranks do not wait for each other to compare them.
    """

    joining = 0.0
    linger = 0.0
    calls = 0

    @abstractmethod
    def exchange(self, payload: bytes, doing: str) -> list[bytes]:
        """All-gather of a message of at most 64 KiB, without kernels; ``doing`` names the op in errors.

        Collective. Raises when a peer has died, the group is aborted or the group's timeout passes.
        """

    @abstractmethod
    def subgroup(self, ranks: tuple[int, ...], generation: int) -> "Place":
        """A member's place in the group of ``ranks``, in order; ``generation`` tells equal groups apart."""

    def reunited(self, ranks: Sequence[int] | None) -> "tuple[Place, list[int]]":
        """The place of the ranks of this group that live, or of ``ranks``; and who they are.

        Collective over them, also after the group has failed. It has to be closed afterwards.
        """
        raise PlaceUnavailableError(f"the ranks of place {self.name!r} end together")

    def known_as(self, ranks: Sequence[int]) -> None:
        """Take note of which ranks of the job the ranks of this group are."""
        return

    def fault(self, reason: str) -> None:
        """Write down what this rank did last, where that is recorded: the group is over."""
        return

    def set_timeout(self, seconds: float) -> None:
        """Bound every later wait of this rank in this group, where waits have a bound of their own."""
        return

    def bound(self) -> float:
        """Seconds that bound a wait of the op that the caller starts now; of no use where is no clock."""
        return DEFAULT_TIMEOUT

    def late(self, peers: Sequence[int] = ()) -> Sequence[int]:
        """Behind whom waits for ``peers`` are, by default this rank's wait just now; empty if not known."""
        return peers

    def trouble(self, doing: str) -> Exception | None:
        """Why ``doing``, which waits for peers, can never end, if that is known. From any thread."""
        return None

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Make every wait of every rank of the group end with an error. Idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Give memory and handles back. The place is unusable afterwards. Idempotent."""

    def check(self) -> None:
        """Raise what the group has failed with, if it has. To be closed in good order is no failure."""
        return

    def failure_of(self, number: int, *, completed: bool) -> Exception | None:
        """The error of call ``number`` after it was enqueued, as far as is known. Never blocks.

        ``completed``: it was seen to have completed before the group failed.
        """
        return None

    def settle(self) -> None:
        """Return once all that this rank has enqueued has ended; raise what it failed with."""
        return


class PlaceStreams(PlaceRank, ABC):
    """Streams of a rank, and how its kernels run on them.

    Attributes
    ----------
    interpreted : True where Triton kernels run in the interpreter, or as PTX on this CPU: small tiles.
    compiled : whether kernels are code of a GPU, with what only that can do: inline PTX, fences of proxies.
    descriptors : whether kernels may load and store by descriptors: where they are compiled, from 9.0 on.
    program_limit : how many programs of one persistent kernel may wait for each other: all stay resident.
    worker : the thread that runs what was submitted, where streams run their items at once; else None.
    alone : whether an asynchronous op, too, may run in the caller: there is nobody it would wait for.
    recorder : of what a call enqueues, where that is planned; see ``places/gpu/plans.py``.
    launching : entered around the launches of one collective op, after all allocation is done.
    """

    interpreted: bool
    compiled: bool = True
    descriptors = True
    program_limit: int = 1 << 30
    worker: Any = None
    alone = False
    recorder: Any = None
    launching: Callable[[], AbstractContextManager[None]] = nullcontext

    def arrive(self) -> None:
        """The caller comes to a barrier of all ranks: its earlier torch code must finish first."""
        self.record_current().synchronize()

    def depart(self) -> None:
        """All ranks have come; the caller's later torch code is after all of theirs."""
        return

    @abstractmethod
    def new_stream(self, name: str, *, priority: bool = False) -> Stream:
        """A stream of this rank; ``priority`` asks for precedence over other streams."""

    @abstractmethod
    def record_current(self) -> Event:
        """The point after all torch code that the caller has issued so far."""

    @abstractmethod
    def hold_current(self, event: Event, waiting_for: str) -> None:
        """Let the caller's later torch code run only after ``event``: blocks on a CPU, not on a GPU."""

    def future_of(self, event: Event, value: object) -> torch.futures.Future[Any] | None:
        """A future of ``value``, which is there at ``event``; None where a plain one will do."""
        return None

    @property
    def capturing(self) -> bool:
        """Whether the caller is capturing a CUDA graph, during which nothing can be made or moved."""
        return False

    def submit(self, function: Callable[[], T], *, asynchronous: bool) -> Future[T]:
        """Run an op's launch side in order: here, or in a worker thread where streams run items at once."""
        return Settled(function())

    def finish(self) -> None:
        """Return once what was submitted has ended, before the group is closed."""
        return

    def poll_limit(self) -> int:
        """Polls after which a wait in a kernel gives up. Interpreted waits are bounded otherwise."""
        return 1 << 62


class UserKernels(PlaceRank):
    """Memory that user code shares, and kernels that it runs on its current stream."""

    def new_memory(self, sizes: Sequence[int]) -> LocalMemory:
        """Memory of this rank alone, a part of each size, for :meth:`share`. Not collective."""
        raise self._no_user_memory()

    def undefine(self, part: Array) -> None:
        """What is in new memory is undefined: nobody may read it before somebody has written."""
        return

    def announce(self, tensor: torch.Tensor) -> None:
        """User code has ``tensor``'s address as a number, for kernels."""
        return

    def owns(self, memory: LocalMemory) -> bool:
        """Whether this rank made ``memory``, in this run."""
        return False

    def share(self, memory: LocalMemory, doing: str) -> list[Sequence[Array]]:
        """Parts of every rank's ``memory``, by rank, equal in sizes; ``doing``: for errors. Collective."""
        raise self._no_user_memory()

    def multicast(self, owner: object, parts: Sequence[Array]) -> int:
        """An address of ``parts``, by rank, for ``multimem`` while ``owner`` lives; 0 if there is none."""
        return 0

    def run_kernel(
        self, launch: KernelLaunch, waited_for: Callable[[], Sequence[int]], timeout: float | None
    ) -> None:
        """Run a kernel on the caller's current stream, to its end.

        ``waited_for()`` says which ranks it waits for now. ``timeout`` bounds it, in seconds, where
        a place has a clock; None is the group's own.
        """
        raise self._no_user_memory()

    def _no_user_memory(self) -> PlaceUnavailableError:
        return PlaceUnavailableError(
            f"interlace.symmetric_memory is for tensors on a CPU, and place {self.name!r} has none; "
            "use torch.distributed._symmetric_memory there"
        )


class Place(PlaceMemory, PlaceControl, PlaceStreams, UserKernels):
    """Memory, execution and control of one rank of one group."""

    def new_engine(self, communicator: object) -> Engine:
        """The engine of the plain collectives of ``communicator``, which is on this place."""
        return ENGINES["streams"](communicator)

    def new_plans(self, communicator: Any) -> Any:
        """Plans to repeat fused calls of ``communicator`` at little cost for the host; None for nothing."""
        return None

    # -- messages from rank to rank, for ``StreamEngine`` ----------------------------------------

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Future[Outcome]:
        """Send ``tensor`` to ``peer`` as ``Engine.send`` does."""
        raise self._no_messages()

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Future[Outcome]:
        """Receive into ``tensor`` from ``peer``, None for any, as ``Engine.recv`` does."""
        raise self._no_messages()

    def _no_messages(self) -> PlaceUnavailableError:
        return PlaceUnavailableError(
            f"place {self.name!r} has no send and recv on streams, only collectives"
        )

"""The interface of a place, for one rank: memory, control, streams, and kernels of user code.

Places differ only in these four roles. A caller that needs one of them takes that role's class.
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
MOST_SECONDS = 1e6  # the longest wait of the system's calls; eleven days


def positive_seconds(name: str, value: object) -> float:
    """Return ``value``, seconds or a timedelta, as a number; raise unless it is positive and finite."""
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
    """Bound each wait of the ops that the caller starts within the block by ``seconds``, or a timedelta.

    This includes asynchronous ops and messages. It takes precedence over the group's own timeout
    (:meth:`Group.set_timeout`). Torch's timeout of one op and the ``timeout`` argument of an op take
    precedence over it. When it passes the group is aborted, as by the group's own timeout: some ranks may
    have finished the op and others not. Only ``Work.wait(timeout)`` may be tried again. In ``sim``, which
    has no clock, it does nothing: an endless wait is a DeadlockError at once. On a GPU it bounds the host
    only.

    Raises ValueError if ``seconds`` is not positive or exceeds a million, TypeError if not a number.

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
    """``of[r]`` is rank r's node. For ``put`` see ``kernels/node_puts.py``; ``options`` link a library."""

    of: tuple[int, ...]
    put: str
    options: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.put in PUTS, self.put

    def members(self, rank: int) -> list[int]:
        return list(order.members(self.of, self.of[rank]))

    def names(self) -> list[int]:
        """Return the nodes, in the order in which sums are computed."""
        return sorted(set(self.of))

    def partners(self, rank: int) -> list[int]:
        """Return the ranks of other nodes that put to ``rank`` or to which it puts, in any op."""
        puts = order.put_targets(rank, self.of)
        return sorted({*puts, *order.put_sources(rank, self.of)})


def table(mapped: Sequence[int], reached: Sequence[int]) -> torch.Tensor:
    """Return the table of peers: base addresses, 0 if not mapped, then how to put to each rank."""
    return torch.tensor([*mapped, *reached], dtype=torch.int64)


class PlaceRank:
    """The rank that a place belongs to.

    Attributes
    ----------
    name : "sim", "shm", "hosts", "cuda" or "nvshmem".
    rank, world_size : this rank within the group.
    address : the address at which the other ranks' processes reach this rank's process.
    device : the device of this rank's tensors.
    simulated : True if all ranks are tasks of one scheduler, in one process and in simulated time.
    virtual : True if ranks share one process and its GPU.
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
    direct_access : True if torch operators may read and write a peer's memory at full speed.
    mapped : whether ranks have symmetric memory; ranks on CPUs of several hosts have none.
    nodes : the ranks of each node, if not all memory is mapped; None on one node.
    """

    direct_access: bool
    mapped = True
    nodes: Nodes | None = None

    @property
    def all_mapped(self) -> bool:
        """Whether all ranks map every rank's memory: not between nodes, nor if ``mapped`` is False."""
        return self.mapped and self.nodes is None

    @abstractmethod
    def allocate(self, nbytes: int) -> SymmetricBuffer:
        """Allocate zeroed symmetric memory of ``nbytes`` on every rank. Collective."""


class PlaceControl(PlaceRank, ABC):
    """Messages between the hosts of the ranks, subgroups, and the failure and end of a group.

    Attributes
    ----------
    joining : the seconds that it took to meet the other processes.
    linger : the seconds that :meth:`close` waits until rank 0 closes; see ``HostGroup.close``.
    calls : the number of this rank's calls, if ranks compare their calls without waiting for each other.
    """

    joining = 0.0
    linger = 0.0
    calls = 0

    @abstractmethod
    def exchange(self, payload: bytes, doing: str) -> list[bytes]:
        """All-gather a message of at most 64 KiB, without kernels; ``doing`` names the op in errors.

        Collective. Raises if a peer has died, the group is aborted or the group's timeout passes.
        """

    @abstractmethod
    def subgroup(self, ranks: tuple[int, ...], generation: int) -> "Place":
        """Return a member's place in the ordered group ``ranks``; ``generation`` separates equal groups."""

    def reunited(self, ranks: Sequence[int] | None) -> "tuple[Place, list[int]]":
        """Return the place of the living ranks of this group, or of ``ranks``; and their numbers.

        Collective over them, also after the group has failed. This place must be closed afterwards.
        """
        raise PlaceUnavailableError(f"the ranks of place {self.name!r} all end together")

    def known_as(self, ranks: Sequence[int]) -> None:
        """Note the numbers that the ranks of this group have in the job."""
        return

    def fault(self, reason: str) -> None:
        """Write this rank's last actions to its record, if there is one, because the group is aborted."""
        return

    def set_timeout(self, seconds: float) -> None:
        """Bound every later wait of this rank in this group, if the place's waits have their own bound."""
        return

    def bound(self) -> float:
        """Return the seconds that bound a wait of the op that starts now; meaningless without a clock."""
        return DEFAULT_TIMEOUT

    def late(self, peers: Sequence[int] = ()) -> Sequence[int]:
        """Return the ranks that delay waits for ``peers``, by default this rank's last; () if unknown."""
        return peers

    def trouble(self, doing: str) -> Exception | None:
        """Return why ``doing``, which waits for peers, can never end; None if unknown. From any thread."""
        return None

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Let every wait of every rank of the group end with an error. Idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Free memory and handles. The place is unusable afterwards. Idempotent."""

    def check(self) -> None:
        """Raise the group's failure, if it has failed. A regular close is not a failure."""
        return

    def failure_of(self, number: int, *, completed: bool) -> Exception | None:
        """Return the error of call ``number`` after it was enqueued, as far as it is known. Never block.

        ``completed``: the call was seen to have completed before the group failed.
        """
        return None

    def settle(self) -> None:
        """Return once all work that this rank has enqueued has ended; raise its error."""
        return


class PlaceStreams(PlaceRank, ABC):
    """Streams of a rank, and the execution of its kernels on them.

    Attributes
    ----------
    interpreted : True if Triton kernels run in the interpreter, or as PTX on this CPU: small tiles.
    compiled : whether kernels are GPU code, which alone allows inline PTX and fences of proxies.
    descriptors : whether kernels may load and store by descriptors: if they are compiled, from 9.0 on.
    program_limit : the most programs of one persistent kernel that may wait for each other: all resident.
    worker : the thread that runs submitted functions, if streams run their items at once; otherwise None.
    alone : whether an asynchronous op may also run in the caller, because it waits for no other rank.
    recorder : records the items that a call enqueues, if it is planned; see ``places/gpu/plans.py``.
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
        """Finish the caller's earlier torch code before it enters a barrier of all ranks."""
        self.record_current().synchronize()

    def depart(self) -> None:
        """Order the caller's later torch code after the barrier that all ranks have entered."""
        return

    @abstractmethod
    def new_stream(self, name: str, *, priority: bool = False) -> Stream:
        """Return a new stream of this rank; ``priority`` asks for precedence over other streams."""

    @abstractmethod
    def record_current(self) -> Event:
        """Return the point after all torch code that the caller has issued so far."""

    @abstractmethod
    def hold_current(self, event: Event, waiting_for: str) -> None:
        """Let the caller's later torch code run only after ``event``: blocks on a CPU, not on a GPU."""

    def future_of(self, event: Event, value: object) -> torch.futures.Future[Any] | None:
        """Return a future of ``value``, which is ready at ``event``; None if a plain future is enough."""
        return None

    @property
    def capturing(self) -> bool:
        """Whether the caller is capturing a CUDA graph, during which memory cannot be made or moved."""
        return False

    def submit(self, function: Callable[[], T], *, asynchronous: bool) -> Future[T]:
        """Run an op's launch side in order: here, or in a worker thread if streams run items at once."""
        return Settled(function())

    def finish(self) -> None:
        """Return once all submitted functions have ended, before the group is closed."""
        return

    def poll_limit(self) -> int:
        """Return the polls after which a kernel's wait times out. Interpreted waits have another bound."""
        return 1 << 62


class UserKernels(PlaceRank):
    """Memory that user code shares, and kernels that it runs on its current stream."""

    def new_memory(self, sizes: Sequence[int]) -> LocalMemory:
        """Return memory of this rank alone, a part of each size, for :meth:`share`. Not collective."""
        raise self._no_user_memory()

    def undefine(self, part: Array) -> None:
        """Mark new memory as undefined: a rank may read it only after a rank has written it."""
        return

    def announce(self, tensor: torch.Tensor) -> None:
        """Note that user code has ``tensor``'s address as a number, for kernels."""
        return

    def owns(self, memory: LocalMemory) -> bool:
        return False

    def share(self, memory: LocalMemory, doing: str) -> list[Sequence[Array]]:
        """Return the equal parts of every rank's ``memory``, by rank; ``doing``: for errors. Collective."""
        raise self._no_user_memory()

    def multicast(self, owner: object, parts: Sequence[Array]) -> int:
        """Return an address of ``parts``, by rank, for ``multimem`` while ``owner`` lives; 0 if none."""
        return 0

    def run_kernel(
        self, launch: KernelLaunch, waited_for: Callable[[], Sequence[int]], timeout: float | None
    ) -> None:
        """Run a kernel on the caller's current stream, to its end.

        ``waited_for()`` returns the ranks that it waits for now. ``timeout`` bounds it, in seconds, if the
        place has a clock; None means the group's timeout.
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
        """Return the engine of the plain collectives of ``communicator``, which is on this place."""
        return ENGINES["streams"](communicator)

    def new_plans(self, communicator: Any) -> Any:
        """Return plans that repeat ``communicator``'s fused calls at little cost for the host, or None."""
        return None

    # -- messages from rank to rank, for ``StreamEngine`` ----------------------------------------

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Future[Outcome]:
        raise self._no_messages()

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Future[Outcome]:
        """Receive into ``tensor`` from ``peer``, None for any, as ``Engine.recv`` does."""
        raise self._no_messages()

    def _no_messages(self) -> PlaceUnavailableError:
        return PlaceUnavailableError(
            f"place {self.name!r} has no send and recv on streams, only collectives"
        )

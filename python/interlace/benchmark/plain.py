"""A plain collective at one size: through interlace, through torch.distributed, and on one rank alone.

If a result replaces the input, inputs of timed calls are zeros: a sum of sums of sums would overflow.
"Alone" is the baseline ``torch``: copies and sums of all ranks' inputs, from the rank's own memory, without
waiting for another rank.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

import interlace
from interlace.benchmark import protocol
from interlace.benchmark.figures import bus_factor
from interlace.ops.library import BY_NAME
from interlace.runtime.core.place import Place

Tensors = tuple[Any, ...]


class MeasuredOp(ABC):
    """One op of a rank at one size, through interlace and torch; algorithms are its record's."""

    op: str
    algorithms: tuple[str, ...] = ("auto",)
    sizes: tuple[str, ...]
    without: str  # for an error about other sizes
    defaults: ClassVar[dict[str, str]] = {}  # by size
    settings: tuple[str, ...] = ()  # options other than sizes
    shape: dict[str, int]
    nbytes: int
    bus_factor: float | None
    flops: float = 0.0

    def __init_subclass__(cls) -> None:
        record = BY_NAME.get(vars(cls).get("op", ""))
        if record is not None:
            cls.algorithms = ("auto", *record.algorithms)

    def __init__(self, place: Place, dtype: torch.dtype) -> None:
        self.device, self.dtype = place.device, dtype
        self.rank, self.world_size = place.rank, place.world_size

    @classmethod
    @abstractmethod
    def refuse(cls, world_size: int, sizes: Sequence[int], dtype: str, **settings: Any) -> None:
        """Raise ValueError if the op does not accept these sizes and settings."""

    @classmethod
    @abstractmethod
    def memory(cls, dtype: torch.dtype, *sizes: int, **settings: Any) -> int:
        """Return an upper bound of the bytes of a rank's tensors, to check for memory before."""

    @property
    def message_bytes(self) -> int:
        """Return the bytes that a rank sends to each other rank, at once."""
        return self.nbytes

    def empty(self, *shape: int) -> torch.Tensor:
        output = torch.empty(shape, dtype=self.dtype, device=self.device)
        return protocol.poison(output)

    @abstractmethod
    def inputs(self, call: int) -> Tensors:
        """Return arguments of :meth:`ours` and :meth:`theirs`."""

    def timed_inputs(self, call: int) -> Tensors:
        return self.inputs(call)

    @abstractmethod
    def ours(self, algorithm: str) -> Callable[..., Any]: ...

    @abstractmethod
    def theirs(self, *tensors: Any) -> Any:
        """Run torch's operators, and collectives of torch.distributed's default group."""

    @abstractmethod
    def check(self, result: Any, call: int, rounds_often: bool = False) -> float:
        """Return the largest error as a multiple of its bound; ``rounds_often``: as baselines may round."""


class Plain(MeasuredOp):
    """One collective of a rank. The size is ``whole`` elements; one rank has ``part`` of them."""

    torch_names: tuple[str, ...] = ()  # in torch.distributed, by release, if they differ
    reduces = True  # if an algorithm depends on it
    sizes: tuple[str, ...] = ("nbytes",)
    without = "has no matmul; it takes --sizes"
    defaults: ClassVar = {"nbytes": "64K:16M:x16"}
    least_ranks = 1

    def __init__(self, place: Place, dtype: torch.dtype, nbytes: int) -> None:
        super().__init__(place, dtype)
        itemsize: int = dtype.itemsize
        self.part = max(1, nbytes // (itemsize * self.world_size))
        self.whole = self.part * self.world_size
        self.own = self.rank * self.part  # the first element of this rank's part
        self.nbytes = self.whole * itemsize
        self.shape = {"bytes": self.nbytes}
        self.bus_factor = bus_factor(self.op, self.world_size)

    @classmethod
    def refuse(cls, world_size: int, sizes: Sequence[int], dtype: str, **settings: Any) -> None:
        if world_size < cls.least_ranks:
            raise ValueError(
                f"--world-size {world_size}: {cls.op} needs at least {cls.least_ranks} ranks"
            )

    @classmethod
    def memory(cls, dtype: torch.dtype, *sizes: int, **settings: Any) -> int:
        return sum(sizes)

    def of(self, rank: int, call: int, first: int = 0, count: int | None = None) -> torch.Tensor:
        """Return the input of ``rank`` in ``call``: all elements, or ``count`` of them."""
        count = self.whole if count is None else count
        return protocol.vector(first, count, rank, call, self.dtype, self.device)

    def inputs(self, call: int) -> Tensors:
        """Return arguments, the result first."""
        return self.empty(self.whole), self.of(self.rank, call)

    def call(self, library: Any, *arguments: Any, **how: Any) -> Any:
        """Call the collective of ``library``, interlace or torch.distributed, which use the same names."""
        getattr(library, self.op)(*arguments, **how)
        return arguments[0]

    def ours(self, algorithm: str) -> Callable[..., Any]:
        options = {"algorithm": algorithm} if len(self.algorithms) > 1 else {}
        return functools.partial(self.call, interlace, **options)

    def theirs(self, *arguments: Any) -> Any:
        if not self.torch_names:
            return self.call(dist, *arguments)
        torchs(type(self))(*arguments)
        return arguments[0]

    @abstractmethod
    def alone_inputs(self, call: int) -> Tensors: ...

    @abstractmethod
    def alone(self, output: Any, source: Any) -> Any:
        """Run on one rank, from its own memory."""


def torchs(kind: type[Plain]) -> Callable[..., Any]:
    """Return the function of torch.distributed, whose name may differ."""
    found: Callable[..., Any] = next(
        getattr(dist, name) for name in kind.torch_names if hasattr(dist, name)
    )
    return found


class _Copying(Plain):
    """A collective whose results are elements of the ranks' inputs."""

    reduces = False

    @abstractmethod
    def pieces(self) -> list[tuple[int, int, int]]:
        """Return (rank, first element, count) of each piece of a result; none if there is no result."""

    def _parts_of_all(self) -> list[tuple[int, int, int]]:
        return [(rank, 0, self.part) for rank in range(self.world_size)]

    def alone_inputs(self, call: int) -> Tensors:
        parts = [self.of(rank, call, first, count) for rank, first, count in self.pieces()]
        source = torch.cat([self.empty(0), *parts])
        return torch.empty_like(source), source

    def alone(self, output: Any, source: Any) -> Any:
        return output.copy_(source)

    def check(self, result: Any, call: int, rounds_often: bool = False) -> float:
        begin, worst = 0, 0.0
        for rank, first, count in self.pieces():
            piece = result[begin : begin + count]
            worst = max(worst, protocol.error_of_copy(piece, first, rank, call))
            begin += count
        return worst


class _Sum(Plain):
    """A collective whose results are sums over ranks."""

    def summed(self) -> tuple[int, int]:
        """Return first element and count of a result; none if there is no result."""
        return 0, self.whole

    def alone_inputs(self, call: int) -> Tensors:
        first, count = self.summed()
        parts = [self.of(rank, call, first, count) for rank in range(self.world_size)]
        return self.empty(count), torch.stack(parts)

    def alone(self, output: Any, source: Any) -> Any:
        return torch.sum(source, 0, dtype=source.dtype, out=output)

    def check(self, result: Any, call: int, rounds_often: bool = False) -> float:
        first, count = self.summed()
        return protocol.error_of_sum(
            result[:count], first, self.world_size, call, rounds_often=rounds_often
        )


class AllReduce(_Sum):
    op = "all_reduce"

    def inputs(self, call: int) -> Tensors:
        return (self.of(self.rank, call),)

    def timed_inputs(self, call: int) -> Tensors:
        return (self.empty(self.whole).zero_(),)

    def alone_inputs(self, call: int) -> Tensors:
        """Return places of results, the own parts of all ranks, and the sums that others would send."""
        sums = self.of(0, call)
        for rank in range(1, self.world_size):
            sums += self.of(rank, call)
        parts = [self.of(r, call, self.own, self.part) for r in range(self.world_size)]
        return self.empty(self.whole), (torch.stack(parts), sums)

    def alone(self, output: Any, source: Any) -> Any:
        parts, sums = source
        first, end = self.own, self.own + self.part
        super().alone(output[first:end], parts)
        output[:first].copy_(sums[:first])
        output[end:].copy_(sums[end:])
        return output


class AllGather(_Copying):
    op = "all_gather"
    torch_names = ("all_gather_single", "all_gather_into_tensor")
    pieces = _Copying._parts_of_all

    @property
    def message_bytes(self) -> int:
        return self.nbytes // self.world_size

    def inputs(self, call: int) -> Tensors:
        return self.empty(self.whole), self.of(self.rank, call, count=self.part)


class ReduceScatter(_Sum):
    op = "reduce_scatter"
    torch_names = ("reduce_scatter_single", "reduce_scatter_tensor")

    def inputs(self, call: int) -> Tensors:
        return self.empty(self.part), self.of(self.rank, call)

    def summed(self) -> tuple[int, int]:
        return self.own, self.part


class AllToAll(_Copying):
    op = "all_to_all"

    def call(self, library: Any, *arguments: Any, **how: Any) -> Any:
        library.all_to_all_single(*arguments)
        return arguments[0]

    def pieces(self) -> list[tuple[int, int, int]]:
        return [(rank, self.own, self.part) for rank in range(self.world_size)]


class Barrier(_Copying):
    """Moves nothing, so there is no size, no bandwidth and nothing to check."""

    op = "barrier"
    sizes = ()
    without = "moves nothing, so it has no size"

    def __init__(self, place: Place, dtype: torch.dtype) -> None:
        self.dtype, self.shape = dtype, {"bytes": 0}
        self.nbytes, self.bus_factor = 0, None

    def pieces(self) -> list[tuple[int, int, int]]:
        return []

    def inputs(self, call: int) -> Tensors:
        return ()

    def call(self, library: Any, *arguments: Any, **how: Any) -> Any:
        library.barrier()


class Broadcast(_Copying):
    op = "broadcast"

    def inputs(self, call: int) -> Tensors:
        return self.empty(self.whole) if self.rank else self.of(0, call), 0

    def pieces(self) -> list[tuple[int, int, int]]:
        return [(0, 0, self.whole)]


class Reduce(_Sum):
    op = "reduce"

    def inputs(self, call: int) -> Tensors:
        return self.of(self.rank, call), 0

    def timed_inputs(self, call: int) -> Tensors:
        return self.empty(self.whole).zero_(), 0

    def summed(self) -> tuple[int, int]:
        return 0, 0 if self.rank else self.whole


class Gather(_Copying):
    op = "gather"

    def inputs(self, call: int) -> Tensors:
        part = self.of(self.rank, call, count=self.part)
        if self.rank:
            return part, None, None
        output = self.empty(self.whole)
        return part, list(output.chunk(self.world_size)), output

    def call(self, library: Any, *arguments: Any, **how: Any) -> Any:
        part, parts, output = arguments
        library.gather(part, parts, 0)
        return output

    def pieces(self) -> list[tuple[int, int, int]]:
        return [] if self.rank else self._parts_of_all()


class Scatter(_Copying):
    op = "scatter"

    def inputs(self, call: int) -> Tensors:
        parts = None if self.rank else list(self.of(0, call).chunk(self.world_size))
        return self.empty(self.part), parts, 0

    def pieces(self) -> list[tuple[int, int, int]]:
        return [(0, self.own, self.part)]


class SendRecv(_Copying):
    """Send to the next rank, receive from the one before."""

    op = "send_recv"
    least_ranks = 2

    def call(self, library: Any, *arguments: Any, **how: Any) -> Any:
        output, x = arguments
        after, before = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        ops = [library.P2POp(library.isend, x, after), library.P2POp(library.irecv, output, before)]
        for work in library.batch_isend_irecv(ops):
            work.wait()
        return output

    def pieces(self) -> list[tuple[int, int, int]]:
        return [((self.rank - 1) % self.world_size, 0, self.whole)]

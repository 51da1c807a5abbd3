"""Ops whose results are rows: what is common to those with a matmul, a norm or an attention.

Results are compared with float64 in 1 row of 16, others in every call, all columns: a tile has at least
16 rows, so none is left out; up to 512 rows all are.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from interlace import reference
from interlace.arguments import checks
from interlace.benchmark.subjects.plain import Tensors
from interlace.benchmark.timing import payload
from interlace.runtime.core.place import Place
from interlace.runtime.tuning.tuning import Problem

ALL_ROWS = 512
ROW_STEP = 16
INPUT, WEIGHT = 0, 1
Expected = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # value, bound, looser bound


class ByRows(ABC):
    """One op of a rank. ``m`` are all rows; ``settings``: what it has besides sizes."""

    op: str
    algorithms: tuple[str, ...] = checks.ALGORITHMS
    sizes: tuple[str, ...] = ("m", "n", "k")
    without = "has a shape; it takes --m, --n and --k"  # of other sizes
    defaults: ClassVar[dict[str, str]] = {}  # of sizes
    settings: tuple[str, ...] = ()
    shards = False  # whether the rows of a tuned problem are those of one rank
    varied: tuple[dict[str, int], ...] = ()  # values that tune tries with the kernels
    parted = ""  # "n" or "k", if ranks have equal parts of it
    scatters = False  # whether a result has this rank's rows only
    nbytes: int
    bus_factor: float | None
    flops: float = 0.0

    def __init__(self, place: Place, dtype: torch.dtype, *sizes: int) -> None:
        self.device, self.dtype = place.device, dtype
        self.rank, self.world_size = place.rank, place.world_size
        self.shape = dict(zip(self.sizes, sizes, strict=True))
        self.m, self.n = self.shape["m"], self.shape["n"]
        self.rows = self.m // self.world_size
        self.own = self.rank * self.rows  # the first row of this rank's part
        # first of the rows of the whole that a result has, and how many
        self.result_rows = (self.own, self.rows) if self.scatters else (0, self.m)
        self._expected: dict[int, Expected] = {}

    @classmethod
    def refuse(cls, world_size: int, m: int | None, dtype: str) -> None:
        """Raise ValueError if the op cannot be so."""
        if not dtype.startswith(("float", "bfloat")):
            raise ValueError(f"--dtype {dtype}: {cls.op} computes with floats")
        if (m or 0) % world_size:
            raise ValueError(
                f"--m {m}: {cls.op} shards rows, and world size {world_size} does not divide them"
            )

    @classmethod
    def refuse_widths(cls, world_size: int, n: int, k: int) -> None:
        """The same for the sizes besides rows."""
        size = {"": 0, "n": n, "k": k}[cls.parted]
        if size % world_size:
            raise ValueError(
                f"--{cls.parted} {size}: {cls.op} gives ranks parts of it, world size {world_size} does "
                "not divide it"
            )

    @classmethod
    def refuse_settings(cls, n: int, **settings: Any) -> None:
        """The same for what there is besides sizes; here nothing."""
        assert not settings, cls.op

    @classmethod
    def elements(cls, *sizes: int, **settings: Any) -> int:
        """The elements of a rank's tensors, or more: whether there is memory for them is asked before."""
        return math.prod(sizes)

    @classmethod
    def problem(cls, dtype: torch.dtype, sizes: Sequence[int], world_size: int) -> Problem:
        """What ``tune`` keeps of the op at these sizes, as the op itself asks for it."""
        m, n, k = (*sizes, 1)[:3]
        rows = m // world_size if cls.shards else m
        return Problem(cls.op, dtype, rows, n, k, world_size)

    @abstractmethod
    def inputs(self, call: int) -> Tensors:
        """Arguments of :meth:`ours` and :meth:`theirs`."""

    def timed_inputs(self, call: int) -> Tensors:
        return self.inputs(call)

    def ours(self, algorithm: str) -> Callable[..., Any]:
        """The op of interlace."""
        raise NotImplementedError

    @abstractmethod
    def theirs(self, *tensors: Any) -> Any:
        """torch's operators, and collectives of torch.distributed's default group."""

    @abstractmethod
    def alone_inputs(self, call: int) -> Tensors:
        """Arguments of :meth:`alone`."""

    @abstractmethod
    def alone(self, *tensors: Any) -> Any:
        """torch's operators in this rank's memory, on what all ranks bring."""

    def symmetric(self, group_name: str) -> Callable[..., Any]:
        """torch's own fused op, over symmetric memory. Raises ValueError where torch has none."""
        raise ValueError(f"--baseline symm_mem: torch has no fused {self.op}")

    @abstractmethod
    def expected(self, rows: torch.Tensor, call: int) -> Expected:
        """Right values and bounds for these rows of the result of ``call``."""

    def compared(self, call: int) -> torch.Tensor:
        """The rows of a result that are compared in ``call``."""
        count = self.result_rows[1]
        step = 1 if count <= ALL_ROWS else ROW_STEP
        return torch.arange(call % step, count, step, device=self.device)

    def check(self, result: Any, call: int, rounds_often: bool = False) -> float:
        rows = self.compared(call)
        if call not in self._expected:
            self._expected[call] = self.expected(rows, call)
        value, bound, looser = self._expected[call]
        if result.shape[0] != self.result_rows[1]:
            return float("inf")
        return reference.worst_ratio(result[rows], value, looser if rounds_often else bound)

    def matrix(self, what: int, rows: int, columns: int, rank: int, call: int) -> torch.Tensor:
        """The payload of ``rank``, of which ``what`` tells the inputs of a call apart."""
        number = 2 * call + what
        flat = payload.vector(0, rows * columns, rank, number, self.dtype, self.device)
        return flat.view(rows, columns)

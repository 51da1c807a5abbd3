"""``python -m interlace check``: every kernel, at several shapes and world sizes, against float64.

On ``cpu`` the kernels run interpreted in ``sim``; on ``cuda`` the same kernels run compiled, with virtual
ranks on the current GPU. A line per case shows the worst error as a share of the error that the dtypes
allow. The exit code is 0 only if no share exceeds 1, and 3 if only time was too short.
"""

import itertools
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

import interlace
from interlace import functional, reference
from interlace.arguments.words import RunPlace
from interlace.benchmark import protocol
from interlace.benchmark.expert_rows import AllToAllGroupedRows
from interlace.benchmark.requests import FUSED, OPS, TUNED
from interlace.groups.groups import default_group
from interlace.ops.collectives.launch import MOST_BYTES
from interlace.ops.library import BY_NAME
from interlace.ops.matmul.formats import FORMATS
from interlace.ops.matmul.reduce import ONE_SHOT_BYTES
from interlace.output.consoles import write
from interlace.output.options import CommandOptions, option, positive_int, seed_number
from interlace.runtime.places.gpu import driver
from interlace.runtime.tuning import configuration
from interlace.tools.catalogue.catalogue import ARCHES, BY_ENGINE, DTYPES, ROLES, entries
from interlace.tools.targets import CALLS, TARGETS

Sizes = tuple[int, ...]


@dataclass
class CheckCase(ABC):
    """A case. ``kernels``: the kernels of the catalogue that it runs. ``overrides``: configuration values.

    ``branch``: what the kernels do only on request, with tiles or instructions for it.
    ``by_switch``: it needs a multicast address. ``by_kernels``: streams of a GPU signal by kernels, and
    not by words that the driver writes.
    """

    op: str
    variant: str
    world_size: int
    sizes: Sizes
    dtype: str
    kernels: tuple[str, ...]
    _: KW_ONLY
    overrides: Mapping[str, int | bool] = field(default_factory=dict)
    branch: str = ""
    by_switch: bool = False
    by_kernels: bool = False
    unit: ClassVar[str] = "elements"  # the unit, if the shape is one number

    @property
    def shape(self) -> str:
        return " x ".join(map(str, self.sizes)) + f" {self.unit}" * (len(self.sizes) == 1)

    @property
    def title(self) -> str:
        return f"{self.op}, {self.variant}, {self.world_size} ranks, {self.shape}, {self.dtype}"

    @contextmanager
    def circumstances(self) -> Iterator[None]:
        stream_words = driver.stream_words
        if self.by_kernels:
            driver.stream_words = lambda device: None  # type: ignore[assignment]
        try:
            with configuration.override(**self.overrides):
                yield
        finally:
            driver.stream_words = stream_words

    @abstractmethod
    def on_rank(self, seed: int) -> Any: ...

    def _on_all(self, value: torch.Tensor, bound: torch.Tensor) -> list[reference.Bounded]:
        """Return the same result for every rank."""
        return [(value, bound)] * self.world_size

    def _share_out(self, value: torch.Tensor, bound: torch.Tensor) -> list[reference.Bounded]:
        """Return a part of the result for every rank."""
        parts = (reference.split(each, self.world_size) for each in (value, bound))
        return list(zip(*parts, strict=True))

    def expected(self, seed: int) -> list[reference.Bounded]:
        """Return the expected results by rank; [] if :meth:`on_rank` returns the error ratio itself."""
        return []

    def ratio(self, results: Sequence[Any], seed: int) -> float:
        """Return the worst error over its bound, from the results of :meth:`on_rank` on every rank."""
        right = self.expected(seed)
        if not right:
            return float(max(results))
        judged = zip(results, right, strict=True)
        return max(reference.worst_ratio(result, *expected) for result, expected in judged)


@dataclass
class Verdict:
    """``ratio`` of the worst error to its bound, the text of an ``error``, why the case was ``skipped``."""

    case: CheckCase
    ratio: float
    seconds: float
    error: str = ""
    skipped: str = ""

    @property
    def passed(self) -> bool:
        return not self.error and self.ratio <= 1


def _on_rank(case: CheckCase, seed: int) -> Any:
    """Run the case on this rank; return None if it needs a switch and there is none."""
    if case.by_switch and not default_group().arena.multicast():
        return None
    return case.on_rank(seed)


def run_case(case: CheckCase, device: str, seed: int) -> Verdict:
    start = time.perf_counter()
    place: RunPlace = "cuda" if device == "cuda" else "sim"
    try:
        with case.circumstances():
            results = interlace.run(_on_rank, case.world_size, case, seed, place=place, seed=seed)
        if results[0] is None:
            return Verdict(case, 0.0, 0.0, skipped="memory has no multicast address here")
        elapsed = time.perf_counter() - start
        return Verdict(case, case.ratio(results, seed), elapsed)
    except Exception as error:
        elapsed = time.perf_counter() - start
        return Verdict(case, float("inf"), elapsed, f"{type(error).__name__}: {error}")


Variant = tuple[str, dict[str, Any], Mapping[str, int | bool]]  # name, arguments, configuration
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
RECORDS = {**BY_NAME, **{each.name: op for op in BY_NAME.values() for each in op.variants}}
"""By the name of an op, or of a variant of an op."""
OF_STREAMS = ("wait_credits_kernel", "finish_kernel")
"""Kernels that streams of a GPU launch around copies; streams of ``sim`` need none."""


@dataclass
class DenseCase(CheckCase):
    """``arguments`` of the op, besides tensors. ``sizes``: m, n, k, or the elements of a collective."""

    arguments: dict[str, Any] = field(default_factory=dict)

    def _random(self, seed: int, rank: int, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        return torch.randn(*shape, generator=generator).to(DTYPES[self.dtype])

    def _inputs(self, seed: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (input, weight) of a rank; shards are uneven, weights of an all-gather are the same."""
        if self.op in COLLECTIVES:
            return self._random(seed, rank, *self.sizes), torch.empty(0)
        m, n, k = self.sizes
        if self.op == "all_gather_matmul":
            shard = self._random(seed, rank, m // self.world_size + (3 * rank) % 7, k)
            return shard, self._random(seed, 99, n, k).t()
        return self._random(seed, rank, m, k), self._random(seed, 50 + rank, k, n)

    def _bias(self, seed: int) -> torch.Tensor | None:
        return self._random(seed, 77, self.sizes[1]) if self.arguments.get("bias") else None

    def on_rank(self, seed: int) -> torch.Tensor:
        device, rank = interlace.device(), interlace.get_rank()
        input, weight = (tensor.to(device) for tensor in self._inputs(seed, rank))
        if self.op in COLLECTIVES:
            return self._collective(input, rank).cpu()
        bias = self._bias(seed)
        arguments = {**self.arguments, "bias": None if bias is None else bias.to(device)}
        result: torch.Tensor = getattr(interlace, self.op)(input, weight, **arguments)
        return result.cpu()

    def _collective(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        op = getattr(interlace, self.op)
        if self.op == "all_reduce":
            op(x, **self.arguments)
            return x
        if self.op == "all_gather":
            source: Any = x
            count = self.world_size * x.numel()
        else:
            source = [part.contiguous() for part in reference.split(x, self.world_size)]
            count = source[rank].numel()
        output = torch.full((count,), torch.nan, dtype=x.dtype, device=x.device)
        op(output, source, **self.arguments)
        return output

    def expected(self, seed: int) -> list[reference.Bounded]:
        operands = (self._inputs(seed, rank) for rank in range(self.world_size))
        inputs, weights = zip(*operands, strict=True)
        dtype, bias = DTYPES[self.dtype], self._bias(seed)
        reduce_op = self.arguments.get("reduce_op", "sum")
        if self.op == "all_gather_matmul":
            gathered = reference.all_gather_matmul(
                inputs, weights[0], dtype, bias=bias, roundings=2
            )
            return self._on_all(*gathered)
        if self.op == "all_gather":
            whole = torch.cat(inputs).double()
            return self._on_all(whole, torch.zeros_like(whole))
        if self.op in COLLECTIVES:
            value, bound = reference.reduce(inputs, reduce_op)
        else:
            value, bound = reference.matmul_all_reduce(inputs, weights, dtype, bias, reduce_op)
        return self._share_out(value, bound) if "scatter" in self.op else self._on_all(value, bound)


def _fused() -> dict[str, list[Variant]]:
    plain: list[Variant] = [(name, {"algorithm": name}, {}) for name in ("pipelined", "unfused")]
    fused = {"algorithm": "fused"}
    average = {**fused, "reduce_op": "avg"}
    reduce: list[Variant] = [
        ("fused", {**fused, "bias": True}, {}),
        ("fused, pointers, avg", average, {"descriptors": False}),
        *plain,
    ]
    return {
        "all_gather_matmul": [
            ("fused, copiers", fused, {}),
            ("fused, copy engine", {**fused, "bias": True}, BY_ENGINE),
            ("fused, pointers", fused, {"descriptors": False}),
            ("fused, by switch", fused, {"multimem": True}),
            *plain,
        ],
        "matmul_reduce_scatter": reduce,
        "matmul_all_reduce": reduce,
    }


def _kernels(
    op: str, algorithm: str, sizes: Sizes, dtype: str, of_streams: tuple[str, ...]
) -> tuple[str, ...]:
    if op == "matmul_all_reduce" and algorithm == "fused":
        large = sizes[0] * sizes[1] * DTYPES[dtype].itemsize > ONE_SHOT_BYTES
        op = "matmul_reduce_scatter" if large else op
    of_op = tuple(BY_NAME[op].algorithms[algorithm])
    return of_op if of_op or algorithm == "unfused" else of_streams


def roles(world_size: int, sizes: Sizes, dtype: str) -> Iterator[CheckCase]:
    """Yield cases for 9.x: warps that load, multiply or store."""
    for op, more in (("all_gather_matmul", ()), ("matmul_reduce_scatter", ("sum_tiles_kernel",))):
        kernels = (f"{op}_roles_kernel", *more)
        about = op, "fused, roles", world_size, sizes, dtype, kernels
        yield DenseCase(*about, overrides=ROLES, arguments={"algorithm": "fused"})


def signals(world_size: int) -> Iterator[CheckCase]:
    """Yield a copy whose arrival a kernel signals, as if the driver had no words of streams."""
    about = "all_gather", "copy, signals by kernels", world_size, (14336,), "bf16"
    options = {"algorithm": "copy"}
    kernels = "publish_kernel", "wait_kernel", *OF_STREAMS
    yield DenseCase(*about, kernels, by_kernels=True, arguments=options)


def dense(device: str, world_size: int) -> Iterator[CheckCase]:
    """Yield dense cases. On a GPU the shapes are large enough for several waves of tiles."""
    shapes = [(96, 80, 64), (61, 45, 37)]
    if device == "cuda":
        shapes = [(2048, 1024, 512), (256, 512, 512), (1000, 520, 264), (61, 45, 37)]
    of_streams: tuple[str, ...] = ()
    if device == "cuda":
        of_streams = (*("wait_kernel",) * (world_size > 1), *OF_STREAMS)
    names = ("bf16", "fp32", "fp16")
    for number, sizes in enumerate(shapes):
        main_tile = device == "cuda" and number == 0  # the other tiles take turns
        for dtype in names if main_tile else (names[(number + world_size) % 3],):
            for op, variants in _fused().items():
                for variant, arguments, overrides in variants:
                    yield DenseCase(
                        *(op, variant, world_size, sizes, dtype),
                        _kernels(op, arguments["algorithm"], sizes, dtype, of_streams),
                        overrides=overrides,
                        by_switch="multimem" in overrides,
                        arguments=arguments,
                    )
            elements = 7 * sizes[0]
            for op, algorithm in itertools.product(COLLECTIVES, ("kernel", "copy", "low_latency")):
                fits = op != "reduce_scatter" and 4 * elements <= MOST_BYTES
                if fits or algorithm != "low_latency":
                    kernels = _kernels(op, algorithm, (elements,), dtype, of_streams)
                    about = op, algorithm, world_size, (elements,), dtype, kernels
                    yield DenseCase(*about, arguments={"algorithm": algorithm})


class _CountedRows(AllToAllGroupedRows):
    """Counts that stay on the device, under a bound for every rank's rows."""

    def ours(self, algorithm: str) -> Callable[..., Any]:
        splits = torch.full((self.world_size,), self.rows, device=self.device)

        def run(input: torch.Tensor, weight: torch.Tensor, buffer: object) -> torch.Tensor:
            output, _ = interlace.all_to_all_grouped_matmul(
                input, weight.unsqueeze(0), splits, num_max_rows_per_rank=self.m
            )
            return output[: self.m]

        return run


COUNTED = "counts on the device"


@dataclass
class RowsCase(CheckCase):
    """``variant`` is the algorithm, then a comma and other properties, which ``settings`` ask for."""

    settings: tuple[tuple[str, int | str], ...] = ()
    unit = "bytes"

    @property
    def algorithm(self) -> str:
        return self.variant.partition(",")[0]

    def subject(self) -> Any:
        kind: Any = _CountedRows if self.variant == COUNTED else OPS[self.op]
        place = default_group().place
        return kind(place, DTYPES[self.dtype], *self.sizes, **dict(self.settings))

    def on_rank(self, seed: int) -> float:
        op, call = self.subject(), seed % 1000
        result = op.ours(self.algorithm)(*op.inputs(call))
        protocol.finish(virtual=op.device.type == "cuda")
        return float(op.check(result, call))


def _kernels_of(op: str, algorithm: str) -> Sequence[str]:
    """Return the kernels of the record; a backward runs its forward before."""
    if algorithm == COUNTED:
        return ("counted_grouped_matmul_kernel",)
    before = _kernels_of(op.removesuffix("_backward"), algorithm) if "_backward" in op else ()
    return (*before, *RECORDS[op].algorithms[algorithm])


class _CheckedOp(NamedTuple):
    """An op of ``bench``, or a ``branch`` of its kernels, which ``sizes`` or ``settings`` choose.

    ``sizes``: in ``sim`` and on a GPU. ``ways``: the algorithms. ``dtypes``: on a GPU, of which ``sim``
    has the first.
    """

    op: str
    sizes: tuple[Sizes, Sizes]
    ways: tuple[str, ...] = ("fused",)
    dtypes: tuple[str, ...] = ("bf16",)
    settings: tuple[tuple[str, int | str], ...] = ()
    branch: str = ""


_HEADS_OF = tuple(op for op, kind in TUNED.items() if "key_heads" in kind.settings)
_WIDE = (48, 48, 160), (128, 1024, 512)  # more numbers along k than the 128 of a step
_BY_SIZES = {
    ("m", "n", "k"): ((48, 48, 24), (1024, 1024, 512)),
    ("m", "n"): ((48, 40), (1024, 2048)),
}
_SIZES: dict[str, tuple[Sizes, Sizes]] = {
    **dict.fromkeys(_HEADS_OF, ((48, 4, 16), (1024, 8, 128))),
    "matmul_all_reduce_norm": ((48, 48, 24), (128, 1024, 512)),  # all-reduce is one kernel
    "all_reduce_norm": ((48, 32), (8, 1024)),
    **dict.fromkeys(FUSED, _WIDE),
}
"""Sizes that are not those of all ops with a shape of that kind."""
_WAYS = {
    "context_parallel_attention": ("all_gather fused", "ring fused", "ulysses fused"),
    "context_parallel_attention_backward": ("all_gather fused", "ring fused"),
    "all_reduce_norm": ("low_latency",),
    "all_to_all_grouped_matmul": ("fused", COUNTED),
}
_ROWS = {
    op: _CheckedOp(op, _SIZES.get(op) or _BY_SIZES[kind.sizes], _WAYS.get(op, ("fused",)))
    for op, kind in TUNED.items()
}
"""Ops of ``bench``. Those in ``FUSED`` have block-scaled operands here; :func:`dense` has others."""
for _op in _HEADS_OF:  # the tiles of heads depend on size and dtype
    _ROWS[_op] = _ROWS[_op]._replace(dtypes=("bf16", "fp16", "fp32"), settings=(("key_heads", 2),))
_WITHOUT_BRANCHES = (
    *(_ROWS[op] for op in _ROWS if op not in FUSED),
    *(_CheckedOp(op, ((4096,), (1 << 20,)), ("multimem",)) for op in COLLECTIVES),
    _CheckedOp("broadcast", ((4096,), (1 << 14,)), ("low_latency",)),
)
_NORMS = ("reduce_scatter_norm", "matmul_reduce_scatter_norm", "all_reduce_norm")


def _branch(
    op: str,
    branch: str,
    sizes: tuple[Sizes, Sizes] | None = None,
    dtypes: tuple[str, ...] = ("bf16",),
    **settings: int | str,
) -> _CheckedOp:
    plain = _ROWS[op]
    pairs = (*plain.settings, *settings.items())
    return _CheckedOp(op, sizes or plain.sizes, plain.ways[:1], dtypes, pairs, branch)


_BRANCHES = (
    *(
        _branch(op, f"heads of {size}", ((24, 4, size), (512, 4, size)), ("bf16", "fp32"))
        for size in (64, 256)
        for op in _HEADS_OF
    ),
    _branch("distributed_decode", "pages", paged=True),
    *(_branch(op, name, quantize=name) for name in ("fp8", *FORMATS) for op in _NORMS),
    *(_branch(op, "layer norm", norm="layer") for op in _NORMS),
    _branch("dispatch", "fp8", ((48, 128), (1024, 2048)), use_fp8=True),
    *(
        _branch(op, f"{name} operands", _WIDE, format=name)
        for name in FORMATS
        for op in (*FUSED, "grouped_matmul_combine")
    ),
    *(_branch("dispatch", f"{name} tokens", format=name) for name in FORMATS),
)


def rows(device: str, world_size: int, ops: Iterable[_CheckedOp]) -> Iterator[CheckCase]:
    on_gpu = device == "cuda"
    for each in ops:
        for way in each.ways:
            for dtype in each.dtypes if on_gpu else each.dtypes[:1]:
                yield RowsCase(
                    *(each.op, ", ".join(filter(None, (way, each.branch))), world_size),
                    *(each.sizes[on_gpu], dtype, tuple(_kernels_of(each.op, way))),
                    branch=each.branch,
                    by_switch=way == "multimem",
                    settings=each.settings,
                )


OUTPUT = torch.bfloat16
GATHER, REDUCE = "all_gather_scaled_matmul", "scaled_matmul_reduce_scatter"


@dataclass
class ScaledCase(CheckCase):
    def _operands(
        self, seed: int, rank: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return input, weight and scales. The weight is contiguous along K, and equal if ranks gather."""
        (m, n, k), gathers = self.sizes, self.op == GATHER
        of_rank = torch.Generator().manual_seed(1000 * seed + rank)
        of_weight = torch.Generator().manual_seed(1000 * seed + (99 if gathers else 50 + rank))
        rows = m // self.world_size if gathers else m
        input = torch.randint(-3, 4, (rows, k), generator=of_rank)
        weight = torch.randint(-3, 4, (n, k), generator=of_weight)
        scales = torch.rand(rows, 1, generator=of_rank), torch.rand(1, n, generator=of_weight)
        fp8 = (each.to(torch.float8_e4m3fn) for each in (input, weight))
        input, weight = fp8
        return input, weight.t(), scales[0] + 0.5, scales[1] + 0.5

    def on_rank(self, seed: int) -> torch.Tensor:
        operands = self._operands(seed, interlace.get_rank())
        op = getattr(functional, self.op)
        on_device = [operand.to(interlace.device()) for operand in operands]
        output = op(*on_device, out_dtype=OUTPUT, algorithm=self.variant)
        return functional.wait(output).cpu()

    def expected(self, seed: int) -> list[reference.Bounded]:
        operands_of = [self._operands(seed, rank) for rank in range(self.world_size)]
        products = [reference.scaled_matmul(*operands) for operands in operands_of]
        if self.op == GATHER:
            value, bound = (torch.cat(each) for each in zip(*products, strict=True))
            return self._on_all(value, reference.rounded(bound, value, OUTPUT))
        unit = reference.unit_roundoff(torch.float32)
        value, bound = reference.sum_of_rounded(products, OUTPUT, unit)
        return self._share_out(value, reference.rounded(bound, value, OUTPUT))


def scaled_cases(device: str, world_size: int) -> Iterator[CheckCase]:
    sizes = (2048, 1024, 512) if device == "cuda" else (48, 32, 48)
    for op in (GATHER, REDUCE):
        kernels = tuple(BY_NAME[op].algorithms["fused"])
        yield ScaledCase(op, "fused", world_size, sizes, "fp8", kernels, branch="fp8")


@dataclass
class TargetCase(CheckCase):
    """A target of ``interlace verify`` with whole numbers: results are exact, otherwise it raises."""

    unit = "calls"

    def on_rank(self, seed: int) -> float:
        TARGETS[self.op].variants[self.variant]()
        return 0.0


@dataclass
class HandleCase(CheckCase):
    """A tensor in symmetric memory: a write before a barrier and a signal is visible after them."""

    def on_rank(self, seed: int) -> float:
        memory, size = interlace.symmetric_memory, interlace.get_world_size()
        progress, tensor = torch.zeros(2, dtype=torch.uint32), memory.empty(4)
        handle = memory.rendezvous(tensor)
        after, before = (handle.rank + 1) % size, (handle.rank - 1) % size
        tensor.fill_(handle.rank)
        handle.barrier()
        seen = handle.get_buffer(after, (4,), tensor.dtype)
        right = bool((seen == after).all())
        handle.put_signal(after)
        handle.wait_signal(before)
        handle.stream_write_value32(progress, 1, 3)
        return 0.0 if right and progress.tolist() == [0, 3] else float("inf")


_HANDLES = (
    "put_signal_kernel", "wait_signal_kernel", "handle_barrier_kernel", "write_value_kernel",
)  # fmt: skip


def _on_nodes(target: str) -> bool:
    return target.startswith("nodes.")


def simulated_cases(world_size: int) -> Iterator[CheckCase]:
    yield HandleCase("symmetric_memory", "handle", world_size, (4,), "fp32", _HANDLES)
    for name, target in TARGETS.items():
        if name == "signal" or _on_nodes(name):
            for variant in target.variants:
                yield TargetCase(name, variant, world_size, (CALLS,), "fp32", target.kernels)


WORLDS = {"cpu": (1, 2, 3, 4), "cuda": (1, 2, 4, 7)}
NODES_RANKS = 4  # two nodes of two
_BETWEEN = [kernel for name in TARGETS if _on_nodes(name) for kernel in TARGETS[name].kernels]
_ROLES = "all_gather_matmul_roles_kernel", "matmul_reduce_scatter_roles_kernel", "sum_tiles_kernel"
WITHOUT = {
    "cpu": dict.fromkeys(_ROLES, "needs a GPU of 9.x"),
    "cuda": dict.fromkeys(_BETWEEN, "runs between nodes: one GPU has one")
    | dict.fromkeys(_HANDLES, "uses handles on a CPU: on a GPU they are torch's own"),
}
"""By device, the reason why a kernel has no case."""


def every_kernel() -> list[str]:
    return list(dict.fromkeys(each.kernel for arch in ARCHES for each in entries(arch)))


def most_telling_first(cases: Iterable[CheckCase]) -> list[CheckCase]:
    """Return a case for each kernel, or branch of one, on each number of ranks first, then the others."""
    seen: set[tuple[int, str, str]] = set()
    first: list[CheckCase] = []
    rest: list[CheckCase] = []
    for case in cases:
        runs = {(case.world_size, case.branch, kernel) for kernel in case.kernels}
        (first if runs - seen else rest).append(case)
        seen |= runs
    return first + rest


def cases(device: str, *, has_roles: bool = True) -> list[CheckCase]:
    found: list[CheckCase] = []
    for world_size in WORLDS[device]:
        found += dense(device, world_size)
        if world_size <= 4:  # heads and rows are shared out evenly
            found += rows(device, world_size, _WITHOUT_BRANCHES)
            found += scaled_cases(device, world_size)
        if device == "cuda" and world_size > 1:
            found += signals(world_size)
        if device == "cuda" and has_roles:
            found += roles(world_size, (2048, 1024, 512), "bf16")
        if device == "cpu" and world_size == NODES_RANKS:
            found += simulated_cases(world_size)
        if world_size <= 4:
            found += rows(device, world_size, _BRANCHES)
    return most_telling_first(found)


def titles_by_kernel(device: str) -> dict[str, list[str]]:
    """Return, by kernel of the catalogue, the titles of the cases that run it, or why there is none."""
    titles: dict[str, list[str]] = {kernel: [] for kernel in every_kernel()}
    for case in cases(device):
        for kernel in case.kernels:
            titles[kernel].append(case.title)
    why = WITHOUT[device]
    return {name: found or [why.get(name, "no case runs it")] for name, found in titles.items()}


LEFT_OUT = 3  # the exit code if time was too short and all cases that ran have passed


@dataclass(frozen=True)
class CheckOptions(CommandOptions):
    """Run every kernel against float64 references, the most informative cases first."""

    statuses = (
        (1, "a case failed"),
        (LEFT_OUT, "all cases that ran have passed, and there was no time for the others"),
    )

    device: str | None = option(
        None, choices=("cpu", "cuda"), help="device (default: cuda if there is a GPU)"
    )
    seed: int = option(0, type=seed_number, help="seed of the inputs (default 0)")
    ranks: tuple[int, ...] = option(
        (),
        type=positive_int,
        action="append",
        metavar="N",
        help="run only cases on this number of ranks; may be repeated",
    )
    seconds: float | None = option(
        None,
        type=positive_int,
        metavar="S",
        help="start no case after this number of seconds; cases left out are counted",
    )
    list: bool = option(
        False, action="store_true", help="print the kernels and their cases, and run nothing"
    )
    json: bool = option(False, action="store_true", help="print JSON")

    def chosen_device(self) -> str:
        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")

    def interprets(self) -> bool:
        return self.chosen_device() == "cpu"


def check(console: Any, options: CheckOptions) -> int:
    """Print a line per case; return 0 if all pass, 1 if one fails, LEFT_OUT if only time was too short."""
    device, ranks, seconds = options.chosen_device(), options.ranks, options.seconds
    if options.list:
        return _list(console, device, options)
    if device == "cuda" and not torch.cuda.is_available():
        raise interlace.PlaceUnavailableError(
            "check --device cuda needs a CUDA device, and torch sees none; use --device cpu"
        )
    has_roles = device == "cuda" and torch.cuda.get_device_capability()[0] == 9
    all_cases = cases(device, has_roles=has_roles)
    chosen = [case for case in all_cases if not ranks or case.world_size in ranks]
    if not chosen:
        raise ValueError(f"ranks: check --device {device} has no cases on {sorted(ranks)} ranks")
    verdicts: list[Verdict] = []
    end = time.monotonic() + (float("inf") if seconds is None else seconds)
    for case in chosen:
        if time.monotonic() > end:
            break
        verdict = run_case(case, device, options.seed)
        verdicts.append(verdict)
        if not options.json:
            console.print(_line(verdict), soft_wrap=True)
    failed = [verdict for verdict in verdicts if not verdict.passed]
    left_out = len(chosen) - len(verdicts)
    if options.json:
        document = {
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "torch": torch.__version__,
            "seed": options.seed,
            "left_out": left_out,
            "cases": [asdict(v) | {"passed": v.passed} for v in verdicts],
        }
        print(json.dumps(document, indent=1))
    else:
        skipped = sum(bool(verdict.skipped) for verdict in verdicts)
        counts = f"{len(verdicts) - len(failed) - skipped} passed, {len(failed)} failed on {device}"
        counts += f", {skipped} skipped" if skipped else ""
        console.print(counts + (f", {left_out} left out after {seconds:g} s" if left_out else ""))
    return 1 if failed else LEFT_OUT if left_out else 0


def _line(verdict: Verdict) -> str:
    case = verdict.case
    begin = f"{case.op:<35} {case.variant:<30} W={case.world_size} {case.shape:<17} {case.dtype:<4}"
    if verdict.skipped:
        return f"[yellow]skip[/yellow]  {begin}  {verdict.skipped}"
    mark = "[green]pass[/green]" if verdict.passed else "[red]FAIL[/red]"
    error = f"  {verdict.error.splitlines()[0]}" if verdict.error else ""
    figures = f"{verdict.ratio:5.2f} of bound  {verdict.seconds * 1e3:6.0f} ms"
    return f"{mark}  {begin}  {figures}{error}"


def _list(console: Any, device: str, options: CheckOptions) -> int:
    found = titles_by_kernel(device)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        for kernel, titles in found.items():
            write(console, "\n  ".join([kernel, *titles]))
    return 0

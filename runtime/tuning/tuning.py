"""The choice of algorithm and configuration for a fused op: looked up, predicted, or the default.

``docs/how-to/gpu/tune.md`` lists the sources in their order, and says what a bucket is and how ranks agree
if their caches differ. All ranks must choose the same: they agree on the problem before, the arithmetic is
exact, and the table is part of the package. Calibrations are exchanged whole, and rank 0's counts.

Thresholds, not the cost model, decide which algorithm ``algorithm="auto"`` stands for, unless there is a
row for the shape of a call. In ``sim`` it is always the kernel, because ``sim`` exists to run kernels. On
CPUs, unfused matmul + reduce-scatter is up to 21 % faster and at most 2 % slower at all sizes (2 and 4
ranks on 2 cores, float32, 2026-11-20): one large torch.mm beats one per owner.

This file also predicts times, from links that ``calibration.py`` has measured or from data sheets. These
are closed forms of what ``benchmarks/predict.py`` simulates event by event::

    matmul  = max(waves of tiles * time of a tile + chunks of a program * cost of a chunk,
                  bytes read / memory bandwidth)
    gather  = bytes received / bandwidth of the sender, and some time per chunk
    fused   = max(matmul, gather + what remains to be multiplied when the last chunks have arrived)

Use them only to rank configurations. The figures are predictions from data sheets and assumptions
(``table.py``) and were not compared with measurements. They use only sums, products and quotients, so that
every rank of a group computes the same bits.
"""

import functools
import os
import pathlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch

from interlace.kernels.launch_formulas import ceil_div, chunk_rows
from interlace.runtime.core import plain
from interlace.runtime.core.call import Call
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.context import Overrides, current
from interlace.runtime.core.place import Place
from interlace.runtime.tuning import calibration, configuration, files, table
from interlace.runtime.tuning.configuration import Configuration
from interlace.runtime.tuning.table import Chip, threshold

NEAR = 2
MOST_CHOICES = 1024
MIXED = 0  # not a chip's capability: tiles that run on any
SMALLEST_PIPELINED_SHARD_US = table.threshold("smallest_pipelined_shard_us")


LARGE_TILE = 128 * 256
HOST_US = 150.0  # assumed: a call without a plan
SEND_US = 12.0  # published: 5-7 us each for a copy and its signal (arXiv 2602.21548)
WORTH_IT = 1.05  # the predicted gain from which another configuration replaces the default


@dataclass(frozen=True)
class Machine:
    """A machine as the model knows it. Seconds, bytes per second, floating-point operations per second.

    ``bandwidth``: of a collective, in bytes received by one rank. ``fused_bandwidth``: the same inside a
    fused op. ``latency``: of a collective without data. ``fused_host``: what a fused op costs beyond its
    parts. ``overlap``: the fraction of the shorter of its two parts that a fused op hides.

    >>> import dataclasses
    >>> dataclasses.replace(CPU, name="mine", bandwidth=4e9).bandwidth
    4000000000.0
    """

    name: str
    latency: float
    bandwidth: float
    flops: float
    fused_host: float
    fused_bandwidth: float
    overlap: float


# fmt: off
#             name   latency  bandwidth  flops   fused_host  fused_bandwidth  overlap
CPU = Machine("cpu", 100e-6,  1.7e9,     3.7e10, 250e-6,     1.8e9,           0.0)
GPU = Machine("gpu", 12e-6,   3.0e11,    5e14,   10e-6,      3.0e11,          0.8)
# fmt: on


def machine_for(device: torch.device) -> Machine:
    return CPU if device.type == "cpu" else GPU


def calibrated(size: int, device_type: str = "cpu") -> Machine:
    """Return the machine with the links that ``interlace calibrate`` has measured among ``size`` ranks.

    The line of all_gather is the one that ``algorithm="auto"`` uses. Pass the result on all ranks or on
    none. Raises LookupError if a mesh of ``size`` ranks was not measured here.

    >>> calibrated(1000)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    LookupError: no calibration of 1000 ranks for cpu in ...: run python -m interlace calibrate --mesh 1000
    """
    base, found = machine_for(torch.device(device_type)), measured_gather(size, device_type)
    if found is None:
        raise LookupError(
            f"no calibration of {size} ranks for {device_type} in {calibration.path(device_type)}: run "
            f"python -m interlace calibrate --mesh {size}"
        )
    bandwidth = found.link.received_gbs * 1e9
    return replace(
        base,
        name=f"{base.name}, calibrated {found.date}",
        latency=found.link.protocols[-1].latency_us * 1e-6,
        bandwidth=bandwidth,
        fused_bandwidth=bandwidth * base.fused_bandwidth / base.bandwidth,
    )


@plain.record
@dataclass(frozen=True)
class GatherTime:
    """The time of an all_gather among some ranks of this machine, and the date of its measurement."""

    link: calibration.Link
    date: str


def measured_gather(size: int, device_type: str) -> GatherTime | None:
    """Return the gather among ``size`` ranks, if ``interlace calibrate`` has measured it here."""
    found = calibration.find(calibration.read(device_type), calibration.OWN, (size,))
    return None if found is None else GatherTime(found.link(0, "all_gather"), found.date)


@dataclass(frozen=True)
class Problem:
    """A fused op as a rank sees it, the same on all ranks.

    ``rows``: of the longest shard, or all rows if the op does not shard them. ``columns``, ``inner``: of
    the widest weight and the longest contraction of all ranks. ``extents``: "even", "odd N" or "odd K", if
    it does not follow from them. ``format``: of packed rows; ``inner`` is then their length in bytes.
    """

    op: str
    dtype: torch.dtype
    rows: int
    columns: int
    inner: int
    world_size: int
    fast_accum: bool = True
    extents: str = ""
    format: str = ""

    @property
    def product(self) -> str:
        """The op without the norm in its tail; its products are the same."""
        return self.op.removesuffix("_norm")

    @property
    def whole(self) -> int:
        """The number of shards that a rank multiplies."""
        return 1 if self.product == "matmul_all_reduce" else self.world_size


def tile_rate(chip: Chip, configuration: Configuration) -> float:
    """Return the fraction of the tensor cores' rate for such tiles. Smaller ones load more per product."""
    rate, area = 1.0, configuration.block_m * configuration.block_n
    while area < LARGE_TILE:
        rate *= chip.small_tile_rate
        area *= 2
    return rate


def matmul_us(chip: Chip, problem: Problem, configuration: Configuration, chunks: int = 1) -> float:
    """Return the time of the persistent matmul alone; peers' shards arrive in ``chunks``; no SM copies."""
    c, p = configuration, problem
    itemsize = p.dtype.itemsize
    if itemsize not in chip.tflops:
        return float("inf")
    sms = max(1, chip.sms - (c.copiers if p.op == "all_gather_matmul" else 0))
    tiles_m = p.whole * ceil_div(p.rows, c.block_m)
    waves = ceil_div(tiles_m * ceil_div(p.columns, c.block_n), sms)
    rate = chip.tflops[itemsize] * 1e6 / chip.sms * tile_rate(chip, c)
    tile = 2.0 * c.block_m * c.block_n * p.inner / rate + chip.tile_us
    weight = p.columns * p.inner * itemsize
    bands = 1
    if weight > chip.l2_mb * 1e6 / 2:
        bands = p.whole * chunks * ceil_div(ceil_div(p.rows, c.block_m * chunks), c.group_m)
    reads = p.whole * p.rows * p.inner * itemsize + bands * weight
    # at most one for each tile, because a program skips chunks without tiles for it
    visited = min(waves, 1 + (p.whole - 1) * chunks)
    return max(waves * tile + visited * chip.chunk_us, reads / (chip.memory_gbs * 1e3))


def fused_us(chip: Chip, problem: Problem, configuration: Configuration) -> float:
    """Return the time of the whole op by its fused kernel."""
    c, p = configuration, problem
    others, itemsize = p.world_size - 1, p.dtype.itemsize
    if p.op == "all_gather_matmul":
        size = max(1, chunk_rows([p.rows], c.block_m, c.chunks))
        chunks = max(1, ceil_div(p.rows, size))
        by = min(chip.link_gbs, c.copiers * chip.copy_gbs) if c.copiers else chip.link_gbs
        sending = others * p.rows * p.inner * itemsize / (by * 1e3)
        sending += 0.0 if c.copiers else others * chunks * chip.copy_us
        matmul = matmul_us(chip, p, c, chunks)
        # each copier sends one chunk, all at once, so as many chunks are last; an engine sends one by one
        last = min(p.rows * others, size * max(1, c.copiers))
        fused = max(matmul, sending + matmul * last / max(1, p.rows * p.world_size))
        # sends by copy engine are not planned (cuda/plans.py): the host issues each of them again
        host = 0.0 if c.copiers else HOST_US + others * chunks * SEND_US
        return max(fused, host)
    pushed = others * p.rows * p.columns * itemsize / (chip.link_gbs * 1e3)
    return max(matmul_us(chip, p, c), pushed)


def fastest(
    chip: Chip,
    problem: Problem,
    default: Configuration,
    candidates: Iterable[Configuration],
    predicted: Callable[[Chip, Problem, Configuration], float] = fused_us,
) -> tuple[Configuration, float]:
    """Return the fastest by prediction, ``default`` unless it gains ``WORTH_IT``; and the gain."""
    times = {each: predicted(chip, problem, each) for each in (default, *candidates)}
    chosen = min(times, key=lambda each: times[each])
    base, least = times[default], times[chosen]
    if not least or base < least * WORTH_IT:
        return default, 1.0
    return chosen, base / least


@dataclass(frozen=True)
class Choice:
    """``algorithm``: the choice for "auto", "" if it is open. ``source``: the rule that decided."""

    configuration: Configuration
    algorithm: str
    source: str


Bucket = tuple[int, int, int, int]  # world, rows, columns, inner


def power(value: int) -> int:
    """Return the exponent of the smallest power of two that is not below ``value``.

    >>> power(1), power(4096), power(4097)
    (0, 12, 13)
    """
    return max(0, value - 1).bit_length()


def bucket_of(problem: Problem) -> Bucket:
    """Return the bucket of a problem.

    >>> bucket_of(Problem("all_gather_matmul", torch.bfloat16, 1000, 3584, 8192, 6))
    (8, 1024, 4096, 8192)
    """
    extents = (problem.world_size, problem.rows, problem.columns, problem.inner)
    world, rows, columns, inner = (1 << power(extent) for extent in extents)
    return world, rows, columns, inner


def distance(a: Bucket, b: Bucket) -> int:
    """Return the distance in doublings. One doubling of the world size counts as two."""
    steps = [abs(power(x) - power(y)) for x, y in zip(a, b, strict=True)]
    return sum(steps) + steps[0]


def dtype_name(problem: Problem) -> str:
    """Return the dtype's name in cache files: torch's, with "exact" for fp8 without ``fast_accum``."""
    if problem.format:
        return problem.format
    name = str(problem.dtype).removeprefix("torch.")
    exact = problem.dtype.itemsize == 1 and not problem.fast_accum
    return f"{name} exact" if exact else name


def extents_of(problem: Problem) -> str:
    return problem.extents or configuration.extents_class(problem.columns, problem.inner)


AnyRow = TypeVar("AnyRow", files.CacheRow, table.Shape)


def nearest(rows: Iterable[AnyRow], bucket: Bucket) -> tuple[AnyRow, int] | None:
    """Return the nearest row, if it is near, and its distance; of equally near ones the first by bucket."""

    def rank(row: AnyRow) -> tuple[int, Bucket]:
        at = (row.world, row.rows, row.columns, row.inner)
        return distance(at, bucket), at

    best = min(rows, key=rank, default=None)
    if best is None or rank(best)[0] > NEAR:
        return None
    return best, rank(best)[0]


def nearest_cached(
    rows: Sequence[files.CacheRow], problem: Problem
) -> tuple[files.CacheRow, int] | None:
    """Return the nearest row of a cache. An op with a norm uses rows of the op without, if it has none."""
    kind = dtype_name(problem), extents_of(problem)
    for op in dict.fromkeys((problem.op, problem.product)):
        same_kind = [row for row in rows if (row.op, row.dtype, row.extents) == (op, *kind)]
        if (found := nearest(same_kind, bucket_of(problem))) is not None:
            return found
    return None


def table_rows(capability: int, problem: Problem) -> list[table.Shape]:
    """Return the table's rows for the problem, all for extents that are multiples of 16."""
    dtype = configuration.dtype_class(problem.dtype, fast_accum=problem.fast_accum)
    kind = (problem.product, capability, dtype)
    rows = table.SHAPES if extents_of(problem) == "even" else ()
    return [row for row in rows if (row.op, row.arch, row.dtype) == kind]


def default(capability: int | None, problem: Problem) -> Configuration:
    """Return the table's configuration for ``problem``. ``capability`` None is the interpreter."""
    p = problem
    if capability is None:
        return configuration.interpreted_default(p.rows, p.columns, p.inner)
    kind = extents_of(p)
    extents = (p.rows, 1 if kind == "odd N" else 16, 1 if kind == "odd K" else 16)
    return configuration.gpu_default(capability, p.dtype, *extents, fast_accum=p.fast_accum)


def decide(
    capability: int | None,
    problem: Problem,
    cached: tuple[files.CacheRow, int] | None,
    *,
    algorithm: str = "auto",
    one_node: bool = True,
    gather: GatherTime | None = None,
) -> Choice:
    """Return the choice without overrides. ``cached`` is the nearest row of the cache and its distance.

    ``algorithm`` is the caller's; its measured values then count. ``gather`` is the measured speed of the
    links between the ranks, if there is one.
    """
    base = default(capability, problem)
    if problem.world_size == 1:
        return Choice(base, "", "default: a world of one")
    shape, chip = None, table.chip_of(capability or MIXED) if one_node else None
    if capability and one_node:
        shape = nearest(table_rows(capability, problem), bucket_of(problem))
    near: list[tuple[str, Choice]] = []  # the cache's choices, then the table's
    if cached is not None:
        row, steps = cached
        values = row.values.get(row.algorithm if algorithm == "auto" else algorithm, {})
        candidate = replace(base, **values)  # type: ignore[arg-type]  # checked when it was read
        if capability is None or not configuration.why_not(
            candidate, capability, problem.dtype.itemsize
        ):
            source = f"{_steps_in_words(steps)} row of the cache, measured {row.date}".rstrip()
            near.append((_steps_in_words(steps), Choice(candidate, row.algorithm, source)))
    if shape is not None:
        row_of_table, steps = shape
        source = f"{_steps_in_words(steps)} row of the table ({row_of_table.source})"
        candidate = replace(base, **row_of_table.values)
        if capability and chip:  # the row is for a bucket; the last wave depends on the very shape
            tiles = [
                replace(tile, **row_of_table.values) for tile in _tiles(capability, problem, base)
            ]
            candidate, _ = fastest(chip, problem, candidate, tiles, matmul_us)
        near.append((_steps_in_words(steps), Choice(candidate, row_of_table.algorithm, source)))
    if near:
        return min(near, key=lambda each: each[0])[1]  # "exact" before "nearest"
    if capability is None:
        return Choice(base, "", "default: blocks that cover the extents, for the interpreter")
    if chip is not None:
        by = "cost model"
        if gather is not None:
            chip = replace(chip, link_gbs=gather.link.received_gbs)
            by = f"cost model with links of {chip.link_gbs:.3g} GB/s, calibrated {gather.date}"
        best, gain = fastest(chip, problem, base, _alternatives(capability, problem, base))
        if best != base:
            return Choice(best, "", f"{by}: predicted {gain:.2f} times as fast as the default")
    known = any(tile.arch == capability // 10 for tile in table.TILES)
    of = f"sm_{capability}" if known else "any GPU"
    return Choice(base, "", f"default: the table's tiles for {of}")


def _steps_in_words(steps: int) -> str:
    return "nearest" if steps else "exact"


def _tiles(capability: int, problem: Problem, base: Configuration) -> list[Configuration]:
    dtype = configuration.dtype_class(problem.dtype, fast_accum=problem.fast_accum)
    fitting = table.tiles(capability, dtype, extents_of(problem))
    return [replace(base, **tile.values) for tile in fitting]


def _alternatives(
    capability: int, problem: Problem, base: Configuration
) -> Iterable[Configuration]:
    """Return the cost model's candidates: the table's tiles and, for a gather, ways of sending."""
    for candidate in _tiles(capability, problem, base):
        yield candidate
        if problem.op == "all_gather_matmul":
            yield from configuration.sending_candidates(candidate)


class TunedFormat(Protocol):
    """A block-scaled format, as far as a problem names it."""

    @property
    def name(self) -> str: ...
    @property
    def fast_accum(self) -> bool: ...


def tuned_as(format: TunedFormat | None) -> dict[str, Any]:
    """Return the terms of a problem that describe operands in ``format``; no terms if it is None."""
    return {} if format is None else {"fast_accum": format.fast_accum, "format": format.name}


@functools.lru_cache(maxsize=MOST_CHOICES)
def gather_problem(
    world_size: int,
    dtype: torch.dtype,
    rows: int,
    columns: tuple[int, ...],
    inner: int,
    *,
    fast_accum: bool = True,
    format: str = "",
) -> Problem:
    """Return the problem of an all-gather + matmul. ``columns`` are of all weights of all ranks."""
    kinds = {configuration.extents_class(column, inner) for column in columns}
    extents = next(kind for kind in ("odd N", "odd K", "even") if kind in kinds)
    extent = (rows, max(columns), inner, world_size)
    return Problem("all_gather_matmul", dtype, *extent, fast_accum, extents, format)


def own_gather(place: Place) -> GatherTime | None:
    """Return the gather of this rank's calibration, where it applies: among processes of one node."""
    if place.simulated or place.nodes is not None or place.virtual:
        return None
    return measured_gather(place.world_size, place.device.type)


def by_calibration(problem: Problem, gather: GatherTime) -> tuple[str, str]:
    """Return "pipelined" or "unfused" for all-gather + matmul, and the reason."""
    whole = problem.world_size * problem.rows * problem.inner * problem.dtype.itemsize
    shard_us = gather.link.us(whole) / (problem.world_size - 1)
    algorithm = "pipelined" if shard_us >= SMALLEST_PIPELINED_SHARD_US else "unfused"
    return algorithm, f"calibration of {gather.date}: {shard_us:.0f} us until a shard is here"


@dataclass
class _Agreed:
    capability: int | None
    rows: tuple[files.CacheRow, ...]
    asks: bool  # rank 0 is asked, because caches differ
    gather: GatherTime | None = None
    chosen: dict[object, Any] = field(default_factory=dict)

    def keep(self, key: object, choice: object) -> None:
        if len(self.chosen) >= MOST_CHOICES:  # true on all ranks at the same call
            self.chosen.clear()
        self.chosen[key] = choice


_groups: WeakKeyDictionary[Communicator, _Agreed] = WeakKeyDictionary()


def own_rows(place: Place) -> tuple[files.CacheRow, ...]:
    """Return the rows of this rank's cache for its machine. Read once per process and file."""
    if place.nodes is not None or (place.simulated and files.VARIABLE not in os.environ):
        return ()
    return _read(place.name, place.device, files.path())


@functools.cache
def _read(
    place: str, device: torch.device, file: pathlib.Path | None
) -> tuple[files.CacheRow, ...]:
    return files.rows_for(files.machine(place, device), file)


def forget() -> None:
    """Read the cache again at the next call of each group. All ranks of a group must do so."""
    _read.cache_clear()
    _groups.clear()


@dataclass(frozen=True)
class Measured:
    """The fastest algorithm for an op other than a matmul, and its kernel's values; empty without a row."""

    algorithm: str = ""
    values: Overrides = ()

    def over(self, base: Configuration) -> Configuration:
        """Return ``base``, which has the overrides already, with these values at lower precedence."""
        return configuration.with_overrides(base, self.values)


UNMEASURED = Measured()


def measured_choice(
    communicator: Communicator, problem: Problem, algorithm: str = "auto"
) -> Measured:
    """Like :func:`choose`, for an op that uses its own default if there is no row. Collective likewise."""
    agreed = _agreement_of(communicator, problem)
    key = ("measured", problem, algorithm)
    found = agreed.chosen.get(key)
    if found is None:
        found = UNMEASURED
        if (nearest_row := _find_row(communicator, agreed, problem)) is not None:
            row = nearest_row[0]
            values = row.values.get(row.algorithm if algorithm == "auto" else algorithm, {})
            named = "" if communicator.place.simulated else row.algorithm
            found = Measured(named, tuple(sorted(values.items())))
        agreed.keep(key, found)
    return found


def _agreement_of(communicator: Communicator, problem: Problem) -> _Agreed:
    agreed = _groups.get(communicator)
    if agreed is None:
        agreed = _groups[communicator] = _agree(communicator, problem.op)
    return agreed


def _find_row(
    communicator: Communicator, agreed: _Agreed, problem: Problem
) -> tuple[files.CacheRow, int] | None:
    found = nearest_cached(agreed.rows, problem)
    if agreed.asks:
        found = _exchange_parts(communicator, problem.op, found)[0]
    return found


def choose(communicator: Communicator, problem: Problem, algorithm: str = "auto") -> Choice:
    """Choose for ``problem``, alike on all ranks. Collective at the first call of a kind."""
    agreed = _agreement_of(communicator, problem)
    explicit = current().overrides
    key = (problem, algorithm, explicit)
    choice: Choice | None = agreed.chosen.get(key)
    if choice is None:
        place, found = communicator.place, _find_row(communicator, agreed, problem)
        gather, one_node, chip = agreed.gather, place.nodes is None, agreed.capability
        choice = decide(chip, problem, found, algorithm=algorithm, one_node=one_node, gather=gather)
        on_cpus = place.direct_access and problem.op == "all_gather_matmul"
        if gather is not None and on_cpus and not choice.algorithm:
            named, source = by_calibration(problem, gather)
            choice = replace(choice, algorithm=named, source=source)
        if explicit:
            overridden = configuration.with_overrides(choice.configuration)
            if agreed.capability and (
                why := configuration.without_effect(overridden, agreed.capability)
            ):
                raise ValueError(f"{problem.op}: {why}, on all ranks")
            choice = replace(choice, configuration=overridden, source="explicit")
        agreed.keep(key, choice)
    return choice


def _exchange_parts(communicator: Communicator, op: str, part: object) -> list[Any]:
    """Return every rank's ``part``, outside any plan. Raises if a rank refuses the op."""
    place = communicator.place
    call = Call(op, part=part)
    return communicator.parts(call, lambda call: place.exchange(call.message, call.op))


def _agree(communicator: Communicator, op: str) -> _Agreed:
    place = communicator.place
    capability = configuration.capability_of(place)
    rows = own_rows(place)
    if place.simulated or place.world_size == 1:  # one process has one cache
        return _Agreed(capability, rows, asks=False)
    gather = own_gather(place)
    own_cache = (capability, files.digest(rows), len(rows), str(files.path()), gather)
    everyone = _exchange_parts(communicator, op, own_cache)
    if any(each[0] != capability for each in everyone):
        return _Agreed(MIXED, (), asks=False)
    _, digest, count, file, first_gather = everyone[0]
    warn = functools.partial(warnings.warn, category=RuntimeWarning, stacklevel=2)
    if own_cache[1] != digest:
        warn(
            f"tuning caches differ between ranks: rank {place.rank} has {len(rows)} rows for this machine "
            f"in {own_cache[3]}, rank 0 has {count} in {file}; rank 0's are used"
        )
    if gather != first_gather:
        warn(
            f"calibrations differ between ranks: rank {place.rank} has {gather}, rank 0 {first_gather}; "
            "rank 0's is used"
        )
    asks = any(each[1] != digest for each in everyone)
    return _Agreed(capability, rows, asks, first_gather)


FUSED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MULTIPLIED_DTYPES = (*FUSED_DTYPES, torch.uint8)
"""Of operands that kernels multiply; bytes are packed rows of block-scaled numbers."""
SMALLEST_FUSED_ROWS = threshold("smallest_fused_rows")
SMALLEST_PIPELINED_BYTES = threshold("smallest_pipelined_bytes")
LARGEST_LOW_LATENCY_BYTES = threshold("largest_low_latency_bytes")
"""Bytes of a rank's message: the operand of all_reduce and broadcast, one shard of all_gather."""


def choose_scaled_algorithm(place: Place, rows: int, *, empty: bool) -> str:
    """Return "fused" or "unfused" for fp8, which chips have from 8.9 on. No scales go between nodes."""
    if empty or not place.all_mapped:
        return "unfused"
    if place.simulated:
        return "fused"
    on_chip = not place.direct_access and torch.cuda.get_device_capability(place.device) >= (8, 9)
    return "fused" if on_chip and rows >= SMALLEST_FUSED_ROWS else "unfused"


def choose_algorithm(
    place: Place,
    dtype: torch.dtype,
    rows: int,
    bytes_gathered: int,
    *,
    empty: bool,
    tuned: str = "",
) -> str:
    """Return "fused", "pipelined" or "unfused" for ``rows`` gathered or scattered rows.

    ``bytes_gathered`` are the bytes that a rank receives before its matmul, 0 if its collective comes
    after. ``empty`` marks an op without any arithmetic. ``tuned`` is the answer of a row for the shape.
    """
    if empty or dtype not in MULTIPLIED_DTYPES or not place.mapped:
        return "unfused"
    if place.simulated:
        return "fused"
    if tuned:
        return tuned
    if place.direct_access:
        return "pipelined" if bytes_gathered >= SMALLEST_PIPELINED_BYTES else "unfused"
    return "fused" if rows >= SMALLEST_FUSED_ROWS else "unfused"


def choose_collective(
    place: Place, small: int | None, *, kernel: bool, multicast: Callable[[], bool] = lambda: False
) -> str:
    """Return "low_latency", "multimem", "kernel" or "copy" for a plain collective of at least one element.

    ``small``: bytes of the message, None if there is no low-latency kernel for the op. ``kernel``: whether
    there is one that pushes. ``multicast()``: whether one store reaches all ranks with the same bits.
    """
    if place.direct_access:
        return "copy"
    if small is not None and small <= LARGEST_LOW_LATENCY_BYTES:
        return "low_latency"
    if not kernel:
        return "copy"
    return "multimem" if not place.interpreted and multicast() else "kernel"

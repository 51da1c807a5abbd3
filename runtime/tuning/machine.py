"""One model of a machine, which makes all predictions of times.

A machine has links, with figures measured by ``calibration.py`` or from data sheets, and a speed. A known
GPU has the figures of its chip. :class:`Machine` predicts whole ops for the fusion pass
(``interlace/compile/fusion.py``), :func:`fused_us` predicts fused ops by configuration, and
:func:`measured_gather` gives both the links of this machine. ``interlace.tensor`` uses the measured lines.

These are closed forms of what ``benchmarks/predict.py`` simulates event by event::

    matmul  = max(waves of tiles * time of a tile + chunks of a program * cost of a chunk,
                  bytes read / memory bandwidth)
    gather  = bytes received / bandwidth of the sender, and some time per chunk
    fused   = max(matmul, gather + what remains to be multiplied when the last chunks have arrived)

Use them only to rank configurations. The figures are predictions from data sheets and assumptions
(``table.py``) and were not compared with measurements. They use only sums, products and quotients, so that
every rank of a group computes the same bits.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from interlace.kernels.launch_formulas import ceil_div, chunk_rows
from interlace.runtime.core import plain
from interlace.runtime.tuning import calibration
from interlace.runtime.tuning.configuration import Configuration
from interlace.runtime.tuning.table import Chip

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
    # at most one for each tile, because a program skips chunks without tiles of its own
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


def best(
    chip: Chip,
    problem: Problem,
    default: Configuration,
    candidates: Iterable[Configuration],
    predicted: Callable[[Chip, Problem, Configuration], float] = fused_us,
) -> tuple[Configuration, float]:
    """Return the candidate that is predicted fastest, if it gains ``WORTH_IT``, else ``default``; and its
    gain."""
    times = {each: predicted(chip, problem, each) for each in (default, *candidates)}
    chosen = min(times, key=lambda each: times[each])
    base, least = times[default], times[chosen]
    if not least or base < least * WORTH_IT:
        return default, 1.0
    return chosen, base / least

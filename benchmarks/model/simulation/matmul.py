"""Times of tiles and matmuls: tensor cores at a clock that power limits, waves, memory traffic.

A tile costs ``2 * BLOCK_M * BLOCK_N * K`` operations of one SM at full clock, whether or not all of it is
inside the matrix. Its rows of A are read from memory once, and columns of B once per band of ``GROUP_M``
tile rows (``tiling.grouped_tile``); then they are in the L2. Another band finds columns of B there only if
it begins within ``sharing_us`` of the one that has read them; where programs wait for chunks, it does not,
and that is why thin chunks are slow. A weight that half of the L2 holds is read once.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from interlace.kernels.launch_formulas import ceil_div
from model.simulation.machines import ModelMachine

BYTES = 2  # per element: bf16
_FULL = 128 * 256 / (128 + 256)  # a tile of this form keeps the tensor cores busy
_HALF = 128 * 128 / (128 + 128)


@dataclass(frozen=True)
class Tiling:
    """Blocks of a matmul kernel, and how it runs them."""

    block_m: int = 128
    block_n: int = 256
    group_m: int = 8
    rate: float = 1.0  # relative to a 128 x 256 tile
    gap_us: float = 0.0  # per tile, when its SM multiplies nothing

    def tiles(self, rows: int, n: int) -> int:
        return ceil_div(rows, self.block_m) * ceil_div(n, self.block_n)


def _form_rate(block_m: int, block_n: int, half: float) -> float:
    """Smaller tiles load more per operation; ``half`` is the rate of 128 x 128."""
    form = block_m * block_n / (block_m + block_n)
    return min(1.0, float((form / _FULL) ** (math.log(half) / math.log(_HALF / _FULL))))


def library_tilings(machine: ModelMachine) -> tuple[Tiling, ...]:
    """Return the tilings that cuBLAS may choose in the model: Hopper's, in steps of 16 columns."""
    return tuple(
        Tiling(
            block_m,
            block_n,
            max(1, 1024 // block_m),
            _form_rate(block_m, block_n, machine.small_tile_rate),
            machine.library_tile_us,
        )
        for block_m in (64, 128, 192, 256)
        for block_n in range(64, 257, 16)
        if block_m * block_n <= 256 * 192
    )


def triton_tiling(machine: ModelMachine, block_m: int, block_n: int, group_m: int) -> Tiling:
    rate = _form_rate(block_m, block_n, machine.triton_small_tile_rate)
    return Tiling(block_m, block_n, group_m, rate, machine.tile_us)


def traffic_bytes(machine: ModelMachine, tiling: Tiling, rows: int, n: int, k: int) -> float:
    """From and to memory, of a matmul by itself."""
    bands = ceil_div(ceil_div(rows, tiling.block_m), tiling.group_m)
    weight = n * k * BYTES
    if weight <= cached_bytes(machine):
        bands = 1
    return float(bands * weight + rows * k * BYTES + rows * n * BYTES)


def cached_bytes(machine: ModelMachine) -> float:
    """Return the bytes of a weight that the L2 holds in the model."""
    return machine.l2_mb * 1e6 / 2


def compute_us(machine: ModelMachine, tiling: Tiling, k: int) -> float:
    """One tile, of an SM at full clock that waits for no memory."""
    return machine.full_clock_us(2.0 * tiling.block_m * tiling.block_n * k / tiling.rate)


def sharing_us(machine: ModelMachine, tiling: Tiling, n: int, k: int) -> float:
    """For how long after a band has begun with columns of B another finds them in the L2."""
    weight = n * k * BYTES
    if weight <= cached_bytes(machine):
        return math.inf
    return compute_us(machine, tiling, k) * machine.sharing_mb * 1e6 / weight


def rate_of(machine: ModelMachine, working: int) -> float:
    """At which ``working`` SMs advance together."""
    return min(1.0, machine.budget / max(1, working))


def matmul_us(machine: ModelMachine, tiling: Tiling, rows: int, n: int, k: int) -> float:
    """A matmul by itself, without its launch: full waves, then what is left; or its memory traffic."""
    sms = int(machine.sms)
    each = compute_us(machine, tiling, k)
    waves, rest = divmod(tiling.tiles(rows, n), sms)
    duration = waves * (each / rate_of(machine, sms) + tiling.gap_us)
    if rest:
        duration += each / rate_of(machine, rest) + tiling.gap_us
    memory = traffic_bytes(machine, tiling, rows, n, k) / (machine.hbm_gbs * 1e3)
    return max(duration, memory)


@lru_cache(maxsize=4096)
def _fastest(
    tilings: tuple[Tiling, ...], machine: ModelMachine, rows: int, n: int, k: int
) -> tuple[float, Tiling]:
    timed = [
        (matmul_us(machine, tiling, rows, n, k), index) for index, tiling in enumerate(tilings)
    ]
    duration, index = min(timed)
    return duration, tilings[index]


def library_tiling(machine: ModelMachine, rows: int, n: int, k: int) -> Tiling:
    return _fastest(library_tilings(machine), machine, rows, n, k)[1]


def library_us(machine: ModelMachine, rows: int, n: int, k: int) -> float:
    """``torch.mm`` by itself, without its launch."""
    if not rows or not n:
        return 0.0
    return _fastest(library_tilings(machine), machine, rows, n, k)[0]


def teraflops(rows: int, n: int, k: int, microseconds: float) -> float:
    """The rate of a matmul that takes ``microseconds``, in TFLOP/s."""
    return 2.0 * rows * n * k / microseconds / 1e6 if microseconds else math.inf

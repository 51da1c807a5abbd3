"""Published figures, the same by the model, and why they differ where they do.

Every figure is its authors' own, on their machine with their baseline. Bars of charts are read to +-0.02.
``held_out`` says that no parameter of the machine was fitted to the figure.
"""

from collections.abc import Callable
from dataclasses import dataclass

from model.predict import predict
from model.simulation.kernels import Shape
from model.simulation.machines import MACHINES, ModelMachine

TOLERANCE = 0.15
TD = "Triton-distributed README, asset/*.png"
SMR = "symm-mem-recipes README"
KRAKEN_AG = "Kraken PR #2"
KRAKEN_RS = "Kraken PR #19"
ASYNC_TP = "pytorch PR #143160"


@dataclass(frozen=True)
class Published:
    source: str
    machine: str
    shape: Shape
    algorithm: str
    speedup: float
    held_out: bool = True


@dataclass(frozen=True)
class Compared:
    published: Published
    predicted: float
    predicted_us: float
    unfused_us: float

    @property
    def error(self) -> float:
        return self.predicted / self.published.speedup - 1

    @property
    def within(self) -> bool:
        return abs(self.error) <= TOLERANCE

    @property
    def why(self) -> str:
        name = "SMR" if self.published.source == SMR else self.published.algorithm
        return "" if self.within else WHY.get((self.published.source, name), "not known")


def _gather(m: int, n: int, k: int, world_size: int = 8, nodes: int = 1) -> Shape:
    return Shape("all_gather_matmul", m, n, k, world_size, nodes)


def _scatter(m: int, n: int, k: int, world_size: int = 8, nodes: int = 1) -> Shape:
    return Shape("matmul_reduce_scatter", m, n, k, world_size, nodes)


# symm-mem-recipes: (N, K), M, tile, then cuBLAS, Triton matmul, cuBLAS + NCCL, fused, microseconds
SMR_FIGURES: tuple[tuple[int, int, int, str, float, float, float, float], ...] = (
    (1792, 4096, 4096, "128 x 128", 105, 125, 230, 213),
    (1792, 4096, 8192, "128 x 128", 194, 236, 416, 318),
    (1792, 4096, 16384, "256 x 128", 391, 434, 819, 514),
    (3584, 8192, 4096, "128 x 128", 403, 483, 652, 543),
    (3584, 8192, 8192, "256 x 128", 828, 849, 1291, 948),
    (3584, 8192, 16384, "256 x 128", 1672, 1655, 2541, 1846),
    (6656, 16384, 4096, "128 x 256", 1558, 1595, 2077, 1776),
    (6656, 16384, 8192, "128 x 256", 2879, 2953, 3847, 3243),
    (6656, 16384, 16384, "128 x 256", 5842, 5948, 7801, 6538),
)
SMR_FITTED = {(3584, 8192, 16384), (6656, 16384, 16384)}  # N, K, M: interference

# Kraken #2: rows of a shard, K (N is 6656): NCCL, torch symm_mem, Kraken, microseconds
KRAKEN_FIGURES = {
    (128, 4096): (141.984, 277.184, 194.624),
    (128, 8192): (284.288, 635.072, 395.040),
    (128, 16384): (513.600, 1166.944, 849.024),
    (256, 4096): (272.992, 309.920, 282.752),
    (256, 8192): (499.392, 548.480, 553.088),
    (256, 16384): (953.216, 1333.120, 1217.248),
    (512, 4096): (514.496, 455.776, 455.296),
    (512, 8192): (912.384, 837.792, 810.368),
    (512, 16384): (1810.432, 1633.312, 1679.776),
}

KRAKEN_FITTED = {(128, 8192)}  # how long readers share

# Kraken #19: M (N is 4096, K 14336): torch + NCCL, async-TP, Kraken, microseconds
KRAKEN_SCATTER_FIGURES = {
    512: (133.653, 613.784, 307.717),
    1024: (223.621, 666.917, 314.597),
    2048: (422.704, 755.246, 409.870),
}

# one node of H800: (N, K) of the whole weight: Triton-distributed, Flux
TD_GATHER = {
    (11008, 4096): (1.32, 1.17),
    (14336, 4096): (1.31, 1.14),
    (28672, 8192): (1.59, 1.48),
    (53248, 16384): (1.42, 1.43),
    (29568, 8192): (1.65, 1.54),
}
TD_SCATTER = {
    (4096, 11008): 1.06,
    (4096, 14336): 1.10,
    (3584, 14336): 1.06,
    (4608, 36864): 1.42,
    (8192, 28672): 1.55,
    (8192, 29568): 1.58,
}
TD_SCATTER_FITTED = {(3584, 14336)}  # the barrier of NVSHMEM

# two nodes of H800: (M, N, K) of the whole
TD_NODE_GATHER = {
    (8192, 49152, 12288): 1.37,
    (16384, 49152, 12288): 1.52,
    (32768, 11008, 4096): 1.08,
    (32768, 14336, 4096): 1.09,
    (8192, 28672, 8192): 1.11,
    (16384, 28672, 8192): 1.20,
    (32768, 28672, 8192): 1.34,
    (8192, 53248, 16384): 1.50,
    (16384, 53248, 16384): 1.62,
    (32768, 53248, 16384): 1.69,
}
TD_NODE_SCATTER = {4096: 1.13, 8192: 1.34, 16384: 1.51, 32768: 1.58, 65536: 1.57}


# Why an error of the model is larger than 15 %, by group of figures. "Too long" and "too short" compare
# the model's times with the published ones; the baseline is NCCL + cuBLAS.
_HOST = (
    "the published time hardly depends on the size, so Python sets it. One cost per operator does not fit "
    "all projects, versions and hosts. The baseline is 13-15 % too long"
)
WHY = {
    (SMR, "SMR"): "the smallest case, which Python issues: the model is 15 % too short; "
    "the baseline is 8 % too long",
    (KRAKEN_AG, "Kraken"): "128 and 256 rows per rank, whose tiles Kraken does not group: "
    "the model is 7-13 % too short, and the baseline 1-8 % too long",
    (
        KRAKEN_AG,
        "symm_mem",
    ): "eight matmuls of 128 and 256 rows, each published as 146 us at K = 16384. "
    "Memory traffic would allow 101 us. The model does not know how cuBLAS runs thin matmuls",
    (KRAKEN_RS, "symm_mem"): _HOST,
    (KRAKEN_RS, "Kraken"): _HOST,
    (ASYNC_TP, "symm_mem"): "the time is fitted; the baseline is 15 % too long",
    (ASYNC_TP, "symm_mem native"): "the model is 3 % too short; the baseline is 15 % too long",
}

NOT_MODELLED = (
    (
        "Flux, matmul + reduce-scatter, H800",
        "0.78-1.32x",
        "extra warps of the kernel pull peers' tiles",
    ),
    (
        "Kraken PR #18, matmul + reduce-scatter, fp32",
        "0.06x",
        "one program per tile, not persistent; fp32",
    ),
    ("PK, H100 (arXiv 2511.13940)", "up to 2.33x", "only the largest speedups are published"),
    ("Triton-distributed PR #153, 8 x H800", "+25-64 %, +23-38 %", "ranges without shapes"),
    ("Flux, L20", "2.9x, 3.1x", "PCIe, another chip"),
    ("Triton-distributed, MI308X; Iris, MI300X", "1.0-1.8x", "other chips"),
    ("end-to-end, attention and MoE figures", "-", "more than one op"),
)


def published() -> list[Published]:
    found = []
    for n, k, m, tile, _, _, nccl, fused in SMR_FIGURES:
        free = (n, k, m) not in SMR_FITTED
        shape = _gather(m, n, k)
        found.append(Published(SMR, "h100x8-500w", shape, f"SMR {tile}", nccl / fused, free))
    for (rows, k), (nccl, symm_mem, kraken) in KRAKEN_FIGURES.items():
        shape = _gather(8 * rows, 6656, k)
        free = (rows, k) not in KRAKEN_FITTED
        for name, figure, out in (("symm_mem", symm_mem, True), ("Kraken", kraken, free)):
            found.append(Published(KRAKEN_AG, "h100x8-500w", shape, name, nccl / figure, out))
    for m, (nccl, symm_mem, kraken) in KRAKEN_SCATTER_FIGURES.items():
        shape = _scatter(m, 4096, 14336)
        for name, figure in (("symm_mem", symm_mem), ("Kraken", kraken)):
            found.append(Published(KRAKEN_RS, "h100x8-500w", shape, name, nccl / figure))
    shape = _gather(2048, 3584, 8192)
    for name, figure in (("symm_mem", 354), ("symm_mem native", 295), ("symm_mem multimem", 277)):
        free = name != "symm_mem"  # the host's cost of a torch operator
        found.append(Published(ASYNC_TP, "h100x8-500w", shape, name, 301 / figure, free))
    for (n, k), (speedup, flux) in TD_GATHER.items():
        for name, figure in (("Triton-distributed", speedup), ("Flux", flux)):
            found.append(Published(TD, "h800x8", _gather(8192, n // 8, k), name, figure))
    for (n, k), figure in TD_SCATTER.items():
        free = (n, k) not in TD_SCATTER_FITTED
        shape = _scatter(8192, n, k // 8)
        found.append(Published(TD, "h800x8", shape, "Triton-distributed", figure, free))
    for (m, n, k), figure in TD_NODE_GATHER.items():
        shape = _gather(m, n // 16, k, 16, 2)
        found.append(Published(TD, "h800x8", shape, "Triton-distributed nodes", figure))
    for m, figure in TD_NODE_SCATTER.items():
        shape = _scatter(m, 12288, 49152 // 16, 16, 2)
        found.append(Published(TD, "h800x8", shape, "Triton-distributed nodes", figure))
    return found


def compare(each: Published, machine: ModelMachine | None = None) -> Compared:
    machine = machine or MACHINES[each.machine]
    ours = predict(machine, each.shape, each.algorithm).microseconds
    unfused = predict(machine, each.shape, "unfused").microseconds
    return Compared(each, unfused / ours, ours, unfused)


def compare_all(progress: Callable[[str], None] | None = None) -> list[Compared]:
    found = []
    for each in published():
        if progress is not None:
            progress(f"published: {each.source}, {each.shape}")
        found.append(compare(each))
    return found

"""The fitted parameters, each refitted: ``python benchmarks/predict.py --fit``.

One parameter of one machine at a time, to the figures named, by the least squares of relative errors. All
other published figures are held out. Stored values are in ``simulation.machines``; a test compares them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from model.predict import predict
from model.published import KRAKEN_FIGURES, SMR_FIGURES, SMR_FITTED, TD_SCATTER, TD_SCATTER_FITTED
from model.simulation.kernels import Shape, library_us, nccl_us, teraflops
from model.simulation.machines import MACHINES, ModelMachine


def least(loss: Callable[[float], float], low: float, high: float, steps: int = 24) -> float:
    """Where ``loss`` is least between two positive numbers, by golden section on a logarithmic scale."""
    low, high = math.log(low), math.log(high)
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = loss(math.exp(left)), loss(math.exp(right))
    for _ in range(steps):  # one of the two inner points is an inner point of the rest
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = loss(math.exp(left))
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = loss(math.exp(right))
    return math.exp((low + high) / 2)


Errors = Callable[[ModelMachine], list[float]]
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Fit:
    """``parameter`` of ``machine`` between ``low`` and ``high``; ``errors`` are log ratios, best all 0."""

    machine: str
    parameter: str
    to: str
    low: float
    high: float
    errors: Errors

    def stored(self) -> float:
        return float(getattr(MACHINES[self.machine], self.parameter))

    def loss(self, value: float) -> float:
        machine = MACHINES[self.machine].with_values("fitted: now", **{self.parameter: value})
        return sum(error * error for error in self.errors(machine))

    def best(self, steps: int = 24) -> float:
        return least(self.loss, self.low, self.high, steps)


def _cublas_700w(machine: ModelMachine) -> list[float]:
    shape = (8192, 4096, 4096)
    return [math.log(teraflops(*shape, library_us(machine, *shape)) / 721.6)]


def _cublas_500w(machine: ModelMachine) -> list[float]:
    return [math.log(library_us(machine, m, n, k) / us) for n, k, m, _, us, *_ in SMR_FIGURES]


def _nccl(machine: ModelMachine) -> list[float]:
    found = []
    for _, k, m, _, matmul, _, both, _ in SMR_FIGURES:
        ours = nccl_us(machine, m * k * 2, 8) + machine.launch_us
        found.append(math.log(ours / (both - matmul)))
    return found


def _interference(machine: ModelMachine) -> list[float]:
    found = []
    for n, k, m, tile, *_, fused in SMR_FIGURES:
        if (n, k, m) in SMR_FITTED:
            shape = Shape("all_gather_matmul", m, n, k)
            found.append(math.log(predict(machine, shape, f"SMR {tile}").microseconds / fused))
    return found


def _sharing(machine: ModelMachine) -> list[float]:
    shape = Shape("all_gather_matmul", 1024, 6656, 8192)
    figure = KRAKEN_FIGURES[128, 8192][2]
    return [math.log(predict(machine, shape, "Kraken").microseconds / figure)]


def _torch_op(machine: ModelMachine) -> list[float]:
    shape = Shape("all_gather_matmul", 2048, 3584, 8192)
    return [math.log(predict(machine, shape, "symm_mem").microseconds / 354)]


def _nvshmem_barrier(machine: ModelMachine) -> list[float]:
    found = []
    for n, k in TD_SCATTER_FITTED:
        shape = Shape("matmul_reduce_scatter", 8192, n, k // 8)
        unfused = predict(machine, shape, "unfused").microseconds
        ours = predict(machine, shape, "Triton-distributed").microseconds
        found.append(math.log(unfused / ours / TD_SCATTER[n, k]))
    return found


FITS = (
    Fit("h100x8", "power_tflops", "cuBLAS at 8192 x 4096 x 4096", 400, 840, _cublas_700w),
    Fit("h100x8-500w", "power_tflops", "SMR, nine 'cublas mm only'", 400, 840, _cublas_500w),
    Fit("h100x8-500w", "nccl_gbs", "SMR, nine 'cublas + nccl' less mm", 100, 450, _nccl),
    Fit("h100x8-500w", "interference_us_per_mb", "SMR, two 'triton fused'", 0.05, 2, _interference),
    Fit("h100x8-500w", "sharing_mb", "Kraken PR #2, 128 rows, K = 8192", 1, 25, _sharing),
    Fit("h100x8-500w", "torch_op_us", "async-TP 354 us", 4, 40, _torch_op),
    Fit("h800x8", "nvshmem_barrier_us", "TD RS N=3584", 2, 200, _nvshmem_barrier),
)

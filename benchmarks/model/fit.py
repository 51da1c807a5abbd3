"""Parameters that are fitted to published figures, or measured.

One parameter of one machine at a time is fitted, to the figures named, by the least squares of relative
errors. All other published figures are held out. Stored values are in ``simulation.machines``; a test
compares them, and ``python benchmarks/predict.py --fit`` fits them again.

A result file that ``gpu.py`` has written says on which device it was measured; every machine of the model
with that device takes from the latest file

    power_tflops   from part "matmul", torch.mm
    tile_us        from part "matmul", the kernel of all_gather_matmul with all flags preset
    link_gbs       h200-pcie: from part "slow-link", transfers by copy engine alone

and is marked ``measured: FILE``. Records whose results were wrong carry no times and are not used. Times of
fused ops in the files are never fitted to; :func:`compare_measured` sets them beside the predictions.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.predict import default_configuration, predict
from model.published import KRAKEN_FIGURES, SMR_FIGURES, SMR_FITTED, TD_SCATTER, TD_SCATTER_FITTED
from model.simulation.kernels import BYTES, Shape, library_us, matmul_us, nccl_us, tiling_of
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
    teraflops = 2e-6 * math.prod(shape) / library_us(machine, *shape)
    return [math.log(teraflops / 721.6)]


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


RESULTS = Path(__file__).parents[1] / "results"
DEVICES = {
    "H200": "h200",
    "H100": "h100x8",
    "H800": "h800",
}  # in the device's name: our names' start
_SHAPE = re.compile(r"(?:W=(?P<w>\d+), )?(?P<m>\d+) x (?P<n>\d+) x (?P<k>\d+)$")
_VIRTUAL = {"fused": "fused", "pipelined": "pipelined", "unfused": "interlace unfused",
            "torch pipelined": "symm_mem"}  # fmt: skip

Record = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    file: str
    records: list[Record]

    def times(self, part: str) -> Iterator[tuple[str, dict[str, int], dict[str, float]]]:
        """(case, its numbers, medians by candidate), of right results."""
        for record in self.records:
            found = _SHAPE.search(str(record.get("case", "")))
            if record.get("part") == part and record.get("correct") and found:
                numbers = {key: int(value) for key, value in found.groupdict("1").items()}
                medians = {
                    name: float(time["median"]) for name, time in record["microseconds"].items()
                }
                yield record["case"], numbers, medians


def measured_for(machine: ModelMachine, folder: Path = RESULTS) -> Measured | None:
    latest: tuple[str, Path, list[Record]] | None = None
    for path in sorted(folder.glob("gpu-*.json")):
        document = json.loads(path.read_text())
        names = [start for mark, start in DEVICES.items() if mark in document.get("device", "")]
        if names and machine.name.startswith(names[0]) and machine.name != "h100x8-500w":
            key = (str(document.get("date", "")), path, document.get("records", []))
            latest = key if latest is None or key[:2] > latest[:2] else latest
    return None if latest is None else Measured(latest[1].name, latest[2])


def calibrated(machine: ModelMachine, folder: Path = RESULTS) -> ModelMachine:
    measured = measured_for(machine, folder)
    if measured is None:
        return machine
    source = f"measured: benchmarks/results/{measured.file}"
    shapes = [
        ((each["m"], each["n"], each["k"]), times) for _, each, times in measured.times("matmul")
    ]
    for parameter, candidate, predicted, low, high in (
        ("power_tflops", "torch.mm", library_us, 100.0, machine.clock_tflops),
        ("tile_us", "kernel", _kernel_us, 0.01, 100.0),
    ):
        timed = [(shape, times[candidate]) for shape, times in shapes if candidate in times]
        if timed:
            machine = _fitted(machine, source, parameter, predicted, timed, low, high)
    if machine.name == "h200-pcie":
        rates = [
            each["m"] * each["k"] * BYTES * (each["w"] - 1) / each["w"] / times["transfer"] / 1e3
            for case, each, times in measured.times("slow-link")
            if case.startswith("copy engine") and "transfer" in times
        ]
        if rates:
            rates.sort()
            machine = machine.with_values(source, link_gbs=rates[len(rates) // 2])
    return machine


def _fitted(
    machine: ModelMachine,
    source: str,
    parameter: str,
    predicted: Callable[..., float],
    timed: Sequence[tuple[tuple[int, int, int], float]],
    low: float,
    high: float,
) -> ModelMachine:
    """``machine`` with the value of ``parameter`` that gives best what was measured at these shapes."""

    def loss(value: float) -> float:
        tried = machine.with_values(source, **{parameter: value})
        return sum(math.log(predicted(tried, *shape) / us) ** 2 for shape, us in timed)

    return machine.with_values(source, **{parameter: least(loss, low, high)})


def _kernel_us(machine: ModelMachine, m: int, n: int, k: int) -> float:
    chosen = default_configuration(Shape("all_gather_matmul", m, n, k))
    return matmul_us(machine, tiling_of(machine, chosen), m, n, k)


def compare_measured(
    machine: ModelMachine, folder: Path = RESULTS
) -> Iterator[tuple[str, str, float, float]]:
    """Yield (case, candidate, measured, predicted) of fused ops in the latest file, in microseconds."""
    measured = measured_for(machine, folder)
    part = "virtual" if machine.virtual_ranks else "slow-link"
    if measured is None or not (machine.virtual_ranks or machine.name == "h200-pcie"):
        return
    for case, size, times in measured.times(part):
        op, algorithms = case.split(" ")[0], _VIRTUAL
        if part == "slow-link":
            op = "all_gather_matmul"
            algorithms = {"fused": "fused"} if case.startswith("copy engine") else {}
        shape = Shape(op, size["m"], size["n"], size["k"], size["w"])
        for name, algorithm in algorithms.items():
            if name in times:
                yield case, name, times[name], predict(machine, shape, algorithm).microseconds

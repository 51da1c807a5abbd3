"""The best chunk size and order: ``best_chunk(machine, m, n, k)``, and the recommended table.

All by prediction. Candidates are few and the best of them is taken, ties going to the larger chunk: fewer
signals, and less that the model may have wrong.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from interlace.kernels import launch_formulas as formulas
from model.predict import default_configuration, orders, predict
from model.simulation.kernels import BYTES, Shape
from model.simulation.machines import ModelMachine

CHUNKS = (1, 2, 3, 4, 8, 16)
COPIERS = (0, 32)
WORTH_IT = 1.15  # predicted speedup; below, the model may be wrong
GOOD_ENOUGH = 1.01  # a larger chunk may cost that much more
SHAPES = ((1792, 4096), (3584, 8192), (6656, 16384))  # N, K of a rank: Llama 8B, 70B, 405B by 8
ROWS = (1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class Recommendation:
    shape: Shape
    chunks: int
    chunk_rows: int
    copiers: int
    order: str
    microseconds: float
    default_us: float  # with the default chunks, by the copy engine
    unfused_us: float
    overlap: float

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_rows * self.shape.k * BYTES

    @property
    def take(self) -> str:
        """ "fused" or "unfused"; "measure" where the model cannot tell."""
        gain = self.unfused_us / self.microseconds
        return "fused" if gain >= WORTH_IT else "unfused" if gain <= 1 else "measure"


@lru_cache(maxsize=512)
def best_chunk(
    machine: ModelMachine, m: int, n: int, k: int, world_size: int = 8, nodes: int = 1
) -> Recommendation:
    """For all-gather + matmul: chunks of a shard, who sends them, and in which order."""
    shape = Shape("all_gather_matmul", m, n, k, world_size, nodes)
    configuration = default_configuration(shape)
    unfused = predict(machine, shape, "unfused")
    default_us = predict(machine, shape, "fused", configuration).microseconds
    found: dict[tuple[int, int], float] = {}
    for copiers in COPIERS:
        for chunks in CHUNKS:
            rows = formulas.chunk_rows(shape.rows, configuration.block_m, chunks)
            if (rows, copiers) not in found:
                tried = replace(configuration, chunks=chunks, copiers=copiers)
                found[rows, copiers] = predict(machine, shape, "fused", tried).microseconds
    least = min(found.values())
    rows, copiers = max(key for key, us in found.items() if us <= least * GOOD_ENOUGH)
    chunks = formulas.ceil_div(max(shape.rows), rows)
    chosen = replace(configuration, chunks=chunks, copiers=copiers)
    timed = {
        order: predict(machine, shape, "fused", chosen, order=order) for order in orders(shape)
    }
    order = min(timed, key=lambda name: timed[name].microseconds)
    default_order = orders(shape)[0]
    if timed[default_order].microseconds <= timed[order].microseconds * GOOD_ENOUGH:
        order = default_order
    best = timed[order]
    return Recommendation(
        shape,
        chunks,
        rows,
        copiers,
        order,
        best.microseconds,
        default_us,
        unfused.microseconds,
        best.overlap,
    )


def recommended(machine: ModelMachine) -> list[Recommendation]:
    return [best_chunk(machine, m, n, k) for n, k in SHAPES for m in ROWS]


def order_times(machine: ModelMachine, shape: Shape) -> dict[str, float]:
    """Return the microseconds of ``fused`` by order; the first order is the kernels' own."""
    return {
        order: predict(machine, shape, "fused", order=order).microseconds for order in orders(shape)
    }


def sensitivities(machine: ModelMachine, shape: Shape) -> list[tuple[str, list[float]]]:
    """Return parameters that nobody has published or measured, the one that matters most first.

    Each has the changes of the time of ``fused`` at half and at twice of it, as fractions.
    """
    base, found = predict(machine, shape).microseconds, []
    for name, source in machine.sources.items():
        if not source.startswith(("published", "measured")):
            values = [getattr(machine, name) * factor for factor in (0.5, 2.0)]
            varied = [machine.with_values("assumed: varied", **{name: value}) for value in values]
            changes = [predict(other, shape).microseconds / base - 1 for other in varied]
            found.append((name, changes))
    return sorted(found, key=lambda each: -max(map(abs, each[1])))

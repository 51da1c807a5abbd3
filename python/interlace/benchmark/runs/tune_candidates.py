"""Candidates that ``interlace tune`` tries for one op at one shape, the default first.

sim   the fused kernel with other blocks and more or fewer programs: what the interpreter takes
shm   the algorithms "unfused" and "pipelined"; the fused kernel is interpreted there, and never faster
cuda  "unfused"; "pipelined" in several chunks; "fused" with other tiles, and with shards sent otherwise

Of an op that is no matmul: every algorithm and method that the place runs, beside what "auto" does; of the
first kernel some other values.

Candidates that the chip cannot run are left out by arithmetic (``tuning/valid_configurations.py``), and of
the rest those that the cost model thinks least of. Of unknown chips it ranks by another's figures.
"""

import itertools
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from interlace.benchmark.subjects.by_rows import ByRows
from interlace.benchmark.subjects.requests import TRITON
from interlace.kernels.launch_formulas import ceil_div
from interlace.runtime.tuning import chips, cost_model, tuning
from interlace.runtime.tuning.auto import FUSED_DTYPES, choose_algorithm
from interlace.runtime.tuning.configuration import Configuration
from interlace.runtime.tuning.tuning import Problem
from interlace.runtime.tuning.valid_configurations import (
    sending_candidates,
    tile_candidates,
    why_not,
)

MOST_TILES = 16
MOST_SENDINGS = 6
MOST_INTERPRETED = 12
SENDING = ("copiers", "chunks")
_LIKE = chips.CHIPS[90]

Values = tuple[tuple[str, int | bool], ...]


@dataclass(frozen=True)
class TuneCandidate:
    """``algorithm`` with a configuration; no values where it has none. ``default`` is what runs untuned."""

    algorithm: str
    values: Values = ()
    default: bool = field(default=False, compare=False)

    @property
    def configuration(self) -> dict[str, int | bool]:
        return dict(self.values)

    def describe(self) -> str:
        """The algorithm, and of the configuration what is most telling."""
        v = self.configuration
        if not v:
            return self.algorithm
        if self.algorithm == "pipelined":
            return f"pipelined, {v['chunks']} chunks"
        if "chunks" not in v:
            return ", ".join([self.algorithm, *(f"{name} {value}" for name, value in v.items())])
        text = f"fused {v['block_m']}x{v['block_n']}x{v['block_k']}"
        text += f", {v['num_warps']} warps, {v['num_stages']} stages, group {v['group_m']}"
        return f"{text}, {v['chunks']} chunks, {v['copiers']} copiers, {v['programs']} programs"


def made(algorithm: str, configuration: Configuration, *, default: bool = False) -> TuneCandidate:
    return TuneCandidate(algorithm, tuple(sorted(asdict(configuration).items())), default)


def by_name(place: str, kind: type[ByRows]) -> list[TuneCandidate]:
    """Candidates for an op that no cost model knows: its algorithms, the kernels' with other values.

    The default is what "auto" runs.
    """
    names = [name for name in kind.algorithms if name != "auto"]
    kernels = [name for name in names if name.split()[-1] in TRITON]
    if place == "shm":
        names = [name for name in names if name not in kernels]
        names = names if len(names) > 1 else []  # "auto" is the only one
    elif place == "sim":
        names = kernels
    fused = [name for name in kernels if name in names and name.endswith("fused")]
    # a method is chosen with its default tiles first; those of the others are not tried
    varied = [(name, values) for name in fused[:1] for values in kind.varied]
    return [
        TuneCandidate("auto", (), True),
        *(TuneCandidate(name) for name in names),
        *(TuneCandidate(name, tuple(sorted(values.items()))) for name, values in varied),
    ]


def untuned(place: str, capability: int | None, problem: Problem) -> tuple[str, tuning.Choice]:
    """The choice of "auto" without a cache: the algorithm, and the configuration with its source."""
    choice = tuning.decide(capability, problem, None)
    kind: Any = SimpleNamespace(simulated=place == "sim", direct_access=place == "shm", mapped=True)
    rows, size = problem.rows * problem.whole, problem.world_size
    gathers = problem.product == "all_gather_matmul"
    received = (size - 1) * problem.rows * problem.inner * problem.dtype.itemsize if gathers else 0
    algorithm = choose_algorithm(
        kind, problem.dtype, rows, received, empty=False, tuned=choice.algorithm
    )
    return algorithm, choice


def candidates(
    place: str, capability: int | None, problem: Problem, *, one_shot: bool = True
) -> list[TuneCandidate]:
    """All to be tried. ``one_shot``: whether an all-reduce is small enough for its own kernel."""
    algorithm, choice = untuned(place, capability, problem)
    base = choice.configuration
    if place == "shm":
        names = ["unfused", "pipelined"] if problem.dtype in FUSED_DTYPES else ["unfused"]
        found = [TuneCandidate(name, (), name == algorithm) for name in names]
        return sorted(found, key=lambda each: not each.default)
    if capability is None:
        fused = [made("fused", each) for each in _interpreted(problem, base)]
        return list(dict.fromkeys([made("fused", base, default=True), *fused]))
    first = TuneCandidate("unfused", (), True)
    if algorithm != "unfused":
        first = made(algorithm, base, default=True)
    found = [first, TuneCandidate("unfused")]
    if problem.dtype not in FUSED_DTYPES:
        return list(dict.fromkeys(found))
    gathers = problem.op == "all_gather_matmul"
    parts = (1, 2, 4, 8) if gathers else (base.chunks,)
    found += [made("pipelined", replace(base, chunks=chunks)) for chunks in parts]
    if problem.product == "matmul_all_reduce" and not one_shot:
        return list(dict.fromkeys([*found, made("fused", base)]))
    itemsize = problem.dtype.itemsize
    tiles = _ranked(problem, capability, tile_candidates(base, capability, itemsize), MOST_TILES)
    groups = [replace(base, group_m=group) for group in (4, 16)]
    sent = []
    if gathers:
        sent = _ranked(problem, capability, sending_candidates(base), MOST_SENDINGS)
    every = [base, *tiles, *groups, *sent]
    fitting = [each for each in every if not why_not(each, capability, itemsize)]
    return list(dict.fromkeys([*found, *(made("fused", each) for each in fitting)]))


def combined(tile: TuneCandidate, sending: TuneCandidate) -> TuneCandidate:
    """The tiles of one with the sends of the other."""
    values = {**tile.configuration, **{name: sending.configuration[name] for name in SENDING}}
    return TuneCandidate("fused", tuple(sorted(values.items())))


def _ranked(
    problem: Problem, capability: int, found: Iterable[Configuration], most: int
) -> list[Configuration]:
    chip = chips.chip_of(capability) or _LIKE
    if problem.dtype.itemsize not in chip.tflops:
        chip = _LIKE
    return sorted(set(found), key=lambda c: (cost_model.fused_us(chip, problem, c), str(c)))[:most]


def _interpreted(problem: Problem, base: Configuration) -> list[Configuration]:
    """Few large tiles first: the interpreter pays per block, not per number."""
    sizes = itertools.product(
        {base.block_m, max(16, base.block_m // 2)},
        {base.block_n, max(16, base.block_n // 2), min(256, base.block_n * 2)},
        {base.block_k, max(16, base.block_k // 2)},
        (1, 2, 3, 4),
    )
    found = [
        replace(base, block_m=m, block_n=n, block_k=k, programs=programs)
        for m, n, k, programs in sizes
    ]

    def blocks(c: Configuration) -> tuple[int, str]:
        steps = ceil_div(problem.columns, c.block_n) * ceil_div(problem.inner, c.block_k)
        return problem.whole * ceil_div(problem.rows, c.block_m) * steps, str(c)

    return sorted(found, key=blocks)[:MOST_INTERPRETED]

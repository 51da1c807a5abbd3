"""Measure candidates for one op at one shape, on every rank: successive halving, each result checked.

``docs/how-to/gpu/tune.md`` describes the three rounds. All ranks see the same times, so all continue with
the same candidates. Candidates beyond the budget are not tried. The candidates, the default first:

    sim   the fused kernel with other blocks and more or fewer programs, which matter to the interpreter
    shm   the algorithms "unfused" and "pipelined"; the fused kernel is interpreted there, and never faster
    cuda  "unfused"; "pipelined" in several chunks; "fused" with other tiles, and other sends of shards

Candidates that the chip cannot run are left out by arithmetic (``tuning/configuration.py``), and of the
rest those that the cost model ranks last. For unknown chips it uses another chip's figures.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from interlace.benchmark import protocol
from interlace.benchmark.fused import ByRows
from interlace.benchmark.requests import TRITON, TUNED, Tick, rank_0, sets_of
from interlace.groups import groups
from interlace.kernels.launch_formulas import ceil_div
from interlace.runtime.tuning import configuration, table, tuning
from interlace.runtime.tuning.configuration import (
    Configuration,
    sending_candidates,
    tile_candidates,
    why_not,
)
from interlace.runtime.tuning.tuning import MULTIPLIED_DTYPES, Problem, choose_algorithm

MOST_TILES = 16
MOST_SENDINGS = 6
MOST_INTERPRETED = 12
SENDING = ("copiers", "chunks")
_LIKE = table.CHIPS[90]

Values = tuple[tuple[str, int | bool], ...]


@dataclass(frozen=True)
class TuneCandidate:
    """``algorithm`` with a configuration, or without values. ``default`` is the untuned choice."""

    algorithm: str
    values: Values = ()
    default: bool = field(default=False, compare=False)

    @property
    def configuration(self) -> dict[str, int | bool]:
        return dict(self.values)

    def describe(self) -> str:
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


def candidate_of(
    algorithm: str, configuration: Configuration, *, default: bool = False
) -> TuneCandidate:
    return TuneCandidate(algorithm, tuple(sorted(asdict(configuration).items())), default)


def by_name(place: str, kind: type[ByRows]) -> list[TuneCandidate]:
    """Return candidates for an op without a cost model: its algorithms, the kernels' with other values."""
    names = [name for name in kind.algorithms if name != "auto"]
    kernels = [name for name in names if name.split()[-1] in TRITON]
    if place == "shm":
        names = [name for name in names if name not in kernels]
        names = names if len(names) > 1 else []  # "auto" is the only one
    elif place == "sim":
        names = kernels
    fused = [name for name in kernels if name in names and name.endswith("fused")]
    # a method is chosen with its default tiles first; other methods' tiles are not tried
    varied = [(name, values) for name in fused[:1] for values in kind.varied]
    return [
        TuneCandidate("auto", (), True),
        *(TuneCandidate(name) for name in names),
        *(TuneCandidate(name, tuple(sorted(values.items()))) for name, values in varied),
    ]


def untuned_choice(
    place: str, capability: int | None, problem: Problem
) -> tuple[str, tuning.Choice]:
    """Return the choice of "auto" without a cache: the algorithm, and the configuration with its source."""
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
    """Return all candidates. ``one_shot``: the all-reduce is small enough for its own kernel."""
    algorithm, choice = untuned_choice(place, capability, problem)
    base = choice.configuration
    if place == "shm":
        names = ["unfused", "pipelined"] if problem.dtype in MULTIPLIED_DTYPES else ["unfused"]
        found = [TuneCandidate(name, (), name == algorithm) for name in names]
        return sorted(found, key=lambda each: not each.default)
    if capability is None:
        fused = [candidate_of("fused", each) for each in _for_interpreter(problem, base)]
        return list(dict.fromkeys([candidate_of("fused", base, default=True), *fused]))
    first = TuneCandidate("unfused", (), True)
    if algorithm != "unfused":
        first = candidate_of(algorithm, base, default=True)
    found = [first, TuneCandidate("unfused")]
    if problem.dtype not in MULTIPLIED_DTYPES:
        return list(dict.fromkeys(found))
    gathers = problem.op == "all_gather_matmul"
    parts = (1, 2, 4, 8) if gathers else (base.chunks,)
    found += [candidate_of("pipelined", replace(base, chunks=chunks)) for chunks in parts]
    if problem.product == "matmul_all_reduce" and not one_shot:
        return list(dict.fromkeys([*found, candidate_of("fused", base)]))
    itemsize = problem.dtype.itemsize
    every_tile = tile_candidates(base, capability, itemsize)
    if problem.format:  # tensor cores, or registers, take this many numbers of it at once
        every_tile = (replace(each, block_k=base.block_k) for each in every_tile)
    tiles = _rank(problem, capability, every_tile, MOST_TILES)
    groups = [replace(base, group_m=group) for group in (4, 16)]
    sent = []
    if gathers:
        sent = _rank(problem, capability, sending_candidates(base), MOST_SENDINGS)
    every = [base, *tiles, *groups, *sent]
    fitting = [each for each in every if not why_not(each, capability, itemsize)]
    return list(dict.fromkeys([*found, *(candidate_of("fused", each) for each in fitting)]))


def combine(tile: TuneCandidate, sending: TuneCandidate) -> TuneCandidate:
    values = {**tile.configuration, **{name: sending.configuration[name] for name in SENDING}}
    return TuneCandidate("fused", tuple(sorted(values.items())))


def _rank(
    problem: Problem, capability: int, found: Iterable[Configuration], most: int
) -> list[Configuration]:
    chip = table.chip_of(capability) or _LIKE
    if problem.dtype.itemsize not in chip.tflops:
        chip = _LIKE
    return sorted(set(found), key=lambda c: (tuning.fused_us(chip, problem, c), str(c)))[:most]


def _for_interpreter(problem: Problem, base: Configuration) -> list[Configuration]:
    """Return few large tiles first: the interpreter's time is per block, not per number."""
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


FINAL_BLOCKS = 7
LEAST_BLOCKS = 3
AUTO = "auto"  # stands for the untuned choice, if that has no other name here
FINALISTS = 3
EARLY = 0.6  # share of the budget for the first round
WORTH_IT = 0.98  # share of the default's time; smaller gains are noise


class CandidateError(Exception):
    """Candidate ``index`` cannot be run: ``reason``. Ends the run, which is then repeated without it."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(index, reason)
        self.index, self.reason = index, reason

    def __str__(self) -> str:
        return f"candidate {self.index}: {self.reason}"


@dataclass(frozen=True)
class TuneRequest:
    """One op at one shape: its sizes, of which the first is all rows. ``settings``: as for ``bench``."""

    op: str
    dtype: torch.dtype
    sizes: tuple[int, ...]
    candidates: tuple[TuneCandidate, ...]
    seconds: float
    virtual: bool = False
    settings: tuple[tuple[str, str], ...] = ()


@dataclass
class Timed:
    """``microseconds`` of each block; [] if time was up. ``error``: as a multiple of the allowed one."""

    candidate: TuneCandidate
    microseconds: list[float] = field(default_factory=list)
    error: float = 0.0
    final: bool = False

    @property
    def median(self) -> float:
        return median(self.microseconds)

    @property
    def right(self) -> bool:
        return self.error <= 1


def on_rank(request: TuneRequest, tick: Tick) -> list[Timed]:
    """Return the times of every candidate, equal on every rank. Collective. Raises CandidateError."""
    return _Search(request, rank_0(tick)).run()


class _Search:
    def __init__(self, request: TuneRequest, tick: Tick) -> None:
        place = groups.default_group().place
        self._request, self._tick = request, tick
        kind: Any = TUNED[request.op]
        self._op = kind(place, request.dtype, *request.sizes, **dict(request.settings))
        self._timed = [Timed(candidate) for candidate in request.candidates]
        self._start = time.perf_counter()
        self._first = self._op.inputs(0)
        count, _ = sets_of(self._first, place)
        self._rotation = protocol.Rotation(protocol.copies_of(self._first, count))
        self._calls = 1

    def _left(self) -> float:
        """Return the seconds left of the budget, on the slowest rank. Collective."""
        return self._request.seconds - protocol.slowest(time.perf_counter() - self._start)

    def _function(self, candidate: TuneCandidate) -> Callable[..., Any]:
        run, values = self._op.ours(candidate.algorithm), candidate.configuration

        def call(*inputs: Any) -> Any:
            with configuration.override(**values):
                return run(*inputs)

        return call

    def _block(self, timed: Timed) -> None:
        call = self._rotation.calling(self._function(timed.candidate))
        seconds = protocol.block(call, self._calls, virtual=self._request.virtual)
        timed.microseconds.append(seconds * 1e6)

    def _check(self, index: int, timed: Timed) -> None:
        try:
            result = self._function(timed.candidate)(*self._first)
            protocol.finish(virtual=self._request.virtual)
        except Exception as error:
            text = (str(error).splitlines() or [""])[0][:300]
            raise CandidateError(index, f"{type(error).__name__}: {text}") from error
        timed.error = protocol.slowest(self._op.check(result, 0))

    def run(self) -> list[Timed]:
        everything = self._timed
        total = len(everything) + FINAL_BLOCKS
        for index, timed in enumerate(everything):
            if index and self._left() < (1 - EARLY) * self._request.seconds:
                break
            self._check(index, timed)
            if not index:
                call = self._rotation.calling(self._function(timed.candidate))
                self._calls = protocol.calls_per_block(call, virtual=self._request.virtual)
            if timed.right:
                self._block(timed)
            self._tick(index + 1, total)
        second = self._best(max(2 * FINALISTS, len(everything) // 3))
        second += self._combinations(second)
        for timed in second:
            for _ in range(2):
                if self._left() > 0:
                    self._block(timed)
        last = self._best(FINALISTS)
        if everything[0] not in last:
            last.append(everything[0])
        for timed in last:
            timed.microseconds.clear()
            timed.final = True
        for number in range(FINAL_BLOCKS):
            if number >= LEAST_BLOCKS and self._left() < 0:
                break
            for timed in last:
                self._block(timed)
            self._tick(len(everything) + number + 1, total)
        return self._timed

    def _best(self, count: int) -> list[Timed]:
        ran = [each for each in self._timed if each.microseconds]
        return sorted(ran, key=lambda each: each.median)[:count]

    def _combinations(self, best: Sequence[Timed]) -> list[Timed]:
        """Combine the fastest tiles with the fastest sends, if no candidate is that already."""
        base = self._request.candidates[0]
        if base.algorithm != "fused" or self._request.op != "all_gather_matmul":
            return []

        def sends(candidate: TuneCandidate) -> list[int | bool]:
            return [candidate.configuration[name] for name in SENDING]

        fused = [each.candidate for each in best if each.candidate.algorithm == "fused"]
        tiles = [each for each in fused if sends(each) == sends(base)]
        senders = [each for each in fused if sends(each) != sends(base)]
        if not tiles or not senders or self._left() < (1 - EARLY) / 2 * self._request.seconds:
            return []
        combination = combine(tiles[0], senders[0])
        if any(each.candidate.values == combination.values for each in self._timed):
            return []
        timed = Timed(combination)
        self._timed.append(timed)
        self._check(len(self._timed) - 1, timed)
        return [timed] if timed.right else []


@dataclass
class Tuned:
    """The result of tuning one shape. ``skipped``: candidates that could not be run, and why."""

    timed: list[Timed]
    skipped: list[tuple[TuneCandidate, str]]

    @property
    def default(self) -> Timed:
        return self.timed[0]

    @property
    def best(self) -> Timed:
        """The fastest right one, if it is faster by more than noise; otherwise the default."""
        right = [each for each in self.timed if each.final and each.right]
        fastest = min(right, key=lambda each: each.median, default=self.default)
        if self.default.right and fastest.median > WORTH_IT * self.default.median:
            return self.default
        return fastest

    @property
    def factor(self) -> float:
        """The default's time over the best one's."""
        return self.default.median / self.best.median

    @property
    def by_algorithm(self) -> dict[str, Timed]:
        """The fastest right one of each algorithm, by its last blocks."""
        found: dict[str, Timed] = {}
        ran = [each for each in self.timed if each.microseconds and each.right]
        for each in sorted(ran, key=lambda each: each.median):
            found.setdefault(each.candidate.algorithm, each)
        found[self.best.candidate.algorithm] = self.best
        found.pop(AUTO, None)
        return found


def search(request: TuneRequest, run: Callable[[TuneRequest], list[Timed]]) -> Tuned:
    """Call ``run``, repeatedly without candidates that cannot be run. Raise if the default cannot."""
    skipped: list[tuple[TuneCandidate, str]] = []
    left = list(request.candidates)
    while True:
        tried = replace(request, candidates=tuple(left))
        try:
            return Tuned(run(tried), skipped)
        except CandidateError as error:
            found: Any = getattr(error, "original", error)  # the error of a rank
            if found.index == 0:
                raise ValueError(
                    f"{request.op}: the default, {left[0].describe()}, cannot be run: {found.reason}"
                ) from error
            if found.index >= len(left):  # a combination of two candidates that can be run
                raise
            skipped.append((left.pop(found.index), found.reason))

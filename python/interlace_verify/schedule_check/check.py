"""``interlace.verify.schedules``: run many interleavings of one SPMD function; shorten the first failure.

A third of the schedules is random, a third uses random priorities of tasks, and a third delays whole ranks
(``runtime/places/sim/scheduler/strategies.py``).

The first failure is *shrunk*. It is recorded as segments (a task, and how far it ran), and segments are
left out as long as the run still fails in the same way.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from interlace import launcher
from interlace.runtime.core.errors import EndlessTaskError
from interlace.runtime.places.sim.choice import programs
from interlace.runtime.places.sim.place import run_sim
from interlace.runtime.places.sim.scheduler.scheduler import (
    QUIET_SECONDS,
    Programs,
    Scheduler,
    interpret,
)
from interlace.runtime.places.sim.scheduler.source_lines import with_lines
from interlace.runtime.places.sim.scheduler.strategies import (
    Replay,
    ScheduleSegment,
    Strategy,
    for_seed,
)
from interlace_verify.schedule_check import parallel
from interlace_verify.schedule_check.interleaving import Story, Storyteller

MOST_SEEDS = 1_000_000  # these take days
NEW_OBJECTS = 50_000  # more than a small schedule creates


def seed_list(seeds: int | Iterable[int]) -> list[int]:
    """Return ``range(seeds)`` or the given seeds. Raise TypeError or ValueError for anything else."""
    if isinstance(seeds, bool) or not isinstance(seeds, (int, Iterable)):
        raise TypeError(f"seeds must be a number of schedules or seeds, got {seeds!r}")
    named = range(seeds) if isinstance(seeds, int) else seeds
    chosen = list(itertools.islice(named, MOST_SEEDS + 1))
    if len(chosen) > MOST_SEEDS:
        raise ValueError(f"seeds: at most {MOST_SEEDS:,} schedules are allowed, got more seeds")
    for seed in chosen:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seeds must be ints, got {seed!r}")
    if not chosen:
        raise ValueError(f"seeds must name at least one schedule, got {seeds!r}")
    return chosen


def refused(error: BaseException | None) -> str | None:
    """Return what the simulator cannot run, if this ended a schedule, which then counts as not checked."""
    return with_lines(error) if isinstance(error, NotImplementedError) else None


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill uninitialised tensors with nan, or the largest number, because old contents may hide an error.

    The switch is set as ``torch.use_deterministic_algorithms`` sets it. That function itself would import
    torch's compiler as well: two seconds in every process that runs schedules.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        try:
            torch._C._set_deterministic_algorithms(True, warn_only=True)
            yield
        finally:
            torch._C._set_deterministic_algorithms(before, warn_only=warns)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Run the garbage collector less often than twice in each schedule, which took up to a tenth of it."""
    before = gc.get_threshold()
    gc.set_threshold(NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


RUN_SECONDS = 60.0


@dataclass(frozen=True)
class SimulatedRun:
    """A function on ranks, to run in one schedule after another, and the options of these runs."""

    on_rank: Callable[[Any], Any]
    world_size: int
    store_buffers: bool = False
    timeout: float = RUN_SECONDS
    programs: Programs = interpret

    def scheduler(self, seed: int, strategy: Strategy, **watched: Any) -> Scheduler:
        options = {"timeout": self.timeout, "programs": self.programs, **watched}
        return Scheduler(seed, strategy=strategy, store_buffers=self.store_buffers, **options)

    def results(self, scheduler: Scheduler) -> list[Any]:
        with poisoned_memory():
            return run_sim(self.on_rank, self.world_size, scheduler=scheduler)


DEEPEST = 50


def digest_of(value: object) -> str:
    """Return equal digests for equal results. Tensors and arrays count by their bits, containers and
    dataclasses by their contents. Other objects count by their type alone: they may differ in address only.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(_bytes(value, DEEPEST))
    return digest.hexdigest()


def _bytes(value: object, depth: int) -> bytes:
    name = type(value).__name__.encode()
    if depth == 0 or value is None:
        return name
    if isinstance(value, torch.Tensor):
        return _tensor_bytes(value)
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        data = b"" if array.dtype.hasobject else array.tobytes()
        return f"{array.shape}{array.dtype}".encode() + data
    if isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value).encode()
    parts: list[bytes]
    if isinstance(value, (list, tuple)):
        parts = [_bytes(each, depth - 1) for each in value]
    elif isinstance(value, (set, frozenset)):
        parts = sorted(_bytes(each, depth - 1) for each in value)
    elif isinstance(value, dict):
        parts = [_bytes(k, depth - 1) + b":" + _bytes(v, depth - 1) for k, v in value.items()]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        parts = [_bytes(getattr(value, field.name, None), depth - 1) for field in fields]
    else:
        return name
    return name + b"(" + b",".join(str(len(part)).encode() + b" " + part for part in parts) + b")"


def _tensor_bytes(value: torch.Tensor) -> bytes:
    head = f"{tuple(value.shape)}{value.dtype}{value.layout}".encode()
    if value.layout == torch.sparse_coo:
        value = value.detach().to_dense()
    if value.layout != torch.strided or value.device.type == "meta" or not value.numel():
        return head
    plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return head + plain.view(torch.uint8).numpy().tobytes()


SHRINK_RUNS = 300
SHRINK_SECONDS = 30.0


@dataclass(frozen=True)
class Failure:
    """A schedule that fails. ``kind`` is the exception's name, or "different results".

    Pass ``segments`` to :func:`replay` to run it again. ``switches`` counts changes from one task to
    another, ``found_switches`` the changes before shrinking. ``told`` is the story of ``segments``,
    ``found`` the story before shrinking; ``story`` has a line per step.
    """

    seed: int
    kind: str
    text: str
    segments: tuple[ScheduleSegment, ...]
    found_switches: int
    told: Story = field(repr=False)
    found: Story = field(repr=False)

    @property
    def switches(self) -> int:
        """Return the number of changes from one task to another in ``segments``."""
        return max(0, len(self.segments) - 1)

    @property
    def story(self) -> tuple[str, ...]:
        """Return the interleaving of accesses that other tasks can see, a line per step."""
        return self.told.lines(shared=True)

    @property
    def head(self) -> str:
        """Return the failure in words, with the call that repeats it."""
        again = f"again with schedules(..., seeds=[{self.seed}])"
        return f"seed {self.seed} fails ({again}): {self.text}"

    def __str__(self) -> str:
        switches = (
            f"with {self.switches} context switches ({self.found_switches} before shrinking):"
        )
        return "\n".join([self.head, switches, *(f"  {line}" for line in self.story)])


@dataclass(frozen=True)
class ScheduleReport:
    """The result of :func:`schedules`: ``failing`` lists the seeds that failed, of ``schedules`` runs.

    ``story`` is the first schedule's, whether it failed or not. ``refusal`` names what the simulator cannot
    run. The seeds in ``refused`` were not checked for this reason; they count neither as run nor as failed.
    """

    world_size: int
    schedules: int
    store_buffers: bool
    seconds: float
    failing: tuple[int, ...]
    story: Story = field(repr=False, compare=False)
    failure: Failure | None = None
    refused: tuple[int, ...] = ()
    refusal: str = ""

    @property
    def clean(self) -> bool:
        """Whether all schedules could be checked and passed."""
        return not self.failing and not self.refused

    @property
    def rate(self) -> float:
        """Schedules per second, without the time for shrinking."""
        return self.schedules / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        memory = ", stores late" if self.store_buffers else ""
        head = f"{self.world_size} ranks, {self.schedules} schedules{memory}, {self.rate:.0f} per second: "
        head += f"{len(self.failing)} fail" if self.failing else "none fails"
        if self.refused:
            head += f"\n\nseed {self.refused[0]} is not checked, nor is any seed like it: {self.refusal}"
        return f"{head}\n\n{self.failure}" if self.failing else head


def schedules(
    fn: Callable[..., object],
    world_size: int,
    *args: object,
    n: int = 1000,
    seeds: int | Iterable[int] | None = None,
    store_buffers: bool = False,
    arch: int | None = None,
    check: Callable[[list[Any]], Any] | None = None,
    deterministic: bool = True,
    workers: int | None = None,
    timeout: float = RUN_SECONDS,
    shrink: bool = True,
    on_progress: Callable[[int], None] = lambda done: None,
    **kwargs: object,
) -> ScheduleReport:
    """Run ``fn(*args, **kwargs)`` on ``world_size`` simulated ranks in many orders of execution.

    Parameters
    ----------
    n : the number of schedules: seeds 0 to n - 1, or ``seeds`` as for :func:`races`. Every third seed (0,
        3, ...) gives the schedule of ``interlace.run(fn, world_size, seed=...)``.
    store_buffers : let stores become visible late and out of order until they are released.
    arch : compile kernels for this GPU (80 is sm_80; or 90) and run their PTX.
    check : called with the list of the ranks' results; raises if they are wrong.
    deterministic : a result that differs from the first schedule's is a failure. Turn this off for
        functions whose result may depend on the order.
    workers : processes (forked) that share the work; default one per core, 1 for this process only.
    timeout : seconds per schedule; a longer schedule is a failure.
    shrink : look for the fewest context switches that fail; takes up to a minute.

    Returns a :class:`ScheduleReport`; its ``failure`` is the first failing seed, shrunk.

    Raises TypeError or ValueError for a wrong argument before anything runs. The report has the exceptions
    of ``fn``.

    >>> from interlace import verify
    >>> verify.schedules(interlace.get_rank, 2, n=4, workers=1).clean
    True
    """
    timeout = launcher.check_run(
        fn,
        world_size,
        timeout,
        store_buffers=store_buffers,
        deterministic=deterministic,
        shrink=shrink,
    )
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"n must be an int, got {n!r}")
    if n < 1:
        raise ValueError(f"n must be positive, got {n}")
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int)):
        raise TypeError(f"workers must be an int or None, got {workers!r}")
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be positive, got {workers}")
    if check is not None and not callable(check):
        raise TypeError(f"check must be callable, got {type(check).__name__}")
    chosen = seed_list(n if seeds is None else seeds)
    on_rank = launcher.rank_function(fn, args, kwargs)
    simulated = SimulatedRun(on_rank, world_size, store_buffers, timeout, programs(arch))
    trial = Trial(simulated, check)
    begin = time.monotonic()
    with rare_collections():
        first_outcome = trial.run(chosen[0], tell=True)
        if deterministic and first_outcome.error is None:
            trial = replace(trial, expected=first_outcome.digest)
        on_progress(1)
        later = parallel.map_seeds(
            lambda seed: trial.run(seed).verdict,
            # if one schedule cannot run or does not end, hardly any other can
            [] if first_outcome.refusal or first_outcome.endless else chosen[1:],
            workers=workers,
            on_progress=lambda done: on_progress(done + 1),
            lost=lambda seed, how: (None, how),
        )
        kinds = [(chosen[0], first_outcome.verdict), *later]
    refusals = {seed: refusal for seed, (_, refusal) in kinds if refusal is not None}
    failing = sorted(seed for seed, (wrong, _) in kinds if wrong is not None)
    seconds = time.monotonic() - begin
    failure = None
    if failing:
        first = next(seed for seed in chosen if seed in failing)
        failed = first_outcome if first_outcome.endless else trial.run(first, tell=True)
        failure = shrunk(trial, first, failed, search=shrink)
    counts = world_size, len(kinds) - len(refusals), store_buffers, seconds
    refused = tuple(sorted(refusals))
    refusal = refusals[refused[0]] if refused else ""
    return ScheduleReport(*counts, tuple(failing), first_outcome.story, failure, refused, refusal)


@dataclass(frozen=True)
class TrialResult:
    """The exception of a run or a digest of its results. ``wrong``: the failure, if any."""

    wrong: str | None
    refusal: str | None
    error: BaseException | None
    digest: str
    segments: tuple[ScheduleSegment, ...]
    story: Story

    @property
    def endless(self) -> bool:
        return isinstance(self.error, EndlessTaskError)

    @property
    def verdict(self) -> tuple[str | None, str | None]:
        return self.wrong, self.refusal


@dataclass(frozen=True)
class Trial:
    """A run to repeat in each schedule. ``expected``: the digest of right results, None to accept any."""

    simulated: SimulatedRun
    check: Callable[[list[Any]], Any] | None
    expected: str | None = None

    def run(
        self, seed: int, segments: Sequence[ScheduleSegment] | None = None, *, tell: bool = False
    ) -> TrialResult:
        """Run the schedule of ``seed``, or of ``segments``; with its story if ``tell``."""
        strategy = for_seed(seed) if segments is None else Replay(segments)
        teller = Storyteller()
        observer = teller if tell else None
        scheduler = self.simulated.scheduler(seed, strategy, observer=observer, quiet=QUIET_SECONDS)
        error, digest, refusal = None, "", None
        try:
            results = self.simulated.results(scheduler)
            digest = digest_of(results)
            if self.check is not None:
                self.check(results)
            wrong = "different results" if self.expected not in (None, digest) else None
        except Exception as caught:
            error, refusal = caught, refused(caught)
            wrong = type(caught).__name__ if refusal is None else None
        story = teller.story(seed, error)
        return TrialResult(wrong, refusal, error, digest, scheduler.recorded(), story)


def shrunk(trial: Trial, seed: int, found: TrialResult, *, search: bool) -> Failure:
    """Return the failure ``found`` with ``seed``; if ``search``, look for the fewest context switches."""
    kind, best = found.wrong, found.segments
    search = search and kind is not None and not found.endless  # other runs would not end either
    deadline = time.monotonic() + SHRINK_SECONDS
    runs = 0

    def still_fails(candidate: Sequence[ScheduleSegment]) -> tuple[ScheduleSegment, ...] | None:
        nonlocal runs
        if runs >= SHRINK_RUNS or time.monotonic() > deadline:
            return None
        runs += 1
        outcome = trial.run(seed, candidate)
        return outcome.segments if outcome.wrong == kind else None

    replayed = still_fails(best) if search else None
    if replayed is not None:
        best = min(best, replayed, key=len)
        part = max(1, len(best) // 2)
        while part:
            tried = map(still_fails, _without(best, part))
            smaller = next((each for each in tried if each and len(each) < len(best)), None)
            if smaller is None:
                part //= 2
            else:
                best = smaller
                part = min(part, max(1, len(best) // 2))
    trial_run = found if best is found.segments else trial.run(seed, best, tell=True)
    text = "the results differ from the first schedule's"
    if kind is None:
        kind = "not repeatable"
        text = "failed once, but not again: something other than the schedule causes it"
    elif trial_run.error is not None:
        text = with_lines(trial_run.error)
    switches = max(0, len(found.segments) - 1)
    return Failure(seed, kind, text, best, switches, trial_run.story, found.story)


def _without(segments: Sequence[ScheduleSegment], part: int) -> Iterator[list[ScheduleSegment]]:
    """Yield ``segments`` with ``part`` neighbours left out, the last ones first."""
    for begin in range(len(segments) - part, -1, -part):
        yield [*segments[:begin], *segments[begin + part :]]
    if len(segments) % part:
        yield list(segments[len(segments) % part :])


def replay(
    fn: Callable[..., object],
    world_size: int,
    segments: Sequence[ScheduleSegment],
    *args: object,
    store_buffers: bool = False,
    seed: int = 0,
    arch: int | None = None,
    timeout: float = RUN_SECONDS,
    **kwargs: object,
) -> list[Any]:
    """Run ``fn`` in the order of a failure's ``segments``, with its ``seed``; return the ranks' results.

    Raises the exceptions of the run, and :class:`CollectiveTimeoutError` after ``timeout`` seconds.

    >>> from interlace import verify
    >>> def on_rank():
    ...     interlace.barrier()
    ...     return interlace.get_rank()
    >>> report = verify.schedules(on_rank, 2, n=1, workers=1, check=lambda results: 1 / 0)
    >>> verify.replay(on_rank, 2, report.failure.segments, seed=report.failure.seed)
    [0, 1]
    """
    timeout = launcher.check_run(fn, world_size, timeout, store_buffers=store_buffers)
    on_rank = launcher.rank_function(fn, args, kwargs)
    simulated = SimulatedRun(on_rank, world_size, store_buffers, timeout, programs(arch))
    return simulated.results(simulated.scheduler(seed, Replay(segments)))

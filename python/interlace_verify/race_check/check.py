"""``interlace.verify.races``: run an SPMD function in ``sim`` and report accesses that are not ordered.

The interpreter reports the accesses of kernels. Torch's dispatcher reports the operators of user code, and
the schema of an operator says what it reads and what it writes.

A schedule with findings is run again, with these observers:

- A :class:`RaceTeller` writes the story.
- Detectors without one of the rules find the rule that a race breaks.
- Detectors in which the atomics of one line acquire and release find a relaxed atomic between two accesses.
  An example is a relaxed counter whose last program signals by another word.

If a check is clean, detectors that ignore the barriers of one line find superfluous barriers. This needs
programs whose threads are known: the interpreter does not know which threads a barrier is for.
"""

from __future__ import annotations

import functools
import linecache
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from interlace import launcher
from interlace.runtime.compat.torch_modes import DispatchMode
from interlace.runtime.core.errors import EndlessTaskError, SourceText
from interlace.runtime.places.sim.choice import Rewrite, programs
from interlace.runtime.places.sim.scheduler.memory_check import BadAccess
from interlace.runtime.places.sim.scheduler.observer import Observer
from interlace.runtime.places.sim.scheduler.scheduler import QUIET_SECONDS, Scheduler
from interlace.runtime.places.sim.scheduler.source_lines import (
    program_lines,
    task_lines,
    with_lines,
)
from interlace.runtime.places.sim.scheduler.strategies import Task, for_seed
from interlace_verify.lint_check.check import specialisation
from interlace_verify.race_check import hints
from interlace_verify.race_check.agents import Rules
from interlace_verify.race_check.collector import Asked
from interlace_verify.race_check.findings import (
    Access,
    Finding,
    RaceReport,
    Reach,
    by_cause,
    with_names,
)
from interlace_verify.race_check.happens_before import Detector
from interlace_verify.schedule_check.check import (
    SimulatedRun,
    rare_collections,
    refused,
    seed_list,
)
from interlace_verify.schedule_check.interleaving import Story, Storyteller

# operators whose result is filled with poison during a check, see ``sampling.poisoned_memory``
_UNDEFINED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# these, and the operators that use only the shape, the dtype or the op of their argument
_SHAPES_ONLY = _UNDEFINED | {
    "wait_tensor",
    *("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_zeros", "new_ones", "new_full"),
}


class TorchAccesses(DispatchMode):
    """Report the tensors that each operator reads and writes to ``detector``, as the current task's."""

    def __init__(self, scheduler: Scheduler, detector: Any) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._detector = detector

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._scheduler.inside and self._scheduler.current.program is None:
            self._note(func, args, kwargs, result)
        return result

    def _note(self, func: OpOverload, args: object, kwargs: object, result: object) -> None:
        task, detector = self._scheduler.current, self._detector
        name = func.overloadpacket.__name__
        tensors = list(_tensors_of(func, args, kwargs))
        if name == "lift_fresh":  # the last step of torch.tensor(...) and torch.from_numpy(...)
            for tensor, _ in tensors:
                detector.new(task, tensor, "tensor")
            return
        if _is_view(func):
            return
        storages = set()
        for tensor, writes in tensors:
            storages.add(tensor.untyped_storage().data_ptr())
            detector.know(tensor, task.rank)
            if name not in _SHAPES_ONLY:
                detector.touch(task, tensor, name, stores=writes)
        for tensor in _tensors(result):
            if tensor.untyped_storage().data_ptr() not in storages:
                detector.new(task, tensor, name, writes=name not in _UNDEFINED)


@cache
def _is_view(func: OpOverload) -> bool:
    """Return whether the operator returns an alias and accesses no data."""
    return torch.Tag.inplace_view in func.tags or any(
        value.alias_info is not None and not value.alias_info.is_write
        for value in func._schema.returns
    )


def _tensors_of(func: OpOverload, args: Any, kwargs: Any) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yield the tensors among the arguments, and whether the operator writes them."""
    for position, argument in enumerate(func._schema.arguments):
        if position < len(args):
            value = args[position]
        elif argument.name in kwargs:
            value = kwargs[argument.name]
        else:
            continue
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors(value):
            yield tensor, writes


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and value.device.type == "cpu":
            yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


class RaceTeller(Storyteller):
    """Writes the story, with torch operators on symmetric memory and all accesses that ``findings`` name.

    ``detector`` must observe each event before the teller does. It names memory of one rank, and finds the
    same findings again (``asked``, see :class:`Collector`), with the step number of each access.
    """

    def __init__(self, seed: int, findings: Iterable[Finding], asked: Asked) -> None:
        super().__init__()
        self.detector = Detector(seed, asked=asked, step=lambda: self._count)
        accesses = [access for each in findings for access in (each.first, each.second)]
        self._named = {(each.rank, each.who, each.lines) for each in accesses if each is not None}

    def _is_named(self, task: Task, lines: tuple[SourceText, ...]) -> bool:
        return (task.rank, self._who(task), lines) in self._named

    def _place(self, task: Task, address: int) -> str | None:
        found = super()._place(task, address)
        if found is None and self._is_named(task, program_lines()):
            found = self.detector.place(address)
        return found

    def on_bad_access(self, task: Task, bad: BadAccess) -> None:
        place = f" at {bad.memory}, byte {bad.offset}" if bad.memory else ""
        text = f"{bad.does}{place}: {bad.kind}"
        self._note(task, text, program_lines())

    def on_signals_seen(self, task: Task, slots: Any) -> None:
        before, lines = self._count, task_lines(task)
        super().on_signals_seen(task, slots)
        if self._count == before and self._is_named(task, lines):
            self._note(task, "has waited for signals", lines)

    def know(self, tensor: torch.Tensor, rank: int) -> None: ...

    def new(self, task: Task, tensor: torch.Tensor, op: str, *, writes: bool = True) -> None:
        if writes and self._memory.find(tensor.data_ptr()) is None:
            self.touch(task, tensor, op, stores=True)

    def touch(self, task: Task, tensor: torch.Tensor, op: str, *, stores: bool) -> None:
        place, lines = self._memory.find(tensor.data_ptr()), task_lines(task)
        if place is None and self._is_named(task, lines):
            place = self.detector.place(tensor.data_ptr())
        if place is not None:
            verb = "writes" if stores else "reads"
            self._note(task, f"{verb} ({op}) at {place}", lines)


_WRITTEN = re.compile(r"barrier|syncthreads|bar\.sync")
_OURS = re.compile(r"/(interlace/kernels|interlace_verify)/")
BARRIER_SEEDS = 2  # seeds for which barriers are left out
MOST_ATOMICS = 16  # lines of atomics that are tried


def superfluous(
    lines: Iterable[SourceText],
    seeds: Iterable[int],
    observed: Callable[[int, list[Detector]], object],
) -> tuple[SourceText, ...]:
    """Return the ``lines`` whose barriers are not needed: without one such line there is no race."""
    left = sorted(filter(_is_written, lines), key=lambda line: line.frames)
    for seed in list(seeds)[:BARRIER_SEEDS]:
        if left:
            asked = [Detector(seed, Rules(ignored=line)) for line in left]
            observed(seed, asked)
            left = [line for line, each in zip(left, asked, strict=True) if not each.found]
    return tuple(left)


def _is_written(line: SourceText) -> bool:
    """Return whether the barrier stands in the user's source (the compiler adds others)."""
    return any(
        _WRITTEN.search(linecache.getline(path, number)) and not _OURS.search(path)
        for path, number in line.frames
    )


def counters(
    detector: Detector, asked: Asked, observed: Callable[[list[Detector]], object]
) -> dict[tuple[object, ...], Access]:
    """Return, by the key of a finding in ``asked``, the atomic that would order it with "acq_rel"."""
    if not asked:
        return {}
    weak = {atomic.lines[0]: atomic for atomic in detector.weak_atomics if atomic.lines}
    accesses = [*weak.values()][:MOST_ATOMICS]
    other_accesses = [
        Detector(detector.seed, Rules(ordered=access.lines[0]), asked=asked) for access in accesses
    ]
    if other_accesses:
        observed(other_accesses)
    tried = [*zip(accesses, other_accesses, strict=True)][::-1]
    return {key: access for access, each in tried for key in asked if key not in each.found}


SEEDS = 10
SEEN = ("ordering", "loads", "received", "barriers")  # the lines that a detector notes

# Causes of races, by the detector's rule: without the rule there is no race in the same run.
CAUSES: dict[str, tuple[str, Callable[[Finding], hints.Hint]]] = {
    "barriers": ("no barrier", hints.before),
    "barriers_after": ("no barrier", hints.after),
    "puts": ("weak order", hints.puts),
    "scopes": ("narrow scope", hints.scope),
    "releases": ("weak order", hints.release),
    "acquires": ("weak order", hints.acquire),
    "proxies": ("no proxy fence", hints.proxy),
}
OFF: dict[str, Any] = dict.fromkeys(CAUSES, False)
NO_RULES = Rules(**OFF)
# All rules but one, for each rule, then no rule; below, each rule alone.
RELAXED = [*(Rules(**{rule: OFF[rule]}) for rule in CAUSES), NO_RULES]
ALONE = [Rules(**OFF | {rule: True}) for rule in CAUSES]


def races(
    fn: Callable[..., object],
    world_size: int,
    *args: object,
    seeds: int | Iterable[int] = SEEDS,
    store_buffers: bool = False,
    arch: int | None = None,
    rewrite: Rewrite | None = None,
    timeout: float = 300.0,
    on_seed: Callable[[int], None] = lambda seed: None,
    **kwargs: object,
) -> RaceReport:
    """Run ``fn(*args, **kwargs)`` on ``world_size`` simulated ranks and report its races.

    Vector clocks (``happens_before.py``) order every load, store, atomic and barrier of every kernel, every
    copy, signal and event of streams, and every torch operator of user code. A race is reported even if
    the schedule did not suffer from it. So a few schedules are enough: they differ in which branches run
    and which ranks come first.

    Parameters
    ----------
    fn : the function, as for :func:`interlace.run`. It may call any Triton kernel, also with inline PTX.
    seeds : the number of schedules, or their seeds.
    store_buffers : let stores become visible late and out of order until they are released.
    arch : compile kernels for this GPU (80 is sm_80; or 90), run their PTX, and check threads separately.
    rewrite : with ``arch``, a function of a kernel's name and its PTX that returns the PTX to run instead.
        Use it to show that a fault is found.
    timeout : seconds per schedule.
    on_seed : called after each schedule, to show progress.

    Returns a :class:`RaceReport`; ``print`` it. Findings are the same in every run with the same seeds.
    An exception of ``fn`` does not end the check. It is listed in the report's ``errors``, once if only
    numbers differ. If the simulator cannot run a kernel, it is listed in ``refusals``.

    >>> import interlace.verify, torch
    >>> def step():
    ...     return interlace.all_gather_matmul(torch.ones(2, 4), torch.ones(4, 2))
    >>> print(interlace.verify.races(step, 2, seeds=1).clean)
    True
    """
    timeout = launcher.check_run(fn, world_size, timeout, store_buffers=store_buffers)
    chosen, on_rank = seed_list(seeds), launcher.rank_function(fn, args, kwargs)
    run_programs = programs(arch, rewrite)
    simulated = SimulatedRun(on_rank, world_size, store_buffers, timeout, run_programs)
    found: dict[object, Finding] = {}
    launches: dict[object, Any] = {}
    errors: list[tuple[int, str]] = []
    refusals: list[tuple[int, str]] = []
    stories: list[Story] = []
    seen: dict[str, set[SourceText]] = {name: set() for name in SEEN}
    reaches: dict[object, Reach] = {}
    events = 0

    def observe(seed: int, asked: Sequence[Observer]) -> Exception | None:
        return observed_run(simulated, seed, Several(asked))

    for number, seed in enumerate(chosen, 1):
        detector = Detector(seed)
        raised = observed_run(simulated, seed, detector)
        error = SourceText("")
        if raised is not None:
            problem = with_lines(raised)
            error = SourceText(f"{type(raised).__name__}: {problem}", problem.frames)
        of_its_kind = errors if refused(raised) is None else refusals
        endless = isinstance(raised, EndlessTaskError)
        differs = bool(error) and _form(error) not in {_form(text) for _, text in of_its_kind}
        if differs:
            of_its_kind.append((seed, error))
        events += detector.events
        for name, lines in seen.items():
            lines |= getattr(detector, name)
        for key, reach in detector.reaches.items():
            reaches.setdefault(key, Reach()).join(reach)
        launches = {**{specialisation(launch): launch for launch in detector.launches}, **launches}
        new = [finding for key, finding in detector.found.items() if key not in found]
        if endless:  # other schedules, and reruns of this one, would also run to the time limit
            found |= {each.key: each for each in new}
            chosen = chosen[:number]
            on_seed(seed)
            break
        if new or differs:
            keys = {each.key: detector.first_at[each.key] for each in new}
            relaxed = [Detector(seed, rules, keys) for rules in RELAXED]
            teller = RaceTeller(seed, new, keys)
            observe(seed, [*relaxed, teller.detector, teller])
            stories.append(teller.story(seed, raised))
            broken = {key: _broken(key, relaxed) for key in keys}
            free = relaxed[-1].found
            if mixed := {key: at for key, at in keys.items() if broken[key] is None}:
                alone = [Detector(seed, rules, mixed) for rules in ALONE]
                observe(seed, alone)
                for key in mixed:
                    found_by = zip(CAUSES, alone, strict=True)
                    broken[key] = [rule for rule, each in found_by if key in each.found]
            chained = [
                each.key
                for each in new
                if not each.signal and {*(broken[each.key] or [""])} <= {"releases", "acquires"}
            ]
            asked = {key: keys[key] for key in chained}
            relays = counters(detector, asked, functools.partial(observe, seed))
            for finding in new:
                again = teller.detector.found.get(finding.key, finding)
                behind = free.get(finding.key, finding).signal is not None
                rules = broken[finding.key] or []
                told_as = _explain(finding, rules, again, behind, detector.polls)
                if access := relays.get(finding.key):
                    text, (at,) = hints.relay(access)
                    told_as = replace(told_as, hint=text, change=(at.lines,))
                found[finding.key] = told_as
        on_seed(seed)

    causes = by_cause([each for each in found.values() if not each.is_done], reaches)
    done = by_cause([each for each in found.values() if each.is_done], reaches)
    barriers = () if causes or errors or refusals else seen["barriers"]
    return RaceReport(
        world_size,
        tuple(chosen),
        events,
        causes,
        tuple(errors),
        tuple(launches.values()),
        tuple(stories),
        tuple(refusals),
        frozenset(seen["ordering"]),
        superfluous(barriers, chosen, observe),
        frozenset(seen["loads"]),
        frozenset(seen["received"]),
        tuple(each for each in done if each.cause not in {other.cause for other in causes}),
    )


def _form(error: str) -> str:
    """Return an error's text without its numbers: ranks, seeds, values."""
    return re.sub(r"\d+", "#", error)


def observed_run(simulated: SimulatedRun, seed: int, observer: Any) -> Exception | None:
    """Run one schedule and return the exception that ended it, if any."""
    watched = {"observer": observer, "on_bad_access": observer.on_bad_access}
    scheduler = simulated.scheduler(seed, for_seed(seed), quiet=QUIET_SECONDS, **watched)
    try:
        with rare_collections(), TorchAccesses(scheduler, observer):
            simulated.results(scheduler)
    except Exception as error:
        return error
    finally:
        if isinstance(observer, Detector):
            for key, each in observer.found.items():
                observer.found[key] = with_names(each, scheduler.memory)
    return None


class Several:
    """Passes each event of a run to several observers, until they are done."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = observers

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def tell_all(*arguments: Any, **named: Any) -> Any:
            self.observers = [each for each in self.observers if not getattr(each, "done", False)]
            answers = [getattr(each, name)(*arguments, **named) for each in self.observers]
            return answers[0] if answers else None

        return tell_all


def _broken(key: tuple[object, ...], relaxed: list[Detector]) -> list[str] | None:
    """Return the rule without which the finding vanishes, or None if it takes several rules."""
    *without, free = relaxed
    rules = [rule for rule, each in zip(CAUSES, without, strict=True) if key not in each.found]
    if "releases" in rules and rules[0].startswith("barriers"):  # there is a barrier, after fences
        return ["releases"]
    return rules[:1] if rules or key in free.found else None


def _explain(
    finding: Finding, broken: list[str], again: Finding, behind: bool, polls: Container[object]
) -> Finding:
    """Return ``finding`` with the ``broken`` rules as its cause and the steps of its accesses in ``again``.

    ``behind``: whether the signal comes after the first access if barriers do not count.
    ``polls``: loads that waited for a plain store, by their texts and lines.
    """
    finding = replace(finding, first=again.first, second=again.second)
    if finding.first is None:
        return finding
    flag = hints.plain_flag(finding, polls)
    rule_hints = [CAUSES[rule][1](finding) for rule in broken] or [
        flag or hints.missing(finding, behind)
    ]
    kinds = {CAUSES[rule][0] for rule in broken} or ({"weak order"} if flag else set())
    kinds = kinds or {"mixed access" if finding.polled else finding.kind}
    return replace(
        finding,
        kind=kinds.pop() if len(kinds) == 1 else "weak order",
        hint="; and ".join(dict.fromkeys(each.text for each in rule_hints)),
        change=tuple(dict.fromkeys(access.lines for each in rule_hints for access in each.at)),
    )

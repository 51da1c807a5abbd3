"""The checks of one ``interlace verify``: which jobs there are, and what came of them.

A *subject* is a shipped op, a function in a file, or the protocols. A *job* is one check of one subject;
jobs run in parallel processes. What they found is a :class:`JobResult` each.
"""

import importlib.util
import inspect
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from interlace.runtime.compat.triton_driver import driver_of
from interlace.runtime.compiler.build import build
from interlace.runtime.compiler.catalogue import ARCHES, Entry, entries, one_of_each
from interlace.verify.lint_check.check import (
    LintReport,
    by_cause,
    lint_many,
    lint_request,
    settled,
    specialisation,
)
from interlace.verify.protocols.patterns import PATTERNS, explored
from interlace.verify.race_check.causes import on_more_ranks
from interlace.verify.race_check.check import races
from interlace.verify.race_check.findings import Finding, RaceReport
from interlace.verify.schedule_check import parallel
from interlace.verify.schedule_check.check import ScheduleReport, schedules
from interlace.verify.shims.imports import calls_a_shim, needed_for
from interlace.verify.suite.targets import TARGETS

CHECKS = ("races", "schedules", "late stores", "lint", "protocol")
PROTOCOLS = "protocols"
FULL_PATTERNS, QUICK_PATTERNS = (4, 3), (3, 2)  # ranks, rounds


@dataclass(frozen=True)
class CheckPlan:
    """A plan: what to check and how much. ``ranks`` for races; schedules run on the smallest of them.

    ``ignore``: rules of lint that do not apply to a user's kernels. ``quick``: lint one variant of each
    kernel, and explore protocols of fewer ranks and rounds.
    """

    ranks: tuple[int, ...] = (2, 3, 4, 8)
    seeds: int = 3
    schedules: int = 20
    arches: tuple[int, ...] = ARCHES
    quick: bool = False
    ignore: tuple[str, ...] = ()


FULL, QUICK = CheckPlan(), CheckPlan((2, 3), 1, 3, (90,), True)
# of a function of one's own, which may need ranks in powers of two
FULL_OWN, QUICK_OWN = CheckPlan((2, 4), 10, 200), CheckPlan((2, 4), 3, 30, (90,))


@dataclass(frozen=True)
class JobResult:
    """One job: ``count`` says how much was looked at, ``findings`` are texts, none if it is clean.

    ``report`` is that of the check, where there is one; ``refusals`` are texts, too, of what could not be
    checked. ``notes`` are neither. ``lost``: the process that checked it has ended.
    """

    subject: str
    check: str
    variant: str
    count: str
    findings: tuple[str, ...]
    seconds: float
    report: RaceReport | ScheduleReport | LintReport | None = field(default=None, repr=False)
    refusals: tuple[str, ...] = ()
    lost: bool = False

    @property
    def notes(self) -> list[str]:
        return self.report.notes if isinstance(self.report, RaceReport) else []

    def to_dict(self) -> dict[str, Any]:
        """For JSON: all but the report."""
        facts = {**vars(self), "seconds": round(self.seconds, 3), "notes": self.notes}
        del facts["report"], facts["lost"]
        return facts


JobOutcome = tuple[
    str, Sequence[str], RaceReport | ScheduleReport | LintReport | None, Sequence[str]
]


class Job(NamedTuple):
    """One check of one function, on one world size, or of one protocol."""

    subject: str
    check: str
    variant: str
    run: Callable[[], JobOutcome]

    @property
    def title(self) -> str:
        return f"{self.subject}: {self.check}, {self.variant}".rstrip(", ")

    def result(self) -> JobResult:
        begin = time.monotonic()
        try:
            count, findings, report, refusals = self.run()
        except Exception as error:  # the other jobs' results are not lost for it
            return replace(
                self.without_result(f"the check ended with {type(error).__name__}: {error}"),
                seconds=time.monotonic() - begin,
            )
        done = count, tuple(findings), time.monotonic() - begin, report, tuple(refusals)
        return JobResult(self.subject, self.check, self.variant, *done)

    def without_result(self, how: str) -> JobResult:
        """Nothing came of it: ``how`` it ended."""
        return JobResult(self.subject, self.check, self.variant, "0 runs", (), 0.0, None, (how,))


def shipped_jobs(names: Sequence[str], plan: CheckPlan) -> list[Job]:
    """Races and schedules of shipped ops, the longest first; a quick plan of several has fewer variants."""
    quick = plan.quick and len(names) > 1
    plan = replace(plan, ranks=tuple(sorted(plan.ranks, reverse=True)))
    return _jobs({name: TARGETS[name].checked(quick) for name in names}, plan)


def function_jobs(subject: str, fn: Callable[[], Any], plan: CheckPlan) -> list[Job]:
    return _jobs({subject: {"": fn}}, plan)


def _jobs(subjects: dict[str, dict[str, Callable[[], Any]]], plan: CheckPlan) -> list[Job]:
    every = [(name, *each) for name, variants in subjects.items() for each in variants.items()]
    jobs = []

    def add(check: str, world_size: int, job: Callable[..., Any], *arguments: Any) -> None:
        for subject, variant, fn in every:
            text = f"{variant} {world_size} ranks".strip()
            jobs.append(Job(subject, check, text, partial(job, fn, world_size, *arguments)))

    for world_size in plan.ranks:
        add("races", world_size, _races, plan.seeds)
    add("schedules", min(plan.ranks), _schedules, plan.schedules, False)
    add("late stores", min(plan.ranks), _schedules, plan.schedules, True)
    return jobs


def protocol_jobs(plan: CheckPlan) -> list[Job]:
    """All interleavings of the patterns of ``kernels/signal.py``."""
    ranks, rounds = QUICK_PATTERNS if plan.quick else FULL_PATTERNS
    text = f"{ranks} ranks, {rounds} rounds"
    return [
        Job(PROTOCOLS, "protocol", f"{name}, {text}", partial(_protocol, name, ranks, rounds))
        for name in PATTERNS
    ]


def _races(fn: Callable[[], Any], world_size: int, seeds: int) -> JobOutcome:
    report = races(fn, world_size, seeds=seeds)
    refusals = [f"seed {seed} is not checked: {text}" for seed, text in report.refusals]
    if not (report.events or report.errors or refusals):
        refusals = ["there is nothing to check: no kernel was launched, and no memory accessed"]
    return f"{report.events} accesses", _texts(report), replace(report, launches=()), refusals


def _texts(report: RaceReport) -> list[str]:
    errors = [f"seed {seed}: {text}" for seed, text in report.errors]
    return [*map(str, report.findings), *errors]


def _schedules(fn: Callable[[], Any], world_size: int, count: int, late: bool) -> JobOutcome:
    report = schedules(fn, world_size, n=count, store_buffers=late, workers=1)
    texts = [str(report)] if report.failing else []
    return f"{report.schedules} schedules", texts, report, [report.refusal] * bool(report.refused)


def _protocol(name: str, ranks: int, rounds: int) -> JobOutcome:
    found = explored(name, ranks, rounds)
    reduced = ", reduced" if found.reduced else ""
    texts = [str(each) for each in (*found.deadlocks, *found.violations)]
    return f"{found.states} states{reduced}", texts, None, []


def run_jobs(jobs: Sequence[Job], *, on_done: Callable[[], None] = lambda: None) -> list[JobResult]:
    """All results, in the order of the jobs. Runs in parallel processes."""
    results = parallel.map_seeds(
        lambda index: jobs[index].result(),
        range(len(jobs)),
        chunk=1,
        name=lambda index: jobs[index].title,
        on_progress=lambda done: on_done(),
        lost=lambda index, how: replace(jobs[index].without_result(how), lost=True),
    )
    return _by_cause([result for _, result in sorted(results, key=itemgetter(0))])


def _by_cause(results: Sequence[JobResult]) -> list[JobResult]:
    """``results`` with each cause of races once, told where it was found first."""
    found: dict[Any, Finding] = {}
    for result in results:
        if isinstance(report := result.report, RaceReport):
            for finding in report.findings:
                key = result.subject, finding.cause
                known = found.get(key)
                found[key] = on_more_ranks(known, report.world_size) if known else finding
    told = []
    for result in results:
        if isinstance(report := result.report, RaceReport):
            mine = [found.pop((result.subject, each.cause), None) for each in report.findings]
            report = replace(report, findings=tuple(filter(None, mine)))
            result = replace(result, report=report, findings=tuple(_texts(report)))
        told.append(result)
    return told


def lint_shipped(
    names: Sequence[str], plan: CheckPlan, *, on_done: Callable[[], None] = lambda: None
) -> list[JobResult]:
    """Every variant of the catalogue of these ops, compiled and linted."""
    wanted = {kernel: name for name in names for kernel in TARGETS[name].kernels}
    chosen = shipped_entries(names, plan)
    reports = build(chosen, on_report=lambda report: on_done())
    results = []
    for entry, report in zip(chosen, reports, strict=True):
        variant = f"{entry.variant} sm_{entry.arch}".strip()
        texts = (f"{report.name} for sm_{report.arch}: {text}" for text in report.problems())
        results.append(_linted(wanted[entry.kernel], variant, tuple(texts), report.seconds))
    return results


def shipped_entries(names: Sequence[str], plan: CheckPlan) -> list[Entry]:
    """The entries that :func:`lint_shipped` compiles."""
    kernels = {kernel for name in names for kernel in TARGETS[name].kernels}
    chosen = [entry for arch in plan.arches for entry in entries(arch) if entry.kernel in kernels]
    return one_of_each(chosen) if plan.quick else chosen


def lint_launches(
    subject: str,
    fn: Callable[[], Any],
    plan: CheckPlan,
    *,
    on_done: Callable[[], None] = lambda: None,
) -> list[JobResult]:
    """Lint every kernel that ``fn`` launches in every form it is seen in.

    But those of interlace, and those that call a shim, which is not compiled to what the package that it
    stands for is compiled to. What races of one schedule settle is no finding. ``fn`` runs in this process.
    """
    checked = [races(fn, world_size, seeds=1) for world_size in plan.ranks]
    clean = all(report.clean for report in checked)
    ordering = frozenset().union(*(report.ordering for report in checked if clean))
    seen = {
        specialisation(launch): launch
        for report in checked
        for launch in report.launches
        if not launch.kernel.fn.__module__.startswith("interlace.kernels.")
        and not calls_a_shim(launch.kernel)
    }
    results, requests = [], []
    for launch in seen.values():
        try:
            requests += [lint_request(launch, arch, plan.ignore) for arch in plan.arches]
        except (TypeError, ValueError) as error:
            text = f"{launch.name} cannot be linted: {error}"
            results.append(replace(_linted(subject, launch.name, ()), refusals=(text,)))
    reports = lint_many(requests, on_report=lambda report: on_done())
    for report in by_cause([settled(report, ordering) for report in reports]):
        variant = f"{report.kernel} sm_{report.arch}"
        results.append(_linted(subject, variant, report.texts(), report.seconds, report))
    return results


def _linted(
    subject: str,
    variant: str,
    texts: tuple[str, ...],
    seconds: float = 0.0,
    report: LintReport | None = None,
) -> JobResult:
    return JobResult(subject, "lint", variant, "1 variant", texts, seconds, report)


def parameters_without_default(fn: Callable[..., Any]) -> list[str]:
    """Names of what a call of ``fn`` has to give; none where its signature is not known."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


def load_function(text: str) -> Callable[[], Any]:
    """The function of "path/to/file.py::function"; errors say what is wrong with the text or the file."""
    path_text, _, name = text.partition("::")
    path = pathlib.Path(path_text)
    if not name or path.suffix != ".py":
        raise ValueError(f"{text}: must be like path/to/file.py::function")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    module_name = path.stem
    known = sys.modules.get(module_name)
    if known is not None and getattr(known, "__file__", None) != str(path.resolve()):
        module_name = f"verified_{path.stem}"
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(module_name, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    own_arguments, sys.argv = sys.argv, [str(path)]  # a script may parse its own
    try:
        with driver_of(90):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        shim = needed_for(error)
        hint = f"; --shims {shim} stands in for it" if shim else ""
        raise ValueError(
            f"{path}: importing it fails: {type(error).__name__}: {error}{hint}"
        ) from error
    finally:
        sys.argv = own_arguments
    fn = getattr(module, name, None)
    if not callable(fn):
        public = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ValueError(f"{path}: has no function {name!r}; it has {', '.join(public) or 'none'}")
    # as jit functions of Triton have, interpreted or not
    if hasattr(fn, "fn") and hasattr(fn, "run"):
        raise ValueError(f"{path}: {name!r} is a kernel; name a function that launches it")
    return fn  # type: ignore[no-any-return]

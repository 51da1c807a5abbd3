"""The checks of one ``interlace verify`` call: its jobs and their results.

A *subject* is a shipped op, a function in a file, or the protocols. A *job* is one check of one subject.
Jobs run in parallel processes, and each gives a :class:`JobResult`.
"""

import contextlib
import importlib
import importlib.util
import inspect
import os
import pathlib
import re
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from interlace.runtime.compiler.request import jitted_function
from interlace.runtime.places.sim.choice import compiled_for
from interlace.tools import user_files
from interlace.tools.catalogue.build import build
from interlace.tools.catalogue.catalogue import ARCHES, Entry, entries, one_of_each
from interlace.tools.targets import TARGETS
from interlace_verify.lint_check.check import (
    LintReport,
    LintRequest,
    by_cause,
    lint_many,
    lint_request,
    settle,
)
from interlace_verify.protocols.patterns import PATTERNS, explore_pattern
from interlace_verify.race_check.check import races
from interlace_verify.race_check.findings import Finding, RaceReport, on_more_ranks
from interlace_verify.schedule_check import parallel
from interlace_verify.schedule_check.check import ScheduleReport, schedules
from interlace_verify.schedule_check.interleaving import in_words
from interlace_verify.shims.imports import calls_a_shim, needed_for

CHECKS = ("races", "schedules", "late stores", "lint", "protocol")
PROTOCOLS = "protocols"
FULL_PATTERNS, QUICK_PATTERNS = (4, 3), (3, 2)  # ranks, rounds


@dataclass(frozen=True)
class CheckPlan:
    """The checks to run and their extent. ``ranks`` are for races; schedules run on the smallest of them.

    ``schedules``: 0 for none. ``ignore``: rules of lint that do not apply to a user's kernels. ``quick``:
    lint one variant of each kernel, and explore protocols of fewer ranks and rounds. ``run_for``: GPUs to
    compile kernels for that cannot be interpreted; () for the first GPU that can run them. ``budget``:
    seconds of processor time for the race check on one number of ranks. When it is spent, no further
    schedule begins; the first one always runs, and is the only one if it has findings. 0: no limit.
    """

    ranks: tuple[int, ...] = (2, 3, 4, 8)
    seeds: int = 3
    schedules: int = 20
    arches: tuple[int, ...] = ARCHES
    quick: bool = False
    ignore: tuple[str, ...] = ()
    run_for: tuple[int, ...] = ()
    budget: float = 0.0


FULL, QUICK = CheckPlan(), CheckPlan((2, 3), 1, 3, (90,), True)
# for a user's function, which may need ranks in powers of two
FULL_OWN, QUICK_OWN = CheckPlan((2, 4), 10, 200), CheckPlan((2, 4), 3, 0, (90,), budget=6.0)

_OF_A_GPU = re.compile(  # errors of torch in a file that needs its shim
    r"process group has not been initialized|env:// rendezvous|not compiled with CUDA|no NVIDIA driver"
)


@dataclass(frozen=True)
class JobResult:
    """The result of one job. ``count`` says how much was checked; ``findings`` are texts, () if clean.

    ``report`` is the check's report, if there is one. ``refusals`` are texts about parts that could not be
    checked. ``notes`` are other texts. ``seconds`` are processor time, with child processes.
    ``lost``: the process of the check has died.
    """

    subject: str
    check: str
    variant: str
    count: str
    findings: tuple[str, ...]
    seconds: float
    report: RaceReport | ScheduleReport | LintReport | None = field(default=None, repr=False)
    refusals: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    lost: bool = False

    def texts(self) -> list[tuple[Any, str]]:
        """Return (key, text) of findings and refusals; the same cause has the same key."""
        race = isinstance(self.report, RaceReport)
        causes = [finding.cause for finding in self.report.findings] if race else []  # type: ignore[union-attr]
        causes += self.findings[len(causes) :]
        refusals = [f"not checked: {text}" for text in self.refusals]
        return [*zip(causes, self.findings, strict=True), *zip(refusals, refusals, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """Return all but the report, for JSON."""
        facts = {**vars(self), "seconds": round(self.seconds, 3)}
        del facts["report"], facts["lost"]
        return facts


class Job(NamedTuple):
    """One check of one function on one world size, or of one protocol."""

    subject: str
    check: str
    variant: str
    run: Callable[[], JobResult]

    @property
    def title(self) -> str:
        return f"{self.subject}: {self.check}, {self.variant}".rstrip(", ")

    def result(self) -> JobResult:
        begin = processor_seconds()
        try:
            result = self._named(self.run())
        except Exception as error:  # the results of other jobs are kept
            result = self.without_result(f"the check ended with {type(error).__name__}: {error}")
        return replace(result, seconds=processor_seconds() - begin)

    def without_result(self, reason: str) -> JobResult:
        """Return the result of a check that ended without one; ``reason`` says why."""
        return self._named(_result("0 runs", refusals=(reason,)))

    def _named(self, result: JobResult) -> JobResult:
        return replace(result, subject=self.subject, check=self.check, variant=self.variant)


def _result(count: str, findings: Iterable[str] = (), **more: Any) -> JobResult:
    """Return the result of a check without its name and its time."""
    return JobResult("", "", "", count, tuple(findings), 0.0, **more)


def shipped_jobs(names: Sequence[str], plan: CheckPlan) -> list[Job]:
    """Return races and schedules of shipped ops, most ranks first; a quick plan has fewer variants."""
    quick = plan.quick and len(names) > 1
    plan = replace(plan, ranks=tuple(sorted(plan.ranks, reverse=True)))
    return _jobs({name: TARGETS[name].checked(quick) for name in names}, plan)


def function_jobs(subject: str, fn: Callable[[], object], plan: CheckPlan) -> list[Job]:
    """Return races and schedules of a user's function; reports of races list the kernels to lint."""
    return _jobs({subject: {"": fn}}, plan, is_users=True)


def _jobs(
    subjects: Mapping[str, dict[str, Callable[[], object]]], plan: CheckPlan, is_users: bool = False
) -> list[Job]:
    variants_of_all = [
        (name, *each) for name, variants in subjects.items() for each in variants.items()
    ]
    jobs = []

    def add(check: str, world_size: int, job: Callable[..., Any], *arguments: Any) -> None:
        for subject, variant, fn in variants_of_all:
            text = f"{variant} {world_size} ranks".strip()
            jobs.append(Job(subject, check, text, partial(job, fn, world_size, *arguments)))

    for world_size in plan.ranks:
        add("races", world_size, _races, plan, is_users)
    if plan.schedules:
        add("schedules", min(plan.ranks), _schedules, plan, False)
        add("late stores", min(plan.ranks), _schedules, plan, True)
    return jobs


def protocol_jobs(plan: CheckPlan) -> list[Job]:
    """Return all interleavings of the patterns of ``kernels/signal.py``."""
    ranks, rounds = QUICK_PATTERNS if plan.quick else FULL_PATTERNS
    text = f"{ranks} ranks, {rounds} rounds"
    return [
        Job(PROTOCOLS, "protocol", f"{name}, {text}", partial(_protocol, name, ranks, rounds))
        for name in PATTERNS
    ]


def _races(fn: Callable[[], object], world_size: int, plan: CheckPlan, is_users: bool) -> JobResult:
    notes = []
    with compiled_for(plan.run_for) as arches:
        report = _race(fn, world_size, plan)
    if plan.run_for and not arches <= {*plan.run_for}:
        wanted, ran = (", ".join(f"sm_{each}" for each in some) for some in (plan.run_for, arches))
        notes.append(
            f"kernels that must be compiled ran as code for {ran}; code for {wanted} cannot be run"
        )
    if report.clean and (done := len(report.seeds)) < plan.seeds:
        notes.append(
            f"{world_size} ranks: only {done} of {plan.seeds} schedules ran, because each takes long; "
            f"--seeds {plan.seeds} runs all"
        )
    refusals = [f"seed {seed} is not checked: {text}" for seed, text in report.refusals]
    if not (report.events or report.errors or refusals):
        refusals = ["there is nothing to check: no kernel was launched, and no memory accessed"]
    count = f"{report.events} accesses in {in_words(len(report.seeds), 'schedule')}"
    report = replace(report, launches=tuple(_to_lint(report, plan)) if is_users else ())
    found = {"refusals": tuple(refusals), "notes": (*notes, *report.notes)}
    return _result(count, _texts(report), report=report, **found)


def _race(fn: Callable[[], object], world_size: int, plan: CheckPlan) -> RaceReport:
    """Return the report of as many schedules as the plan and its budget allow."""
    if not plan.budget:
        return races(fn, world_size, seeds=plan.seeds)
    begin, here = processor_seconds(), time.process_time()
    report = races(fn, world_size, seeds=1)
    left = plan.budget - (processor_seconds() - begin)
    more = min(plan.seeds - 1, int(left / max(time.process_time() - here, 1e-9)))
    if more < 1 or not report.clean:
        return report
    more_races = races(fn, world_size, seeds=range(1, 1 + more))
    return replace(
        more_races,
        seeds=report.seeds + more_races.seeds,
        events=report.events + more_races.events,
        launches=report.launches + more_races.launches,
        ordering=report.ordering | more_races.ordering,
        loads=report.loads | more_races.loads,
        received=report.received | more_races.received,
        superfluous=tuple(each for each in report.superfluous if each in more_races.superfluous),
    )


def _texts(report: RaceReport) -> list[str]:
    errors = [f"seed {seed}: {text}{_shim_hint(text)}" for seed, text in report.errors]
    return [*map(str, report.findings), *errors]


def _shim_hint(error: str, shim: str | None = None) -> str:
    shim = shim or ("torch" if _OF_A_GPU.search(error) else None)
    return f"; --shims {shim} stands in for it" if shim else ""


def _schedules(fn: Callable[[], Any], world_size: int, plan: CheckPlan, late: bool) -> JobResult:
    with compiled_for(plan.run_for):
        report = schedules(fn, world_size, n=plan.schedules, store_buffers=late, workers=1)
    texts = [f"{report}{_shim_hint(str(report))}"] if report.failing else []
    count = in_words(report.schedules, "schedule")
    refusals = (report.refusal,) * bool(report.refused)
    return _result(count, texts, report=report, refusals=refusals)


def _protocol(name: str, ranks: int, rounds: int) -> JobResult:
    found = explore_pattern(name, ranks, rounds)
    reduced = ", reduced" if found.reduced else ""
    texts = [str(each) for each in (*found.deadlocks, *found.violations)]
    return _result(f"{found.states} states{reduced}", texts)


def processor_seconds() -> float:
    """Return the processor time of this process and its children; running ones count only with /proc."""
    total = time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    ticks = os.sysconf("SC_CLK_TCK")
    for child in running_children():
        with contextlib.suppress(OSError):  # it has ended
            figures = pathlib.Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, figures[11:15])) / ticks
    return total


def running_children() -> list[str]:
    """Return the pids of this process's children, as far as /proc exists and their threads live."""
    found: list[str] = []
    for children in pathlib.Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += children.read_text().split()
    return found


def run_jobs(
    jobs: Sequence[Job], *, on_done: Callable[[JobResult], object] = lambda result: None
) -> list[JobResult]:
    """Run jobs in parallel; return results in the order of jobs. ``on_done`` gets each when it is done."""
    results: list[tuple[int, JobResult]] = []
    for index, result in parallel.map_seeds(
        lambda index: jobs[index].result(),
        range(len(jobs)),
        chunk=1,
        name=lambda index: jobs[index].title,
        lost=lambda index, how: replace(jobs[index].without_result(how), lost=True),
    ):
        results.append((index, result))
        on_done(result)
    return _by_cause([result for _, result in sorted(results, key=itemgetter(0))])


def _by_cause(results: Sequence[JobResult]) -> list[JobResult]:
    """Return ``results`` with each cause of races once, in the first result that has it."""
    found: dict[object, Finding] = {}
    for result in results:
        if isinstance(report := result.report, RaceReport):
            for finding in report.findings:
                key = result.subject, finding.cause
                known = found.get(key)
                found[key] = on_more_ranks(known, report.world_size) if known else finding
    first_results = []
    for result in results:
        if isinstance(report := result.report, RaceReport):
            kept_findings = [
                found.pop((result.subject, each.cause), None) for each in report.findings
            ]
            report = replace(report, findings=tuple(filter(None, kept_findings)))
            result = replace(result, report=report, findings=tuple(_texts(report)))
        first_results.append(result)
    return first_results


def lint_shipped(
    names: Sequence[str], plan: CheckPlan, *, on_done: Callable[[], None] = lambda: None
) -> list[JobResult]:
    """Compile and lint every variant of these ops in the catalogue."""
    wanted = {kernel: name for name in names for kernel in TARGETS[name].kernels}
    chosen, begin = shipped_entries(names, plan), processor_seconds()
    reports = build(chosen, on_report=lambda report: on_done())
    results = []
    for entry, report in zip(chosen, reports, strict=True):
        variant = f"{entry.variant} sm_{entry.arch}".strip()
        texts = (f"{report.name} for sm_{report.arch}: {text}" for text in report.problems())
        results.append(_lint(wanted[entry.kernel], variant, tuple(texts), report.seconds))
    return _of_processor(results, processor_seconds() - begin)


def _of_processor(results: list[JobResult], seconds: float) -> list[JobResult]:
    """Return ``results`` with ``seconds`` of processor time shared out in proportion to their times."""
    share = seconds / (sum(result.seconds for result in results) or 1.0)
    return [replace(result, seconds=result.seconds * share) for result in results]


def shipped_entries(names: Sequence[str], plan: CheckPlan) -> list[Entry]:
    kernels = {kernel for name in names for kernel in TARGETS[name].kernels}
    chosen = [entry for arch in plan.arches for entry in entries(arch) if entry.kernel in kernels]
    return one_of_each(chosen) if plan.quick else chosen


def lint_launches(
    subject: str,
    results: Sequence[JobResult],
    plan: CheckPlan,
    *,
    on_done: Callable[[], None] = lambda: None,
) -> list[JobResult]:
    """Lint every kernel in each form in which the race checks of ``results`` saw it launched.

    Skip interlace's kernels, and kernels that call a shim, because its code differs from the code of the
    real package. Leave out findings that the race checks have settled.
    """
    checked = [result.report for result in results if isinstance(result.report, RaceReport)]
    ended = not any(report.errors or report.refusals for report in checked)
    ordering = frozenset().union(*(report.ordering for report in checked if ended))
    private = frozenset().union(*(report.loads for report in checked if ended))
    private -= frozenset().union(*(report.received for report in checked))
    linted, requests, begin = [], [], processor_seconds()
    for name, asked in launched_kernels(results):
        try:
            if isinstance(asked, str):
                raise ValueError(asked)
            requests += [replace(each, kernel=_kernel(*each.kernel)) for each in asked]
        except (ImportError, LookupError, TypeError, ValueError) as error:
            text = f"{name} cannot be linted: {error}"
            linted.append(replace(_lint(subject, name, ()), refusals=(text,)))
    reports = lint_many(requests, on_report=lambda report: on_done())
    for report in by_cause([settle(report, ordering, private) for report in reports]):
        variant = f"{report.kernel} sm_{report.arch}"
        linted.append(_lint(subject, variant, report.texts(), report.seconds, report))
    return _of_processor(linted, processor_seconds() - begin)


def launched_kernels(
    results: Sequence[JobResult],
) -> list[tuple[str, tuple[LintRequest, ...] | str]]:
    """Return, by name, all forms of kernels that race checks saw, or the reason not to lint one."""
    reports = (result.report for result in results if isinstance(result.report, RaceReport))
    return [*{repr(each): each for report in reports for each in report.launches}.values()]


def _to_lint(
    report: RaceReport, plan: CheckPlan
) -> Iterator[tuple[str, tuple[LintRequest, ...] | str]]:
    """Yield (name, requests) of each launch, or (name, the reason). Other processes also import by name."""
    for launch in report.launches:
        home = launch.kernel.fn.__module__
        if home.startswith("interlace.kernels.") or calls_a_shim(launch.kernel):
            continue
        try:
            requests = [lint_request(launch, arch, plan.ignore) for arch in plan.arches]
        except (TypeError, ValueError) as error:
            yield launch.name, str(error)
        else:
            at = home, jitted_function(launch.kernel).__name__
            yield launch.name, tuple(replace(each, kernel=at) for each in requests)


def _kernel(module: str, name: str) -> Any:
    """Return the kernel whose function has that name. Raise LookupError if there is none."""
    for found in vars(importlib.import_module(module)).values():
        with contextlib.suppress(TypeError, ValueError):
            if jitted_function(found).__name__ == name:
                return found
    raise LookupError(f"{module} has no kernel {name}")


def _lint(
    subject: str,
    variant: str,
    texts: tuple[str, ...],
    seconds: float = 0.0,
    report: LintReport | None = None,
) -> JobResult:
    return JobResult(subject, "lint", variant, "1 variant", texts, seconds, report)


def parameters_without_default(fn: Callable[..., object]) -> list[str]:
    """Return the parameters that a call of ``fn`` must pass; [] if its signature is not known."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


def load_function(text: str) -> Callable[[], Any]:
    """Load as :func:`user_files.load_function` does; errors name the shim that a file may need."""
    return user_files.load_function(text, lambda error: _shim_hint(str(error), needed_for(error)))

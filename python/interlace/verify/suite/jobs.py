"""The checks of one ``interlace verify``: which jobs there are, and what came of them.

A *subject* is a shipped op, a function in a file, or the protocols. A *job* is one check of one subject;
jobs run in parallel processes. What they found is a :class:`Result` each.
"""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from interlace.runtime.compiler.build import build
from interlace.runtime.compiler.catalogue import Entry, entries
from interlace.verify.lint_check.check import lint_many
from interlace.verify.lint_check.launches import lint_request, specialisation
from interlace.verify.protocols.patterns import PATTERNS, explored
from interlace.verify.race_check.check import races
from interlace.verify.schedule_check import parallel
from interlace.verify.schedule_check.check import schedules
from interlace.verify.suite.targets import TARGETS

CHECKS = ("races", "schedules", "late stores", "lint", "protocol")
PROTOCOLS = "protocols"
FULL_PATTERNS, QUICK_PATTERNS = (4, 3), (3, 2)  # ranks, rounds


@dataclass(frozen=True)
class Plan:
    """What to check and how much. ``ranks`` for races; schedules run on the smallest of them.

    ``ignore``: rules of lint that do not apply to a user's kernels. ``quick``: lint one variant of each
    kernel, and explore protocols of fewer ranks and rounds.
    """

    ranks: tuple[int, ...] = (2, 3, 4, 8)
    seeds: int = 3
    schedules: int = 20
    arches: tuple[int, ...] = (80, 90, 100)
    quick: bool = False
    ignore: tuple[str, ...] = ()

    @property
    def patterns(self) -> tuple[int, int]:
        """Ranks and rounds of the protocols."""
        return QUICK_PATTERNS if self.quick else FULL_PATTERNS


QUICK = Plan((2, 3), 1, 3, (90,), True)


@dataclass(frozen=True)
class Result:
    """One job: ``count`` says how much was looked at, ``findings`` are texts, none if it is clean."""

    subject: str
    check: str
    variant: str
    count: str
    findings: tuple[str, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "seconds": round(self.seconds, 3)}


@dataclass(frozen=True)
class Job:
    """One check of one function, on one world size, or of one protocol."""

    subject: str
    check: str
    variant: str
    run: Callable[[], tuple[str, Sequence[str]]]

    def result(self) -> Result:
        begin = time.monotonic()
        count, findings = self.run()
        seconds = time.monotonic() - begin
        return Result(self.subject, self.check, self.variant, count, tuple(findings), seconds)


def shipped_jobs(names: Sequence[str], plan: Plan) -> list[Job]:
    """Races and schedules of shipped ops, the largest world size first: it takes longest.

    A quick plan leaves variants out where it is for several ops, not where somebody asks for one.
    """
    jobs = []
    quick = plan.quick and len(names) > 1
    for world_size in sorted(plan.ranks, reverse=True):
        for name in names:
            for variant, fn in TARGETS[name].checked(quick).items():
                jobs.append(_race_job(name, variant, fn, world_size, plan))
    for name in names:
        for variant, fn in TARGETS[name].checked(quick).items():
            for late in (False, True):
                jobs.append(_schedule_job(name, variant, fn, min(plan.ranks), plan, late))
    return jobs


def protocol_jobs(plan: Plan) -> list[Job]:
    """All interleavings of the patterns of ``kernels/signal.py``."""
    ranks, rounds = plan.patterns

    def job(name: str) -> Job:
        def run() -> tuple[str, Sequence[str]]:
            found = explored(name, ranks, rounds)
            wrong = [str(each) for each in (*found.deadlocks, *found.violations)]
            reduced = ", reduced" if found.reduced else ""
            return f"{found.states} states{reduced}", wrong

        return Job(PROTOCOLS, "protocol", f"{name}, {ranks} ranks, {rounds} rounds", run)

    return [job(name) for name in PATTERNS]


def function_jobs(subject: str, fn: Callable[[], Any], plan: Plan) -> list[Job]:
    """Races and schedules of a user's function."""
    jobs = [_race_job(subject, "", fn, world_size, plan) for world_size in plan.ranks]
    smallest = min(plan.ranks)
    return jobs + [_schedule_job(subject, "", fn, smallest, plan, late) for late in (False, True)]


def _race_job(
    subject: str, variant: str, fn: Callable[[], Any], world_size: int, plan: Plan
) -> Job:
    def run() -> tuple[str, Sequence[str]]:
        report = races(fn, world_size, seeds=plan.seeds)
        texts = [str(finding) for finding in report.findings]
        texts += [f"seed {seed}: {text}" for seed, text in report.errors]
        return f"{report.events} accesses", texts

    return Job(subject, "races", f"{variant} {world_size} ranks".strip(), run)


def _schedule_job(
    subject: str, variant: str, fn: Callable[[], Any], world_size: int, plan: Plan, late: bool
) -> Job:
    def run() -> tuple[str, Sequence[str]]:
        report = schedules(fn, world_size, n=plan.schedules, store_buffers=late, workers=1)
        texts = [] if report.clean else [str(report)]
        return f"{report.schedules} schedules", texts

    check = "late stores" if late else "schedules"
    return Job(subject, check, f"{variant} {world_size} ranks".strip(), run)


def run_jobs(
    jobs: Sequence[Job], *, workers: int | None = None, on_done: Callable[[], None] = lambda: None
) -> list[Result]:
    """All results, in the order of the jobs. Runs in parallel processes."""
    results: dict[int, Result] = {}
    # torch imports this, for seconds, when it first dispatches to a mode: here, and not in every worker
    importlib.import_module("torch._dynamo")
    for index, result in parallel.map_seeds(
        lambda index: jobs[index].result(),
        range(len(jobs)),
        workers=workers,
        chunk=1,
        on_progress=lambda done: on_done(),
    ):
        results[index] = result
    return [results[index] for index in range(len(jobs))]


def lint_shipped(
    names: Sequence[str], plan: Plan, *, on_done: Callable[[], None] = lambda: None
) -> list[Result]:
    """Every variant of the catalogue of these ops, compiled and linted."""
    results = []
    wanted = {kernel: name for name in names for kernel in TARGETS[name].kernels}
    chosen = shipped_entries(names, plan)
    reports = build(chosen, on_report=lambda report: on_done())
    for entry, report in zip(chosen, reports, strict=True):
        texts = [f"{report.name} for sm_{report.arch}: {text}" for text in report.problems()]
        results.append(
            Result(
                wanted[entry.kernel],
                "lint",
                f"{entry.variant} sm_{entry.arch}".strip(),
                "1 variant",
                tuple(texts),
                report.seconds,
            )
        )
    return results


def shipped_entries(names: Sequence[str], plan: Plan) -> list[Entry]:
    """What :func:`lint_shipped` compiles."""
    kernels = {kernel for name in names for kernel in TARGETS[name].kernels}
    chosen = [entry for arch in plan.arches for entry in entries(arch) if entry.kernel in kernels]
    if plan.quick:
        first = {(entry.kernel, entry.arch): entry for entry in reversed(chosen)}
        chosen = list(first.values())
    return chosen


def lint_launches(
    subject: str, fn: Callable[[], Any], plan: Plan, *, on_done: Callable[[], None] = lambda: None
) -> list[Result]:
    """Lint every kernel that ``fn`` launches, other than interlace's own, in every form it is seen in."""
    seen = {
        specialisation(launch): launch
        for world_size in plan.ranks
        for launch in races(fn, world_size, seeds=1).launches
        if not launch.kernel.fn.__module__.startswith("interlace.kernels.")
    }
    results, requests = [], []
    for launch in seen.values():
        try:
            requests += [lint_request(launch, arch, plan.ignore) for arch in plan.arches]
        except TypeError as error:
            text = f"{launch.name} cannot be linted: {error}"
            results.append(Result(subject, "lint", launch.name, "1 variant", (text,), 0.0))
    for report in lint_many(requests, on_report=lambda report: on_done()):
        texts = () if report.clean else (str(report),)
        variant = f"{report.kernel} sm_{report.arch}"
        results.append(Result(subject, "lint", variant, "1 variant", texts, report.seconds))
    return results


def load_function(text: str) -> Callable[[], Any]:
    """The function of "path/to/file.py::function".

    Raises ValueError or OSError that says what is wrong with the text or the file.
    """
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
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path}: importing it fails: {type(error).__name__}: {error}") from error
    finally:
        sys.argv = own_arguments
    fn = getattr(module, name, None)
    if not callable(fn):
        public = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ValueError(f"{path}: has no function {name!r}; it has {', '.join(public) or 'none'}")
    return fn  # type: ignore[no-any-return]

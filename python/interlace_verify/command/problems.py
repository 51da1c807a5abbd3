"""The findings of every check in one form, from which the page and the log of ``--sarif`` are written."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from interlace.runtime.core.errors import SourceText
from interlace_verify import Finding, LintReport, RaceReport, ScheduleReport
from interlace_verify.schedule_check.interleaving import Story
from interlace_verify.suite.jobs import JobResult

Lines = Sequence[SourceText]


class ReportedProblem(NamedTuple):
    """A finding. ``rule`` is its check and its kind, such as "races/write-read".

    ``at`` are the lines to change, ``related`` other lines with what happens there, ``source`` the lines to
    show with it. ``views`` are schedules with their titles, and the race to mark in each. ``head`` is the
    text without the facts of all schedules.
    """

    rule: str
    text: str
    at: Lines = ()
    related: tuple[tuple[Lines, str], ...] = ()
    views: tuple[tuple[str, Story, Finding | None], ...] = ()
    source: Lines = ()
    head: str = ""


def problems(result: JobResult) -> Iterator[ReportedProblem]:
    report = result.report
    if isinstance(report, RaceReport):
        stories = {story.seed: story for story in report.stories}
        for finding in report.findings:
            yield _race(finding, stories[finding.seed])
        for seed, text in report.errors:
            story, rule = stories[seed], f"schedules/{text.partition(':')[0]}"
            at = _end(text, story)
            yield ReportedProblem(
                rule, f"seed {seed}: {text}", at, views=((f"seed {seed}", story, None),)
            )
    elif isinstance(report, ScheduleReport) and (failure := report.failure) is not None:
        text = str(report).partition("\nwith ")[0]  # the views show the rest
        before = f"before shrinking, {failure.found_switches} context switches"
        after = f"shrunk, {failure.switches} context switches"
        views = ((before, failure.found, None), (after, failure.told, None))
        at = _end(failure.text, failure.told)
        yield ReportedProblem(f"schedules/{failure.kind}", text, at, views=views, head=failure.head)
    elif isinstance(report, LintReport):
        for fault, text in zip(report.findings, report.texts(), strict=True):
            at = [fault.where, report.place]
            yield ReportedProblem(f"lint/{fault.rule}", text, at, source=at[:1])
    else:
        yield from (ReportedProblem(result.check, text) for text in result.findings)


def _race(finding: Finding, story: Story) -> ReportedProblem:
    accesses = [access for access in (finding.first, finding.second) if access]
    source = [line for access in accesses for line in access.lines]
    if finding.signal:
        accesses += [finding.signal.written, finding.signal.seen]
    related = [(access.lines, str(access)) for access in accesses]
    related += [(lines, f"to change: {finding.hint}") for lines in finding.change[1:]]
    at = finding.change[0] if finding.change else finding.second.lines
    views = ((f"seed {finding.seed}", story, finding),)
    return ReportedProblem(f"races/{finding.kind}", str(finding), at, tuple(related), views, source)


def _end(text: str, story: Story) -> Lines:
    """Return the lines where a run ended: at its exception, its endless wait, or its last known step."""
    if isinstance(text, SourceText) and text.frames:
        return [text]
    # a wait for the end of a kernel ends only after the kernel's own wait
    waits = sorted(story.blocked, key=lambda wait: wait.waiting_for.startswith("the end of kernel"))
    ends = [*map(story.where, waits), *(step.lines for step in story.steps[::-1])]
    return next(filter(None, ends), ())

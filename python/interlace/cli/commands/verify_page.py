"""Findings of ``verify`` as panels of the page of ``--html``: schedules, races and deadlocks in red."""

import re
from collections.abc import Iterator, Sequence

from interlace.cli.output.page import PageEvent, PageView, Panel, write_page
from interlace.runtime.core.errors import BlockedWait
from interlace.verify import Finding, LintReport, RaceReport, ScheduleReport
from interlace.verify.schedule_check.interleaving import Step, Story
from interlace.verify.suite.jobs import JobResult

KINDS = {
    "loads": "load",
    "reads": "load",
    "stores": "store",
    "writes": "store",
    "barrier": "barrier",
    "has": "item",
}


def write(path: str, target: str, results: Sequence[JobResult]) -> None:
    """Write the page; where nothing was found it shows the first schedule of each subject."""
    table = [("subject", "check", "", "looked at", "findings", "CPU seconds")]
    for each in results:
        figures = str(len(each.findings) or "none"), f"{each.seconds:.1f}"
        table.append((each.subject, each.check, each.variant, each.count, *figures))
    found = {panel.text: panel for result in results for panel in panels(result)}
    every = [*found.values(), Panel("What was looked at", "", table=table)]
    for each in () if found else results:
        if each.check == "schedules" and isinstance(each.report, ScheduleReport):
            view = view_of("the first schedule", each.report.story)
            every.append(Panel(f"{each.subject}, {each.variant}", "", [view]))
    verdict = f"{len(found)} finding{'' if len(found) == 1 else 's'}" if found else "no findings"
    facts = ", ".join(dict.fromkeys(result.check for result in results))
    write_page(path, f"verify {target}", verdict, facts, every, bad=bool(found))


def panels(result: JobResult) -> Iterator[Panel]:
    """A panel for each finding of a job."""
    title, report = f"{result.subject.rpartition('::')[2]}, {result.variant}", result.report
    if isinstance(report, RaceReport):
        stories = {story.seed: story for story in report.stories}
        for finding in report.findings:
            view = view_of(f"seed {finding.seed}", stories[finding.seed], finding)
            lines = (*(finding.first.lines if finding.first else ()), *finding.second.lines)
            yield Panel(f"{finding.kind}: {title}", str(finding), [view], True, lines)
        for seed, text in report.errors:
            view, kind = view_of(f"seed {seed}", stories[seed]), text.partition(":")[0]
            yield Panel(f"{kind}: {title}", f"seed {seed}: {text}", [view], True)
    elif isinstance(report, ScheduleReport) and report.failure is not None:
        failure = report.failure
        views = [
            view_of(f"as found, {failure.found_switches} context switches", failure.found),
            view_of(f"shrunk, {failure.switches} context switches", failure.told),
        ]
        text = str(report).partition("\nwith ")[0]  # the views tell the rest
        yield Panel(f"{failure.kind}: {result.check}, {title}", text, views, True)
    elif isinstance(report, LintReport):
        for fault, text in zip(report.findings, report.texts(), strict=True):
            yield Panel(f"{fault.rule}: {title}", text, [], True, [fault.where])
    else:
        for text in result.findings:
            yield Panel(f"{result.check}: {title}", text, [], True)


def view_of(title: str, story: Story, finding: Finding | None = None) -> PageView:
    """``story`` with the accesses of ``finding`` in red, and with what was waited for when it ended."""
    steps = [(_lane(step), step) for step in story.steps]
    waits = [((wait.rank, wait.who), wait) for wait in story.blocked]
    lanes = sorted({lane for lane, _ in [*steps, *waits]})
    view, numbers = PageView(title, "steps", lanes), range(story.first, story.first + len(steps))
    accesses = () if finding is None else (finding.first, finding.second)
    told = [each.step for each in accesses if each and each.step is not None]
    red = [number for number in told if number in numbers]
    for number, (lane, step) in enumerate(steps, story.first):
        word = step.text.partition(" ")[0]
        kind = "memory" if step.task == "memory" else KINDS.get(word, "signal")
        mark = "red" if number in red else ""
        begins = lanes.index(lane), number, number + 1
        view.events.append(PageEvent(*begins, kind, step.text, step.lines, mark))
        inside = [each - story.first for each in step.after if each >= story.first]
        view.arrows += [(each, number - story.first, "wait") for each in inside]
    if len(red) == 2:
        view.arrows.append((red[0] - story.first, red[1] - story.first, "red"))
    for lane, wait in waits:
        text = f"waits for {str(wait).partition(' waits for ')[2]}"
        begins = lanes.index(lane), numbers.stop, numbers.stop + 3
        view.events.append(PageEvent(*begins, "wait", text, story.where(wait), "blocked"))
    for number, (_, wait) in enumerate(waits, len(steps)):
        view.arrows += [(number, each, "blocked") for each in _owed_by(wait, view)]
    return view


def _lane(step: Step) -> tuple[int, str]:
    return step.rank, "memory" if step.task == "memory" else step.who.partition(" of launch ")[0]


def _owed_by(wait: BlockedWait, view: PageView) -> list[int]:
    """Events to which the arrow of a wait that never ends goes: the last ones of whom it waits for."""
    ranks = [] if wait.source is None else [wait.source]
    if kernel := re.match(r"the end of kernel (\w+)", wait.waiting_for):
        lanes = [
            n
            for n, (r, who) in enumerate(view.lanes)
            if r == wait.rank and who.startswith(kernel[1])
        ]
    else:
        if named := re.match(r"ranks \[([\d, ]+)\]", wait.waiting_for):
            ranks = [int(each) for each in named[1].split(",")]
        lanes = [n for n, (rank, _) in enumerate(view.lanes) if rank in ranks]
    if not lanes:  # a word: whoever has touched it last
        own = view.lanes.index((wait.rank, wait.who))
        word = re.compile(re.escape(wait.waiting_for.partition(" and ")[0]) + r"(,| and )")
        touched = [n for n, e in enumerate(view.events) if word.search(e.text) and e.lane != own]
        return touched[-1:]
    last = {event.lane: number for number, event in enumerate(view.events) if event.lane in lanes}
    blocked = [number for number in last.values() if view.events[number].mark == "blocked"]
    return blocked or list(last.values())

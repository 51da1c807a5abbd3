"""``interlace verify``: check races, schedules, kernels and protocols; print a table and all findings."""

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from interlace.output.consoles import count_in_bar, new_table, write_table
from interlace.output.files import refuse_outputs
from interlace.output.options import CommandOptions, arches, option, positive_int, world_sizes
from interlace.output.page import PageEvent, PageView, Panel, write_page
from interlace.runtime.core.errors import BlockedWait
from interlace.tools.targets import TARGETS
from interlace_verify import RULES, Finding, ScheduleReport
from interlace_verify.command import sarif
from interlace_verify.command.problems import problems
from interlace_verify.schedule_check.interleaving import Story
from interlace_verify.shims.imports import SHIMS, installed
from interlace_verify.suite import jobs as suite
from interlace_verify.suite.jobs import PROTOCOLS, CheckPlan, JobResult

_NUMBER = re.compile(r"\d+ ")
Bars = Callable[[str, int | None], Callable[..., None]]


@dataclass(frozen=True)
class VerifyOptions(CommandOptions):
    """Look for races, failing schedules and broken rules in kernels, without a GPU."""

    statuses = ((1, "there are findings, or a part could not be checked"),)

    target: str = option(
        "all",
        positional=True,
        nargs="?",
        metavar="all|OP|FILE.py::FUNCTION",
        help="the target: everything, one op of interlace, or a function that every rank runs",
    )
    full: bool = option(
        False, action="store_true", help="check more cases, and schedules of FILE.py; takes minutes"
    )
    ranks: tuple[int, ...] | None = option(
        None, type=world_sizes, metavar="2,3,4,8", help="world sizes; schedules use the smallest"
    )
    seeds: int | None = option(
        None, type=positive_int, help="number of schedules for the race check"
    )
    schedules: int | None = option(
        None, type=positive_int, help="number of schedules for the schedule check"
    )
    arch: tuple[int, ...] | None = option(
        None, type=arches, metavar="80,90,100", help="architectures to compile kernels for"
    )
    ignore: tuple[str, ...] = option(
        (),
        action="append",
        choices=tuple(RULES),
        metavar="RULE",
        help="skip this rule of lint for the kernels of FILE.py; may be repeated",
    )
    shims: tuple[str, ...] = option(
        (),
        action="append",
        choices=tuple(SHIMS),
        help="emulate a package whose device functions FILE.py calls; may be repeated",
    )
    html: str | None = option(None, metavar="FILE", help="write an HTML page of the findings")
    sarif: str | None = option(None, metavar="FILE", help="write SARIF for code scanning")
    json: bool = option(False, action="store_true", help="print JSON")

    def interprets(self) -> bool:
        return True


def verify(console: Any, options: VerifyOptions) -> int:
    """Check ``options.target``; return 1 if there are findings or unchecked parts, otherwise 0."""
    is_shipped = options.target == "all" or options.target in (*TARGETS, PROTOCOLS)
    if not is_shipped and "::" not in options.target:
        known = ", ".join(["all", *TARGETS, PROTOCOLS])
        raise ValueError(f"{options.target}: must be a file.py::function or one of {known}")
    for name in ("ignore", "shims"):
        if is_shipped and (names := getattr(options, name)):
            raise ValueError(f"--{name} {names[0]} is for kernels of FILE.py, not {options.target}")
    source = None if is_shipped else options.target.partition("::")[0]
    refuse_outputs({"--html": options.html, "--sarif": options.sarif}, {"the target": source})
    plan, tell = _plan(options, is_shipped), Teller(console)
    # output of the user's code must not get into the JSON
    quiet = contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext()
    with quiet, installed(*options.shims), count_in_bar() as begin:
        results = _run(options, plan, is_shipped, begin, None if options.json else tell)
    if options.json:
        facts = {
            "target": options.target,
            "ranks": list(plan.ranks),
            "clean": not any(result.findings or result.refusals for result in results),
            "results": [result.to_dict() for result in results],
        }
        console.out(json.dumps(facts, indent=2))
    else:
        render(console, results, tell)
    if options.html is not None:
        write_findings(options.html, options.target, results)
        print(f"Page: {options.html}", file=sys.stderr)
    if options.sarif is not None:
        sarif.write(options.sarif, results)
        print(f"SARIF: {options.sarif}", file=sys.stderr)
    return 1 if any(result.findings or result.refusals for result in results) else 0


def _plan(options: VerifyOptions, is_shipped: bool) -> CheckPlan:
    plans = (suite.QUICK, suite.FULL) if is_shipped else (suite.QUICK_OWN, suite.FULL_OWN)
    default = plans[options.full]
    return CheckPlan(
        options.ranks or default.ranks,
        options.seeds or default.seeds,
        options.schedules or default.schedules,
        options.arch or default.arches,
        default.quick,
        options.ignore,
        options.arch or (),
        0.0 if options.seeds else default.budget,
    )


def _run(
    options: VerifyOptions, plan: CheckPlan, is_shipped: bool, begin: Bars, tell: "Teller | None"
) -> list[JobResult]:
    target, count = options.target, None
    if is_shipped:
        names = list(TARGETS) if target == "all" else [target] if target in TARGETS else []
        jobs, lint = suite.shipped_jobs(names, plan), partial(suite.lint_shipped, names, plan)
        if target in ("all", PROTOCOLS):
            jobs += suite.protocol_jobs(plan)
        count = len(suite.shipped_entries(names, plan))
    else:
        fn = suite.load_function(target)
        if wanted := suite.parameters_without_default(fn):
            raise ValueError(
                f"{target} takes {', '.join(wanted)}, but every rank calls it without arguments: name a "
                "function without arguments, for example a functools.partial"
            )
        jobs = suite.function_jobs(target, fn, plan)
    step = begin("running", len(jobs))

    def finish(result: JobResult) -> None:
        if tell is not None:
            tell(result)
        step()

    results = suite.run_jobs(jobs, on_done=finish)
    if not is_shipped:
        count = len(suite.launched_kernels(results)) * len(plan.arches)
        lint = partial(suite.lint_launches, target, results, plan)
    return results + lint(on_done=begin("compiling", count))


class Teller:
    """Prints the findings of each job as soon as it is done, and each cause once."""

    def __init__(self, console: Any) -> None:
        self._console = console
        self._told: set[Any] = set()

    def __call__(self, result: JobResult) -> None:
        from rich.markup import escape

        title = f"{result.subject}: {result.check}, {result.variant}".rstrip(", ")
        for cause, text in result.texts():
            if (key := (result.subject, cause)) not in self._told:
                self._told.add(key)
                self._console.print(f"\n[bold red]{escape(title)}[/]")
                self._console.print(escape(text), soft_wrap=True)


def render(console: Any, results: list[JobResult], tell: Teller | None = None) -> None:
    """Print the findings that were not printed yet, the table, and a final line."""
    from rich.markup import escape

    for result in results:
        (tell := tell or Teller(console))(result)
    write_table(console, _table(results))
    for result in [r for r in results if r.check == "protocol" and not r.findings]:
        console.print(
            f"protocol {result.variant}: {result.count}, all interleavings pass", style="dim"
        )
    for note in dict.fromkeys(note for result in results for note in result.notes):
        console.print(escape(note), soft_wrap=True, highlight=False)
    count = sum(len(result.findings) for result in results)
    unchecked = sum(bool(result.refusals) for result in results)
    summary = [f"{count} finding{'s' * (count != 1)}."] * bool(count)
    summary += [f"{unchecked} not checked."] * bool(unchecked)
    if summary:
        console.print(f"\n[red]{' '.join(summary)}[/]")
    else:
        console.print(
            "[green]No findings.[/] The table shows how much was checked.", highlight=False
        )


def _table(results: list[JobResult]) -> Any:
    from rich.text import Text

    table = new_table()
    table.add_column("subject", no_wrap=True)
    checks = [check for check in suite.CHECKS if any(r.check == check for r in results)]
    for check in checks:
        counts = {result.count for result in results if result.check == check}
        units = {
            _NUMBER.sub("", count.partition(",")[0]).removesuffix("s") + "s" for count in counts
        }
        title = "\n".join([check, *(f"[dim]{unit}[/]" for unit in units)])
        table.add_column(title, no_wrap=True, justify="right")
    table.add_column("CPU\n[dim]seconds[/]", justify="right", no_wrap=True)
    for subject in dict.fromkeys(result.subject for result in results):
        subject_results = [result for result in results if result.subject == subject]
        cells = []
        for check in checks:
            done = [result for result in subject_results if result.check == check]
            bad = sum(len(result.findings) for result in done)
            numbers = zip(*(_NUMBER.findall(result.count) for result in done), strict=False)
            amount = " in ".join(f"{sum(map(int, number)):,}" for number in numbers)
            if not done:
                cells.append(Text("-", "dim"))
            elif bad:
                cells.append(Text(f"{bad} found", "red"))
            elif any(result.refusals for result in done):
                cells.append(Text("not checked", "red"))
            else:
                cells.append(Text(amount, "green"))
        seconds = sum(result.seconds for result in subject_results)
        table.add_row(Text(subject.rpartition("::")[2]), *cells, f"{seconds:.1f}")
    return table


EVENTS = {
    "loads": "load",
    "reads": "load",
    "stores": "store",
    "writes": "store",
    "barrier": "barrier",
    "has": "item",
}


def write_findings(path: str, target: str, results: Sequence[JobResult]) -> None:
    """Write the page; without findings it shows the first schedule of each subject."""
    table = [("subject", "check", "", "checked", "findings", "CPU seconds")]
    for each in results:
        figures = str(len(each.findings) or "none"), f"{each.seconds:.1f}"
        table.append((each.subject, each.check, each.variant, each.count, *figures))
    found = {panel.text: panel for result in results for panel in panels(result)}
    every = [*found.values(), Panel("Checks", "", table=table)]
    for each in () if found else results:
        if each.check == "schedules" and isinstance(each.report, ScheduleReport):
            view = view_of("the first schedule", each.report.story)
            every.append(Panel(f"{each.subject}, {each.variant}", "", [view]))
    verdict = f"{len(found)} finding{'' if len(found) == 1 else 's'}" if found else "no findings"
    facts = ", ".join(dict.fromkeys(result.check for result in results))
    write_page(path, f"verify {target}", verdict, facts, every, bad=bool(found))


def panels(result: JobResult) -> Iterator[Panel]:
    title = f"{result.subject.rpartition('::')[2]}, {result.variant}"
    if isinstance(result.report, ScheduleReport):
        title = f"{result.check}, {title}"
    for problem in problems(result):
        kind = problem.rule.rpartition("/")[2]
        views = [view_of(*view) for view in problem.views]
        yield Panel(f"{kind}: {title}", problem.text, views, True, problem.source)


def view_of(title: str, story: Story, finding: Finding | None = None) -> PageView:
    """Return ``story`` with the accesses of ``finding`` in red, and the waits that were left at its end."""
    steps = []
    for step in story.steps:
        actor = "memory" if step.task == "memory" else step.who.partition(" of launch ")[0]
        steps.append(((step.rank, actor), step))
    waits = [((wait.rank, wait.who), wait) for wait in story.blocked]
    lanes = sorted({lane for lane, _ in [*steps, *waits]})
    view, numbers = PageView(title, "steps", lanes), range(story.first, story.first + len(steps))
    accesses = () if finding is None else (finding.first, finding.second)
    step_numbers = [access.step for access in accesses if access and access.step is not None]
    red = [number for number in step_numbers if number in numbers]
    for number, (lane, step) in enumerate(steps, story.first):
        word = step.text.partition(" ")[0]
        kind = "memory" if step.task == "memory" else EVENTS.get(word, "signal")
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


def _owed_by(wait: BlockedWait, view: PageView) -> list[int]:
    """Return the targets of the arrows of an endless wait: the last events of the tasks it waits for."""
    ranks = [] if wait.source is None else [wait.source]
    if kernel := re.match(r"the end of kernel (\w+)", wait.waiting_for):
        lanes = [
            n
            for n, (r, actor) in enumerate(view.lanes)
            if r == wait.rank and actor.startswith(kernel[1])
        ]
    else:
        if named := re.match(r"ranks \[([\d, ]+)\]", wait.waiting_for):
            ranks = [int(each) for each in named[1].split(",")]
        lanes = [n for n, (rank, _) in enumerate(view.lanes) if rank in ranks]
    if not lanes:  # a word: the last event that accesses it
        waiting_lane = view.lanes.index((wait.rank, wait.who))
        word = re.compile(re.escape(wait.waiting_for.partition(" and ")[0]) + r"(,| and )")
        touched = [
            n for n, e in enumerate(view.events) if word.search(e.text) and e.lane != waiting_lane
        ]
        return touched[-1:]
    last = {event.lane: number for number, event in enumerate(view.events) if event.lane in lanes}
    blocked = [number for number in last.values() if view.events[number].mark == "blocked"]
    return blocked or list(last.values())

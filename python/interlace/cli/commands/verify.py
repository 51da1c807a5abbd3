"""``interlace verify``: race-check, schedule, lint and explore; a table, and every finding in full."""

import contextlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from interlace.cli.commands import sarif, verify_page
from interlace.cli.output.consoles import write_table
from interlace.cli.output.files import refuse_outputs
from interlace.cli.output.options import CommandOptions, arches, option, positive_int, world_sizes
from interlace.cli.output.progress import counted
from interlace.verify import RULES
from interlace.verify.shims.imports import SHIMS, installed
from interlace.verify.suite import jobs as suite
from interlace.verify.suite.jobs import PROTOCOLS, CheckPlan, JobResult
from interlace.verify.suite.targets import TARGETS

_NUMBER = re.compile(r"\d+ ")
Bars = Callable[[str, int | None], Callable[..., None]]


@dataclass(frozen=True)
class VerifyOptions(CommandOptions):
    """Look for races, failing schedules and broken rules in kernels, without a GPU."""

    target: str = option(
        "all",
        positional=True,
        nargs="?",
        metavar="all|OP|FILE.py::FUNCTION",
        help="everything, one op of interlace, or a function of one's own that every rank runs",
    )
    full: bool = option(
        False, action="store_true", help="more of everything, and schedules of FILE.py: minutes"
    )
    ranks: tuple[int, ...] | None = option(
        None, type=world_sizes, metavar="2,3,4,8", help="of races; schedules are on the fewest"
    )
    seeds: int | None = option(None, type=positive_int, help="schedules for races")
    schedules: int | None = option(
        None, type=positive_int, help="schedules that are run to their end"
    )
    arch: tuple[int, ...] | None = option(
        None, type=arches, metavar="80,90,100", help="GPUs that kernels are compiled for"
    )
    ignore: tuple[str, ...] = option(
        (),
        action="append",
        choices=tuple(RULES),
        metavar="RULE",
        help="a rule of lint that does not apply to the kernels of FILE.py; may be repeated",
    )
    shims: tuple[str, ...] = option(
        (),
        action="append",
        choices=tuple(SHIMS),
        help="stand in for a package whose device functions FILE.py calls; may be repeated",
    )
    html: str | None = option(None, metavar="FILE", help="write a page to look at what was found")
    sarif: str | None = option(None, metavar="FILE", help="write findings for code scanning")
    json: bool = option(False, action="store_true", help="print JSON")

    def interprets(self) -> bool:
        return True


def verify(console: Any, options: VerifyOptions) -> int:
    """Check ``options.target``: 1 if anything was found, else 0."""
    own = options.target == "all" or options.target in (*TARGETS, PROTOCOLS)
    if not own and "::" not in options.target:
        known = ", ".join(["all", *TARGETS, PROTOCOLS])
        raise ValueError(f"{options.target}: names no file.py::function, and is none of {known}")
    for name in ("ignore", "shims"):
        if own and (given := getattr(options, name)):
            raise ValueError(f"--{name} {given[0]} is for kernels of FILE.py, not {options.target}")
    source = None if own else options.target.partition("::")[0]
    refuse_outputs({"--html": options.html, "--sarif": options.sarif}, {"the target": source})
    plan, tell = _plan(options, own), Teller(console)
    # what the user's code prints must not get into the JSON
    quiet = contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext()
    with quiet, installed(*options.shims), counted() as begin:
        results = _run(options, plan, own, begin, None if options.json else tell)
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
        verify_page.write(options.html, options.target, results)
        print(f"Page: {options.html}", file=sys.stderr)
    if options.sarif is not None:
        sarif.write(options.sarif, results)
        print(f"SARIF: {options.sarif}", file=sys.stderr)
    return 1 if any(result.findings or result.refusals for result in results) else 0


def _plan(options: VerifyOptions, own: bool) -> CheckPlan:
    plans = (suite.QUICK, suite.FULL) if own else (suite.QUICK_OWN, suite.FULL_OWN)
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
    options: VerifyOptions, plan: CheckPlan, own: bool, begin: Bars, tell: "Teller | None"
) -> list[JobResult]:
    target, count = options.target, None
    if own:
        names = list(TARGETS) if target == "all" else [target] if target in TARGETS else []
        jobs, lint = suite.shipped_jobs(names, plan), partial(suite.lint_shipped, names, plan)
        if target in ("all", PROTOCOLS):
            jobs += suite.protocol_jobs(plan)
        count = len(suite.shipped_entries(names, plan))
    else:
        fn = suite.load_function(target)
        if wanted := suite.parameters_without_default(fn):
            raise ValueError(
                f"{target} takes {', '.join(wanted)}, and every rank calls it without arguments; name one "
                "that takes none, as functools.partial makes it"
            )
        jobs = suite.function_jobs(target, fn, plan)
    step = begin("running", len(jobs))

    def done(result: JobResult) -> None:
        if tell is not None:
            tell(result)
        step()

    results = suite.run_jobs(jobs, on_done=done)
    if not own:
        count = len(suite.launched(results)) * len(plan.arches)
        lint = partial(suite.lint_launches, target, results, plan)
    return results + lint(on_done=begin("compiling", count))


class Teller:
    """Prints what was found by a job, as soon as it is done, and each cause once."""

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
    """The findings that have not been told, the table, and one line."""
    from rich.markup import escape

    for result in results:
        (tell := tell or Teller(console))(result)
    write_table(console, _table(results))
    for result in [r for r in results if r.check == "protocol" and not r.findings]:
        console.print(
            f"protocol {result.variant}: {result.count}, all interleavings right", style="dim"
        )
    for note in dict.fromkeys(note for result in results for note in result.notes):
        console.print(escape(note), soft_wrap=True, highlight=False)
    count = sum(len(result.findings) for result in results)
    unchecked = sum(bool(result.refusals) for result in results)
    said = [f"{count} finding{'s' * (count != 1)}."] * bool(count)
    said += [f"{unchecked} not checked."] * bool(unchecked)
    if said:
        console.print(f"\n[red]{' '.join(said)}[/]")
    else:
        console.print(
            "[green]No findings.[/] The table says how much was looked at.", highlight=False
        )


def _table(results: list[JobResult]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("subject", no_wrap=True)
    checks = [check for check in suite.CHECKS if any(r.check == check for r in results)]
    for check in checks:
        counts = {result.count for result in results if result.check == check}
        units = {_NUMBER.sub("", each.partition(",")[0]).removesuffix("s") + "s" for each in counts}
        title = "\n".join([check, *(f"[dim]{unit}[/]" for unit in units)])
        table.add_column(title, no_wrap=True, justify="right")
    table.add_column("CPU\n[dim]seconds[/]", justify="right", no_wrap=True)
    for subject in dict.fromkeys(result.subject for result in results):
        mine = [result for result in results if result.subject == subject]
        cells = []
        for check in checks:
            done = [result for result in mine if result.check == check]
            bad = sum(len(result.findings) for result in done)
            numbers = zip(*(_NUMBER.findall(result.count) for result in done), strict=False)
            amount = " in ".join(f"{sum(map(int, each)):,}" for each in numbers)
            if not done:
                cells.append(Text("-", "dim"))
            elif bad:
                cells.append(Text(f"{bad} found", "red"))
            elif any(result.refusals for result in done):
                cells.append(Text("not checked", "red"))
            else:
                cells.append(Text(amount, "green"))
        seconds = sum(result.seconds for result in mine)
        table.add_row(Text(subject.rpartition("::")[2]), *cells, f"{seconds:.1f}")
    return table

"""Findings of ``verify`` as SARIF 2.1.0, which code hosts show in the diff of a pull request.

Paths are relative to the repository that the command runs in. A finding is at the innermost of its lines
that is in the repository, so that one in a library is where it was called.
"""

import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from interlace import __version__
from interlace.runtime.core.errors import SourceText
from interlace.verify import KINDS, RULES, LintReport, RaceReport, ScheduleReport
from interlace.verify.schedule_check.interleaving import Story
from interlace.verify.suite import targets
from interlace.verify.suite.jobs import JobResult

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
MOST_STEPS = 200  # of a schedule; its last ones


class SourcePlace(NamedTuple):
    """Lines, innermost first, and what happened there."""

    lines: Sequence[SourceText]
    text: str = ""


class LocatedFinding(NamedTuple):
    """A finding: the rule, its text, where it is, what else belongs to it, the steps that lead to it."""

    rule: str
    text: str
    place: SourcePlace
    others: Sequence[SourcePlace] = ()
    steps: Sequence[SourcePlace] = ()


def write(path: str, results: Sequence[JobResult]) -> None:
    """Write a log of one run."""
    root = repository(pathlib.Path.cwd())
    found = {each.text: (each, result) for result in results for each in findings(result)}
    about = {f"races/{kind}": text for kind, text in KINDS.items()}
    about |= {f"lint/{rule}": text for rule, text in RULES.items()}
    rules = dict.fromkeys(_id(each.rule) for each, _ in found.values())
    texts = {_id(rule): text for rule, text in about.items()}
    driver = {
        "name": "interlace",
        "version": __version__,
        "rules": [{"id": i, "shortDescription": {"text": texts.get(i, i)}} for i in rules],
    }
    run = {
        "tool": {"driver": driver},
        "originalUriBaseIds": {"ROOT": {"uri": root.as_uri() + "/"}},
        "columnKind": "unicodeCodePoints",
        "results": [_result(each, result, root) for each, result in found.values()],
    }
    log = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    pathlib.Path(path).write_text(json.dumps(log, indent=2) + "\n", encoding="ascii")


def repository(folder: pathlib.Path) -> pathlib.Path:
    """The folder or the one above it that has ``.git``; the folder itself if there is none."""
    return next((each for each in (folder, *folder.parents) if (each / ".git").exists()), folder)


def findings(result: JobResult) -> Iterator[LocatedFinding]:
    """The findings of one job."""
    report = result.report
    if isinstance(report, RaceReport):
        for finding in report.findings:
            first, second = finding.first, finding.second
            place, other = (
                SourcePlace(second.lines, str(second)),
                SourcePlace(first.lines, str(first)),
            )
            yield LocatedFinding(f"races/{finding.kind}", str(finding), place, [other])
        stories = {story.seed: story for story in report.stories}
        for seed, text in report.errors:
            rule = f"races/{text.partition(':')[0]}"
            yield LocatedFinding(rule, f"seed {seed}: {text}", _end(stories[seed]))
    elif isinstance(report, ScheduleReport) and report.failure is not None:
        told = report.failure.told
        steps = [
            SourcePlace(step.lines, f"{step.task} {step.text}") for step in told.steps if step.lines
        ]
        rule = f"schedules/{report.failure.kind}"
        yield LocatedFinding(rule, str(report), _end(told), steps=steps[-MOST_STEPS:])
    elif isinstance(report, LintReport):
        for fault in report.findings:
            text = f"{report.kernel} for sm_{report.arch}: {fault}"
            yield LocatedFinding(f"lint/{fault.rule}", text, SourcePlace([fault.where]))
    else:
        for text in result.findings:
            yield LocatedFinding(result.check, text, SourcePlace([]))


def _end(story: Story) -> SourcePlace:
    """Where a run ended: the wait that does not, or the last step that has a line."""
    ends = [*map(story.where, story.blocked), *(step.lines for step in story.steps[::-1])]
    return SourcePlace(next(filter(None, ends), ()))


def _id(rule: str) -> str:
    return rule.replace(" ", "-")


def _result(found: LocatedFinding, result: JobResult, root: pathlib.Path) -> dict[str, Any]:
    own = _location(found.place, root) or _location(SourcePlace([_subject(result.subject)]), root)
    related = [place for each in found.others if (place := _location(each, root))]
    made = {
        "ruleId": _id(found.rule),
        "level": "error",
        "message": {"text": f"{result.subject}, {result.check} {result.variant}\n{found.text}"},
        "locations": [own],
        "relatedLocations": [{"id": number, **each} for number, each in enumerate(related, 1)],
    }
    steps = [{"location": place} for each in found.steps if (place := _location(each, root))]
    if steps:
        made["codeFlows"] = [{"threadFlows": [{"locations": steps}]}]
    return made


def _location(place: SourcePlace, root: pathlib.Path) -> dict[str, Any] | None:
    """The innermost line that is in the repository, else the innermost one; None without any."""
    frames = [(pathlib.Path(path).resolve(), line) for path, line in _frames(place.lines)]
    inside = [frame for frame in frames if frame[0].is_relative_to(root)]
    if not frames:
        return None
    path, line = (inside or frames)[0]
    artifact = {"uri": path.as_uri()}
    if inside:
        relative = pathlib.PurePosixPath("/", path.relative_to(root))
        artifact = {"uri": relative.as_uri().removeprefix("file:///"), "uriBaseId": "ROOT"}
    region = {"artifactLocation": artifact, "region": {"startLine": max(1, line)}}
    message = {"message": {"text": place.text}} if place.text else {}
    return {"physicalLocation": region, **message}


def _frames(lines: Iterable[SourceText]) -> list[tuple[str, int]]:
    return [frame for line in lines for frame in line.frames]


def _subject(subject: str) -> SourceText:
    """The function that was checked: of "path/to/file.py::function" its first line, else the targets."""
    path, _, name = subject.partition("::")
    if not name:
        return SourceText(subject, ((targets.__file__, 1),))
    text = pathlib.Path(path).read_text("utf-8")
    defined = re.search(rf"^(async )?def {name}\b", text, re.MULTILINE)
    line = text[: defined.start()].count("\n") + 1 if defined else 1
    return SourceText(subject, ((path, line),))

"""Findings of ``verify`` as SARIF 2.1.0, which code hosts show in the diff of a pull request.

Paths are relative to the repository in which the command runs. A finding is at the line to change, if that
is known, and names the other lines. It uses the innermost line that is in the repository, so an error in a
library is at the line of the call. Without such a line it is at the function that was checked.
"""

import hashlib
import json
import pathlib
import re
import urllib.parse
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from interlace import __version__
from interlace.runtime.compiler.request import definition
from interlace.runtime.core.errors import SourceText
from interlace.tools import targets
from interlace_verify import KINDS, RULES
from interlace_verify.command.problems import Lines, problems
from interlace_verify.suite.jobs import JobResult

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
MOST_STEPS = 200  # the last steps of a schedule that are written
DEFINITION = re.compile(r"\s*(?:async )?def (\w+)")
# Rules besides the rules of races and lint. An exception of a rank is a rule with its name.
OTHERS = {
    "schedules/DeadlockError": "Ranks or programs wait for each other, and nothing can run.",
    "schedules/CollectiveTimeoutError": "In some schedule the function does not end in time.",
    "schedules/different-results": "The results of ranks depend on the schedule.",
    "schedules/not-repeatable": "A schedule failed once, but not again: the schedule is not the cause.",
    "lint": "A compiled kernel breaks a rule.",
    "protocol": "An interleaving of a signal pattern fails.",
}


def write(path: str, results: Sequence[JobResult]) -> None:
    root = repository(pathlib.Path.cwd())
    found: dict[object, dict[str, Any]] = {}
    for each in (each for result in results for each in findings(result, root)):
        if (
            first_result := found.setdefault(_cause(each), each)
        ) is not each and "codeFlows" in each:
            found[_cause(each)] = first_result if "codeFlows" in first_result else each
    texts = {f"races/{_id(kind)}": text for kind, text in KINDS.items()}
    texts |= {f"lint/{_id(rule)}": text for rule, text in RULES.items()} | OTHERS
    rules = {}
    times: Counter[str] = Counter()
    for each in found.values():
        rule = each["ruleId"]
        text = texts.get(rule) or f"In some schedule a rank raises {rule.rpartition('/')[2]}."
        rules[rule] = {"id": rule, "shortDescription": {"text": text}}
        mark = _fingerprint(each, root)
        times[mark] += 1
        each["partialFingerprints"] = {"primaryLocationLineHash": f"{mark}:{times[mark]}"}
    driver = {"name": "interlace", "version": __version__, "rules": [*rules.values()]}
    run = {
        "tool": {"driver": driver},
        "originalUriBaseIds": {"ROOT": {"uri": root.as_uri() + "/"}},
        "columnKind": "unicodeCodePoints",
        "results": list(found.values()),
    }
    log = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    pathlib.Path(path).write_text(json.dumps(log, indent=2) + "\n", encoding="ascii")


def _fingerprint(finding: dict[str, Any], root: pathlib.Path) -> str:
    """Hash the rule, the file, the function and the text of the line, so that other lines may change."""
    facts, (place,) = [finding["ruleId"]], finding["locations"]
    if place:
        at = place["physicalLocation"]
        uri, number = at["artifactLocation"]["uri"], at["region"]["startLine"]
        file = root / urllib.parse.unquote(uri)
        lines = file.read_text("utf-8").splitlines()[:number] if file.is_file() else []
        heads = (match[1] for line in lines[::-1] if (match := DEFINITION.match(line)))
        facts += [uri, next(heads, ""), *(line.strip() for line in lines[number - 1 :])]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def _cause(finding: dict[str, Any]) -> tuple[str, str]:
    """Return a key that is equal for the same failure in several checks and for findings of equal text."""
    of_a_run = finding["ruleId"].startswith("schedules/")
    return finding["ruleId"], repr(finding["locations"] if of_a_run else finding["message"])


def repository(folder: pathlib.Path) -> pathlib.Path:
    """Return the nearest of ``folder`` and its parents that has ``.git``, or ``folder``."""
    return next((each for each in (folder, *folder.parents) if (each / ".git").exists()), folder)


def findings(result: JobResult, root: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yield the findings of one job in SARIF's form."""
    subject = _subject(result.subject)
    for problem in problems(result):
        lines = (problem.at, *(each for each, _ in problem.related), [subject])
        place = next(filter(None, (location(each, root) for each in lines)), {})
        at = place.get("physicalLocation")
        others = (location(each, root, text) for each, text in problem.related)
        related = [each for each in others if each and each["physicalLocation"] != at]
        text = problem.head or problem.text
        found = {
            "ruleId": _id(problem.rule),
            "level": "error",
            "message": {"text": f"{result.subject}, {result.check} {result.variant}\n{text}"},
            "locations": [place],
            "relatedLocations": [{"id": number, **each} for number, each in enumerate(related, 1)],
        }
        if problem.head:  # a failure, and the steps of its shortest schedule
            _, story, _ = problem.views[-1]
            steps = story.steps[-MOST_STEPS:]
            ways = (location(each.lines, root, f"{each.task} {each.text}") for each in steps)
            if flow := [{"location": way} for way in ways if way]:
                found["codeFlows"] = [{"threadFlows": [{"locations": flow}]}]
        yield found


def _id(rule: str) -> str:
    return rule.replace(" ", "-")


def location(lines: Lines, root: pathlib.Path, text: str = "") -> dict[str, Any] | None:
    """Return the innermost line in the repository, with ``text`` as its message; None without one."""
    for path, line in (frame for each in lines for frame in each.frames):
        inside = pathlib.Path(path).resolve()
        if inside.is_relative_to(root) and "site-packages" not in inside.parts:
            uri = pathlib.PurePosixPath("/", inside.relative_to(root)).as_uri()
            artifact = {"uri": uri.removeprefix("file:///"), "uriBaseId": "ROOT"}
            place = {"artifactLocation": artifact, "region": {"startLine": max(1, line)}}
            message = {"message": {"text": text}} if text else {}
            return {"physicalLocation": place, **message}
    return None


def _subject(subject: str) -> SourceText:
    """Return the first line of the checked function "path/to/file.py::function", or the targets' line."""
    path, _, name = subject.partition("::")
    if not name:
        return SourceText(subject, ((targets.__file__, 1),))
    return definition(path, name)

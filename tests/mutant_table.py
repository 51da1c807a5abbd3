"""Mutants, and the checks that catch them: ``python tests/mutant_table.py [--write]``; some minutes.

Runs every check on every mutant of ``protocol_mutants.py``. With ``--write`` the table goes into
docs/explanation/checks.md, between two comments. Without it, differences from the document are printed. The
exit code is 1 if there are differences, or if no check catches some mutant.
"""

import argparse
import difflib
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Sequence

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

from interlace.verify import KINDS, RULES
from interlace_verify.schedule_check.parallel import map_seeds
from mutants.mutant_checks import CHECKS, caught
from mutants.protocol_mutants import CASES

DOCUMENT = pathlib.Path(__file__).parents[1] / "docs/explanation/checks.md"
BEGIN = "<!-- mutants: python tests/mutant_table.py --write -->"
END = "<!-- end of mutants -->"
EFFORT = 3
NOTHING = "-"
NOT_RUN = "does not run"


def cell(check: str, texts: Sequence[str]) -> str:
    """Return the findings of a check in a few words: kinds, rules, or the ends of runs."""
    if check == "lint":
        found = [next(rule for rule in RULES if f"{rule}: " in text) for text in texts]
    else:
        found = [kind for text in texts for kind in _kinds(text)]
        found = found or [_ending(text) for text in texts]
    return ", ".join(dict.fromkeys(found)) or NOTHING


def _kinds(text: str) -> list[str]:
    """Return the kind of a finding, also in the other order; nothing if the text is not a finding."""
    kinds = [kind for kind in KINDS if re.match(rf"{kind}( \([\w-]+ race\))?: ", text)]
    return kinds + re.findall(r"^  reverse ([\w-]+),", text, re.MULTILINE) if kinds else []


def _ending(text: str) -> str:
    """Return how a run failed. Other exceptions are from the interpreter, which refuses the mutant."""
    if "deadlock: nothing can run" in text:
        return "deadlock"
    if "results differ" in text or re.search(r"AssertionError: wrong (result|data|sum) ", text):
        return "wrong result"
    return next((kind for kind in KINDS if f": {kind}: " in text), NOT_RUN)


def rows(results: dict[tuple[str, str], list[str]]) -> list[list[str]]:
    """By mutant: its name, its file, and a cell per check."""
    return [
        [case.mutant.name, case.mutant.file]
        + [cell(check, results[case.mutant.name, check]) for check in CHECKS]
        for case in CASES
    ]


def table(lines: Sequence[Sequence[str]]) -> str:
    """Markdown, with a sentence that counts."""
    head = ["mutant", "file", *CHECKS]
    text = [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines)]
    files = len({line[1] for line in lines})
    counts = ", ".join(
        f"{check} {sum(line[2 + column] not in (NOTHING, NOT_RUN) for line in lines)}"
        for column, check in enumerate(CHECKS)
    )
    missed = len(uncaught(lines))
    end = "none is missed by all" if not missed else f"{missed} are missed by all"
    return "\n".join([*text, "", f"{len(lines)} mutants of {files} files: {counts}; {end}."])


def uncaught(lines: Sequence[Sequence[str]]) -> list[str]:
    """Names of mutants that no check finds."""
    return [line[0] for line in lines if set(line[2:]) <= {NOTHING, NOT_RUN}]


def run_all(workers: int | None) -> dict[tuple[str, str], list[str]]:
    """Every check of every mutant, in parallel processes."""
    jobs = [(case, check) for check in reversed(CHECKS) for case in CASES]
    results: dict[tuple[str, str], list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:

        def job(number: int) -> list[str]:
            case, check = jobs[number]
            home = pathlib.Path(folder, str(number))
            home.mkdir()
            try:
                return caught(case, check, home, effort=EFFORT)
            except Exception as error:
                raise RuntimeError(f"{check} of {case.mutant.name!r} cannot be run") from error

        for number, texts in map_seeds(job, range(len(jobs)), workers=workers, chunk=1):
            case, check = jobs[number]
            results[case.mutant.name, check] = texts
            found = cell(check, texts)
            print(
                f"{len(results)}/{len(jobs)} {case.mutant.name}: {check}: {found}", file=sys.stderr
            )
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the table into the document")
    parser.add_argument("--workers", type=int, help="processes; one per core by default")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = rows(run_all(options.workers))
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    old, marker, after = rest.partition(END)
    assert marker, f"{DOCUMENT} has no {BEGIN} ... {END}"
    new = f"\n{table(lines)}\n"
    missed = uncaught(lines)
    for name in missed:
        print(f"caught by nothing: {name}")
    if options.write:
        DOCUMENT.write_text(before + BEGIN + new + END + after)
    else:
        changes = difflib.unified_diff(
            old.splitlines(),
            new.splitlines(),
            "docs/explanation/checks.md",
            "found now",
            lineterm="",
            n=0,
        )
        print("\n".join(changes))
    return 1 if missed or (not options.write and old != new) else 0


if __name__ == "__main__":
    sys.exit(main())

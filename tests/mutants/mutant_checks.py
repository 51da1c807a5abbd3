"""Run one check of ``interlace.verify`` on one mutant; used by the tests and by mutant_table.py."""

import os
import pathlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

from interlace.tools.catalogue.build import BuildReport, build
from interlace.tools.catalogue.catalogue import Entry, entries
from interlace.tools.targets import TARGETS
from interlace.verify import Fault, lint_many, races, schedules
from interlace_verify.lint_check.check import lint_request
from interlace_verify.schedule_check.check import poisoned_memory as filled
from mutants.first_fault import first_fault
from mutants.mutations import Case, Mutant, importable, mutated, mutated_function

CHECKS = ("races", "schedules", "late stores", "lint")
WORLD = 3
USER_WORLD = 2
ARCH = 90
BATCH = 4  # schedules, before it is looked whether one has failed


def caught(case: Case, check: str, folder: pathlib.Path, *, effort: int = 1) -> list[str]:
    """Return the findings of ``check`` in the mutant; "first race" stops at one."""
    if check == "lint":
        return _lint(case, folder) if case.mutant.of_kernels else _lint_launched(case, folder)
    if not case.mutant.of_kernels:
        fn = mutated_function(case.mutant, case.target, folder)
        with filled():
            return _run(fn, check, USER_WORLD, effort)
    op, _, variant = case.target.partition(" ")
    with mutated(case.mutant, folder), filled():
        return _run(TARGETS[op].variants[variant], check, WORLD, effort)


def _run(fn: Callable[[], Any], check: str, world_size: int, effort: int) -> list[str]:
    if check == "first race":
        found = first_fault(fn, world_size, range(10 * effort))
        return [found] if found else []
    if check == "races":
        for seed in range(10 * effort):
            report = races(fn, world_size, seeds=[seed])
            if not report.clean:
                errors = [text for _, text in report.errors]
                return [str(finding) for finding in report.findings] + errors
        return []
    late = check == "late stores"
    for first in range(0, 20 * effort, BATCH):
        seeds = range(first, first + BATCH)
        report = schedules(fn, world_size, seeds=seeds, store_buffers=late, workers=1, shrink=False)
        if not report.clean:
            return [str(report)]
    return []


def built_beside(
    mutant: Mutant, shipped: Sequence[Entry], folder: pathlib.Path
) -> tuple[list[BuildReport], list[BuildReport]]:
    """Return the reports of these kernels as they are, and with the fault."""
    mutant.write(folder)
    with importable(folder):
        reports = build([*shipped, *(_of(mutant, each) for each in shipped)])
    return reports[: len(shipped)], reports[len(shipped) :]


def _of(mutant: Mutant, entry: Entry) -> Entry:
    return replace(entry, module=entry.module.replace("interlace.kernels", mutant.package))


def _lint(case: Case, folder: pathlib.Path) -> list[str]:
    """Return the problems of ``case.kernel``, or of the first catalogue entries of the op."""
    case.mutant.write(folder)
    op = case.target.partition(" ")[0]
    kernels = (case.kernel,) if case.kernel else TARGETS[op].kernels
    chosen = []
    for kernel in kernels:
        entry = next(entry for entry in entries(ARCH) if entry.kernel == kernel)
        chosen.append(_of(case.mutant, entry))
    # the cache goes by the text of a kernel: it would give it the lines of another mutant's files
    own_cache = mock.patch.dict(os.environ, TRITON_CACHE_DIR=str(folder / "cache"))
    with importable(folder), own_cache:
        reports = build(chosen, workers=1)
    return [text for report in reports for text in report.problems()]


def _lint_launched(case: Case, folder: pathlib.Path) -> list[str]:
    """Return the problems of a function's kernels that the mutation has added.

    A rule that was broken as often before the mutation does not count.
    """
    original = replace(case.mutant, name=f"{case.mutant.name} undone", edits=())
    known = Counter(map(_broken, _faults(original, case.target, folder)))
    found = []
    for fault in _faults(case.mutant, case.target, folder):
        known[_broken(fault)] -= 1
        if known[_broken(fault)] < 0:
            found.append(str(fault))
    return found


def _broken(fault: Fault) -> tuple[str, str]:
    return fault.rule, re.sub(r"\S+:\d+", "", fault.where)


def _faults(mutant: Mutant, function: str, folder: pathlib.Path) -> list[Fault]:
    launches = races(mutated_function(mutant, function, folder), USER_WORLD, seeds=1).launches
    requests = [lint_request(launch, ARCH) for launch in launches]
    return [fault for report in lint_many(requests, workers=1) for fault in report.findings]

"""Run one check of ``interlace.verify`` on one mutant; used by the tests and by mutant_table.py."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from interlace.runtime.build import build
from interlace.runtime.catalogue import entries
from interlace.verify import races, schedules
from interlace.verify.targets import TARGETS
from mutations import importable, mutated, mutated_function
from protocol_mutants import Case

CHECKS = ("races", "schedules", "late stores", "lint")
WORLD = 3
ARCH = 90


def caught(case: Case, check: str, folder: pathlib.Path, *, effort: int = 1) -> list[str]:
    """What ``check`` finds in the mutant: texts, none if it finds nothing."""
    if check == "lint":
        return _lint(case, folder)
    if not case.mutant.of_kernels:
        fn = mutated_function(case.mutant, case.target, folder)
        return _run(fn, check, 2, effort)
    op, _, variant = case.target.partition(" ")
    with mutated(case.mutant, folder):
        return _run(TARGETS[op].variants[variant], check, WORLD, effort)


def _run(fn: Callable[[], Any], check: str, world_size: int, effort: int) -> list[str]:
    if check == "races":
        for seed in range(10 * effort):
            report = races(fn, world_size, seeds=[seed])
            if not report.clean:
                errors = [text for _, text in report.errors]
                return [str(finding) for finding in report.findings] + errors
        return []
    late = check == "late stores"
    found = schedules(fn, world_size, n=20 * effort, store_buffers=late, workers=1, shrink=False)
    return [] if found.clean else [str(found)]


def _lint(case: Case, folder: pathlib.Path) -> list[str]:
    mutant = case.mutant
    mutant.write(folder)
    if not mutant.of_kernels or not case.kernel:
        return []
    entry = next(entry for entry in entries(ARCH) if entry.kernel == case.kernel)
    module = entry.module.replace("interlace.kernels", mutant.package)
    with importable(folder):
        (report,) = build([replace(entry, module=module)], workers=1)
    return report.problems()

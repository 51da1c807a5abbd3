"""The kernel whose warps have roles, compiled: what lint says of it, and of it with a fault."""

from __future__ import annotations

import pathlib
import re
from dataclasses import replace

import pytest

from interlace.runtime.compiler import catalogue
from interlace.runtime.compiler.build import BuildReport, build
from interlace.runtime.compiler.catalogue import MatmulVariant
from interlace.runtime.compiler.lint.loops import Loop
from interlace.runtime.compiler.lint.ptx import PtxModule
from interlace.runtime.compiler.request import Entry
from tiers import thorough

ENTRY = catalogue.all_gather_matmul(90, MatmulVariant(overrides=catalogue.ROLES))
FILE = pathlib.Path(catalogue.__file__).parents[2] / "kernels/fused/all_gather_matmul_roles.py"
REFERENCE = catalogue.all_gather_matmul(90, MatmulVariant(overrides=catalogue.BY_ENGINE))
MUTANTS = {
    "no fence": (r" +fence_descriptor_loads\(.*\n", "", {"unfenced descriptor load"}),
    "no wait": (r" +wait\(workspace.*\n", "", set()),
    "a fence of shared memory": (
        r"fence_descriptor_loads\(.*\n",
        "hopper.fence_async_shared()\n",
        {"unfenced descriptor load"},
    ),
}


def mutant(folder: pathlib.Path, pattern: str, text: str) -> Entry:
    changed, count = re.subn(pattern, text, FILE.read_text())
    assert count == 1
    path = folder / "all_gather_matmul_mutant.py"
    path.write_text(changed)
    return replace(ENTRY, module=path.stem, path=str(path))


def waits_before_loads(ptx: str) -> bool:
    """Whether a wait comes before some load by TMA; and all others come before waits, or on other ways."""
    program = PtxModule(ptx)
    code = program.instructions
    waits = program.where(lambda one: {"acquire", "sys", "ld"} <= one.parts)
    loads = program.where(lambda one: "shared::cta" in one.parts or "shared::cluster" in one.parts)
    loads = [i for i in loads if code[i].operation.startswith("cp.async.bulk.tensor")]
    assert loads
    return any(program.flow.before(wait, load) for wait in waits for load in loads)


def compiled(entry: Entry, stem: pathlib.Path) -> tuple[BuildReport, str]:
    (report,) = build([entry], artifacts=[str(stem)])
    return report, stem.with_suffix(".ptx").read_text() if report.error is None else ""


def test_it_is_clean_and_waits_before_it_loads(tmp_path: pathlib.Path) -> None:
    report, ptx = compiled(ENTRY, tmp_path / "kernel")
    assert report.problems() == [] and report.tensor_cores == 4
    assert waits_before_loads(ptx)


@thorough
@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_found(name: str, tmp_path: pathlib.Path) -> None:
    pattern, text, rules = MUTANTS[name]
    report, ptx = compiled(mutant(tmp_path, pattern, text), tmp_path / "kernel")
    assert report.error is None
    assert {fault.rule for fault in report.faults} == rules
    assert bool(rules) == waits_before_loads(ptx)


@thorough
def test_those_who_multiply_do_nothing_per_chunk() -> None:
    """What the roles are for, counted: against the reference, of the same tile."""
    roles, reference = build([ENTRY, REFERENCE])

    def innermost(report: BuildReport, what: str) -> Loop:
        """The smallest loop with products."""
        loops = [loop for loop in report.loops if loop.wgmma_waits and what in loop.where]
        return min(loops, key=lambda loop: loop.instructions)

    step, other = innermost(roles, "_multiply"), innermost(reference, "")
    assert step.wgmma_waits == 1 and step.tensor_maps == 0
    assert step.barriers < other.barriers and step.instructions < other.instructions
    per_chunk = [loop for loop in reference.loops if loop.tensor_maps]
    assert any(loop.depth == 1 and loop.tensor_maps == 2 for loop in per_chunk)
    assert not any(loop.tensor_maps for loop in roles.loops if "_multiply" in loop.where)

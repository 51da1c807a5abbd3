"""Kernels whose warps have roles, compiled: what lint says of them, and of them with a fault."""

import pathlib
import re
from dataclasses import replace

import pytest

from cases.builds import compiled
from interlace.runtime.compiler.lint.ptx import PtxModule
from interlace.runtime.compiler.lint.sass import Loop
from interlace.runtime.compiler.request import Entry
from interlace.tools.catalogue import catalogue
from interlace.tools.catalogue.build import BuildReport, build
from interlace.tools.catalogue.catalogue import MatmulVariant
from tiers import few, thorough

PRODUCTS, SUMS = catalogue.matmul_reduce_scatter_roles(MatmulVariant())
ENTRIES = {
    "all_gather_matmul": catalogue.all_gather_matmul(90, MatmulVariant(overrides=catalogue.ROLES)),
    "matmul_reduce_scatter": PRODUCTS,
}
REFERENCES = {
    "all_gather_matmul": catalogue.all_gather_matmul(
        90, MatmulVariant(overrides=catalogue.BY_ENGINE)
    ),
    "matmul_reduce_scatter": catalogue.matmul_reduce_scatter(90, MatmulVariant()),
}
# How what others have written, or may still read, is reached after a wait.
AFTER_A_WAIT = {"all_gather_matmul": "shared::", "matmul_reduce_scatter": "global.shared::"}
FOLDER = pathlib.Path(catalogue.__file__).parents[2] / "kernels/matmul"
COMPLETE = r"complete_descriptor_stores\(TILES.*\n"
MUTANTS = {
    "no fence": (
        "all_gather_matmul",
        r" +fence_descriptor_loads\(.*\n",
        "",
        {"unfenced descriptor load"},
    ),
    "no wait": ("all_gather_matmul", r" +wait\(workspace.*\n", "", set()),
    "a fence of shared memory": (
        "all_gather_matmul",
        r"fence_descriptor_loads\(.*\n",
        "gl.nvidia.hopper.fence_async_shared()\n",
        {"unfenced descriptor load"},
    ),
    "no wait for stores": ("matmul_reduce_scatter", COMPLETE, "\n", {"published descriptor store"}),
    "a wait until stores have read": (
        "matmul_reduce_scatter",
        COMPLETE,
        "tma.store_wait(0)\n",
        {"published descriptor store"},
    ),
    "no wait for credit": ("matmul_reduce_scatter", "free = wait_credit.*", "free = True", set()),
}


def mutant(op: str, folder: pathlib.Path, pattern: str, text: str) -> Entry:
    changed, count = re.subn(pattern, text, (FOLDER / f"{op}_roles.py").read_text())
    assert count == 1
    path = folder / f"{op}_mutant.py"
    path.write_text(changed)
    return replace(ENTRIES[op], module=path.stem, path=str(path))


def waits_before(ptx: str, how: str) -> bool:
    program = PtxModule(ptx)
    code = program.instructions
    waits = program.where(lambda one: {"acquire", "sys", "ld"} <= one.parts)
    moves = program.where(lambda one: one.operation.startswith("cp.async.bulk.tensor"))
    moves = [i for i in moves if how in code[i].operation]
    assert moves
    return any(program.flow.before(wait, move) for wait in waits for move in moves)


@pytest.mark.parametrize("op", few(ENTRIES, "all_gather_matmul"))
def test_it_is_clean_and_waits_before_it_moves(op: str, tmp_path: pathlib.Path) -> None:
    (report,), (ptx,) = compiled([ENTRIES[op]], tmp_path)
    assert report.problems() == [] and report.tensor_cores == 4
    assert waits_before(ptx, AFTER_A_WAIT[op])


@thorough
@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_found(name: str, tmp_path: pathlib.Path) -> None:
    op, pattern, text, rules = MUTANTS[name]
    (report,), (ptx,) = compiled([mutant(op, tmp_path, pattern, text)], tmp_path)
    assert report.error is None
    assert {fault.rule for fault in report.faults} == rules
    assert bool(rules) == waits_before(ptx, AFTER_A_WAIT[op])


@thorough
@pytest.mark.parametrize("op", ENTRIES)
def test_those_who_multiply_do_nothing_per_part(op: str) -> None:
    roles, reference = build([ENTRIES[op], REFERENCES[op]])

    def innermost(report: BuildReport, what: str) -> Loop:
        loops = [loop for loop in report.loops if loop.wgmma_waits and what in loop.where]
        return min(loops, key=lambda loop: loop.instructions)

    step, other = innermost(roles, " in multiply"), innermost(reference, "")
    assert step.wgmma_waits == 1 and step.tensor_maps == 0
    assert step.barriers < other.barriers and step.instructions < other.instructions
    per_part = [loop for loop in reference.loops if loop.tensor_maps]
    assert any(loop.depth == 1 and loop.tensor_maps == 2 for loop in per_part)
    assert not any(loop.tensor_maps for loop in roles.loops if " in multiply" in loop.where)
    # A thread has 128 accumulators, and clears none of them for a tile.
    per_tile = max(loop.instructions for loop in roles.loops if " in multiply" in loop.where)
    assert per_tile < 128


@thorough
def test_sums_by_themselves_load_as_much_at_once() -> None:
    """Without the bound on registers, ptxas uses them for fewer loads."""
    ours, alone, reference = build(
        [SUMS, replace(SUMS, max_registers=0), REFERENCES["matmul_reduce_scatter"]]
    )
    in_flight = [
        [loop.loads_in_flight for loop in each.loops if " in sum_contributions" in loop.where]
        for each in (ours, alone, reference)
    ]
    assert ours.problems() == []
    assert in_flight[0] == in_flight[2] == [8] and in_flight[1] < [8], in_flight

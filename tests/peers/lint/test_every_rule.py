"""Every rule of lint in other projects' styles: a right kernel is clean, one fault breaks that rule.

The fault is an edit of ``linted_kernels.py``, or a launch that its kernel is not made for.
"""

import linecache
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from interlace_verify.lint_check.check import RULES, LintReport, LintRequest, lint_many
from mutants.mutations import mutant_of, mutated_function
from support import mended
from tiers import few

FILE = "tests/peers/lint/linted_kernels.py"
TILES = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64}


@dataclass(frozen=True)
class RuleCase:
    """A rule, and a kernel in the ``style`` of a peer that breaks it by an edit or other options.

    ``at``: what stands in the kernel's line that the finding names; nothing, if it names none.
    """

    rule: str
    style: str
    kernel: str
    types: Mapping[str, Any]
    constexprs: Mapping[str, Any]
    edit: tuple[str, str] = ("", "")
    at: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    wrong_options: Mapping[str, Any] = field(default_factory=dict)

    def requests(self, folder: pathlib.Path) -> list[LintRequest]:
        """The right one and the wrong one."""
        edits = [self.edit] if self.edit[0] else []
        right = mutated_function(mutant_of(FILE, "none"), self.kernel, folder)
        wrong = mutated_function(mutant_of(FILE, self.rule, *edits), self.kernel, folder)
        request = LintRequest(right, self.types, self.constexprs, **self.options)
        return [request, replace(request, kernel=wrong, **self.wrong_options)]


def pointers(kind: str, *names: str) -> dict[str, str]:
    return {f"{name}_ptr": f"*{kind}" for name in names}


def matmul(output: str, signal: str) -> dict[str, Any]:
    """Of Triton-distributed's matmuls: types, constexprs, and what is aligned."""
    types = pointers("bf16", "a", "b", output) | pointers("i32", signal)
    types |= dict.fromkeys("MNK", "i32")
    divisible = ["a_ptr", "b_ptr", f"{output}_ptr", *"MNK"]
    return {"types": types, "constexprs": TILES, "options": {"divisible": divisible}}


ONE_SHOT: dict[str, Any] = {
    "kernel": "one_shot_kernel",
    "types": {"buffers": ("*fp32", "*fp32"), "output_ptr": "*fp32"},
    "constexprs": {"WORLD_SIZE": 2, "BLOCK": 8192},
    "options": {"num_warps": 8},
}
CASES = [
    RuleCase(
        "does not compile",
        "Kraken",
        # a tuple of buffers has no number that is known only when the kernel runs
        edit=("static_range(WORLD_SIZE):\n        total", "range(WORLD_SIZE):\n        total"),
        at="buffers[peer]",
        **ONE_SHOT,
    ),
    RuleCase("release without barrier", "minimal_async_ep", "dispatch_rows_kernel", pointers("bf16",
     "from") | pointers("i32", "peers", "rows") | pointers("i64", "table", "flags"), {"WIDTH": 1024},
     ("    tl.debug_barrier()\n    tl.atomic_xchg(flag,", "    tl.atomic_xchg(flag,"),
     "tl.atomic_xchg(flag,"),
    RuleCase("narrow scope", "Iris", "put_kernel", pointers("fp32", "source", "inbox") | pointers("i32",
     "ready") | {"heap_bases": "*i64", "rank": "i32", "peer": "i32"}, {"BLOCK": 1024},
     ('(ready, 1, sem="release", scope="sys")', '(ready, 1, sem="release")'), "tl.atomic_xchg(ready,"),
    RuleCase("weak poll", "Kraken", "all_gather_kernel", pointers("i32", "flags") | pointers("i64",
     "buffers") | pointers("fp32", "output"), {"WORLD_SIZE": 2, "BLOCK": 1024}, ('AFTER_WAIT="acquire"',
     'AFTER_WAIT="relaxed"'), "take_flag("),
    RuleCase("dropped wait", "Iris", "consume_tiles_kernel", pointers("fp32", "tiles",
     "output") | pointers("i32", "locks"), {"TILES": 4, "BLOCK": 1024},
     ('tl.atomic_cas(locks_ptr + tile, 1, 1, sem="acquire", scope="sys")', "tl.load(locks_ptr + tile)"),
     "while tl.load(locks_ptr + tile)"),
    RuleCase("published descriptor store", "Triton-distributed", "gemm_rs_kernel",
     edit=("    complete_bulk_stores()\n    tl.debug", "    tl.debug"),
     at="tl.atomic_xchg(signal_ptr + tile,", **matmul("scatter", "signal")),
    RuleCase("unfenced descriptor load", "Triton-distributed", "ag_gemm_kernel",
     edit=("    fence_async()\n", ""), at="a.load([row, k])", **matmul("output", "ready")),
    RuleCase("early load", "Triton-distributed", "persistent_ag_gemm_kernel",
     edit=("a_ptr + (row + offs_m)", "a_ptr + (tile * BLOCK_M + offs_m)"), at="a = tl.load(a_ptr",
     **matmul("output", "ready")),
    RuleCase(
        "weakened by ptxas",
        "torchcomms",
        "window_kernel",
        pointers("fp32", "window", "output") | pointers("i32", "signals"),
        {"SOURCES": 1, "BLOCK": 1024},
        at="wait_signal_from(",
        wrong_options={"constexprs": {"SOURCES": 0, "BLOCK": 1024}},  # nobody is waited for
    ),
    RuleCase("spills", "Kraken", wrong_options={"num_warps": 1}, **ONE_SHOT),
    RuleCase("shared memory", "Triton-distributed", "ag_gemm_kernel", wrong_options={"num_stages": 8},
     **matmul("output", "ready")),
    RuleCase(
        "no tensor cores",
        "Triton-distributed",
        "scaled_ag_gemm_kernel",
        pointers("fp8e4nv", "a", "b")
        | pointers("u8", "a_scale", "b_scale")
        | pointers("fp32", "output")
        | pointers("i32", "ready"),
        dict.fromkeys("MNK", 128),
        at="tl.dot_scaled(",
        options={"arch": 100},
        wrong_options={"arch": 90},  # which has no matrix instruction for scaled numbers
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def reports(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[LintReport]]:
    """By rule, of the tests that run: what is said of the right kernel and of the wrong one."""
    asked = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    cases = [case for case in CASES if any(each.get("case") is case for each in asked)]
    folder = tmp_path_factory.mktemp("kernels")
    made = lint_many([each for case in cases for each in case.requests(folder)])
    return {case.rule: made[2 * i : 2 * i + 2] for i, case in enumerate(cases)}


def test_no_rule_is_without_a_kernel_that_breaks_it_and_one_that_does_not() -> None:
    assert [case.rule for case in CASES] == list(RULES)
    assert all(case.edit[0] or case.wrong_options for case in CASES)


@pytest.mark.parametrize(
    "case",
    few(CASES, *(case for case in CASES if case.rule == "weakened by ptxas")),
    ids=lambda case: f"{case.rule} in {case.style}",
)
def test_the_right_kernel_is_clean_and_the_wrong_one_is_found(
    case: RuleCase, reports: dict[str, list[LintReport]]
) -> None:
    right, wrong = reports[case.rule]
    assert right.clean, str(right)
    if mended(case.rule):
        pytest.skip("this Triton mends the wrong kernel")
    assert {fault.rule for fault in wrong.findings} == {case.rule}, str(wrong)
    where = wrong.findings[0].where
    assert case.at in (linecache.getline(*where.frames[-1]) if where else ""), str(wrong)

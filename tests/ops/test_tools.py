"""Every op of the registry is in the list of every tool, under its own name or a similar op's.

Tools that read the records get a new op at once. Tools with their own list lack it, and the test names
them.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from unittest import mock

from torch import Tensor

from cases.op_tools import NAMES, SAME, WHY_NOT
from interlace.benchmark.requests import OPS as MEASURED, TUNED
from interlace.cli.commands.check import WORLDS, cases, every_kernel
from interlace.ops.library import BY_NAME
from interlace.ops.op.op import Op, fused_by
from interlace.tools.targets import STANDS_FOR, targets
from ops import contracts
from ops.test_contract import cells

INNER = {
    "rank": "",  # nothing is sent
    "routed_matmul_combine": "grouped_matmul_combine",
    "routed_matmul_combine_backward": "dispatch",
    "context_parallel_attention_backward": "context_parallel_attention",
}
"""Ops that are no public function: of which one they are."""


def public_name(op: str) -> str:
    op = op.removeprefix("block_scaled_")  # the public function calls this op for such operands
    return INNER.get(op, SAME.get(op, op))


def without_tool(ops: Mapping[str, Op]) -> Iterator[str]:
    """Return the ops that tools lack."""
    verified, built = targets(ops), every_kernel()
    checked = {kernel for device in WORLDS for case in cases(device) for kernel in case.kernels}
    listed = {"verify": verified, "bench": MEASURED, "tune": TUNED}
    for name, op in ops.items():
        yield from (f"{name}: no example of {each}" for each in op.without_example())
        kernels = {kernel for each in op.algorithms.values() for kernel in each}
        yield from (f"{name}: {each} is not built" for each in sorted(kernels - {*built}))
        yield from (f"{name}: {each} is not checked" for each in sorted(kernels - checked))
        public = public_name(name)
        for tool, known in listed.items():
            called = NAMES.get((public, tool), (public,))
            if public and (public, tool) not in WHY_NOT and not {*called} <= {*known}:
                yield f"{name}: {tool} does not know it"


def test_every_tool_knows_every_op() -> None:
    assert list(without_tool(BY_NAME)) == []


@mock.patch.dict(BY_NAME)  # a new record is in the registry at once
def test_a_new_op_is_missed_where_a_tool_has_a_list_of_its_own() -> None:
    """Verify and the contract matrix find it at once; the tools that need code do not."""
    kernels = fused_by("another_kernel")
    new = dataclasses.replace(BY_NAME["matmul_all_reduce"], name="another", algorithms=kernels)
    grown = {**BY_NAME, "another": new}
    target = targets(grown)["another"]
    assert [*target.variants] == ["fused", "pipelined", "unfused"]
    assert target.kernels == ("another_kernel",)
    assert contracts.gaps(grown) == []
    assert [*grown] == [*cells("values", grown)]
    unknown = dataclasses.make_dataclass("unknown", [("input", Tensor), ("speed", int)])
    without = dataclasses.replace(new, arguments=unknown)
    assert contracts.gaps({"another": without}) == ["another: no example of speed"]
    assert list(without_tool(grown)) == [
        "another: another_kernel is not built",
        "another: another_kernel is not checked",
        "another: bench does not know it",
        "another: tune does not know it",
    ]


def test_a_target_that_stands_for_an_op_has_its_kernels() -> None:
    known = targets(BY_NAME)
    for name, target in STANDS_FOR.items():
        assert BY_NAME[name].algorithms.keys() <= known[target].variants.keys()
        kernels = {kernel for each in BY_NAME[name].algorithms.values() for kernel in each}
        assert kernels <= {*known[target].kernels}

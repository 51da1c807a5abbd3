"""Cases of ``interlace check``: every kernel of the catalogue has one that runs it, or a reason."""

import functools
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import interlace
from interlace.cli.commands import check as known
from interlace.cli.commands.check import (
    LEFT_OUT,
    CheckOptions,
    DenseCase,
    RowsCase,
    check,
    run_case,
)
from interlace.output.consoles import PlainConsole
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.places.gpu import driver
from interlace.runtime.tuning.configuration import LARGEST_HEAD, gpu_attention
from interlace.tools.catalogue.catalogue import DTYPES
from tiers import few

DEVICES = ("cpu", "cuda")
cases_of = functools.cache(known.cases)
every_kernel = functools.cache(known.every_kernel)
IN_SIM = cases_of("cpu")
FIRST = [case.title for case in IN_SIM if case.world_size == 2][:20]


def forgotten(device: str, kernels: list[str]) -> set[str]:
    """Return ``kernels`` without a case and a reason, kernels with both, and unknown ones."""
    run = {kernel for case in cases_of(device) for kernel in case.kernels}
    return {*kernels} ^ (run ^ known.WITHOUT[device].keys())


@pytest.mark.parametrize("device", DEVICES)
def test_no_kernel_is_forgotten(device: str) -> None:
    assert not forgotten(device, every_kernel())


def test_a_new_kernel_would_be_seen() -> None:
    kernels = [*every_kernel(), "new_kernel"]
    assert "new_kernel" in forgotten("cpu", kernels)
    with mock.patch.multiple(known, cases=cases_of, every_kernel=lambda: kernels):
        assert known.titles_by_kernel("cpu")["new_kernel"] == ["no case runs it"]


@pytest.mark.parametrize("title", few([case.title for case in IN_SIM], *FIRST))
def test_a_case_passes_and_launches_the_kernels_that_it_names(title: str) -> None:
    (case,) = (case for case in IN_SIM if case.title == title)
    launched = set()

    def init(launch: KernelLaunch, kernel: object, *rest: object, **more: object) -> None:
        stock(launch, kernel, *rest, **more)  # type: ignore[arg-type]
        launched.add(launch.name)

    stock = KernelLaunch.__init__
    with mock.patch.object(KernelLaunch, "__init__", init):
        verdict = run_case(case, "cpu", seed=0)
    assert verdict.passed and not verdict.skipped, (verdict.ratio, verdict.error)
    assert launched >= {*case.kernels}


def test_every_tile_of_attention_on_a_gpu_has_a_case() -> None:
    """The size of heads and the dtype determine the tiles."""
    attention = [case for case in cases_of("cuda") if "context_parallel" in case.op]
    for capability, backward in itertools.product((80, 90, 100), (False, True)):
        found, every = (
            {
                gpu_attention(capability, DTYPES[dtype], size, backward=backward)
                for dtype, size in kinds
            }
            for kinds in (
                {
                    (case.dtype, case.sizes[2])
                    for case in attention
                    if ("backward" in case.op) == backward
                },
                itertools.product(DTYPES, range(16, LARGEST_HEAD + 1, 16)),
            )
        )
        assert found == every, (capability, backward)


def test_a_branch_that_is_not_taken_is_seen() -> None:
    def judged(op: str, branch: str, damaged: Callable[[Any], Any], **changed: Any) -> float:
        (case,) = (
            each for each in IN_SIM if (each.op, each.branch, each.world_size) == (op, branch, 2)
        )
        assert isinstance(case, RowsCase)

        def on_rank() -> float:
            subject, other = case.subject(), replace(case, **changed).subject()
            return float(subject.check(damaged(other.ours(case.algorithm)(*other.inputs(0))), 0))

        return max(interlace.run(on_rank, 2))

    double = ("reduce_scatter_norm", "fp8", lambda made: ((made[0][0], 2 * made[0][1]), made[1]))
    for op, branch, damaged, changed in (
        (*double, {}),
        ("dispatch", "fp8", lambda made: (made[0], 2 * made[1]), {}),
        ("reduce_scatter_norm", "layer norm", lambda made: made, {"settings": ()}),
    ):
        assert judged(op, branch, lambda made: made) <= 1 < judged(op, branch, damaged, **changed)


def test_pages_are_read_in_the_order_of_the_table() -> None:
    (case,) = (each for each in IN_SIM if each.branch == "pages" and each.world_size == 2)
    tables: list[torch.Tensor] = []
    decode = interlace.distributed_decode

    def seen(*tensors: Any, block_table: torch.Tensor, **how: Any) -> Any:
        tables.append(block_table)
        return decode(*tensors, block_table=block_table, **how)

    with mock.patch.object(interlace, "distributed_decode", seen):
        assert run_case(case, "cpu", 0).passed
    assert (
        all(table.numel() > 1 and table[0, 0] > table[0, 1] for table in tables)
        and len(tables) == 2
    )


def test_kernels_and_their_branches_come_first() -> None:
    for device, world_size in itertools.product(DEVICES, (1, 2, 4)):
        cases = [case for case in cases_of(device) if case.world_size == world_size]
        found = {(case.op, case.branch) for case in cases[: 2 * len(cases) // 3]}
        assert {
            ("context_parallel_attention_backward", "heads of 64"),
            ("distributed_decode", "heads of 256"),
            ("distributed_decode", "pages"),
            ("reduce_scatter_norm", "fp8"),
            ("matmul_reduce_scatter_norm", "layer norm"),
            ("all_reduce_norm", "fp8"),
            ("dispatch", "fp8"),
        } <= found
    on_two = [case for case in IN_SIM if case.world_size == 2]
    wanted = {kernel for case in on_two for kernel in case.kernels}
    half = on_two[: len(on_two) // 2]
    assert {kernel for case in half for kernel in case.kernels} == wanted and len(wanted) > 25
    assert "fp8" in {case.dtype for case in half}
    assert on_two[0].op == "all_gather_matmul" and on_two[0].variant == "fused, copiers"


def test_what_fails_is_told() -> None:
    about = "all_reduce", "copy", 2, (64,), "fp32", ()
    case = DenseCase(*about, arguments={"algorithm": "copy"})
    assert run_case(case, "cpu", 0).passed
    with mock.patch.object(DenseCase, "_collective", lambda self, x, rank: x):
        assert run_case(case, "cpu", 0).ratio > 1
    refused = run_case(DenseCase(*about, arguments={"algorithm": "no such"}), "cpu", 0)
    assert not refused.passed and "algorithm" in refused.error


def test_what_needs_a_switch_is_skipped_with_a_word() -> None:
    case = next(case for case in IN_SIM if case.variant == "multimem" and case.world_size == 2)
    assert isinstance(case, RowsCase) and case.by_switch
    with mock.patch("interlace.runtime.core.memory.Arena.multicast", lambda arena: False):
        verdict = run_case(case, "cpu", 0)
    assert verdict.passed and "no multicast address" in verdict.skipped


def test_streams_can_be_made_to_signal_by_kernels() -> None:
    (case, *_) = (case for case in cases_of("cuda") if "publish_kernel" in case.kernels)
    before = driver.stream_words
    with case.circumstances():
        assert case.by_kernels and driver.stream_words(0) is None
    assert driver.stream_words is before


def test_what_is_left_out_has_not_passed(capsys: pytest.CaptureFixture[str]) -> None:
    options = CheckOptions("cpu", ranks=(1,), seconds=0.0, json=True)
    assert check(None, options) == LEFT_OUT
    said = json.loads(capsys.readouterr().out)
    assert said["left_out"] > 5 and len(said["cases"]) <= 1


@pytest.mark.parametrize("device", DEVICES)
def test_the_list_names_every_kernel(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.multiple(known, cases=cases_of, every_kernel=every_kernel):
        assert check(PlainConsole(), CheckOptions(device, list=True)) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if not line.startswith("  ")] == every_kernel()
        assert check(None, CheckOptions(device, list=True, json=True)) == 0
        assert json.loads(capsys.readouterr().out) == known.titles_by_kernel(device)

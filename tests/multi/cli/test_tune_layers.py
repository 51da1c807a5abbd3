"""``tune`` of ops without a matmul: ``auto`` then takes the measured algorithm."""

import dataclasses
import io
import os
import pathlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console
from torch.utils._pytree import tree_map_only

import interlace
from interlace.benchmark.requests import TUNED
from interlace.benchmark.tune import by_name
from interlace.cli.commands.tune import TuneOptions, tune
from interlace.groups.groups import default_group
from interlace.ops.attention import head_exchange
from interlace.ops.experts.combine import Combine
from interlace.ops.experts.dispatch import Dispatch
from interlace.runtime.core.context import context_with
from interlace.runtime.tuning import files, tuning
from interlace.runtime.tuning.files import CacheRow

# auto would not choose these on CPUs
FASTEST = {
    "all_reduce_norm": "unfused",
    "reduce_scatter_norm": "unfused",
    "gather_normed": "unfused",
    "matmul_all_reduce_norm": "pipelined",
    "matmul_all_to_all": "pipelined",
    "all_to_all_matmul": "pipelined",
    "all_to_all_grouped_matmul": "pipelined",
    "all_gather_grouped_matmul": "pipelined",
    "dispatch": "pipelined",
    "combine": "pipelined",
    "context_parallel_attention": "ring pipelined",
    "context_parallel_attention_backward": "ring pipelined",
}
SIZES = {"m": 8, "n": 16, "k": 8}


def call(op: str, algorithm: str = "auto") -> Any:
    """Call the op with the sizes of ``SIZES``, as ``tune`` does."""
    kind = TUNED[op]
    sizes = tuple(SIZES.values())[: len(kind.sizes)]
    subject = kind(default_group().place, torch.float32, *sizes)
    return subject.ours(algorithm)(*subject.inputs(0))


def told(op: str, file: str, algorithm: str = "auto") -> list[str]:
    """Return the algorithms of a call in a profile, with ``file`` as the cache."""
    said: list[str] = []
    with mock.patch.dict(os.environ, {files.VARIABLE: file}):
        tuning.forget()
        ranges: Any = SimpleNamespace(begin=said.append)
        try:
            with context_with(op_ranges=ranges):
                tree_map_only(torch.Tensor, torch.sum, call(op, algorithm))
        finally:
            tuning.forget()
    return said


def row(op: str, named: str) -> CacheRow:
    kind = TUNED[op]
    sizes = tuple(SIZES.values())[: len(kind.sizes)]
    problem = kind.problem(torch.float32, sizes, 2)
    about = tuning.dtype_name(problem), tuning.extents_of(problem)
    return CacheRow(op, *about, *tuning.bucket_of(problem), named, {named: {}})


@pytest.mark.parametrize("op", FASTEST)
def test_what_was_measured_is_taken(op: str, tmp_path: pathlib.Path) -> None:
    here, file = files.machine("shm", torch.device("cpu")), tmp_path / "tune.json"
    files.add(here, [row(op, FASTEST[op])], file)
    for said, expected in (
        (interlace.run(told, 2, op, "off", place="shm"), False),
        (interlace.run(told, 2, op, str(file), place="shm"), True),
    ):
        assert [FASTEST[op] in each for each in said] == [expected] * 2
    method, way = ("all_gather", "auto") if "attention" in op else ("", "unfused")
    (mine, _) = interlace.run(told, 2, op, str(file), f"{method} {way}".strip(), place="shm")
    assert any((method or way) in each for each in mine)


# values that no default has
KERNELS: list[tuple[str, Any, str, int]] = [
    ("matmul_all_to_all", head_exchange.ToHeads, "group_m", 5),
    ("all_to_all_matmul", head_exchange.FromHeads, "group_m", 5),
    ("dispatch", Dispatch, "copy_rows", 2),
    ("combine", Combine, "copy_rows", 2),
]


@pytest.mark.parametrize(("op", "kind", "name", "value"), KERNELS)
def test_the_kernel_gets_what_was_measured(
    op: str, kind: Any, name: str, value: int, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "tune.json"
    found = dataclasses.replace(row(op, "fused"), values={"fused": {name: value}})
    files.add(files.machine("sim", torch.device("cpu")), [found], file)
    with mock.patch.object(kind, "fused", autospec=True, side_effect=kind.fused) as spy:
        for where, expected in (("off", False), (str(file), True)):
            spy.reset_mock()
            # Around both: ranks of one process would give back what the other has set.
            with mock.patch.dict(os.environ, {files.VARIABLE: where}):
                interlace.run(told, 2, op, where, "fused")
            got = [getattr(each.args[-1], name) == value for each in spy.call_args_list]
            assert got == [expected] * 2


def run_tune(**options: Any) -> tuple[int, str]:
    out = io.StringIO()
    return tune(Console(file=out, width=250), TuneOptions(**options)), out.getvalue()


def test_the_command(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "tune.json"
    given: Any = {"budget": 0.5, "cache": str(file), "m": "8", "n": "16"}
    code, text = run_tune(op=("all_reduce_norm",), place="shm", plot="-", **given)
    assert code == 0 and "default" in text and "auto" in text and "####" in text
    machine = files.machine("shm", torch.device("cpu"))
    for found in files.rows_for(machine, file):  # none, if nothing is faster than what auto does
        assert (found.op, found.rows, found.columns) == ("all_reduce_norm", 8, 16)
    code, text = run_tune(op=("context_parallel_attention",), dry_run=True, arch=90, world_size=8)
    assert code == 0 and "ring fused" in text and "block_m 64" in text


def test_candidates_go_by_names_that_a_cache_takes() -> None:
    for kind in TUNED.values():
        for place in ("sim", "shm", "cuda"):
            found = by_name(place, kind)
            assert found[0].default and len(set(found)) == len(found)
            assert place != "shm" or len(found) != 2  # one beside "auto" is what that is
            known = {"auto", *files.BY_OP.get(kind.op, files.ALGORITHMS)}
            assert {each.algorithm for each in found} <= known
            for each in found:
                if each.values:
                    assert each.configuration.keys() <= vars(tuning.Configuration()).keys()

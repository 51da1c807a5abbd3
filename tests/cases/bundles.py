"""The bundles that tests build: every op, three architectures, and options that change the manifest."""

import json
import pathlib
from typing import Any

from interlace.cli.commands.build import write
from interlace.runtime.compiler.bundle.bundle import BundleTarget
from interlace.runtime.compiler.bundle.ops import OPS, KernelOptions

ARCHES = {op: [90] for op in OPS} | {"all_gather_matmul": [80, 90, 100], "matmul_all_reduce": [80]}
OPTIONS = {
    "all_gather_matmul": KernelOptions(),
    "matmul_reduce_scatter": KernelOptions("fp16", weight="nk", bias="n"),
    "matmul_all_reduce": KernelOptions("fp32", inner=4095, average=True),
    "matmul_reduce_scatter_norm": KernelOptions(norm="layer", bias="n", gather="normed"),
    "matmul_all_reduce_norm": KernelOptions(quantize=True),
    "reduce_norm": KernelOptions("fp16", average=True, gather="both"),
    "low_latency_norm": KernelOptions(),
    "dispatch": KernelOptions(topk=2, experts=3),
    "combine": KernelOptions(topk=2, experts=3),
    "grouped_matmul_combine": KernelOptions(topk=2, experts=3),
    "matmul_all_to_all": KernelOptions(bias="n"),
    "all_to_all_matmul": KernelOptions("fp16", weight="nk"),
    "context_parallel_attention": KernelOptions(head_dim=64),
    "distributed_decode": KernelOptions("fp16", head_dim=64),
    "all_gather": KernelOptions(),
    "reduce_scatter": KernelOptions(average=True),
    "all_reduce": KernelOptions(overrides={"block_elements": 1024}),
}


def build_all(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """All of them below ``folder``; the directory of each by op."""
    targets = [BundleTarget(op, OPTIONS[op], ARCHES[op], folder / op) for op in OPS]
    problems = {report.name: report.problems() for report in write(targets)}
    assert not any(problems.values()), problems
    return {target.op: target.out for target in targets}


def manifest_of(path: pathlib.Path) -> dict[str, Any]:
    """The manifest of the bundle in ``path``."""
    return json.loads((path / "manifest.json").read_text())  # type: ignore[no-any-return]

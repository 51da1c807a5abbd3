"""The bundles that tests build, and what the host launches of each op, on tensors without memory."""

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from interlace.kernels import launch_formulas
from interlace.ops.attention import blocks, head_exchange, key_transport
from interlace.ops.attention.decode import DecodeProblem, decode_fused
from interlace.ops.attention.problem import (
    AttentionMask,
    AttentionProblem,
    AttentionResult,
    TokenShards,
)
from interlace.ops.collectives import launch as plain
from interlace.ops.collectives.launch import broadcast
from interlace.ops.experts.combine import Combine, Home
from interlace.ops.experts.dispatch import Dispatch
from interlace.ops.experts.grouped import EXCHANGE, GATHER, GroupedMatmul, Routes
from interlace.ops.experts.grouped_combine import GroupedMatmulCombine
from interlace.ops.experts.routing import Assignment, Bounds, Received
from interlace.ops.matmul import (
    launch_gather as gather_matmul,
    launch_norms as normed,
    launch_reduce as matmul_reduce,
)
from interlace.runtime.core.memory import Layout, Workspace
from interlace.runtime.tuning.configuration import Configuration, gpu_attention
from interlace.tools.bundle import OPS, BundleTarget, KernelOptions, build_bundles
from interlace.tools.catalogue.absent_group import AbsentGroup
from interlace.tools.catalogue.catalogue import MatmulVariant

ARCHES = {op: [90] for op in OPS} | {"all_gather_matmul": [80, 100, 90], "matmul_all_reduce": [80]}
OPTIONS = {
    "all_gather_matmul": KernelOptions(),
    "matmul_reduce_scatter": KernelOptions("fp16", weight="nk", bias="n"),
    "matmul_all_reduce": KernelOptions("fp32", inner=4095, average=True),
    "matmul_reduce_scatter_norm": KernelOptions(
        norm="layer", bias="n", gather="normed", quantize="fp8_static"
    ),
    "matmul_all_reduce_norm": KernelOptions(quantize="fp8"),
    "reduce_norm": KernelOptions("fp16", average=True, gather="both"),
    "low_latency_norm": KernelOptions(),
    "dispatch": KernelOptions(topk=2, experts=3),
    "combine": KernelOptions(topk=2, experts=3),
    "grouped_matmul_combine": KernelOptions(topk=2, experts=3),
    "all_gather_grouped_matmul": KernelOptions("fp16", weight="nk"),
    "all_to_all_grouped_matmul": KernelOptions(bias="n"),
    "matmul_all_to_all": KernelOptions(bias="n"),
    "all_to_all_matmul": KernelOptions("fp16", weight="nk"),
    "context_parallel_attention": KernelOptions(head_dim=64),
    "attention_of_heads": KernelOptions("fp16", head_dim=64),
    "attention_of_heads_backward": KernelOptions("fp32", head_dim=256),
    "distributed_decode": KernelOptions("fp16", head_dim=64),
    "all_gather": KernelOptions(),
    "reduce_scatter": KernelOptions(average=True),
    "all_reduce": KernelOptions(overrides={"block_elements": 1024}),
    "broadcast": KernelOptions(),
}


ONE_OF_EACH = (("all_gather_matmul", "90"), ("all_gather", "90"), ("all_reduce", "90"))
"""An op of each kind, and its architecture; the others are thorough."""


def build_all(
    folder: pathlib.Path, arches: Mapping[str, list[int]] = ARCHES
) -> dict[str, pathlib.Path]:
    """Build all bundles of ``arches`` below ``folder``, and return the directory of each op."""
    targets = [BundleTarget(op, OPTIONS[op], arches[op], folder / op) for op in arches]
    problems = {report.name: report.problems() for report in build_bundles(targets)}
    assert not any(problems.values()), problems
    return {target.op: target.out for target in targets}


def manifest_of(path: pathlib.Path) -> dict[str, Any]:
    return json.loads((path / "manifest.json").read_text())  # type: ignore[no-any-return]


LIMIT = 132
TOKENS = 4  # in an op by words
GROUPED_EXPERTS = 3  # on each rank
EXTRA = {"tokens": TOKENS, "query_rows": 4, "programs": 32, "home_rows": 5000}
"""Launch values that are no argument of a kernel."""


class HostGroup(AbsentGroup):
    """A group that has tables of addresses and lists its leases."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(world_size)
        self.rank, self.layouts = rank, list[Layout]()
        self.buffer.rank = rank
        self.place.program_limit = LIMIT

    def table(self, key: Any, rows: Any, *, passing: bool = False) -> torch.Tensor:
        return torch.tensor([value for row in rows() for value in row], dtype=torch.int64)

    def enqueue(self, op: str, layout: Layout, body: Callable[[Workspace], None]) -> None:
        self.layouts.append(layout)
        super().enqueue(op, layout, body)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@dataclass(frozen=True)
class Shape:
    rows: tuple[int, ...]
    columns: int = 4096


SHAPES = [
    Shape((5000, 4096, 4000, 3000)),
    Shape((8192,) * 8, 1024),
    Shape((700, 0, 129), 272),
    Shape((4096,)),
]
INNER = {"matmul_all_reduce": 4095}


def launched_on_host(op: str, shape: Shape, rank: int, configuration: Configuration) -> HostGroup:
    """Return the launches and leases of the host's part of ``op`` for ``shape``."""
    group: Any = HostGroup(rank, len(shape.rows))
    if op in LAUNCHES:
        LAUNCHES[op](group, shape.rows, configuration)
    elif op.startswith("matmul") or op.endswith(("matmul", "norm")):
        _fused(op, group, shape, configuration)
    else:
        _plain(op, group, shape.rows, configuration)
    return group  # type: ignore[no-any-return]


def _fused(op: str, group: Any, shape: Shape, configuration: Configuration) -> None:
    rows, own, most = list(shape.rows), shape.rows[group.rank], max(shape.rows)
    columns = 4096 if op.endswith("_norm") else shape.columns  # slices are cut for the columns
    options = replace(OPTIONS[op], columns=columns, inner=INNER.get(op, 4096))
    operands, segments = MatmulVariant(**vars(options)), launch_formulas.segments_of(rows)
    whole: Any = ()
    if op == "all_gather_matmul":
        input, linear = operands.tensors(own)
        linear.output = meta(sum(rows), columns)
        call = group, input, [linear], rows, None, configuration
        gather_matmul.all_gather_matmul_fused(*call)
    elif op == "matmul_all_to_all":
        input, linear = replace(operands, columns=columns * len(rows)).tensors(own)
        linear.output = meta(sum(rows), columns)
        head_exchange.ToHeads(group, input, linear, rows).fused(configuration)
    elif op == "all_to_all_matmul":
        _, linear = replace(operands, inner=operands.inner * len(rows)).tensors(own)
        input = meta(sum(rows), operands.inner, dtype=operands.torch_dtype)
        head_exchange.FromHeads(group, input, linear, rows).fused(configuration)
    elif op.startswith("matmul_all_reduce"):
        input, linear = operands.tensors(most)
        linear = operands.normed(linear, most)[0] if op.endswith("_norm") else linear
        matmul_reduce.matmul_all_reduce_fused(group, input, linear, configuration)
    else:
        input, linear = operands.tensors(sum(rows))
        linear.output = linear.output[:own]
        if op.endswith("_norm"):
            linear, *whole = operands.normed(linear, own)
        if op == "reduce_norm":
            normed.reduce_fused(group, op, input, linear, segments, configuration, *whole)
        else:
            call = group, input, linear, segments, configuration, *whole
            matmul_reduce.matmul_reduce_scatter_fused(*call)


def _plain(op: str, group: Any, rows: Sequence[int], configuration: Configuration) -> None:
    own, most, total = meta(rows[group.rank]), meta(max(rows)), meta(sum(rows))
    if op == "all_gather":
        plain.all_gather_kernel(group, own, apart(sum(rows)), rows, configuration)
    elif op == "reduce_scatter":
        plain.reduce_scatter_kernel(group, total, own, rows, configuration, average=True)
    else:
        plain.all_reduce_kernel(group, most, most, configuration, average=False)


def apart(elements: int) -> Any:
    """Return a flat output with another address than the input; tensors without memory have address 0."""
    tensor = mock.MagicMock(dtype=torch.bfloat16, numel=lambda: elements)
    tensor.__getitem__.return_value.data_ptr.return_value = 16
    return tensor


def _low_latency_norm(group: Any, rows: Any, configuration: Configuration) -> None:
    operands, matrix = MatmulVariant(), meta(TOKENS, 4096)
    linear, _ = operands.normed(operands.tensors(TOKENS)[1], TOKENS)
    normed.RowReduction(group, "all_reduce_norm", matrix, linear, None, None).low_latency()


def _broadcast(group: Any, rows: Any, configuration: Configuration) -> None:
    broadcast(group, meta(3001, dtype=torch.int32), len(rows) - 1)


def _routed(op: str, group: Any) -> tuple[Any, Any, Home]:
    """Return a rank's experts, the experts of some tokens, and the way of their rows back to the tokens."""
    topk, experts = OPTIONS[op].topk, OPTIONS[op].experts
    chosen = Assignment(
        meta(40, topk, dtype=torch.int64), experts * group.world_size, group.world_size
    )
    weights = meta(40, topk, dtype=torch.float32)
    return experts, chosen, Home(chosen.inverse, weights, meta(40, 4096))


def _segments(experts: int, group: Any) -> torch.Tensor:
    return meta(experts, group.world_size, 3, dtype=torch.int64)


def _dispatch(group: Any, rows: Any, configuration: Configuration) -> None:
    experts, chosen, home = _routed("dispatch", group)
    weights: Any = home.weights
    arrived, of_rows = meta(90, 4096), meta(90, dtype=torch.float32)
    result = Received(arrived, None, of_rows, _segments(experts, group))
    op = Dispatch(group, meta(40, 4096), None, result)
    op.fused(chosen.sent(weights), Bounds(40, 2, 0), configuration)


def _combine(group: Any, rows: Any, configuration: Configuration) -> None:
    experts, _, home = _routed("combine", group)
    op = Combine(group, meta(90, 4096), home)
    op.fused(_segments(experts, group), Bounds(40, 2, 0), configuration)


def _grouped_matmul_combine(group: Any, rows: Any, configuration: Configuration) -> None:
    experts, _, home = _routed("grouped_matmul_combine", group)
    input, linear = MatmulVariant().tensors(90, experts)
    op = GroupedMatmulCombine(group, input, linear, home)
    op.fused(_segments(experts, group), EXTRA["home_rows"], EXTRA["programs"], configuration)


def splits_of(op: str, rows: Sequence[int]) -> list[int]:
    """Rows of every rank for each of all experts, of which the second gets none."""
    total = GROUPED_EXPERTS * (len(rows) if op.startswith("all_to_all") else 1)
    splits: list[int] = []
    for count in rows:
        each = count // total
        splits += [count - each * (total - 2), 0, *[each] * (total - 2)]
    return splits


def _grouped_matmul(op: str, group: Any, rows: Any, configuration: Configuration) -> None:
    splits, ranks, experts = splits_of(op, rows), len(rows), GROUPED_EXPERTS
    total = len(splits) // ranks
    counts = tuple(tuple(splits[r * total : (r + 1) * total]) for r in range(ranks))
    routes = Routes(group.rank, counts, experts)
    variant = MatmulVariant(OPTIONS[op].dtype, OPTIONS[op].weight, bias=OPTIONS[op].bias)
    input, linear = variant.tensors(rows[group.rank], experts)
    linear = replace(linear, output=input.new_empty(routes.received(group.rank), 4096))
    GroupedMatmul(group, op, input, linear, routes, None).fused(configuration)


def _attention(group: Any, rows: Any, configuration: Configuration) -> None:
    size, count = OPTIONS["context_parallel_attention"].head_dim, rows[group.rank]
    tiles = gpu_attention(90, torch.bfloat16, size, backward=False)
    query, key, lse = meta(count, 2, 8, size), meta(count, 2, 2, size), meta(2, 8, count)
    about = TokenShards(tuple(rows), "zigzag"), AttentionMask(True), None, 0.125, 4
    problem = AttentionProblem(group, "context_parallel_attention", query, key, key, *about)
    key_transport.all_gather_attention_fused(problem, query, lse, tiles)


def _heads(group: Any, rows: Any, backward: bool) -> None:
    op = f"attention_of_heads{'_backward' * backward}"
    size, dtype = OPTIONS[op].head_dim, OPTIONS[op].torch_dtype
    tiles = gpu_attention(90, dtype, size, backward=backward)
    query, key = (meta(sum(rows), 2, heads, size, dtype=dtype) for heads in (8, 2))
    lse = meta(2, 8, sum(rows), dtype=torch.float32)
    about = TokenShards(tuple(rows), "zigzag"), AttentionMask(True), None, 0.125, 4
    problem = AttentionProblem(group, op, query, key, key, *about, ranks=tuple(range(len(rows))))
    if backward:
        result = AttentionResult(query, query, lse)
        blocks.attention_to_all_backward(problem, result, (query, key, key), tiles, gather=False)
    else:
        blocks.attention_to_all(problem, query, lse, tiles, gather=False)


def _decode(group: Any, rows: Any, configuration: Configuration) -> None:
    size, half = OPTIONS["distributed_decode"].head_dim, torch.float16
    tiles = gpu_attention(90, half, size, backward=False)
    query = meta(3, 1, 8, size, dtype=half)
    cache = meta(3, rows[group.rank], 2, size, dtype=half)
    lengths = meta(3, 1, dtype=torch.int64)
    problem = DecodeProblem(group, query, cache, cache, lengths, 0.125)
    grouped = problem.by_key_head()
    decode_fused(
        problem, grouped, meta(*grouped.shape[:-1]), replace(tiles, block_m=16, num_warps=4)
    )


LAUNCHES = {
    "low_latency_norm": _low_latency_norm,
    "broadcast": _broadcast,
    "dispatch": _dispatch,
    "combine": _combine,
    "grouped_matmul_combine": _grouped_matmul_combine,
    **{op: partial(_grouped_matmul, op) for op in (GATHER, EXCHANGE)},
    "context_parallel_attention": _attention,
    "attention_of_heads": lambda group, rows, _: _heads(group, rows, backward=False),
    "attention_of_heads_backward": lambda group, rows, _: _heads(group, rows, backward=True),
    "distributed_decode": _decode,
}

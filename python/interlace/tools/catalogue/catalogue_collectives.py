"""Entries of the catalogue: signals, rows of experts, plain collectives on a node and between nodes.

Those between nodes are as tests run them, and linked with NVSHMEM. Variants::

    stores        puts are stores: what the lint rules are about, without code that is not ours
    nvshmem       linked with ``libnvshmem_device.bc``: it must compile with no symbol left over. What
                  the library does with registers, stack and memory ordering is not judged
    bytes, bf16   of the moves: a flat tensor of bytes, or rows of bf16 for all-gather + matmul
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from interlace.kernels import launch_formulas as formulas
from interlace.kernels import signal, slots
from interlace.kernels.arguments import Peers
from interlace.kernels.node_puts import LIBRARY
from interlace.ops.collectives import launch as plain
from interlace.ops.collectives import low_latency as small
from interlace.ops.collectives import node_moves
from interlace.ops.collectives.multimem import BySwitch
from interlace.ops.experts.combine import Combine, Home
from interlace.ops.experts.dispatch import Dispatch
from interlace.ops.experts.routing import Assignment, Bounds, Received
from interlace.ops.matmul import node_reduce as node_matmul_reduce
from interlace.ops.matmul.operands import Linear
from interlace.runtime.compiler.nvshmem_library import device_library
from interlace.runtime.compiler.request import Entry
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.tuning.configuration import Configuration, gpu_default
from interlace.tools.catalogue.absent_group import RANKS, AbsentGroup, entry, launched, meta

NODE_RANKS = 8
FORMS = {torch.uint8: "bytes", torch.bfloat16: "bf16"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SCALED_DTYPES = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
MANY_ROWS = 4096
EXPERTS = 2
TOPK = 8  # slots of a token
ELEMENTS = 1 << 20  # of a shard
UNITS = {torch.int32: "", torch.int16: "by 2 bytes", torch.int8: "by bytes"}
"""What the units of a low-latency kernel are called in the name of an entry."""


def signals(arch: int) -> Iterator[Entry]:
    """The kernels of ``kernels/signal.py`` and ``slots.py``, one program of one warp each."""
    table, peers = meta(RANKS), Peers(meta(RANKS), 0, RANKS)
    pads = {"pads_ptr": table, "status_ptr": table, "rank": 0, "world_size": RANKS, "channel": 0}
    polls = {"polls": 1 << 40}
    word = torch.empty(2, dtype=torch.uint32)[1:]  # of a progress array, anywhere in it
    kernels: dict[Any, dict[str, Any]] = {
        signal.publish_kernel: {"peers": peers, "peer": 0, "slot_byte": 0},
        signal.wait_kernel: {"peers": peers, "source": 0, "slot_byte": 0},
        slots.wait_credits_kernel: {"peers": peers},
        slots.finish_kernel: {"peers": peers},
        signal.put_signal_kernel: {**pads, "peer": 0, **polls},
        signal.wait_signal_kernel: {**pads, "peer": 0, **polls},
        signal.handle_barrier_kernel: {**pads, **polls},
        signal.write_value_kernel: {"word_ptr": word, "value": 1 << 40},
    }
    for kernel, arguments in kernels.items():
        yield entry(KernelLaunch(kernel, 1, arguments, "a signal", num_warps=1), "", arch)


def plain_collectives(arch: int) -> Iterator[Entry]:
    for dtype in DTYPES:
        configuration = gpu_default(arch, DTYPES[dtype], MANY_ROWS)
        yield collective(arch, "all_gather", dtype, configuration)
        for average in (False, True):
            yield collective(arch, "reduce_scatter", dtype, configuration, average=average)
            yield collective(arch, "all_reduce", dtype, configuration, average=average)
        yield from by_the_switch(arch, dtype, configuration)
    yield from low_latency(arch)


def collective(
    arch: int, op: str, dtype: str, configuration: Configuration, *, average: bool = False
) -> Entry:
    """The plain all-gather, reduce-scatter or one-shot all-reduce of ``dtype``, by Triton's name."""
    whole = meta(RANKS * ELEMENTS, dtype=DTYPES[dtype])
    part, lengths = whole[:ELEMENTS], [ELEMENTS] * RANKS

    def run(group: Any) -> None:
        if op == "all_gather":
            plain.all_gather_kernel(group, part, whole, lengths, configuration)
        elif op == "reduce_scatter":
            plain.reduce_scatter_kernel(group, whole, part, lengths, configuration, average=average)
        else:
            plain.all_reduce_kernel(group, part, part, configuration, average=average)

    (launch,) = launched(run)
    return entry(launch, f"{dtype} average" if average else dtype, arch)


def by_the_switch(arch: int, dtype: str, configuration: Configuration) -> Iterator[Entry]:
    """The kernels of ``kernels/collectives/multimem.py`` for ``dtype``, from 9.0 on."""
    if arch < 90:
        return
    whole, lengths = meta(RANKS * ELEMENTS, dtype=DTYPES[dtype]), [ELEMENTS] * RANKS
    part = whole[:ELEMENTS]

    def run(group: Any) -> None:
        by = BySwitch(group, configuration)
        by.all_gather(part, whole, lengths)
        by.reduce_scatter(whole, part, lengths)
        by.all_reduce(part, part)

    for launch in launched(run, group=AbsentGroup(multicast=True)):
        yield entry(launch, dtype, arch)


def _by_words(
    arch: int, variant: str, op: Callable[..., object], *values: Any, **named: Any
) -> Entry:
    """Polls are relaxed, because what they look at is the data itself: nothing has to be acquired."""
    (launch,) = launched(op, *values, **named)
    return entry(launch, variant, arch, ignore=("weak poll",))


def low_latency(arch: int) -> Iterator[Entry]:
    """One-shot, of words that carry their flags."""
    for unit, word in UNITS.items():
        # behind the first unit, so that no larger ones do
        data = meta(65, dtype=unit)[0 if unit is torch.int32 else 1 :]
        yield _by_words(arch, word, small.all_gather, data, data)
        yield _by_words(arch, word, small.broadcast, data, 0)
    for name, dtype in DTYPES.items():
        yield _by_words(arch, name, small.all_reduce, meta(64, dtype=dtype), average=False)
    data = meta(65, dtype=torch.bfloat16)
    yield _by_words(arch, "bf16 average", small.all_reduce, data[:64], average=True)
    yield _by_words(arch, "bf16 by 2 bytes", small.all_reduce, data[1:], average=False)


def broadcast(arch: int, dtype: str) -> list[Entry]:
    """Of few bytes, in units of 4."""
    return [_by_words(arch, dtype, small.broadcast, meta(65, dtype=torch.int32), 0)]


def between_nodes(arch: int, put: str = "stores") -> Iterator[Entry]:
    """The kernels between nodes, with puts of this kind."""
    dtype = torch.bfloat16
    configuration = gpu_default(arch, dtype, MANY_ROWS)
    whole, lengths = meta(NODE_RANKS * ELEMENTS, dtype=dtype), [ELEMENTS] * NODE_RANKS
    part, flat = whole[:ELEMENTS], meta(ELEMENTS, dtype=torch.uint8)
    matrix, rows = meta(MANY_ROWS, MANY_ROWS, dtype=dtype), [MANY_ROWS] * NODE_RANKS
    every, segments = meta(sum(rows), MANY_ROWS, dtype=dtype), formulas.segments_of(rows)
    linear = Linear(matrix, None, matrix)
    found: dict[str, Entry] = {}

    def run(group: Any) -> None:
        workspace, far = group.workspace(), node_moves.Partners(group)
        moves = node_moves.gather_moves(group, rows, MANY_ROWS)
        for input in (flat, matrix):
            far.move(workspace, input, moves, 1, configuration)
        node_moves.reduce_scatter(group, whole, part, lengths, configuration, average=False)
        node_matmul_reduce.matmul_reduce_scatter(group, every, linear, segments, configuration)

    for launch in launched(run, group=AbsentGroup(NODE_RANKS, put=put)):
        made = entry(launch, put, arch)
        if made.kernel == "move_kernel":
            made = replace(made, variant=f"{put} {FORMS[launch.arguments['input'].ptr.dtype]}")
        found.setdefault(made.name, made)
    # the kernel that multiplies puts nothing, and is with those of one node
    return iter(each for each in found.values() if "PUT" in each.constants)


def linked(arch: int, folder: str | None = None) -> list[Entry]:
    """Entries between nodes, linked with what ``nvshmem_library`` finds, or PlaceUnavailableError."""
    library = {LIBRARY: device_library(arch, folder)}
    entries = between_nodes(arch, "nvshmem")
    return [replace(entry, libraries=library, default=False) for entry in entries]


@dataclass(frozen=True)
class ExpertsVariant:
    """Slots of a token, experts of a rank."""

    topk: int = TOPK
    experts: int = EXPERTS

    def chosen(self) -> Assignment:
        return Assignment(meta(MANY_ROWS, self.topk), RANKS * self.experts, RANKS)


ROUTED = ExpertsVariant()


def experts_rows(
    arch: int,
    dtype: str,
    *,
    weighted: bool,
    routed: ExpertsVariant = ROUTED,
    columns: int = 4096,
    overrides: Any = None,
) -> list[Entry]:
    """Dispatch and combine of rows of ``dtype``; of fp8 with scales, and dispatch alone."""
    assignment, kind = routed.chosen(), (DTYPES | SCALED_DTYPES)[dtype]
    scaled = dtype in SCALED_DTYPES
    configuration = replace(gpu_default(arch, torch.bfloat16, MANY_ROWS), **overrides or {})
    x, segments = meta(MANY_ROWS, columns, dtype=kind), meta(routed.experts, RANKS, 3)
    scales = meta(MANY_ROWS, 32, dtype=torch.float32) if scaled else None
    weights = meta(MANY_ROWS, routed.topk, dtype=torch.float32) if weighted else None
    bounds = Bounds(MANY_ROWS, 2, 0)
    result = Received(x, scales, None if weights is None else weights[:, 0], segments)

    def run(group: Any) -> None:
        sent = assignment.sent(weights)
        Dispatch(group, x, scales, result).fused(sent, bounds, configuration)
        if not scaled:
            home = Home(assignment.inverse, weights, x)
            Combine(group, x, home).fused(segments, bounds, configuration)

    variant = f"{dtype} weighted" if weighted else dtype
    return [entry(launch, variant, arch) for launch in launched(run)]

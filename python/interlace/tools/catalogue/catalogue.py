"""The catalogue of kernels: each in the variants that the default configuration launches.

One :class:`Entry` is one compilation, as the launch of an op specialises it. They come from the launches of
the ops, see ``absent_group.py``; the sizes come from ``tuning/configuration.py``.

Words in the names of variants::

    bf16, fp16, fp32   dtype of all operands
    kn, nk             B contiguous along N, or along K (a transposed nn.Linear weight)
    tma, pointers      the path through kernels/products.py; tma where the chip has it
    odd N, odd K       extents that are not multiples of 16: elements move one by one
    bias n, bias m     one value per column, one per row
    copiers            programs of this kernel push the chunks; without, the copy engine does
    few rows           at most 64 rows per rank
    scaled tensor      fp8 operands, bf16 output: one scale for each operand; "row": per row and column
    fast               as many bits as the tensor cores keep while they add up, and not fp32's
    multimem           copiers send once for all ranks, through the switch
    rms, layer         the norm of rows, with a residual; "fp8" if it is quantised by a scale for each row,
                       "fp8_static" by a scale within the weight, or the name of a block-scaled format
    mxfp8, ...         block-scaled operands; bf16 output
    gathered           own rows go to all ranks: "normed", or "both", the sums too
    stores, nvshmem    puts between nodes are stores, which the lint rules check; or are linked with
                       ``libnvshmem_device.bc``, whose own registers, stack and order are not judged
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from interlace.kernels import launch_formulas as formulas, signal, slots
from interlace.kernels.arguments import Peers
from interlace.kernels.epilogue import ACTIVATIONS
from interlace.kernels.node_puts import LIBRARY
from interlace.ops.attention.head_exchange import FromHeads, ToHeads
from interlace.ops.collectives import launch as plain, launch as small, node_moves
from interlace.ops.collectives.launch import BySwitch
from interlace.ops.experts.combine import Combine, Home
from interlace.ops.experts.counted import CountedMatmul, CountedSizes
from interlace.ops.experts.dispatch import Dispatch
from interlace.ops.experts.grouped import GroupedMatmul, Routes
from interlace.ops.experts.grouped_combine import GroupedMatmulCombine
from interlace.ops.experts.routing import Assignment, Bounds, Received
from interlace.ops.matmul import (
    launch_gather as gather_matmul,
    launch_norms as normed,
    launch_reduce as matmul_reduce,
    launch_reduce as node_matmul_reduce,
)
from interlace.ops.matmul.formats import FORMATS, OPERAND_FORMATS
from interlace.ops.matmul.operands import Linear
from interlace.runtime.compiler.nvshmem_library import device_library
from interlace.runtime.compiler.request import Entry as Entry
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.numerics.norms import BY_ROW, QUANTIZE, QUANTIZED, NormTail, RowNorm
from interlace.runtime.tuning.configuration import Configuration, gpu_default
from interlace.tools.catalogue.absent_group import (
    DTYPES as DTYPES,
    EXPERTS,
    MANY_ROWS,
    RANKS,
    AbsentGroup,
    KernelOptions,
    entry,
    launches_of,
    meta,
)
from interlace.tools.catalogue.catalogue_attention import attention

NODE_RANKS = 8
FORMS = {torch.uint8: "bytes", torch.bfloat16: "bf16"}
SCALED_DTYPES = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
ELEMENTS = 1 << 20  # in a shard
UNITS = {torch.int32: "", torch.int16: "by 2 bytes", torch.int8: "by bytes"}
"""The names of a low-latency kernel's units in the name of an entry."""


def signals(arch: int) -> Iterator[Entry]:
    """The kernels of ``kernels/signal.py`` and ``slots.py``, one program of one warp each."""
    table, peers = meta(RANKS), Peers(meta(RANKS), 0, RANKS)
    pads = {"pads_ptr": table, "status_ptr": table, "rank": 0, "world_size": RANKS, "channel": 0}
    polls = {"polls": 1 << 40}
    word = torch.empty(2, dtype=torch.uint32)[1:]  # anywhere in a progress array
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

    (launch,) = launches_of(run)
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

    for launch in launches_of(run, group=AbsentGroup(multicast=True)):
        yield entry(launch, dtype, arch)


def _by_words(
    arch: int, variant: str, op: Callable[..., object], *values: Any, **named: Any
) -> Entry:
    """Return an entry with relaxed polls: they read the data itself, so nothing has to be acquired."""
    (launch,) = launches_of(op, *values, **named)
    return entry(launch, variant, arch, ignore=("weak poll",))


def low_latency(arch: int) -> Iterator[Entry]:
    """Yield one-shot collectives of words that carry their flags."""
    for unit, word in UNITS.items():
        # after the first unit, so that larger units do not fit
        data = meta(65, dtype=unit)[0 if unit is torch.int32 else 1 :]
        yield _by_words(arch, word, small.all_gather, data, data)
        yield _by_words(arch, word, small.broadcast, data, 0)
    for name, dtype in DTYPES.items():
        yield _by_words(arch, name, small.all_reduce, meta(64, dtype=dtype), average=False)
    data = meta(65, dtype=torch.bfloat16)
    yield _by_words(arch, "bf16 average", small.all_reduce, data[:64], average=True)
    yield _by_words(arch, "bf16 by 2 bytes", small.all_reduce, data[1:], average=False)


def broadcast(arch: int, dtype: str) -> list[Entry]:
    """Return broadcasts of few bytes, in units of 4."""
    return [_by_words(arch, dtype, small.broadcast, meta(65, dtype=torch.int32), 0)]


def between_nodes(arch: int, put: str = "stores") -> Iterator[Entry]:
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

    for launch in launches_of(run, group=AbsentGroup(NODE_RANKS, put=put)):
        of_launch = entry(launch, put, arch)
        if of_launch.kernel == "move_kernel":
            of_launch = replace(
                of_launch, variant=f"{put} {FORMS[launch.arguments['input'].ptr.dtype]}"
            )
        found.setdefault(of_launch.name, of_launch)
    # the kernel that multiplies does not put, and is among the kernels of one node
    return iter(each for each in found.values() if "PUT" in each.constants)


def linked_entries(arch: int, folder: str | None = None) -> list[Entry]:
    """Return entries between nodes, linked with NVSHMEM's library, or raise PlaceUnavailableError."""
    library = {LIBRARY: device_library(arch, folder)}
    entries = between_nodes(arch, "nvshmem")
    return [replace(entry, libraries=library, default=False) for entry in entries]


ARCHES = (80, 90, 100)  # they stand for the others
BY_ENGINE = {"copiers": 0}
"""Options with which the copy engine sends, and no programs of the kernel."""
ROLES = {**BY_ENGINE, "warp_roles": True}
"""Options with which separate warps of the kernel load, multiply or store."""


def entries(arch: int) -> list[Entry]:
    return [
        *signals(arch),
        *plain_collectives(arch),
        *_fused(arch),
        *_experts(arch),
        *attention(arch),
        *_norms(arch),
        *between_nodes(arch),
    ]


def one_of_each(found: Iterable[Entry]) -> list[Entry]:
    """Return the first variant of each kernel for each architecture."""
    first: dict[tuple[str, int], Entry] = {}
    for each in found:
        first.setdefault((each.kernel, each.arch), each)
    return list(first.values())


@dataclass(frozen=True)
class MatmulVariant(KernelOptions):
    """A variant of a kernel that multiplies; ``path`` is "tma" or "pointers"."""

    path: str = "tma"
    activation: str = ""
    scales: str = ""
    fast_accum: bool = True
    grouped: bool = False
    multimem: bool = False

    @property
    def tma(self) -> bool:
        return self.path == "tma"

    def chosen(self) -> Assignment:
        return Assignment(meta(MANY_ROWS, self.topk), RANKS * self.experts, RANKS)

    def normed(self, linear: Linear, rows: int) -> tuple[Linear, normed.WholeRows | None]:
        """Return ``linear`` with the norm, for ``rows`` own rows, and the rows gathered on all ranks."""
        columns, dtype = linear.output.shape[1], linear.output.dtype
        weight = meta(columns, dtype=dtype)
        bias = weight if self.norm == "layer" else None
        made = QUANTIZED if self.quantize else dtype
        format = FORMATS.get(self.quantize)
        scale = meta(rows, 1, dtype=torch.float32) if self.quantize == BY_ROW else None
        residual, total = meta(rows, columns, dtype=dtype), meta(rows, columns, dtype=dtype)
        kind = RowNorm(self.norm, 1e-6, weight, bias)
        rows_of_norm = meta(rows, columns, dtype=made)
        if format is not None:
            rows_of_norm = meta(rows, format.row_bytes(columns), dtype=torch.uint8)
        tail = NormTail(kind, residual, rows_of_norm, scale, format)
        whole = normed.WholeRows(tail.normed, scale, total if self.gather == "both" else None)
        return replace(linear, output=total, tail=tail), whole if self.gather != "none" else None

    def describe_norm(self) -> str:
        gathered = "" if self.gather == "none" else f"gathered {self.gather}"
        return " ".join(filter(None, (self.norm, self.quantize, gathered)))

    @property
    def torch_dtype(self) -> torch.dtype:
        if self.format:
            return torch.uint8
        return (DTYPES | SCALED_DTYPES)[self.dtype]

    def configuration(self, arch: int) -> Configuration:
        extents = self.rows, self.columns, self.inner
        fast = OPERAND_FORMATS[self.format].fast_accum if self.format else self.fast_accum
        kind = {"fast_accum": fast, "grouped": self.grouped}
        default = gpu_default(arch, self.torch_dtype, *extents, **kind)
        descriptors = default.descriptors and self.tma
        of_variant: dict[str, Any] = {"descriptors": descriptors, "multimem": self.multimem}
        return replace(default, **of_variant | self.overrides)

    def tensors(self, rows: int, *experts: int) -> tuple[torch.Tensor, Linear]:
        """Return the input, with ``rows``, and the weight with its bias and scales."""
        columns, inner, dtype = self.columns, self.inner, self.torch_dtype
        format = OPERAND_FORMATS.get(self.format)
        inner = inner if format is None else format.row_bytes(inner)
        weight = meta(*experts, inner, columns, dtype=dtype)
        if self.weight == "nk":
            weight = meta(*experts, columns, inner, dtype=dtype).mT
        output_dtype = torch.bfloat16 if self.scales else DTYPES[self.dtype]
        bias = meta(columns, dtype=output_dtype) if self.bias else None
        output = meta(rows, columns, dtype=output_dtype)
        linear = Linear(
            weight,
            bias,
            output,
            self.bias,
            self.activation,
            self.scales,
            average=self.average,
            format=format,
        )
        if self.scales:
            linear.scale = meta(columns, dtype=torch.float32)
            linear.row_scale = meta(rows, dtype=torch.float32)
            linear.fast_accum = self.fast_accum
        return meta(rows, inner, dtype=dtype), linear

    def describe(self) -> str:
        words = [self.format or self.dtype, self.weight, "tma" if self.tma else "pointers"]
        words += ["odd N"] if self.columns % 16 else []
        words += ["odd K"] if self.inner % 16 else []
        words += [f"bias {self.bias}"] if self.bias else []
        words += ["few rows"] if self.rows < MANY_ROWS else []
        words += [f"scaled {self.scales}"] if self.scales else []
        words += ["fast"] if self.scales and self.fast_accum else []
        words += [self.activation] if self.activation else []
        words += ["multimem"] if self.multimem else []
        return " ".join(words)


def _by_default(arch: int) -> MatmulVariant:
    """Return bf16 by descriptors, where a default has them."""
    tma = gpu_default(arch, torch.bfloat16, MANY_ROWS).descriptors
    return MatmulVariant(path="tma" if tma else "pointers")


def _fused(arch: int) -> Iterator[Entry]:
    bf16 = _by_default(arch)
    transposed, tma = replace(bf16, weight="nk"), bf16.tma
    by_pointers = MatmulVariant(path="pointers")
    fp32 = replace(by_pointers, dtype="fp32")
    shared = [
        bf16,
        transposed,
        *([by_pointers, replace(by_pointers, weight="nk")] if tma else []),
        replace(by_pointers, columns=4095, inner=4095),
        replace(by_pointers, inner=4095),
        replace(by_pointers, weight="nk", columns=4095),
        replace(bf16, bias="n"),
        replace(bf16, bias="m"),
        replace(bf16, rows=64),
        replace(bf16, dtype="fp16"),
        fp32,
        replace(fp32, weight="nk", bias="n"),
    ]
    for operands in shared:
        yield all_gather_matmul(arch, operands)
        yield matmul_reduce_scatter(arch, operands)
        yield matmul_all_reduce(arch, operands)
        if operands.bias != "m":
            yield grouped_matmul(arch, operands)
        if operands.bias != "m" and not operands.columns % RANKS:
            yield matmul_all_to_all(arch, operands)
            if not operands.tma and not operands.inner % RANKS:
                yield all_to_all_matmul(arch, operands)
    for operands in (bf16, transposed, fp32):
        yield all_gather_matmul(arch, replace(operands, overrides=BY_ENGINE))
        yield matmul_node_reduce_scatter(arch, operands)
    yield grouped_matmul(arch, replace(bf16, overrides=BY_ENGINE))
    for activation in ACTIVATIONS:
        activated = replace(bf16, bias="n", activation=activation)
        yield all_gather_matmul(arch, activated)
        yield matmul_reduce_scatter(arch, activated)
    yield matmul_all_reduce(arch, replace(bf16, bias="n", activation="gelu"))
    if arch == 90:
        for operands in (bf16, transposed, MatmulVariant(dtype="fp16", activation="gelu")):
            yield all_gather_matmul(arch, replace(operands, overrides=ROLES))
            yield from matmul_reduce_scatter_roles(operands)
    if arch >= 90:
        yield all_gather_matmul(arch, replace(bf16, multimem=True))
        yield all_gather_matmul(
            arch, MatmulVariant("fp8e4nv", "nk", scales="row", fast_accum=False, multimem=True)
        )
        for operands in _scaled_variants():
            yield all_gather_matmul(arch, operands)
            yield matmul_reduce_scatter(arch, operands)
    default = gpu_default(arch, torch.uint8, MANY_ROWS)
    for name, format in FORMATS.items():
        tma = default.descriptors and format.loads_by_descriptor(default)
        operands = MatmulVariant(weight="nk", path="tma" if tma else "pointers", format=name)
        for make in _OF_PACKED_ROWS:
            yield replace(make(arch, operands), default=True)
        counted = counted_grouped_matmul(arch, operands)
        yield replace(counted, default=name != "mxfp4")  # this one spills 4 instructions on 10.0
        # not a default: for nvfp4 the first spills 8 instructions on 10.0
        yield matmul_reduce_scatter_norm(arch, operands)
        yield matmul_all_reduce_norm(arch, operands)


def _scaled_variants() -> Iterator[MatmulVariant]:
    """Yield fp8 variants: weights are contiguous along K, as torch requires."""
    fp8 = MatmulVariant("fp8e4nv", "nk", scales="tensor", fast_accum=False)
    yield fp8
    yield replace(fp8, scales="row", bias="n")
    yield replace(fp8, fast_accum=True)
    yield replace(fp8, fast_accum=True, scales="row")
    yield replace(fp8, dtype="fp8e5", scales="row")
    yield replace(fp8, rows=64)


def _fused_entry(arch: int, operands: MatmulVariant, launch: KernelLaunch, *words: str) -> Entry:
    words = (operands.describe(), *words, "average" if operands.average else "")
    variant = " ".join(filter(None, words))
    allowed = gpu_default(arch, operands.torch_dtype, operands.rows).descriptors
    odd = operands.columns % 16 or operands.inner % 16
    default = bool(operands.tma or odd or not allowed)
    return entry(launch, variant, arch, default=default)


def all_gather_matmul(arch: int, operands: MatmulVariant) -> Entry:
    configuration = operands.configuration(arch)
    input, linear = operands.tensors(operands.rows)
    rows, group = [operands.rows] * RANKS, AbsentGroup(multicast=operands.multimem)
    op = gather_matmul.all_gather_matmul_fused
    (launch,) = launches_of(op, input, [linear], rows, None, configuration, group=group)
    return _fused_entry(arch, operands, launch, "copiers" if configuration.copiers else "")


def grouped_matmul(arch: int, operands: MatmulVariant) -> Entry:
    operands = replace(operands, grouped=True)
    configuration = operands.configuration(arch)
    input, linear = operands.tensors(operands.rows, EXPERTS)
    counts = ((operands.rows // EXPERTS,) * EXPERTS,) * RANKS
    routes = Routes(0, counts, EXPERTS)
    call = "all_gather_grouped_matmul", input, linear, routes, None
    (launch,) = launches_of(lambda group: GroupedMatmul(group, *call).fused(configuration))
    return _fused_entry(arch, operands, launch, "copiers" if configuration.copiers else "")


def counted_grouped_matmul(arch: int, operands: MatmulVariant) -> Entry:
    operands = replace(operands, grouped=True)
    configuration = operands.configuration(arch)
    input, linear = operands.tensors(operands.rows, EXPERTS)
    sizes = CountedSizes(operands.rows, 2 * configuration.block_m, RANKS, EXPERTS)

    def run(group: Any) -> None:
        op = CountedMatmul(group, input, linear, meta(EXPERTS, RANKS, 3))
        op.fused(meta(5 * sizes.lines + 1), meta(RANKS, 2 + EXPERTS), sizes, configuration)

    (launch,) = launches_of(run)
    return _fused_entry(arch, operands, launch)


def matmul_reduce_scatter(arch: int, operands: MatmulVariant) -> Entry:
    (launch,) = scatters(arch, operands)
    return _fused_entry(arch, operands, launch)


def scatters(arch: int, operands: MatmulVariant) -> list[KernelLaunch]:
    input, linear, segments = _scatter_operands(operands, RANKS)
    op, configuration = matmul_reduce.matmul_reduce_scatter_fused, operands.configuration(arch)
    return launches_of(op, input, linear, segments, configuration)


def matmul_reduce_scatter_roles(operands: MatmulVariant) -> list[Entry]:
    """Return the kernels for 9.0: the products by warps with roles, and the sums."""
    operands = replace(operands, overrides=ROLES | operands.overrides)
    return [_fused_entry(90, operands, launch) for launch in scatters(90, operands)]


def matmul_all_to_all(arch: int, operands: MatmulVariant) -> Entry:
    """Return the kernel. ``columns`` is the number of columns of one rank."""
    input, linear = replace(operands, columns=RANKS * operands.columns).tensors(operands.rows)
    linear.output = meta(RANKS * operands.rows, operands.columns, dtype=operands.torch_dtype)
    call, configuration = (input, linear, [operands.rows] * RANKS), operands.configuration(arch)
    (launch,) = launches_of(lambda group: ToHeads(group, *call).fused(configuration))
    return _fused_entry(arch, operands, launch)


def all_to_all_matmul(arch: int, operands: MatmulVariant) -> Entry:
    """Return the kernel that loads by pointers. ``inner`` is the length of one rank's part of K."""
    operands = replace(operands, path="pointers")
    _, linear = replace(operands, inner=RANKS * operands.inner).tensors(operands.rows)
    part = meta(RANKS * operands.rows, operands.inner, dtype=operands.torch_dtype)
    call, configuration = (part, linear, [operands.rows] * RANKS), operands.configuration(arch)
    (launch,) = launches_of(lambda group: FromHeads(group, *call).fused(configuration))
    words = "copiers" if configuration.copiers else ""
    return replace(_fused_entry(arch, operands, launch, words), default=True)


def matmul_node_reduce_scatter(arch: int, operands: MatmulVariant) -> Entry:
    configuration = operands.configuration(arch)
    input, linear, segments = _scatter_operands(operands, NODE_RANKS)
    group = AbsentGroup(NODE_RANKS, put="stores")
    op = node_matmul_reduce.matmul_reduce_scatter
    _, launch, *_ = launches_of(op, input, linear, segments, configuration, group=group)
    return _fused_entry(arch, operands, launch)


def _scatter_operands(operands: MatmulVariant, ranks: int) -> tuple[Any, Linear, Any]:
    """Return the input of all ranks' rows, the weight with one rank's output, and the segments."""
    input, linear = operands.tensors(ranks * operands.rows)
    linear.output = linear.output[: operands.rows]
    return input, linear, formulas.segments_of([operands.rows] * ranks)


def matmul_all_reduce(arch: int, operands: MatmulVariant) -> Entry:
    configuration = operands.configuration(arch)
    input, linear = operands.tensors(operands.rows)
    (launch,) = launches_of(matmul_reduce.matmul_all_reduce_fused, input, linear, configuration)
    return _fused_entry(arch, operands, launch)


def experts_rows(arch: int, operands: MatmulVariant, *, weighted: bool = True) -> list[Entry]:
    """Return dispatch and combine of rows; for fp8 with scales, only dispatch."""
    dtype, kind = operands.dtype, operands.torch_dtype
    assignment, scaled = operands.chosen(), dtype in SCALED_DTYPES
    of_variant: dict[str, Any] = dict(operands.overrides)
    configuration = replace(gpu_default(arch, torch.bfloat16, MANY_ROWS), **of_variant)
    x, segments = meta(MANY_ROWS, operands.columns, dtype=kind), meta(operands.experts, RANKS, 3)
    scales = meta(MANY_ROWS, 32, dtype=torch.float32) if scaled else None
    weights = meta(MANY_ROWS, operands.topk, dtype=torch.float32) if weighted else None
    bounds = Bounds(MANY_ROWS, 2, 0)
    result = Received(x, scales, None if weights is None else weights[:, 0], segments)

    def run(group: Any) -> None:
        sent = assignment.sent(weights)
        Dispatch(group, x, scales, result).fused(sent, bounds, configuration)
        if not scaled:
            home = Home(assignment.inverse, weights, x)
            Combine(group, x, home).fused(segments, bounds, configuration)

    variant = f"{dtype} weighted" if weighted else dtype
    return [entry(launch, variant, arch) for launch in launches_of(run)]


def _experts(arch: int) -> Iterator[Entry]:
    """Yield kernels for rows of experts: words of 4 bytes, with and without weights and scales."""
    for dtype, weighted in (("bf16", True), ("bf16", False), ("fp32", True)):
        yield from experts_rows(arch, MatmulVariant(dtype), weighted=weighted)
    if arch >= 90:
        yield from experts_rows(arch, MatmulVariant("fp8e4nv"))
    bf16 = _by_default(arch)
    for operands in (
        bf16,
        replace(bf16, weight="nk"),
        replace(bf16, bias="n"),
        replace(bf16, rows=64),
        MatmulVariant(path="pointers", columns=4095, inner=4095),
        MatmulVariant("fp32", "nk", path="pointers"),
    ):
        yield grouped_matmul_combine(arch, operands)
        yield counted_grouped_matmul(arch, operands)


def grouped_matmul_combine(arch: int, operands: MatmulVariant) -> Entry:
    operands = replace(operands, grouped=True)
    configuration = operands.configuration(arch)
    input, linear = operands.tensors(operands.rows, operands.experts)
    weights = meta(MANY_ROWS, operands.topk, dtype=torch.float32)
    tokens = meta(MANY_ROWS, operands.columns, dtype=linear.output.dtype)
    home = Home(operands.chosen().inverse, weights, tokens)

    def run(group: Any) -> None:
        op = GroupedMatmulCombine(group, input, linear, home)
        op.fused(meta(operands.experts, RANKS, 3), operands.rows, 128, configuration)

    (launch,) = launches_of(run)
    return _fused_entry(arch, operands, launch)


def _norms(arch: int) -> Iterator[Entry]:
    bf16, fp32 = _by_default(arch), MatmulVariant("fp32", path="pointers")
    rms, layer = bf16, replace(bf16, norm="layer")
    norms = [rms, layer, replace(rms, gather="normed"), replace(layer, gather="both")]
    if arch >= 89:  # Triton makes no float8_e4m3fn for older ones
        quantised = [replace(rms, quantize=name) for name in QUANTIZE]
        norms += [*quantised, *(replace(each, gather="normed") for each in quantised)]
    for operands in (*norms, fp32, replace(fp32, norm="layer", gather="both")):
        yield matmul_reduce_scatter_norm(arch, operands)
        yield reduce_norm(arch, operands)
    for operands in (*norms[:2], *norms[4:6], fp32):
        yield matmul_all_reduce_norm(arch, operands)
        yield low_latency_norm(arch, operands)
    for name in FORMATS:
        packed = replace(rms, quantize=name)
        yield reduce_norm(arch, replace(packed, gather="normed"))
        yield low_latency_norm(arch, packed)


def matmul_reduce_scatter_norm(arch: int, operands: MatmulVariant) -> Entry:
    input, linear, segments = _scatter_operands(operands, RANKS)
    linear, whole = operands.normed(linear, operands.rows)
    op, configuration = matmul_reduce.matmul_reduce_scatter_fused, operands.configuration(arch)
    (launch,) = launches_of(op, input, linear, segments, configuration, whole)
    return _fused_entry(arch, operands, launch, operands.describe_norm())


def matmul_all_reduce_norm(arch: int, operands: MatmulVariant) -> Entry:
    input, linear = operands.tensors(operands.rows)
    linear, _ = operands.normed(linear, operands.rows)
    configuration = operands.configuration(arch)
    (launch,) = launches_of(matmul_reduce.matmul_all_reduce_fused, input, linear, configuration)
    return _fused_entry(arch, operands, launch, operands.describe_norm())


def _rows_entry(arch: int, operands: MatmulVariant, launch: KernelLaunch, **more: Any) -> Entry:
    words = operands.dtype, operands.describe_norm(), "average" if operands.average else ""
    return entry(launch, " ".join(filter(None, words)), arch, **more)


def reduce_norm(arch: int, operands: MatmulVariant) -> Entry:
    input = meta(RANKS * MANY_ROWS, operands.columns, dtype=operands.torch_dtype)
    linear, whole = operands.normed(operands.tensors(MANY_ROWS)[1], MANY_ROWS)
    segments = formulas.segments_of([MANY_ROWS] * RANKS)
    call = "reduce_scatter_norm", input, linear, segments, operands.configuration(arch), whole
    (launch,) = launches_of(normed.reduce_fused, *call)
    return _rows_entry(arch, operands, launch)


def low_latency_norm(arch: int, operands: MatmulVariant) -> Entry:
    """Return all-reduce and norm of few rows, whose words carry their flags."""
    linear, _ = operands.normed(operands.tensors(MANY_ROWS)[1], MANY_ROWS)
    input = meta(4, operands.columns, dtype=operands.torch_dtype)

    def run(group: Any) -> None:
        normed.RowReduction(group, "all_reduce_norm", input, linear, None, None).low_latency()

    (launch,) = launches_of(run)
    return _rows_entry(arch, operands, launch, ignore=("weak poll",))


_OF_PACKED_ROWS = (
    all_gather_matmul,
    matmul_reduce_scatter,
    matmul_all_reduce,
    grouped_matmul,
    grouped_matmul_combine,
)

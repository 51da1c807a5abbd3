"""What is built ahead of a GPU: every kernel, in the variants that the default configuration launches.

One :class:`Entry` is one compilation, written down as the launch would specialise it: the types of the
arguments, which of them are divisible by 16, the constexprs, warps and stages. The values mirror
``algorithms/gather_matmul.py``, ``algorithms/matmul_reduce.py`` and ``algorithms/plain.py``; the sizes
come from ``tuning/configuration.py``.

Variants of a fused kernel, named in this order::

    bf16, fp16, fp32   dtype of all operands
    kn, nk             B contiguous along N, or along K (a transposed nn.Linear weight)
    tma, pointers      the path through kernels/matmul.py; tma where the chip has it
    odd N, odd K       extents that are no multiples of 16: elements move one by one
    bias n, bias m     one value per column, one per row
    copiers            programs of this kernel push the chunks; without, the copy engine does
    few rows           at most 64 rows per rank
    scaled tensor      fp8 operands, bf16 output: one scale for each operand; "row": per row and column
    fast               as many bits as the tensor cores keep while they add up, and not fp32's
    silu, ...          the activation
    multimem           copiers send once for all ranks, through the switch
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from interlace.kernels.epilogue import ACTIVATIONS
from interlace.runtime.compiler.catalogue_collectives import by_the_switch, low_latency
from interlace.runtime.compiler.catalogue_nodes import between_nodes
from interlace.runtime.compiler.entry import Constant
from interlace.runtime.compiler.entry import Entry as Entry
from interlace.runtime.tuning.configuration import Configuration, gpu_default

ARCHES = (80, 90, 100)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SCALED_DTYPES = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
MANY_ROWS = 4096


def entries(arch: int) -> list[Entry]:
    """Everything that is built for ``arch``."""
    return [*signals(arch), *_collectives(arch), *_fused(arch), *between_nodes(arch)]


def signals(arch: int) -> Iterator[Entry]:
    """The kernels of ``kernels/signal.py``."""
    kernels = {
        "publish_kernel": ("rank", "peer", "slot_byte"),
        "wait_kernel": ("rank", "world_size", "source", "slot_byte"),
        "wait_credits_kernel": ("rank", "world_size"),
        "finish_kernel": ("rank", "world_size"),
    }
    for kernel, integers in kernels.items():
        types = {"peers_ptr": "*i64"} | dict.fromkeys(integers, "i32")
        yield Entry("interlace.kernels.signal", kernel, "", arch, types, divisible=("peers_ptr",))
    flags = {
        "put_signal_kernel": ("rank", "world_size", "channel", "peer"),
        "wait_signal_kernel": ("rank", "world_size", "channel", "peer"),
        "handle_barrier_kernel": ("rank", "world_size", "channel"),
    }
    for kernel, integers in flags.items():
        pointers = {"pads_ptr": "*i64", "status_ptr": "*i64"}
        types = pointers | dict.fromkeys(integers, "i32") | {"polls": "i64"}
        yield Entry("interlace.kernels.signal", kernel, "", arch, types, divisible=tuple(pointers))
    types = {"word_ptr": "*u32", "value": "i64"}
    yield Entry("interlace.kernels.signal", "write_value_kernel", "", arch, types)


_WORKSPACE = {
    "peers_ptr": "*i64",
    "rank": "i32",
    "world_size": "i32",
    "slot_offset": "i32",
    "data_offset": "i32",
}
_WORKSPACE_DIVISIBLE = ("peers_ptr", "data_offset")


def _collectives(arch: int) -> Iterator[Entry]:
    for dtype in DTYPES:
        configuration = gpu_default(arch, DTYPES[dtype], MANY_ROWS)
        yield all_gather(arch, dtype, configuration)
        for average in (False, True):
            yield reduce_scatter(arch, dtype, configuration, average=average)
            yield all_reduce(arch, dtype, configuration, average=average)
        block, num_warps = configuration.block_elements, configuration.num_warps
        yield from by_the_switch(arch, dtype, block, num_warps)
    yield from low_latency(arch, tuple(DTYPES))


def _flat(dtype: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Types and divisible arguments that the plain collectives share."""
    types = {**_WORKSPACE, "input_ptr": f"*{dtype}", "output_ptr": f"*{dtype}"}
    return types, (*_WORKSPACE_DIVISIBLE, "input_ptr", "output_ptr")


def all_gather(arch: int, dtype: str, configuration: Configuration) -> Entry:
    """The plain all-gather of ``dtype``, by Triton's name."""
    types, divisible = _flat(dtype)
    tables = {"sends_ptr": "*i64", "arrivals_ptr": "*i64"}
    return Entry(
        "interlace.kernels.transfer",
        "all_gather_kernel",
        dtype,
        arch,
        {**types, **tables, "num_sends": "i32", "num_arrivals": "i32"},
        {"COPIERS": configuration.copiers, "BLOCK": configuration.block_elements},
        (*divisible, *tables),
        configuration.num_warps,
    )


def reduce_scatter(
    arch: int, dtype: str, configuration: Configuration, *, average: bool = False
) -> Entry:
    """The plain reduce-scatter."""
    types, divisible = _flat(dtype)
    return Entry(
        "interlace.kernels.collectives.reduction",
        "reduce_scatter_kernel",
        f"{dtype} average" if average else dtype,
        arch,
        {**types, "segments_ptr": "*i64", "own_elements": "i32"},
        {"BLOCK": configuration.block_elements, "AVERAGE": average},
        (*divisible, "segments_ptr"),
        configuration.num_warps,
    )


def all_reduce(
    arch: int, dtype: str, configuration: Configuration, *, average: bool = False
) -> Entry:
    """The plain one-shot all-reduce."""
    types, divisible = _flat(dtype)
    return Entry(
        "interlace.kernels.collectives.reduction",
        "all_reduce_kernel",
        f"{dtype} average" if average else dtype,
        arch,
        {**types, "elements": "i32"},
        {"BLOCK": configuration.block_elements, "AVERAGE": average},
        divisible,
        configuration.num_warps,
    )


@dataclass(frozen=True)
class Operands:
    """A variant of the matmul that the fused kernels share.

    ``overrides`` are values of the configuration other than the default ones.
    """

    dtype: str = "bf16"
    layout: str = "kn"
    tma: bool = True
    columns: int = 4096
    inner: int = 4096
    bias: str = ""
    rows: int = MANY_ROWS
    overrides: dict[str, int] = field(default_factory=dict)
    activation: str = ""
    scales: str = ""
    fast_accum: bool = True
    grouped: bool = False
    multimem: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        return (DTYPES | SCALED_DTYPES)[self.dtype]

    @property
    def output_dtype(self) -> str:
        return "bf16" if self.scales else self.dtype

    def configuration(self, arch: int) -> Configuration:
        """What is launched for these operands."""
        default = gpu_default(
            arch,
            self.torch_dtype,
            self.rows,
            self.columns,
            self.inner,
            fast_accum=self.fast_accum,
            grouped=self.grouped,
        )
        return replace(default, **self.overrides)  # type: ignore[arg-type]

    def describe(self) -> str:
        words = [self.dtype, self.layout, "tma" if self.tma else "pointers"]
        words += ["odd N"] if self.columns % 16 else []
        words += ["odd K"] if self.inner % 16 else []
        words += [f"bias {self.bias}"] if self.bias else []
        words += ["few rows"] if self.rows < MANY_ROWS else []
        words += [f"scaled {self.scales}"] if self.scales else []
        words += ["fast"] if self.scales and self.fast_accum else []
        words += [self.activation] if self.activation else []
        words += ["multimem"] if self.multimem else []
        return " ".join(words)


def _fused(arch: int) -> Iterator[Entry]:
    tma = gpu_default(arch, torch.bfloat16, MANY_ROWS).descriptors
    plain = Operands(tma=tma)
    shared = [
        plain,
        Operands(tma=tma, layout="nk"),
        *([Operands(tma=False), Operands(tma=False, layout="nk")] if tma else []),
        Operands(tma=False, columns=4095, inner=4095),
        Operands(tma=False, inner=4095),
        Operands(tma=False, layout="nk", columns=4095),
        Operands(tma=tma, bias="n"),
        Operands(tma=tma, bias="m"),
        Operands(tma=tma, rows=64),
        Operands(tma=tma, dtype="fp16"),
        Operands(tma=False, dtype="fp32"),
        Operands(tma=False, dtype="fp32", layout="nk", bias="n"),
    ]
    for operands in shared:
        yield all_gather_matmul(arch, operands, copiers=True)
    for operands in (plain, Operands(tma=tma, layout="nk"), Operands(tma=False, dtype="fp32")):
        yield all_gather_matmul(arch, operands, copiers=False)
    for operands in shared:
        if operands.bias != "m":
            yield grouped_matmul(arch, operands)
    yield grouped_matmul(arch, plain, copiers=False)
    for operands in shared:
        yield matmul_reduce_scatter(arch, operands)
    for operands in (plain, Operands(tma=tma, layout="nk"), Operands(tma=False, dtype="fp32")):
        yield matmul_node_reduce_scatter(arch, operands)
    for operands in shared:
        yield matmul_all_reduce(arch, operands)
    for activation in ACTIVATIONS:
        yield all_gather_matmul(arch, Operands(tma=tma, bias="n", activation=activation))
        yield matmul_reduce_scatter(arch, Operands(tma=tma, bias="n", activation=activation))
    yield matmul_all_reduce(arch, Operands(tma=tma, bias="n", activation="gelu"))
    if arch >= 90:
        yield all_gather_matmul(arch, Operands(tma=tma, multimem=True))
        yield all_gather_matmul(
            arch, Operands("fp8e4nv", "nk", scales="row", fast_accum=False, multimem=True)
        )
        for operands in _scaled():
            yield all_gather_matmul(arch, operands)
            yield matmul_reduce_scatter(arch, operands)


def _scaled() -> Iterator[Operands]:
    """fp8: weights are contiguous along K, as torch asks for."""
    fp8 = Operands("fp8e4nv", "nk", scales="tensor", fast_accum=False)
    yield fp8
    yield replace(fp8, scales="row", bias="n")
    yield replace(fp8, fast_accum=True)
    yield replace(fp8, fast_accum=True, scales="row")
    yield replace(fp8, dtype="fp8e5", scales="row")
    yield replace(fp8, rows=64)


def _matmul(
    arch: int, operands: Operands
) -> tuple[Configuration, dict[str, str], dict[str, Constant], tuple[str, ...]]:
    """Configuration, types, constants and divisible arguments that all fused kernels share."""
    configuration = operands.configuration(arch)
    pointer = f"*{operands.dtype}"
    along, across = ("weight_stride_n", "weight_stride_k")
    if operands.layout == "nk":
        along, across = across, along
    types = {
        **_WORKSPACE,
        "input_ptr": pointer,
        "input_stride": "i32",
        "weight_ptr": pointer,
        across: "i32",
        "bias_ptr": f"*{operands.output_dtype}",
        "output_ptr": f"*{operands.output_dtype}",
        "N": "i32",
        "K": "i32",
    }
    descriptors = operands.layout if operands.tma else ""
    constants: dict[str, Constant] = {
        along: 1,
        "BLOCK_M": configuration.block_m,
        "BLOCK_N": configuration.block_n,
        "BLOCK_K": configuration.inner_block(descriptors),
        "GROUP_M": configuration.group_m,
        "DESCRIPTORS": descriptors,
        "BIAS": operands.bias,
        "ACTIVATION": operands.activation,
        "SUBTILE": configuration.stored_parts,
        "INPUT_PRECISION": "ieee",
    }
    pointers = ("input_ptr", "weight_ptr", "bias_ptr", "output_ptr")
    divisible: tuple[str, ...] = (*_WORKSPACE_DIVISIBLE, *pointers)
    if operands.columns % 16 == 0:
        divisible += ("N", across) if operands.layout == "kn" else ("N",)
    if operands.inner % 16 == 0:
        divisible += ("K", "input_stride")
        divisible += (across,) if operands.layout == "nk" else ()
    return configuration, types, constants, divisible


def _scales(operands: Operands) -> dict[str, str]:
    """Types of the scales, which are the output's where there are none."""
    dtype = "fp32" if operands.scales else operands.dtype
    return dict.fromkeys(("row_scale_ptr", "column_scale_ptr"), f"*{dtype}")


def _loop(
    configuration: Configuration, operands: Operands, *, published: bool = False
) -> dict[str, Constant]:
    """Constants of the kernels whose tile loop the compiler may rearrange."""
    return {
        "SCALES": operands.scales,
        "FAST_ACCUM": operands.fast_accum,
        "FLATTEN": configuration.flatten and operands.tma,
        "WARP_SPECIALIZE": configuration.warp_specialize and operands.tma,
        "OUT_DESCRIPTOR": configuration.output_descriptors
        and operands.tma
        and not (published and configuration.warp_specialize),
        "COMPILED": True,
    }


_NOT_GROUPED = ("SCALES", "FAST_ACCUM")


def _is_default(arch: int, operands: Operands) -> bool:
    allowed = gpu_default(arch, operands.torch_dtype, operands.rows).descriptors
    odd = operands.columns % 16 or operands.inner % 16
    return bool(operands.tma or odd or not allowed)


def all_gather_matmul(arch: int, operands: Operands, *, copiers: bool = True) -> Entry:
    """All-gather + matmul; without ``copiers`` the copy engine sends."""
    configuration, types, constants, divisible = _matmul(arch, operands)
    tables = {"sends_ptr": "*i64", "chunks_ptr": "*i64"}
    return Entry(
        "interlace.kernels.fused.all_gather_matmul",
        "all_gather_matmul_kernel",
        operands.describe() + (" copiers" if copiers else ""),
        arch,
        {
            **types,
            **_scales(operands),
            **tables,
            "num_sends": "i32",
            "num_chunks": "i32",
            "scale_offset": "i32",
            "multicast": "i64" if operands.multimem else "i32",
        },
        {
            **constants,
            **_loop(configuration, operands),
            "COPIERS": configuration.copiers if copiers else 0,
            "COPY_ROWS": configuration.copy_rows,
            "COPY_COLUMNS": configuration.copy_columns,
            "MULTICAST": "multimem" if operands.multimem else "",
            "ALIGNED": operands.inner % 16 == 0,
        },
        (*divisible, *_scales(operands), *tables, "scale_offset"),
        configuration.num_warps,
        configuration.num_stages,
        _is_default(arch, operands),
    )


def grouped_matmul(arch: int, operands: Operands, *, copiers: bool = True) -> Entry:
    """All-gather or all-to-all + grouped matmul; without ``copiers`` the copy engine sends."""
    operands = replace(operands, grouped=True)
    configuration, types, constants, divisible = _matmul(arch, operands)
    tables = {"sends_ptr": "*i64", "offsets_ptr": "*i64"}
    loop = _loop(configuration, operands)
    integers = ("weight_stride_e", "num_sends", "num_experts", "chunk_rows")
    if operands.columns % 16 == 0 or operands.inner % 16 == 0:
        divisible += ("weight_stride_e",)
    return Entry(
        "interlace.kernels.fused.grouped_matmul",
        "grouped_matmul_kernel",
        operands.describe() + (" copiers" if copiers else ""),
        arch,
        {**types, **tables, **dict.fromkeys(integers, "i32")},
        {
            **constants,
            **{name: value for name, value in loop.items() if name not in _NOT_GROUPED},
            "COPIERS": configuration.copiers if copiers else 0,
            "COPY_ROWS": configuration.copy_rows,
            "COPY_COLUMNS": configuration.copy_columns,
            "ALIGNED": operands.inner % 16 == 0,
        },
        (*divisible, *tables),
        configuration.num_warps,
        configuration.num_stages,
        _is_default(arch, operands),
    )


def matmul_reduce_scatter(arch: int, operands: Operands, *, average: bool = False) -> Entry:
    """Matmul + reduce-scatter."""
    types = {"segments_ptr": "*i64", "own_rows": "i32", **_scales(operands)}
    constants = _loop(operands.configuration(arch), operands, published=True)
    return _reduction(arch, operands, "matmul_reduce_scatter", types, average, constants)


def matmul_node_reduce_scatter(arch: int, operands: Operands) -> Entry:
    """Matmul + reduce-scatter between nodes, the kernel that multiplies."""
    tables = dict.fromkeys(("segments_ptr", "members_ptr", "sums_ptr"), "*i64")
    counts = ("num_members", "own_member", "num_nodes", "own_node", "own_rows", "tiles_each")
    multiples = dict.fromkeys(("stride", "landing_offset"), "i32")
    numbers = dict.fromkeys((*counts, "landed_slot"), "i32")
    constants = _loop(operands.configuration(arch), operands, published=True)
    types = {**tables, **numbers, **multiples, **_scales(operands)}
    entry = _reduction(arch, operands, "matmul_node_reduce_scatter", types, False, constants)
    module = "interlace.kernels.nodes.matmul_reduce_scatter"
    return replace(entry, module=module, divisible=(*entry.divisible, *multiples))


def matmul_all_reduce(arch: int, operands: Operands, *, average: bool = False) -> Entry:
    """Matmul + all-reduce."""
    return _reduction(arch, operands, "matmul_all_reduce", {"M": "i32"}, average, {})


def _reduction(
    arch: int,
    operands: Operands,
    op: str,
    types: dict[str, str],
    average: bool,
    own: dict[str, Constant],
) -> Entry:
    """A fused reduction, with the ``types`` and the constants that it has of its own."""
    configuration, shared, constants, divisible = _matmul(arch, operands)
    return Entry(
        f"interlace.kernels.fused.{op}",
        f"{op}_kernel",
        operands.describe() + (" average" if average else ""),
        arch,
        {**shared, **types},
        {**constants, **own, "AVERAGE": average},
        (*divisible, *(name for name in types if name.endswith("_ptr"))),
        configuration.num_warps,
        configuration.num_stages,
        _is_default(arch, operands),
    )

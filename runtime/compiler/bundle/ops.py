"""Ops that are built ahead of time: their kernels in the order of their launches, and its formulas.

Formulas are over *launch values*, which whoever launches knows: the kernel's own arguments, and those of
``VALUES``. They call the functions of the launch side (``launch_formulas.py``); tests compare
what both come to. In upper case are constants of one build: constexprs of the kernel, and

    CHUNKS     chunks per shard           ITEMSIZE   bytes of an element
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

import torch

from interlace.kernels.signal import HEADER_WORDS, MAX_WORLD_SIZE
from interlace.runtime.compiler import catalogue
from interlace.runtime.compiler.catalogue import (
    DTYPES,
    MANY_ROWS,
    Entry,
    MatmulVariant,
    NormVariant,
)
from interlace.runtime.core.memory import DATA_ALIGNMENT, WORD
from interlace.runtime.tuning.configuration import Configuration, check_values, gpu_default

VALUES = {
    "rank": "this rank, from 0",
    "world_size": "number of ranks",
    "rows": "rows of every rank, by rank; of a flat tensor: its elements",
    "resident": "programs of this kernel that the device keeps resident at once: one for each of its "
    "multiprocessors, less what else runs there meanwhile",
}

# Not of one build: which path is an option, and how many programs is said at the launch.
_NOT_OVERRIDDEN = ("descriptors", "programs", "warp_roles")


@dataclass(frozen=True)
class KernelOptions:
    """Options that specialise the kernels of a bundle. The world size does not.

    ``dtype`` by Triton's name. ``weight`` is "kn" (contiguous along N) or "nk" (along K), ``bias`` "",
    "n" or "m", ``path`` "auto", "tma" or "pointers", ``norm`` "rms" or "layer", of rows that get a residual
    and, with ``quantize``, are made fp8. For ``rows`` per rank, ``columns`` and ``inner``
    the tiles are chosen; where the last two are multiples of 16, so they must be at every launch.
    ``overrides`` are values of the configuration.
    """

    dtype: str = "bf16"
    weight: str = "kn"
    bias: str = ""
    average: bool = False
    path: str = "auto"
    rows: int = MANY_ROWS
    columns: int = 4096
    inner: int = 4096
    norm: str = "rms"
    quantize: bool = False
    overrides: dict[str, int] = field(default_factory=dict)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def configuration(self, arch: int) -> Configuration:
        """The default one of ``arch`` with the overrides."""
        default = gpu_default(arch, self.torch_dtype, self.rows, self.columns, self.inner)
        return replace(default, **self.overrides)  # type: ignore[arg-type]

    @property
    def variant(self) -> NormVariant:
        return NormVariant(self.norm, self.quantize)

    def operands(self, arch: int) -> MatmulVariant:
        possible = gpu_default(arch, self.torch_dtype, self.rows).descriptors
        possible = possible and self.columns % 16 == 0 and self.inner % 16 == 0
        if self.path == "tma" and not possible:
            raise ValueError(
                f"path is 'tma': sm_{arch} does not have it for {self.torch_dtype} with "
                f"{self.columns} columns and inner dimension {self.inner}"
            )
        return MatmulVariant(
            self.dtype,
            self.weight,
            possible and self.path != "pointers",
            self.columns,
            self.inner,
            self.bias,
            self.rows,
            self.overrides,
        )


@dataclass(frozen=True)
class BundleOp:
    """One op of a bundle: ``entry`` is its kernel, ``grid`` how many programs of it are launched.

    finish_kernel follows it on the stream. ``tables`` name the quantity that an argument points to;
    ``options`` are those that apply.
    """

    entry: Callable[[int, KernelOptions], Entry]
    options: tuple[str, ...]
    grid: str
    quantities: dict[str, str]
    tables: dict[str, str] = field(default_factory=dict)
    conditions: tuple[str, ...] = ()

    def checked(self, name: str, options: KernelOptions) -> None:
        """Raises ValueError for an option that ``name`` does not have, or that has no such value."""
        for one in fields(KernelOptions):
            changed = getattr(options, one.name) != getattr(KernelOptions(), one.name)
            if changed and one.name not in (*self.options, "dtype", "rows", "overrides"):
                raise ValueError(f"{one.name} is no option of {name}")
        known = {f.name for f in fields(Configuration)} - set(_NOT_OVERRIDDEN)
        for key, value in options.overrides.items():
            if key not in known:
                raise ValueError(f"{key} is not in the configuration: {', '.join(sorted(known))}")
            check_values({key: value})
            if value == 0 and not isinstance(value, bool):
                raise ValueError(f"{key} must be positive, got {value}")


def _collective(op: str) -> Callable[[int, KernelOptions], Entry]:
    return lambda arch, options: catalogue.collective(
        arch, op, options.dtype, options.configuration(arch), average=options.average
    )


def _normed(fused: Callable[..., Entry]) -> Callable[[int, KernelOptions], Entry]:
    def made(arch: int, options: KernelOptions) -> Entry:
        _can_be_fp8(arch, options)
        return fused(arch, options.operands(arch), options.variant, average=options.average)

    return made


def _normed_rows(arch: int, options: KernelOptions) -> Entry:
    _can_be_fp8(arch, options)
    configuration, columns = options.configuration(arch), options.columns
    made = arch, options.dtype, options.variant, configuration
    return catalogue.reduce_norm(*made, columns=columns, average=options.average)


def _can_be_fp8(arch: int, options: KernelOptions) -> None:
    if options.quantize and arch < 89:
        raise ValueError(f"quantize: Triton makes no float8_e4m3fn for sm_{arch}")


def _reduced(fused: Callable[..., Entry]) -> Callable[[int, KernelOptions], Entry]:
    return lambda arch, options: fused(arch, options.operands(arch), average=options.average)


RANKS = (f"0 < world_size <= {MAX_WORLD_SIZE}", "0 <= rank < world_size")
_ROWS = ("len(rows) == world_size", "min(rows) >= 0", "max(rows) > 0")
_FUSED = ("weight", "bias", "path", "columns", "inner")

OPS = {
    "all_gather_matmul": BundleOp(
        lambda arch, options: catalogue.all_gather_matmul(arch, options.operands(arch)),
        _FUSED,
        "persistent_grid(COPIERS, tiles, resident)",
        {
            "chunk_size": "chunk_rows(rows, BLOCK_M, CHUNKS)",
            "tiles_n": "ceil_div(N, BLOCK_N)",
            "tiles": "tiles_of(rows, BLOCK_M, tiles_n)",
            "slots": "chunk_slots(rows, chunk_size)",
            "data_bytes": "gathered_bytes(rows, K * ITEMSIZE)",
            "sends": "send_lines(rank, world_size, rows, chunk_size)",
            "num_sends": "sends_of(rank, world_size, rows, chunk_size)",
            "chunks": "chunk_lines(rank, world_size, rows, chunk_size, BLOCK_M, tiles_n)",
            "num_chunks": "len(chunks)",
            "multicast": "0",  # bundles send to each rank by itself
        },
        {"sends_ptr": "sends", "chunks_ptr": "chunks"},
        # without columns nobody would wait for what arrives, and it would hit the next op
        (*RANKS, *_ROWS, "N > 0", "resident > COPIERS"),
    ),
    "matmul_reduce_scatter": BundleOp(
        _reduced(catalogue.matmul_reduce_scatter),
        (*_FUSED, "average"),
        "persistent_grid(0, tiles, resident)",
        {
            "tiles_n": "ceil_div(N, BLOCK_N)",
            "tiles": "tiles_of(rows, BLOCK_M, tiles_n)",
            "slots": "reduce_slots(world_size, rows, BLOCK_M, tiles_n)",
            "data_bytes": "contributed_bytes(world_size, rows, N * ITEMSIZE)",
            "segments": "segment_lines(rank, world_size, segments_of(rows), BLOCK_M, tiles_n)",
            "own_rows": "rows[rank]",
        },
        {"segments_ptr": "segments"},
        (*RANKS, *_ROWS),
    ),
    "matmul_all_reduce": BundleOp(
        _reduced(catalogue.matmul_all_reduce),
        (*_FUSED, "average"),
        "persistent_grid(0, tiles, resident)",
        {
            "tiles_n": "ceil_div(N, BLOCK_N)",
            "tiles": "tiles_of([M], BLOCK_M, tiles_n)",
            "slots": "reduce_slots(world_size, [M], BLOCK_M, tiles_n)",
            "data_bytes": "contributed_bytes(world_size, [M], N * ITEMSIZE)",
        },
        conditions=RANKS,
    ),
    "matmul_reduce_scatter_norm": BundleOp(
        _normed(catalogue.matmul_reduce_scatter_norm),
        (*_FUSED, "average", "norm", "quantize"),
        "persistent_grid(0, tiles, resident)",
        {
            "tiles_n": "ceil_div(N, BLOCK_N)",
            "tiles": "tiles_of(rows, BLOCK_M, tiles_n)",
            "slots": "reduce_slots(world_size, rows, BLOCK_M, tiles_n)",
            "data_bytes": "contributed_bytes(world_size, rows, N * ITEMSIZE)",
            "segments": "segment_lines(rank, world_size, segments_of(rows), BLOCK_M, tiles_n)",
        },
        {"segments_ptr": "segments"},
        (*RANKS, *_ROWS),
    ),
    "matmul_all_reduce_norm": BundleOp(
        _normed(catalogue.matmul_all_reduce_norm),
        (*_FUSED, "average", "norm", "quantize"),
        "persistent_grid(0, tiles, resident)",
        {
            "tiles_n": "ceil_div(N, BLOCK_N)",
            "tiles": "tiles_of([M], BLOCK_M, tiles_n)",
            "slots": "reduce_slots(world_size, [M], BLOCK_M, tiles_n)",
            "data_bytes": "contributed_bytes(world_size, [M], N * ITEMSIZE)",
        },
        conditions=RANKS,
    ),
    "reduce_norm": BundleOp(
        _normed_rows,
        ("columns", "average", "norm", "quantize"),
        "persistent_grid(0, tiles_of(rows, BLOCK_M, 1), resident)",
        {
            "slots": "reduce_slots(world_size, rows, BLOCK_M, 1)",
            "data_bytes": "contributed_bytes(world_size, rows, N * ITEMSIZE)",
            "segments": "segment_lines(rank, world_size, segments_of(rows), BLOCK_M, 1)",
        },
        {"segments_ptr": "segments"},
        (*RANKS, *_ROWS, "N <= BLOCK_N"),
    ),
    "all_gather": BundleOp(
        _collective("all_gather"),
        (),
        "persistent_grid(COPIERS, num_arrivals, resident)",
        {
            "chunk_size": "chunk_elements(rows, BLOCK, CHUNKS)",
            "slots": "chunk_slots(rows, chunk_size)",
            "data_bytes": "gathered_bytes(rows, ITEMSIZE)",
            "sends": "send_lines(rank, world_size, rows, chunk_size)",
            "num_sends": "sends_of(rank, world_size, rows, chunk_size)",
            "arrivals": "arrival_lines(rank, world_size, rows, chunk_size, True)",
            "num_arrivals": "slots",
        },
        {"sends_ptr": "sends", "arrivals_ptr": "arrivals"},
        (*RANKS, *_ROWS, "resident > COPIERS"),
    ),
    "reduce_scatter": BundleOp(
        _collective("reduce_scatter"),
        ("average",),
        "persistent_grid(0, ceil_div(max(rows), BLOCK), resident)",
        {
            "slots": "reduce_slots(world_size, rows, BLOCK, 1)",
            "data_bytes": "contributed_bytes(world_size, rows, ITEMSIZE)",
            "segments": "segment_lines(rank, world_size, segments_of(rows), BLOCK, 1)",
            "own_elements": "rows[rank]",
        },
        {"segments_ptr": "segments"},
        (*RANKS, *_ROWS),
    ),
    "all_reduce": BundleOp(
        _collective("all_reduce"),
        ("average",),
        "persistent_grid(0, ceil_div(elements, BLOCK), resident)",
        {
            "slots": "reduce_slots(world_size, [elements], BLOCK, 1)",
            "data_bytes": "contributed_bytes(world_size, [elements], ITEMSIZE)",
        },
        conditions=RANKS,
    ),
}

# One op at a time; of several on one buffer, the largest. Slots and data never change places.
WORKSPACE = {
    "slot_offset": f"{HEADER_WORDS * WORD}",
    "data_offset": f"ceil_div(slot_offset + slots * {WORD}, {DATA_ALIGNMENT}) * {DATA_ALIGNMENT}",
    "buffer_bytes": "data_offset + data_bytes",
}


def descriptor_conditions(entry: Entry) -> tuple[str, ...]:
    """Conditions that descriptors (TMA) put on the operands, besides multiples of 16."""
    rows_of_weight = {"kn": "weight_stride_k >= N", "nk": "weight_stride_n >= K"}
    path = entry.fixed.get("DESCRIPTORS", "")
    return ("K > 0", "input_stride >= K", rows_of_weight[str(path)]) if path else ()

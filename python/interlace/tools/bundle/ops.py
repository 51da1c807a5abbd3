"""Ops that are built ahead of time, and the options of a build.

What their launches compute is in ``kernels/bundle_formulas.py``, by the same names.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace

import torch

from interlace.kernels import bundle_formulas
from interlace.kernels.attention.decode import DECODE_LANES
from interlace.kernels.experts.dispatch import COUNT_NUMBERS
from interlace.kernels.signal import HEADER_WORDS, MAX_WORLD_SIZE
from interlace.ops.attention.blocks import MERGED
from interlace.ops.attention.decode import MOST_PIECES
from interlace.ops.collectives.low_latency import (
    BLOCK_WORDS,
    EPOCHS_OFFSET,
    MOST_PROGRAMS,
    WORDS_OFFSET,
)
from interlace.runtime.core.memory import DATA_ALIGNMENT, WORD
from interlace.runtime.tuning.configuration import Configuration, check_values, gpu_default
from interlace.tools.catalogue import catalogue, catalogue_attention
from interlace.tools.catalogue.catalogue import (
    DTYPES,
    MANY_ROWS,
    Entry,
    ExpertsVariant,
    MatmulVariant,
    NormVariant,
)

# Not of one build: which path is an option, and how many programs is said at the launch.
_NOT_OVERRIDDEN = ("descriptors", "programs", "warp_roles")


@dataclass(frozen=True)
class KernelOptions:
    """Options that specialise the kernels of a bundle. The world size does not.

    ``dtype`` by Triton's name. ``weight`` is "kn" (contiguous along N) or "nk" (along K), ``bias`` "",
    "n" or "m", ``path`` "auto", "tma" or "pointers", ``norm`` "rms" or "layer", of rows that get a residual
    and, with ``quantize``, "fp8" or "fp8_static", are made fp8; ``gather`` "none", or which of them all
    ranks get, "normed" or "both" with the sums. ``head_dim`` is of an attention, ``value_dim`` of its
    values, 0 for the same; ``topk`` are slots of a token, ``experts`` those of a rank. For ``rows`` per
    rank, ``columns`` and ``inner`` the tiles are chosen; where the last two are multiples of 16, so they
    must be at every launch. ``overrides`` are values of the configuration.
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
    quantize: str = ""
    gather: str = "none"
    head_dim: int = 128
    value_dim: int = 0
    topk: int = catalogue.TOPK
    experts: int = catalogue.EXPERTS
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
        return NormVariant(self.norm, self.quantize, "" if self.gather == "none" else self.gather)

    @property
    def routed(self) -> ExpertsVariant:
        return ExpertsVariant(self.topk, self.experts)

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


Make = Callable[[int, KernelOptions], list[Entry]]


@dataclass(frozen=True)
class BundleOp:
    """One op of a bundle: ``entries`` are its kernels, in the order of their launches.

    finish_kernel follows on the stream, but where the memory is that of ``words`` that carry their flags.
    Those of ``apart`` wait for nothing, and without a ``workspace`` none does. ``tables`` name the quantity
    that an argument points to; ``options`` are those that apply. ``names``: of a kernel's arguments those
    that mean something else there than in the others, and what they are called. ``constants`` are the
    same for all builds.
    """

    entries: Make
    options: tuple[str, ...]
    tables: dict[str, str] = field(default_factory=dict)
    conditions: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    words: bool = False
    workspace: bool = True
    names: dict[str, dict[str, str]] = field(default_factory=dict)
    constants: dict[str, int] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether finish_kernel follows."""
        return self.workspace and not self.words

    def checked(self, name: str, options: KernelOptions) -> None:
        """Raises ValueError for an option that ``name`` does not have, or that has no such value."""
        for one in fields(KernelOptions):
            changed = getattr(options, one.name) != getattr(KernelOptions(), one.name)
            if changed and one.name not in (*self.options, "dtype", "rows", "overrides"):
                raise ValueError(f"{one.name} is no option of {name}")
        known = {f.name for f in fields(Configuration)} - set(_NOT_OVERRIDDEN)
        chunks = options.overrides.get("chunks", 1)
        if chunks > bundle_formulas.MOST_CHUNKS:
            raise ValueError(
                f"chunks is {chunks}; a bundle has {bundle_formulas.MOST_CHUNKS} at the most"
            )
        for key, value in options.overrides.items():
            if key not in known:
                raise ValueError(f"{key} is not in the configuration: {', '.join(sorted(known))}")
            check_values({key: value})
            if value == 0 and not isinstance(value, bool):
                raise ValueError(f"{key} must be positive, got {value}")


VALUES = {
    "rank": "this rank, from 0",
    "world_size": "number of ranks",
    "rows": "rows of every rank, by rank; of a flat tensor: its elements; of attention: its tokens",
    "splits": "rows of every rank for each of all experts, one rank after another",
    "tokens": "rows of the input",
    "programs": "programs of the kernel, alike on all ranks",
    "home_rows": "rows of the rank to which most come home",
    "most_tokens": "tokens of the rank that has most",
    "senders": "programs that send to one rank, alike on all ranks",
    "query_rows": "heads of queries that see one head of keys, times the tokens of a sequence",
    "resident": "programs of this kernel that the device keeps resident at once: one for each of its "
    "multiprocessors, less what else runs there meanwhile",
}


def _collective(op: str) -> Make:
    def made(arch: int, options: KernelOptions) -> list[Entry]:
        how = options.dtype, options.configuration(arch)
        return [catalogue.collective(arch, op, *how, average=options.average)]

    return made


def _by_columns(made: Callable[..., Entry]) -> Make:
    def of_options(arch: int, options: KernelOptions) -> list[Entry]:
        if options.bias == "m":
            raise ValueError("bias is 'm': this op has a bias per column only")
        return [made(arch, options.operands(arch))]

    return of_options


def _reduced(fused: Callable[..., Entry]) -> Make:
    return lambda arch, options: [fused(arch, options.operands(arch), average=options.average)]


def _normed(fused: Callable[..., Entry]) -> Make:
    def made(arch: int, options: KernelOptions) -> list[Entry]:
        _can_be_fp8(arch, options)
        return [fused(arch, options.operands(arch), options.variant, average=options.average)]

    return made


def _reduce_norm(arch: int, options: KernelOptions) -> list[Entry]:
    _can_be_fp8(arch, options)
    made = arch, options.dtype, options.variant, options.configuration(arch)
    columns, average = options.columns, options.average
    return [catalogue.reduce_norm(*made, columns=columns, average=average)]


def _low_latency_norm(arch: int, options: KernelOptions) -> list[Entry]:
    _can_be_fp8(arch, options)
    made, columns = (arch, options.dtype, options.variant), options.columns
    return [catalogue.low_latency_norm(*made, columns=columns, average=options.average)]


def _can_be_fp8(arch: int, options: KernelOptions) -> None:
    if options.quantize and arch < 89:
        raise ValueError(f"quantize: Triton makes no float8_e4m3fn for sm_{arch}")


def _experts_rows(*kernels: str) -> Make:
    def made(arch: int, options: KernelOptions) -> list[Entry]:
        found = catalogue.experts_rows(
            arch,
            options.dtype,
            weighted=True,
            routed=options.routed,
            columns=options.columns,
            overrides=options.overrides,
        )
        return [each for each in found if each.kernel in kernels]

    return made


def _attention(made: Callable[..., Iterable[Entry]]) -> Make:
    return lambda arch, options: list(
        made(
            arch,
            options.dtype,
            options.head_dim,
            value_size=options.value_dim or None,
            **options.overrides,
        )
    )


RANKS = (f"0 < world_size <= {MAX_WORLD_SIZE}", "0 <= rank < world_size")
_ROWS = (*RANKS, "len(rows) == world_size", "min(rows) >= 0", "max(rows) > 0")
_SPLITS = (*RANKS, "num_experts > 0", "min(splits) >= 0", "max(splits) > 0")
_SENT = (*RANKS, "senders > 0", "most_tokens > 0", "experts <= EXPERTS")
# Without columns nobody would wait for what arrives, and it would hit the next op.
_WAITED = ("N > 0", "resident > COPIERS")
_BLOCKS = f"0 < blocks <= {MOST_PROGRAMS}"
_FUSED = ("weight", "bias", "path", "columns", "inner")
_NORM = ("average", "norm", "quantize")
_ROUTED = ("topk", "experts", "columns")
_HEAD = ("head_dim", "value_dim")
_SEGMENTS = {"segments_ptr": "segments"}
_KEYS = {"parts_ptr": "parts", "spans_ptr": "spans"}
_WORDS = {"epochs_offset": EPOCHS_OFFSET, "words_offset": WORDS_OFFSET}
# Of all ops, for ``bundle_formulas.py``.
CONSTANTS = {
    "WORD": WORD,
    "HEADER_WORDS": HEADER_WORDS,
    "DATA_ALIGNMENT": DATA_ALIGNMENT,
    "BLOCK_WORDS": BLOCK_WORDS,
    "COUNT_NUMBERS": COUNT_NUMBERS,
    "DECODE_LANES": DECODE_LANES,
    "MERGED": MERGED,
    "MOST_PIECES": MOST_PIECES,
}


def _of_heads(*, backward: bool) -> BundleOp:
    return BundleOp(
        _attention(functools.partial(catalogue_attention.heads_kernels, backward=backward)),
        _HEAD,
        _KEYS,
        (*_ROWS, "min(rows) > 1", "heads % key_heads == 0"),
        workspace=False,
        constants={"span_stride": 0, "first_head": 0},
    )


OPS = {
    "all_gather_matmul": BundleOp(
        lambda arch, options: [catalogue.all_gather_matmul(arch, options.operands(arch))],
        _FUSED,
        {"sends_ptr": "sends", "chunks_ptr": "chunks"},
        (*_ROWS, *_WAITED),
        constants={"multicast": 0},  # bundles send to each rank by itself
    ),
    "matmul_reduce_scatter": BundleOp(
        _reduced(catalogue.matmul_reduce_scatter),
        (*_FUSED, "average"),
        _SEGMENTS,
        _ROWS,
    ),
    "matmul_all_reduce": BundleOp(
        _reduced(catalogue.matmul_all_reduce),
        (*_FUSED, "average"),
        conditions=RANKS,
    ),
    "matmul_reduce_scatter_norm": BundleOp(
        _normed(catalogue.matmul_reduce_scatter_norm),
        (*_FUSED, *_NORM, "gather"),
        _SEGMENTS,
        _ROWS,
    ),
    "matmul_all_reduce_norm": BundleOp(
        _normed(catalogue.matmul_all_reduce_norm),
        (*_FUSED, *_NORM),
        conditions=RANKS,
    ),
    "reduce_norm": BundleOp(
        _reduce_norm,
        ("columns", *_NORM, "gather"),
        _SEGMENTS,
        (*_ROWS, "N <= BLOCK_N"),
    ),
    "low_latency_norm": BundleOp(
        _low_latency_norm,
        ("columns", *_NORM),
        conditions=(*RANKS, _BLOCKS, "N * ITEMSIZE % UNIT == 0"),
        words=True,
        constants=_WORDS,
    ),
    "dispatch": BundleOp(
        _experts_rows("dispatch_send_kernel", "dispatch_receive_kernel"),
        _ROUTED,
        conditions=_SENT,
        constants={"counts_byte": 0},
    ),
    "combine": BundleOp(
        _experts_rows("combine_kernel"),
        _ROUTED,
        conditions=_SENT,
        constants={"tokens": 0},
    ),
    "grouped_matmul_combine": BundleOp(
        lambda arch, options: [
            catalogue.grouped_matmul_combine(arch, options.operands(arch), options.routed)
        ],
        ("weight", "path", "columns", "inner", "topk", "experts"),
        conditions=(*RANKS, "0 < programs <= resident", "home_rows > 0", "num_experts <= EXPERTS"),
    ),
    **{
        op: BundleOp(
            _by_columns(catalogue.grouped_matmul),
            _FUSED,
            {"sends_ptr": "sends", **_SEGMENTS},
            (*_SPLITS, experts, *_WAITED),
        )
        for op, experts in (
            ("all_gather_grouped_matmul", "len(splits) == world_size * num_experts"),
            ("all_to_all_grouped_matmul", "len(splits) == world_size * world_size * num_experts"),
        )
    },
    "matmul_all_to_all": BundleOp(
        _by_columns(catalogue.matmul_all_to_all),
        _FUSED,
        {"shards_ptr": "shards"},
        _ROWS,
    ),
    "all_to_all_matmul": BundleOp(
        _by_columns(catalogue.all_to_all_matmul),
        ("weight", "bias", "columns", "inner"),
        {"sends_ptr": "sends"},
        (*_ROWS, "min(rows) > 0", *_WAITED),
    ),
    "context_parallel_attention": BundleOp(
        _attention(catalogue_attention.gathered_attention),
        _HEAD,
        {"sends_ptr": "sends", **_KEYS},
        (*_ROWS, "min(rows) > 1", "resident > COPIERS", "heads % key_heads == 0"),
        apart=("merge_attention_kernel",),
        constants={"span_stride": 0, "first_head": 0},
    ),
    "attention_of_heads": _of_heads(backward=False),
    "attention_of_heads_backward": _of_heads(backward=True),
    "distributed_decode": BundleOp(
        _attention(catalogue_attention.decode_kernels),
        _HEAD,
        conditions=(*RANKS, _BLOCKS),
        apart=("decode_attention_kernel", "merge_attention_kernel"),
        words=True,
        # between the last two: what is merged is exchanged
        names={
            "merge_attention_kernel": {"output_ptr": "input_ptr"},
            # a cache in one piece has none
            "decode_attention_kernel": {"pages_ptr": "lengths_ptr"},
        },
        constants={"per_key": 1, "first_head": 0, "pages_stride": 0, "pages_size": 0, **_WORDS},
    ),
    "all_gather": BundleOp(
        _collective("all_gather"),
        (),
        {"sends_ptr": "sends", "arrivals_ptr": "arrivals"},
        (*_ROWS, "resident > COPIERS"),
    ),
    "reduce_scatter": BundleOp(
        _collective("reduce_scatter"),
        ("average",),
        _SEGMENTS,
        _ROWS,
    ),
    "all_reduce": BundleOp(
        _collective("all_reduce"),
        ("average",),
        conditions=RANKS,
    ),
    "broadcast": BundleOp(
        lambda arch, options: catalogue.broadcast(arch, options.dtype),
        (),
        conditions=(*RANKS, "0 <= root < world_size", _BLOCKS),
        words=True,
        constants=_WORDS,
    ),
}


def descriptor_conditions(entry: Entry) -> tuple[str, ...]:
    """Conditions that descriptors (TMA) put on the operands, besides multiples of 16."""
    rows_of_weight = {"kn": "weight_stride_k >= N", "nk": "weight_stride_n >= K"}
    path = entry.fixed.get("DESCRIPTORS")
    if path in rows_of_weight:
        return "K > 0", "input_stride >= K", rows_of_weight[path]
    return ("keys_stride >= batches * key_heads * (HEAD_DIM + VALUE_DIM)",) if path else ()


def kernels(op: str) -> tuple[str, ...]:
    """Names of the kernels of an op itself, in the order of their launches."""
    return tuple(name for name in bundle_formulas.OPS[op] if name.endswith("_kernel"))

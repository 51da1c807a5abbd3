"""The table of defaults without a measurement. To change a default, change a row; to add one, add a row.

``docs/how-to/gpu/tune.md`` describes the parts. A row's last entry names its source. It begins with
"measured" (in a file of ``benchmarks/results``, which is named), "model" (predicted by
``benchmarks/predict.py``), "published" (by another project, which is named) or "assumed", which
``tests/sim/tuning/test_tuning_table.py`` checks.

Do not add rows of your own machine to this file: ``python -m interlace tune`` writes them into a cache,
which takes precedence.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from interlace.runtime.core.limits import SHARED_KIB

Values = dict[str, Any]
"""Fields of ``configuration.Configuration``, by name."""

ANY = ""


# Speeds are data sheets times an assumed fraction that can be reached (0.85 of the matmul rate, 0.9 of
# memory, 0.83 of NVLink). Nothing here was measured by this project.
BUILDABLE = tuple(sorted(arch for arch in SHARED_KIB if arch >= 80))
"""The architectures for which kernels are compiled. Older ones have no bfloat16."""


@dataclass(frozen=True)
class Chip:
    """Round figures of an architecture with NVLink; ``tflops`` by bytes per element, 4 without TF32.

    ``copy_gbs``: of one SM that copies to a peer. ``small_tile_rate``: the rate of a tile half as large as
    128 x 256, relative to that tile. ``tile_us``: the part of a tile's time that does not overlap.
    ``chunk_us``: the cost of a chunk in which a program has tiles: the wait, and a pipeline that drains and
    fills again. ``copy_us``: the time before each copy of a copy engine, with its signal.
    """

    name: str
    sms: int
    tflops: dict[int, float]
    memory_gbs: float
    link_gbs: float
    l2_mb: float
    copy_gbs: float = 4.6  # published: arXiv 2511.13940, on Hopper
    small_tile_rate: float = 0.83  # published: symm-mem-recipes, cuBLAS against Triton, on Hopper
    tile_us: float = 2.0
    chunk_us: float = 3.0
    copy_us: float = 3.0


CHIPS = {
    80: Chip("A100", 108, {4: 16.5, 2: 265.0}, 1830.0, 250.0, 40.0),
    90: Chip("H100", 132, {4: 57.0, 2: 750.0, 1: 1500.0}, 3000.0, 375.0, 50.0),
    100: Chip("B200", 148, {4: 64.0, 2: 1900.0, 1: 3800.0}, 7200.0, 750.0, 126.0),
}
"""Chips of 8.6, 8.9 and 12.x have all sizes, mostly without NVLink, so there are no predictions for
them."""


def chip_of(capability: int) -> Chip | None:
    """Return the figures of a chip, if they are known.

    >>> chip_of(90).name, chip_of(120)
    ('H100', None)
    """
    return CHIPS.get({103: 100}.get(capability, capability))


class Tile(NamedTuple):
    """``arch``: compute capability, 9 for all of 9.x, "" for any. ``dtype`` of the operands: "fp32",
    "16 bit", "fp8 exact" (sums exact to fp32), "fp8 fast", "fp8" for both. ``extents``: "even" if columns
    and inner are multiples of 16, else "odd N" or "odd K". ``rows``: "few", up to 64 of a rank, or "many".

    ``flags``: flatten, out (the product is stored by descriptor). From 9.0 on, operands are loaded by
    descriptor (TMA), except fp32, and gathers send once for all ranks if the memory has a multicast
    address.
    """

    arch: int | str
    dtype: str
    extents: str
    rows: str
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    subtile: int
    flags: str
    source: str

    @property
    def values(self) -> Values:
        flags, new = self.flags.split(), self.arch != ANY and int(self.arch) >= 9
        same = ("block_m", "block_n", "block_k", "num_warps", "num_stages")
        return {
            **{name: getattr(self, name) for name in same},
            "epilogue_subtile": self.subtile,
            "descriptors": new and self.dtype != "fp32",
            "flatten": "flatten" in flags,
            "output_descriptors": "out" in flags,
            "multimem": new,
            "native_values": "values" in flags,
            "native_scales": "scales" in flags,
        }


class Shape(NamedTuple):
    """``rows`` of the longest shard, ``columns`` and ``inner`` of a rank's matmul, and ``world``, the
    number of ranks. Each is a power of two that stands for all sizes above half of it. ``algorithm``: the
    choice for "auto"; "" leaves it to the thresholds. ``values`` change the default of the architecture.
    """

    op: str
    arch: int
    dtype: str
    world: int
    rows: int
    columns: int
    inner: int
    algorithm: str
    values: Values
    source: str


class AttentionTile(NamedTuple):
    """``head_dim``: the largest head size of the row; ``way``: "forward" or "backward".

    In a backward, a program keeps ``block_m`` rows, of queries or of keys, and reads ``block_n`` of the
    other at a time. From 9.0 on, keys are loaded by descriptor (TMA), except fp32.
    """

    arch: int | str
    dtype: str
    way: str
    head_dim: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    source: str


class Threshold(NamedTuple):
    """``place``: "gpu", "cpu", or "" for both."""

    name: str
    place: str
    value: int
    source: str


# fmt: off
_FILLS = "assumed: accumulators fill the registers, stages the shared memory; compiles without spills"
_WAVES = "assumed: where larger tiles fill their last wave badly; compiles without spills"
_BOTH = f"{_FILLS}; 12.x as 8.0, whose shared memory suffices it"
_OLD = "assumed: as on 8.0, whose shared memory suffices it"
_FP32 = "assumed: without tensor cores operands need registers too; compiles without spills"
_PACKED = "assumed: compiles without spills; never run on a GPU"
_NATIVE = "values scales"
_ODD = "assumed: every element has an address, and addresses need registers"

_TILES: tuple[tuple[Any, ...], ...] = (
    # archs          dtype        extents  rows      m    n    k  warps stages parts flags
    # in one part ptxas spills fp32 on 10.0, on 9.0 in two
    ((8, 9),         "fp32",      ANY,     ANY,     64,  64,  32,  8,    2,    1,   "",            _FP32),
    ((10, 12, ANY),  "fp32",      ANY,     ANY,     64,  64,  32,  8,    2,    2,   "",            _FP32),
    ((8, 12),        "16 bit",    "even",  "many", 128, 128,  32,  8,    4,    1,   "",            _BOTH),
    ((8, 12),        "16 bit",    "even",  "few",   64, 128,  32,  8,    4,    1,   "",            _BOTH),
    ((9,),           "16 bit",    "even",  "many", 128, 256,  64,  8,    3,    1,   "flatten out", _FILLS),
    ((10,),          "16 bit",    "even",  "many", 128, 256,  64,  8,    4,    4,   "flatten out", _FILLS),
    ((9,),           "16 bit",    "even",  "many", 128, 128,  64,  8,    5,    1,   "flatten out", _WAVES),
    ((10,),          "16 bit",    "even",  "many", 128, 128,  64,  8,    5,    4,   "flatten out", _WAVES),
    ((9, 10),        "16 bit",    "even",  "few",   64, 256,  64,  4,    4,    4,   "flatten out", _FILLS),
    ((8, 9, 10, 12), "16 bit",    "odd N", "many", 128,  64,  16,  8,    3,    1,   "",            _ODD),
    ((8, 9, 10, 12), "16 bit",    "odd N", "few",   64,  64,  16,  8,    3,    1,   "",            _ODD),
    ((8, 12),        "16 bit",    "odd K", "many", 128, 128,  16,  8,    3,    1,   "",            _ODD),
    ((8, 12),        "16 bit",    "odd K", "few",   64, 128,  16,  8,    3,    1,   "",            _ODD),
    ((9, 10),        "16 bit",    "odd K", "many", 128, 256,  16,  8,    3,    1,   "",            _ODD),
    ((9, 10),        "16 bit",    "odd K", "few",   64, 256,  16,  8,    3,    1,   "",            _ODD),
    ((8, 12),        "fp8",       ANY,     "many", 128, 128, 128,  8,    2,    4,   "flatten out", _BOTH),
    ((8, 12),        "fp8",       ANY,     "few",   64, 128, 128,  8,    2,    4,   "flatten out", _BOTH),
    # exact sums are kept beside the tensor cores' own sums, which needs registers
    ((9,),           "fp8 exact", ANY,     "many", 128, 128, 128,  8,    4,    4,   "flatten out", _FILLS),
    ((9,),           "fp8 fast",  ANY,     "many", 128, 256, 128,  8,    4,    4,   "flatten out", _FILLS),
    ((10,),          "fp8",       ANY,     "many", 128, 256, 128,  8,    4,    4,   "flatten out", _FILLS),
    ((9, 10),        "fp8",       ANY,     "few",   64, 128, 128,  8,    4,    4,   "flatten out", _FILLS),
    # block-scaled operands, by pointers: what they are converted to takes registers. Of 64 numbers along
    # k, and not 32, ptxas spills on 8.0
    ((8, 12, ANY),   "packed",    ANY,     ANY,    128,  64,  32,  8,    2,    1,   "",            _PACKED),
    ((9,),           "packed",    ANY,     ANY,     64, 128, 128,  8,    3,    4,   "values",      _PACKED),
    ((10,),          "packed exact", ANY,  ANY,    128, 128, 128,  8,    3,    4,   _NATIVE,       _PACKED),
    ((10,),          "packed fast",  ANY,  ANY,    128, 256, 128,  8,    3,    1,   _NATIVE,       _PACKED),
    # any other GPU: no descriptors, and 32 KiB of the 48 KiB that every GPU has
    ((ANY,),         "16 bit",    "even",  ANY,     64, 128,  32,  8,    2,    1,   "",            _OLD),
    ((ANY,),         ANY,         ANY,     ANY,     64,  64,  32,  8,    2,    1,   "",            _OLD),
)
TILES = tuple(Tile(arch, *row) for archs, *row in _TILES for arch in archs)

FEW_ROWS = 64

# The changes of a tile for a grouped matmul, by dtype and extents. More addresses are alive, and otherwise
# ptxas of Triton 3.6 spills on 10.0.
GROUPED: dict[tuple[str, str], Values] = {
    ("16 bit", "odd N"): {"epilogue_subtile": 2},
    **{
        (dtype, extents): {"block_n": 64}
        for dtype in ("packed", "packed exact", "packed fast")
        for extents in ("even", "odd N", "odd K")
    },
}

_FITS = "assumed: compiles without spills on 9.0 and 10.0, with few on 8.0; never run on a GPU"
_ATTENTION: tuple[tuple[Any, ...], ...] = (
    # archs   dtype     way         head   m    n  warps stages
    ((9,),   "16 bit", "forward",   128, 128, 128,  8,    2),
    ((9,),   "16 bit", "forward",   256,  64,  64,  8,    2),
    ((8,),   "16 bit", "forward",    64, 128,  64,  8,    2),
    ((ANY,), "16 bit", "forward",    64, 128, 128,  8,    2),
    ((8,),   "16 bit", "forward",   128,  64,  64,  8,    2),
    ((ANY,), "16 bit", "forward",   128, 128,  32,  8,    3),
    ((ANY,), "16 bit", "forward",   256,  64,  32,  8,    1),
    ((9,),   "16 bit", "backward",  128, 128,  64,  8,    2),
    ((8,),   "16 bit", "backward",  128,  64,  32,  8,    2),
    ((ANY,), "16 bit", "backward",   64,  64,  64,  8,    2),
    ((ANY,), "16 bit", "backward",  128,  64,  32,  8,    3),
    ((ANY,), "16 bit", "backward",  256,  32,  32,  8,    1),
    # without tensor cores operands also need registers
    ((ANY,), "fp32",   "forward",    64,  16,  32,  4,    1),
    ((9,),   "fp32",   "forward",   128,  16,  16,  4,    1),
    ((ANY,), "fp32",   "forward",   128,  16,  32,  8,    1),
    ((8,),   "fp32",   "forward",   256,  16,  16,  4,    1),
    ((ANY,), "fp32",   "forward",   256,  16,  32,  8,    2),
    ((8,),   "fp32",   "backward",  256,  16,  16,  8,    1),
    ((9,),   "fp32",   "backward",   64,  32,  32,  4,    1),
    ((ANY,), "fp32",   "backward",  128,  32,  32,  8,    1),
    ((ANY,), "fp32",   "backward",  256,  16,  16,  8,    1),
)
ATTENTION = tuple(
    AttentionTile(arch, *row)
    for archs, *row in ((*each, _FITS) for each in _ATTENTION)
    for arch in archs
)

# The sender of an all-gather's chunks and its options, where SHAPES and the cost model say nothing.
SENDING = {"copiers": 8, "chunks": 4, "copy_rows": 16, "copy_columns": 512}
SENDING_FP32 = {**SENDING, "copy_columns": 256}

_MODEL = "model: h100x8, table 'recommended' of docs/reference/predictions.md"
_THIN = f"{_MODEL}, which is kind to fusing, and says no"
_WHOLE = {"copiers": 0, "chunks": 1}    # whole shards by the copy engine
_HALVES = {"copiers": 0, "chunks": 2}

SHAPES = (
    #     op                  arch dtype    ranks  rows  columns inner  algorithm  values
    Shape("all_gather_matmul", 90, "16 bit",   8,   128,   2048,  4096, "unfused", _WHOLE,  _THIN),
    Shape("all_gather_matmul", 90, "16 bit",   8,   256,   2048,  4096, "",        _WHOLE,  _MODEL),
    Shape("all_gather_matmul", 90, "16 bit",   8,   512,   2048,  4096, "fused",   _WHOLE,  _MODEL),
    Shape("all_gather_matmul", 90, "16 bit",   8,  1024,   2048,  4096, "fused",   _WHOLE,  _MODEL),
    Shape("all_gather_matmul", 90, "16 bit",   8,  2048,   2048,  4096, "fused",   _HALVES, _MODEL),
    Shape("all_gather_matmul", 90, "16 bit",   8,   128,   4096,  8192, "",        _WHOLE,  _MODEL),
    Shape("all_gather_matmul", 90, "16 bit",   8,   256,   4096,  8192, "",        _WHOLE,  _MODEL),
    Shape("all_gather_matmul", 90, "16 bit",   8,   512,   4096,  8192, "fused",   _WHOLE,  _MODEL),
    Shape("all_gather_matmul", 90, "16 bit",   8,  1024,   4096,  8192, "fused",   _WHOLE,  _MODEL),
    Shape("all_gather_matmul", 90, "16 bit",   8,  2048,   4096,  8192, "fused",   _WHOLE,  _MODEL),
    Shape("all_gather_matmul", 90, "16 bit",   8,   128,   8192, 16384, "unfused", _WHOLE,  _THIN),
    Shape("all_gather_matmul", 90, "16 bit",   8,   256,   8192, 16384, "",        _WHOLE,  _MODEL),
    Shape("all_gather_matmul", 90, "16 bit",   8,   512,   8192, 16384, "",        _WHOLE,  _MODEL),
    Shape("all_gather_matmul", 90, "16 bit",   8,  1024,   8192, 16384, "fused",   _WHOLE,  _MODEL),
    Shape("all_gather_matmul", 90, "16 bit",   8,  2048,   8192, 16384, "fused",   _WHOLE,  _MODEL),
)

THRESHOLDS = (
    #         name                        place  value
    # all rows; with fewer, fusing loses to the plain sequence
    Threshold("smallest_fused_rows",      "gpu", 512,
              "published: up to 512 rows fused ops lose or tie (Kraken #2, #19, pytorch #179770)"),
    # bytes that a rank receives before its matmul; with fewer, pipelined all-gather + matmul loses to
    # unfused
    Threshold("smallest_pipelined_bytes", "cpu", 4 << 20,
              "measured: benchmarks/results/cpu-2026-11-20-ba592b65.json"),
    # time of a shard's transfer, if it was calibrated; used instead of the bytes. Unfused less torch.mm
    # alone, by peers: pipelined lost or tied at 2500 and 2690, won at 5670 and 6960; this is the middle of
    # the gap
    Threshold("smallest_pipelined_shard_us", "cpu", 3900,
              "measured: benchmarks/results/cpu-2026-11-20-ba592b65.json"),
    # bytes of the output; with more, matmul + all-reduce becomes reduce-scatter and all-gather
    Threshold("one_shot_bytes",           ANY,   256 << 10, "assumed: as torch's symmetric memory"),
    # bytes of a rank's message; up to this size it is sent in words that carry their flag
    Threshold("largest_low_latency_bytes", ANY,  32 << 10,
              "assumed: no measurement; words with flags move twice the bytes"),
    # bytes of the gathered input, of the product; a CPU's engine moves up to so many, peers' memory more
    Threshold("engine_gather_bytes",      "cpu", 1 << 20, "assumed: the run was not kept"),
    # bytes of all ranks' keys and values; with more, a ring with room for two ranks' is chosen
    Threshold("ring_attention_bytes",     "gpu", 2 << 30, "assumed: gathered keys beside a model's memory"),
    Threshold("engine_reduce_bytes",      "cpu", 1 << 20, "assumed: the run was not kept"),
)

# The smallest and the largest block: the power of two between them that covers the extent is chosen.
INTERPRETED = {"block_m": (16, 128), "block_n": (16, 128), "block_k": (16, 256), "copy_columns": (16, 1024)}
INTERPRETED_VALUES = {"copy_rows": 64, "programs": 3}
# fmt: on


def threshold(name: str) -> int:
    """Return the value of the row ``name``.

    >>> threshold("smallest_fused_rows")
    512
    """
    return next(row.value for row in THRESHOLDS if row.name == name)


def tiles(capability: int, dtype: str, extents: str) -> list[Tile]:
    """Return all rows for a GPU of ``capability`` (90 is 9.0): its own, or those for any if it has none.

    >>> [(tile.block_m, tile.block_n, tile.rows) for tile in tiles(90, "16 bit", "even")]
    [(128, 256, 'many'), (128, 128, 'many'), (64, 256, 'few')]
    """
    fitting = [t for t in TILES if dtype.startswith(t.dtype) and t.extents in (extents, ANY)]
    exact = [tile for tile in fitting if tile.arch == capability // 10]
    return exact or [tile for tile in fitting if tile.arch == ANY]

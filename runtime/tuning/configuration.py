"""Block sizes and launch options: their meaning, their defaults, values of the user's own, and limits.

The defaults are rows of ``table.py``. ``tuning.py`` chooses for the fused ops of a group, by measured rows
and the cost model; plain collectives and offline builds take :func:`choose` and :func:`gpu_default`,
attention :func:`choose_attention`.

What a GPU can run is decided by arithmetic alone, on the safe side: what :func:`why_not` passes fits; what
it refuses might have fitted after all. Registers are bounded for the accumulator only, so a configuration
that passes may still spill, which its time shows.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace

import torch

from interlace.runtime.core.context import Overrides, context_with, current
from interlace.runtime.core.limits import shared_bytes
from interlace.runtime.core.place import Place
from interlace.runtime.tuning import table

MOST_ACCUMULATORS = 128  # fp32 numbers of a thread: half of the registers that it can have
WARP = 32
MOST_STAGES = 6
OUTPUT_BYTES = 2  # of a number; parts of fp32 leave without descriptors
BARRIERS = 16  # bytes of a stage, at most
METHODS = ("all_gather", "ring", "ulysses")
LARGEST_HEAD = 256


@dataclass(frozen=True)
class Configuration:
    """A way to build and launch the kernels of one call.

    ``copiers`` programs push chunks inside the all-gather kernel; 0 leaves that to the copy engine.
    ``chunks`` is how many chunks a shard is sent in. ``programs`` bounds a persistent grid (0: as
    many as the place keeps resident). ``descriptors`` allows the TMA path where shapes permit it.

    ``epilogue_subtile`` is in how many parts a tile is stored, ``output_descriptors`` whether by TMA
    where nobody publishes it. ``flatten`` makes one loop of tiles and their k loops, so that the loads of
    a tile overlap with the end of the one before it; ``warp_specialize`` gives loads and products warps
    of their own. Without TMA none of the last three applies.

    ``warp_roles`` (9.x): each warp of a fused matmul loads, multiplies or stores, so nothing drains at a
    chunk or an owner (``kernels/matmul/warp_roles.py``). Where products leave by TMA, operands and output
    have 16 bits, and there are no scales; in all-gather + matmul, where the copy engine sends, and there is
    no bias. Never run on a GPU.

    ``multimem`` lets copiers send once for all ranks where the memory has a multicast address.

    ``native_values``, ``native_scales``: whether a GPU has instructions for fp8 of block-scaled operands,
    and tensor cores that multiply by 8-bit scales; without, integers convert operands to bfloat16.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    group_m: int = 8
    num_warps: int = 8
    num_stages: int = 3
    copiers: int = 1
    copy_rows: int = 16
    copy_columns: int = 512
    chunks: int = 2
    programs: int = 0
    descriptors: bool = True
    block_elements: int = 4096
    epilogue_subtile: int = 1
    output_descriptors: bool = False
    flatten: bool = False
    warp_specialize: bool = False
    warp_roles: bool = False
    multimem: bool = False
    native_values: bool = False
    native_scales: bool = False

    @functools.cached_property
    def pointer_block_k(self) -> int:
        """``block_k`` without TMA; ranks need not agree on it.

        Every element of B's tile has an address of its own: at 32 the addresses
        of a 256 wide tile spill on 9.0 (24 bytes), at 16 they do not. Not measured on a GPU.
        """
        return min(self.block_k, 16) if self.block_n >= 256 else self.block_k

    @functools.cached_property
    def stored_parts(self) -> int:
        """``epilogue_subtile``, or fewer where parts of a narrow tile were less than TMA stores.

        With ``warp_roles`` two at least, as there is room for two: while one leaves the next is made.
        """
        parts = max(self.epilogue_subtile, 2 if self.warp_roles else 1)
        return min(parts, max(1, self.block_n // SMALLEST_DOT))

    @functools.cached_property
    def activated_parts(self) -> int:
        """``stored_parts`` of a tile with an activation: a thread has at most 32 numbers of a part.

        gelu of all 128 of a 128 x 256 tile spills 503 times on 9.0, of 64 29 times, of 32 it does not.
        """
        numbers = self.block_m * self.block_n // (32 * self.num_warps)
        return max(self.stored_parts, min(4, numbers // 32, self.block_n // SMALLEST_DOT))


_KINDS = {each.name: type(each.default) for each in fields(Configuration)}


SMALLEST_DOT = 16
"""The smallest extent of a block that ``tl.dot`` takes, and of columns that TMA stores."""


def _powers(least: int, most: int) -> tuple[Sequence[int], str]:
    found = [1 << bit for bit in range(31) if least <= 1 << bit <= most]
    return found, f"a power of two within {least}..{most}"


def _one_of(*values: int) -> tuple[Sequence[int], str]:
    return values, f"one of {', '.join(map(str, values))}"


def _from(least: int, meaning: str = "") -> tuple[Sequence[int], str]:
    most = 1 << 16
    return range(least, most + 1), f"within {least}..{most}{meaning}"


# The values that a field can have where it is no bool: powers of two because of tl.arange. 2**20 numbers is
# as large as Triton lets a block be; extents of tiles go up to the square root of that.
_ALLOWED: dict[str, tuple[Sequence[int], str]] = {
    "block_m": _powers(SMALLEST_DOT, 1024),
    "block_n": _powers(SMALLEST_DOT, 1024),
    "block_k": _powers(SMALLEST_DOT, 1024),
    "copy_rows": _powers(1, 1024),
    "copy_columns": _powers(16, 1024),
    "block_elements": _powers(1, 1 << 20),
    "num_warps": _one_of(1, 2, 4, 8, 16),
    "epilogue_subtile": _one_of(1, 2, 4),
    "group_m": _from(1),
    "num_stages": _from(1),
    "chunks": _from(1),
    "copiers": _from(0, ", where 0 is none"),
    "programs": _from(0, ", where 0 is as many as are resident"),
}


def check_values(values: Mapping[str, object]) -> None:
    """Raise TypeError or ValueError, naming the field, unless all are fields, with values they can have.

    >>> check_values({"block_m": 48})
    Traceback (most recent call last):
    ValueError: block_m is 48; it must be a power of two within 16..1024
    """
    for name, value in values.items():
        kind = _KINDS.get(name)
        if kind is None:
            known = ", ".join(_KINDS)
            raise TypeError(f"{name!r} is no field of the configuration; there are {known}")
        allowed, text = _ALLOWED.get(name, ((True, False), "True or False"))
        if type(value) is not kind:
            typed = text if kind is bool else f"an int, {text}"
            raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; it must be {typed}")
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}; it must be {text}")


@contextmanager
def override(**values: int | bool) -> Iterator[None]:
    """Within the block, every configuration has these values; ``interlace.configured``.

    They win over everything that is tuned or predicted, in fused ops and collectives. All ranks of a group
    have to give the same ones, else fused ops raise ValueError. A name or a value that :func:`check_values`
    refuses is a TypeError or ValueError on entering the block.

    >>> def on_rank():
    ...     with interlace.configured(block_m=64, chunks=1):
    ...         return interlace.all_gather_matmul(torch.ones(2, 8), torch.ones(8, 4)).sum()
    >>> interlace.run(on_rank, 2)
    [tensor(128.), tensor(128.)]
    """
    check_values(values)
    with context_with(overrides=tuple(sorted({**dict(current().overrides), **values}.items()))):
        yield


def with_overrides(base: Configuration, values: Overrides = ()) -> Configuration:
    """``base`` with ``values``, and with the values of :func:`override`, which win over them."""
    return replace(base, **{**dict(values), **dict(current().overrides)})  # type: ignore[arg-type]


def dtype_class(dtype: torch.dtype, *, fast_accum: bool = True) -> str:
    if dtype.itemsize == 1:
        kind = "packed" if dtype == torch.uint8 else "fp8"
        return f"{kind} fast" if fast_accum else f"{kind} exact"
    return "16 bit" if dtype.itemsize == 2 else "fp32"


def extents_class(columns: int, inner: int) -> str:
    return "odd N" if columns % 16 else "odd K" if inner % 16 else "even"


def gpu_default(
    capability: int,
    dtype: torch.dtype,
    rows: int,
    columns: int = 4096,
    inner: int = 4096,
    *,
    fast_accum: bool = True,
    grouped: bool = False,
) -> Configuration:
    """The first row of the table's ``TILES`` that fits a GPU of compute ``capability`` (90 is 9.0).

    ``interlace build`` shows that no default spills. Ranks must agree on what they signal: ``block_m``
    depends on ``rows`` alone (those of the longest shard), ``block_n`` not on ``inner``, which may differ.
    """
    extents = extents_class(columns, inner)
    fitting = table.tiles(capability, dtype_class(dtype, fast_accum=fast_accum), extents)
    few = "few" if rows <= table.FEW_ROWS else "many"
    tile = next(tile for tile in fitting if tile.rows in (few, table.ANY))
    changed = table.GROUPED.get((tile.dtype, extents), {}) if grouped else {}
    sending = table.SENDING_FP32 if dtype == torch.float32 else table.SENDING
    return Configuration(**{**sending, **tile.values, **changed})


def _interpreted(**extents: int) -> Configuration:
    """For the interpreter, which few, large tiles suit: powers of two over the extents, within bounds."""
    blocks = dict(table.INTERPRETED_VALUES)
    for name, extent in extents.items():
        smallest, largest = table.INTERPRETED[name]
        blocks[name] = min(max(1 << (extent - 1).bit_length(), smallest), largest)
    return Configuration(**blocks)  # type: ignore[arg-type]


def interpreted_default(rows: int, columns: int, inner: int) -> Configuration:
    """Few, large tiles, for the interpreter."""
    return _interpreted(block_m=rows, block_n=columns, block_k=inner, copy_columns=inner)


def capability_of(place: Place) -> int | None:
    """The compute capability of a rank's GPU: 90 is 9.0; None for the interpreter."""
    if place.interpreted:
        return None
    major, minor = torch.cuda.get_device_capability(place.device)
    return 10 * major + minor


def choose(
    place: Place,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    inner: int,
    *,
    grouped: bool = False,
    fast_accum: bool = True,
) -> Configuration:
    """The default for a ``rows x inner @ inner x columns`` matmul per rank and shard, with overrides."""
    capability, extents = capability_of(place), (rows, columns, inner)
    if capability is None:
        chosen = interpreted_default(*extents)
    else:
        how = {"grouped": grouped, "fast_accum": fast_accum}
        chosen = gpu_default(capability, dtype, *extents, **how)
    return with_overrides(chosen)


def gpu_attention(
    capability: int, dtype: torch.dtype, head_dim: int, *, backward: bool
) -> Configuration:
    """The first row of the table's ``ATTENTION`` that fits a GPU of compute ``capability``."""
    wide = dtype == torch.float32
    kind = "fp32" if wide else "16 bit"
    way = "backward" if backward else "forward"
    row = next(
        row
        for row in table.ATTENTION
        if row.arch in (capability // 10, table.ANY)
        and row.dtype == kind
        and row.way == way
        and head_dim <= row.head_dim
    )
    sending = table.SENDING_FP32 if wide else table.SENDING
    values = {
        name: getattr(row, name) for name in ("block_m", "block_n", "num_warps", "num_stages")
    }
    values["descriptors"] = capability >= 90 and not wide
    return Configuration(**{**sending, **values})


def for_decoding(chosen: Configuration, dtype: torch.dtype) -> Configuration:
    """Rows are the few heads that share keys; of fp32, whose products registers hold, few keys, too."""
    keys = 16 if dtype == torch.float32 else chosen.block_n
    return replace(chosen, block_m=16, block_n=keys, num_warps=4)


def choose_attention(
    place: Place,
    dtype: torch.dtype,
    head_dim: int,
    rows: int,
    *,
    keys: int | None = None,
    backward: bool = False,
    decode: bool = False,
) -> Configuration:
    """The default for shards of ``rows`` queries and ``keys``, by default as many, with overrides."""
    capability = capability_of(place)
    if capability is None:
        chosen = _interpreted(
            block_m=max(1, rows),
            block_n=max(1, rows if keys is None else keys),
            copy_columns=1024,
        )
    else:
        chosen = gpu_attention(capability, dtype, head_dim, backward=backward)
        if decode:
            chosen = for_decoding(chosen, dtype)
    return with_overrides(chosen)


# -- limits ----------------------------------------------------------------------------------------


def shared_needed(configuration: Configuration, itemsize: int, capability: int = 90) -> int:
    """Bytes for the operands of all stages, and for the part of a tile that is stored at once.

    On 10.x the tile loop, flattened, has room for two parts.

    >>> shared_needed(Configuration(block_m=128, block_n=256, block_k=64, num_stages=4), 2) >> 10
    256
    """
    c = configuration
    loads = c.num_stages * ((c.block_m + c.block_n) * c.block_k * itemsize + BARRIERS)
    stored = c.block_m * (c.block_n // c.stored_parts) * OUTPUT_BYTES
    twice = c.warp_roles or (capability // 10 == 10 and c.output_descriptors)
    return loads + (2 if twice else 1) * stored


def why_not(configuration: Configuration, capability: int, itemsize: int) -> str:
    """Why a GPU of ``capability`` cannot run a matmul with it; "" if it can.

    >>> why_not(Configuration(block_m=256, block_n=256, num_stages=6, num_warps=16), 90, 2)
    '524384 bytes of shared memory, sm_90 has 232448'
    """
    c = configuration
    try:
        check_values(asdict(c))
    except (TypeError, ValueError) as error:
        return str(error)
    if c.block_n // c.epilogue_subtile < SMALLEST_DOT:
        return f"epilogue_subtile is {c.epilogue_subtile} of {c.block_n} columns"
    each = c.block_m * c.block_n // (c.num_warps * WARP)
    if each > MOST_ACCUMULATORS and capability // 10 != 10:  # 10.x has tensor memory
        return f"{each} accumulators of a thread, more than {MOST_ACCUMULATORS}"
    needed, most = shared_needed(c, itemsize, capability), shared_bytes(capability)
    if needed > most:
        return f"{needed} bytes of shared memory, sm_{capability} has {most}"
    return ""


def without_effect(configuration: Configuration, capability: int) -> str:
    """A text: the option that changes nothing on a GPU of ``capability``, and why; "" if all do something.

    >>> without_effect(Configuration(warp_specialize=True), 90)
    'warp_specialize does nothing on sm_90 with 8 warps: Triton takes 4 there'
    """
    c = configuration
    if c.warp_specialize and capability // 10 == 9 and c.num_warps != 4:
        return (
            f"warp_specialize does nothing on sm_{capability} with {c.num_warps} warps: "
            "Triton takes 4 there"
        )
    if c.warp_roles and capability // 10 != 9:
        return f"warp_roles does nothing on sm_{capability}: its kernel is for 9.x"
    return ""


def tile_candidates(
    default: Configuration, capability: int, itemsize: int
) -> Iterator[Configuration]:
    """``default``, and it with other tiles and warps, with as many stages as fit, or one less."""
    yield default
    sizes = (64, 128, 256)
    inner = {4: (32, 64), 2: (64, 128)}.get(itemsize, sizes)
    for block_m, block_n, block_k, warps in itertools.product(sizes, sizes, inner, (4, 8)):
        made = replace(
            default,
            block_m=block_m,
            block_n=block_n,
            block_k=block_k,
            num_warps=warps,
            epilogue_subtile=block_n // 64 if default.epilogue_subtile > 1 else 1,
        )
        staged = [replace(made, num_stages=stages) for stages in range(2, MOST_STAGES + 1)]
        yield from [each for each in staged if not why_not(each, capability, itemsize)][-2:]


def sending_candidates(configuration: Configuration) -> Iterator[Configuration]:
    """Candidates with the same tiles, and shards in more and fewer chunks, by copy engine or programs."""
    for copiers, chunks in itertools.product((0, 8, 16, 32), (1, 2, 4, 8)):
        yield replace(configuration, copiers=copiers, chunks=chunks)

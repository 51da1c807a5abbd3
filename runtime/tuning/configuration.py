"""Block sizes and launch options: their meaning, their defaults, the user's own values, and limits.

Arithmetic alone decides what a GPU can run, and it errs on the safe side: a configuration that
:func:`why_not` passes fits, and one that it refuses might fit after all. Only the registers of the
accumulator are counted, so a configuration that passes may still spill, which its measured time shows.
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

MOST_ACCUMULATORS = 128  # fp32 numbers per thread: half of the registers that it can have
WARP = 32
MOST_STAGES = 6
OUTPUT_BYTES = 2  # per number; fp32 parts are stored without descriptors
BARRIERS = 16  # bytes per stage, at most
METHODS = ("all_gather", "ring", "ulysses")
LARGEST_HEAD = 256


@dataclass(frozen=True)
class Configuration:
    """A way to build and launch the kernels of one call.

    ``copiers`` programs push chunks inside the all-gather kernel; with 0 the copy engine sends them.
    ``chunks`` is the number of chunks in which a shard is sent. ``programs`` bounds a persistent grid (0:
    as many as the place keeps resident). ``descriptors`` allows the TMA path where shapes permit it.

    ``epilogue_subtile`` is the number of parts in which a tile is stored. ``output_descriptors``: store by
    TMA if the store publishes nothing. ``flatten`` joins the loop over tiles and their k loops into one, so
    that a tile's loads overlap with the end of the previous tile. ``warp_specialize`` gives loads and
    products separate warps. Without TMA, the last three have no effect.

    ``warp_roles`` (9.x): each warp of a fused matmul loads, multiplies or stores, so that the pipeline does
    not drain at a chunk or an owner (``kernels/matmul/warp_roles.py``). It applies if products are stored
    by TMA, operands and output have 16 bits, and there are no scales. For all-gather + matmul it also needs
    the copy engine as sender, and no bias. Never run on a GPU.

    ``multimem`` lets copiers send once for all ranks if the memory has a multicast address.

    ``native_values``, ``native_scales``: whether a GPU has instructions for fp8 values of block-scaled
    operands, and tensor cores that multiply by 8-bit scales. Without them, integer instructions convert the
    operands to bfloat16.
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
        """``block_k`` without TMA. Ranks may differ in it.

        Every element of B's tile has its own address. With 32, the addresses of a 256 wide tile spill on
        9.0 (24 bytes); with 16 they do not. Not measured on a GPU.
        """
        return min(self.block_k, 16) if self.block_n >= 256 else self.block_k

    @functools.cached_property
    def stored_parts(self) -> int:
        """``epilogue_subtile``, or fewer if parts of a narrow tile would be smaller than a TMA store.

        With ``warp_roles`` at least two: one is stored while the next is made.
        """
        parts = max(self.epilogue_subtile, 2 if self.warp_roles else 1)
        return min(parts, max(1, self.block_n // SMALLEST_DOT))

    @functools.cached_property
    def activated_parts(self) -> int:
        """``stored_parts`` of a tile with an activation: a thread has at most 32 numbers of a part.

        gelu of all 128 numbers of a 128 x 256 tile spills 503 times on 9.0, of 64 numbers 29 times, of 32
        never.
        """
        numbers = self.block_m * self.block_n // (32 * self.num_warps)
        return max(self.stored_parts, min(4, numbers // 32, self.block_n // SMALLEST_DOT))


_KINDS = {field.name: type(field.default) for field in fields(Configuration)}


SMALLEST_DOT = 16
"""The smallest extent of a block that ``tl.dot`` accepts, and of columns that TMA stores."""


def _powers(least: int, most: int) -> tuple[Sequence[int], str]:
    found = [1 << bit for bit in range(31) if least <= 1 << bit <= most]
    return found, f"a power of two within {least}..{most}"


def _one_of(*values: int) -> tuple[Sequence[int], str]:
    return values, f"one of {', '.join(map(str, values))}"


def _from(least: int, meaning: str = "") -> tuple[Sequence[int], str]:
    most = 1 << 16
    return range(least, most + 1), f"within {least}..{most}{meaning}"


# The allowed values of the fields that are not bools. Powers of two, because of tl.arange. Triton allows
# blocks of up to 2**20 numbers, so the extents of tiles go up to the square root of that.
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
    """Raise TypeError or ValueError with the field's name unless all are fields with allowed values.

    >>> check_values({"block_m": 48})
    Traceback (most recent call last):
    ValueError: block_m is 48; it must be a power of two within 16..1024
    """
    for name, value in values.items():
        kind = _KINDS.get(name)
        if kind is None:
            known = ", ".join(_KINDS)
            raise TypeError(f"{name!r} is not a field of the configuration; the fields are {known}")
        allowed, text = _ALLOWED.get(name, ((True, False), "True or False"))
        if type(value) is not kind:
            typed = text if kind is bool else f"an int, {text}"
            raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; it must be {typed}")
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}; it must be {text}")


@contextmanager
def override(**values: int | bool) -> Iterator[None]:
    """Within the block, every configuration has these values. Public name: ``interlace.configured``.

    They take precedence over all tuned and predicted values, in fused ops and collectives. All ranks of a
    group must pass the same values; otherwise fused ops raise ValueError. An unknown name or an invalid
    value raises TypeError or ValueError when the block is entered.

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
    """Return ``base`` with ``values``. The values of :func:`override` take precedence over both."""
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
    """Return the first row of the table's ``TILES`` that fits a GPU of compute ``capability`` (90 is 9.0).

    ``interlace build`` shows that no default spills. Ranks must agree on the units that they signal:
    ``block_m`` depends on ``rows`` alone (of the longest shard), and ``block_n`` does not depend on
    ``inner``, which may differ between ranks.
    """
    extents = extents_class(columns, inner)
    fitting = table.tiles(capability, dtype_class(dtype, fast_accum=fast_accum), extents)
    few = "few" if rows <= table.FEW_ROWS else "many"
    tile = next(tile for tile in fitting if tile.rows in (few, table.ANY))
    changed = table.GROUPED.get((tile.dtype, extents), {}) if grouped else {}
    sending = table.SENDING_FP32 if dtype == torch.float32 else table.SENDING
    return Configuration(**{**sending, **tile.values, **changed})


def _for_interpreter(**extents: int) -> Configuration:
    """Return few, large tiles for the interpreter: powers of two over the extents, within bounds."""
    blocks = dict(table.INTERPRETED_VALUES)
    for name, extent in extents.items():
        smallest, largest = table.INTERPRETED[name]
        blocks[name] = min(max(1 << (extent - 1).bit_length(), smallest), largest)
    return Configuration(**blocks)  # type: ignore[arg-type]


def interpreted_default(rows: int, columns: int, inner: int) -> Configuration:
    """Return few, large tiles for the interpreter."""
    return _for_interpreter(block_m=rows, block_n=columns, block_k=inner, copy_columns=inner)


def capability_of(place: Place) -> int | None:
    """Return the compute capability of a rank's GPU (90 is 9.0), or None for the interpreter."""
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
    """Return the default for a ``rows x inner @ inner x columns`` matmul per shard, with overrides."""
    capability, extents = capability_of(place), (rows, columns, inner)
    if capability is None:
        chosen = interpreted_default(*extents)
    else:
        options = {"grouped": grouped, "fast_accum": fast_accum}
        chosen = gpu_default(capability, dtype, *extents, **options)
    return with_overrides(chosen)


def gpu_attention(
    capability: int, dtype: torch.dtype, head_dim: int, *, backward: bool
) -> Configuration:
    """Return the first row of the table's ``ATTENTION`` that fits a GPU of compute ``capability``."""
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
    """Adapt tiles to decoding: rows are the few heads that share keys; fp32 products also need few keys."""
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
    """Return the default for shards of ``rows`` queries and ``keys`` (default: as many), with overrides."""
    capability = capability_of(place)
    if capability is None:
        chosen = _for_interpreter(
            block_m=max(1, rows),
            block_n=max(1, rows if keys is None else keys),
            copy_columns=1024,
        )
    else:
        chosen = gpu_attention(capability, dtype, head_dim, backward=backward)
        if decode:
            chosen = for_decoding(chosen, dtype)
    return with_overrides(chosen)


def shared_needed(configuration: Configuration, itemsize: int, capability: int = 90) -> int:
    """Return the bytes for the operands of all stages and for the part of a tile that is stored at once.

    On 10.x the flattened tile loop has room for two parts.

    >>> shared_needed(Configuration(block_m=128, block_n=256, block_k=64, num_stages=4), 2) >> 10
    256
    """
    c = configuration
    loads = c.num_stages * ((c.block_m + c.block_n) * c.block_k * itemsize + BARRIERS)
    stored = c.block_m * (c.block_n // c.stored_parts) * OUTPUT_BYTES
    twice = c.warp_roles or (capability // 10 == 10 and c.output_descriptors)
    return loads + (2 if twice else 1) * stored


def why_not(configuration: Configuration, capability: int, itemsize: int) -> str:
    """Return why a GPU of ``capability`` cannot run a matmul with this configuration, or "" if it can.

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
    """Return which option has no effect on a GPU of ``capability``, and why; "" if all have one.

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
    """Yield ``default``, and variants with other tiles and warps and as many stages as fit, or one less."""
    yield default
    sizes = (64, 128, 256)
    inner = {4: (32, 64), 2: (64, 128)}.get(itemsize, sizes)
    for block_m, block_n, block_k, warps in itertools.product(sizes, sizes, inner, (4, 8)):
        candidate = replace(
            default,
            block_m=block_m,
            block_n=block_n,
            block_k=block_k,
            num_warps=warps,
            epilogue_subtile=block_n // 64 if default.epilogue_subtile > 1 else 1,
        )
        staged = [replace(candidate, num_stages=stages) for stages in range(2, MOST_STAGES + 1)]
        yield from [each for each in staged if not why_not(each, capability, itemsize)][-2:]


def sending_candidates(configuration: Configuration) -> Iterator[Configuration]:
    """Yield candidates with the same tiles: more and fewer chunks, sent by copy engine or programs."""
    for copiers, chunks in itertools.product((0, 8, 16, 32), (1, 2, 4, 8)):
        yield replace(configuration, copiers=copiers, chunks=chunks)

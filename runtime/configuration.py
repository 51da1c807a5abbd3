"""Block sizes and launch options, chosen per place and shape, overridable for a block of code."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from interlace.runtime.place import Place


@dataclass(frozen=True)
class Configuration:
    """How the kernels of one call are built and launched.

    ``copiers`` programs push chunks inside the all-gather kernel; 0 leaves that to the copy engine.
    ``chunks`` is how many chunks a shard is sent in. ``programs`` bounds a persistent grid (0: as
    many as the place keeps resident). ``descriptors`` allows the TMA path where shapes permit it.

    ``epilogue_subtile`` is in how many parts a tile is stored, ``output_descriptors`` whether by TMA
    where nobody publishes it. ``flatten`` makes one loop of tiles and their k loops, so that the loads of
    a tile overlap with the end of the one before it; ``warp_specialize`` gives loads and products warps
    of their own. Without TMA none of the last three applies.

    ``multimem`` lets copiers send once for all ranks where the memory has a multicast address.
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
    multimem: bool = False

    def inner_block(self, descriptors: str) -> int:
        """``BLOCK_K`` for a path of the matmul; ranks need not agree on it.

        Without descriptors every element of B's tile has an address of its own: at 32 the addresses
        of a 256 wide tile spill on 9.0 (24 bytes), at 16 they do not. Not measured on a GPU.
        """
        return min(self.block_k, 16) if self.block_n >= 256 and not descriptors else self.block_k


_override: contextvars.ContextVar[dict[str, int | bool] | None] = contextvars.ContextVar(
    "interlace_configuration", default=None
)


@contextmanager
def override(**values: int | bool) -> Iterator[None]:
    """Within the block, every configuration has these values: ``with override(block_m=32): ...``."""
    replace(Configuration(), **values)  # type: ignore[arg-type]  # an unknown name fails here
    token = _override.set({**(_override.get() or {}), **values})
    try:
        yield
    finally:
        _override.reset(token)


def overridden() -> bool:
    """Whether :func:`override` has set anything here."""
    return bool(_override.get())


def set_override(values: dict[str, int | bool]) -> None:
    """As :func:`override`, for the rest of the current context."""
    _override.set(dict(values))


def current_override() -> dict[str, int | bool]:
    """What :func:`override` has set here, for handing on to another thread or process."""
    return dict(_override.get() or {})


def gpu_default(
    capability: int,
    dtype: torch.dtype,
    rows: int,
    columns: int = 4096,
    inner: int = 4096,
    *,
    fast_accum: bool = True,
) -> Configuration:
    """What a GPU of compute ``capability`` (90 is 9.0) runs for a matmul, before overrides.

    Tiles fill the accumulator registers (on 10.0 the tensor memory), stages the shared memory of one
    program: 163 KiB on 8.0, 227 KiB on 9.0 and 10.0, 99 KiB on the small chips 8.6, 8.9 and 12.0.
    ``interlace build`` shows that no default spills.

    Ranks must agree on what they signal: ``block_m`` depends on ``rows`` alone (those of the longest
    shard) and ``block_n`` not on ``inner``, which may differ between ranks.
    """
    hopper = capability >= 90
    chosen = Configuration(copiers=8, chunks=4, descriptors=hopper, multimem=hopper)
    if dtype == torch.float32:
        # No tensor cores, unless TF32 is allowed: the operands need registers as well. Tiles in one part
        # on 9.0, in two on 10.0: the other way round ptxas saves registers and spills.
        return replace(
            chosen,
            block_m=64,
            block_n=64,
            block_k=32,
            num_stages=2,
            epilogue_subtile=2 if capability >= 100 else 1,
            copy_columns=256,
            descriptors=False,
        )
    if rows <= 64:
        chosen = replace(chosen, block_m=64)
    if dtype.itemsize == 1:
        # On 9.0 sums that are exact to fp32 are kept beside the tensor cores' own, which takes registers.
        wide = capability in (100, 103) or (capability == 90 and fast_accum)
        wide = wide and rows > 64
        return replace(
            chosen,
            block_n=256 if wide else 128,
            block_k=128,
            num_stages=4 if capability in (90, 100, 103) else 2,
            epilogue_subtile=4,
            flatten=True,
            output_descriptors=True,
        )
    if columns % 16:
        # Every element has an address of its own, and addresses need registers.
        return replace(chosen, block_n=64, block_k=16)
    large = capability in (90, 100, 103)
    chosen = replace(chosen, block_n=256 if large else 128)
    if inner % 16:
        return replace(chosen, block_k=16)
    if not large:
        return replace(chosen, block_k=32, num_stages=4)
    chosen = replace(
        chosen, num_stages=4, epilogue_subtile=4, flatten=True, output_descriptors=True
    )
    return replace(chosen, num_warps=4) if rows <= 64 else chosen


def choose(
    place: Place,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    inner: int,
    *,
    fast_accum: bool = True,
) -> Configuration:
    """The configuration for a ``rows x inner @ inner x columns`` matmul per rank and shard."""
    if place.interpreted:
        chosen = Configuration(
            block_m=_block(rows, 16, 128),
            block_n=_block(columns, 16, 128),
            block_k=_block(inner, 16, 256),
            copy_rows=64,
            copy_columns=_block(inner, 16, 1024),
            programs=3,
        )
    else:
        major, minor = torch.cuda.get_device_capability(place.device)
        chosen = gpu_default(10 * major + minor, dtype, rows, columns, inner, fast_accum=fast_accum)
    return replace(chosen, **current_override())  # type: ignore[arg-type]


def _block(extent: int, smallest: int, largest: int) -> int:
    """The power of two that covers ``extent``, within bounds: few, large tiles suit an interpreter."""
    block = smallest
    while block < extent and block < largest:
        block *= 2
    return block

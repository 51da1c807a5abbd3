"""Configurations that a GPU can run, by arithmetic alone, and the candidates that tuning tries.

Bounds on the safe side: what passes fits; what is refused might have fitted after all. Registers are
bounded for the accumulator only, so a candidate that passes may still spill, which its time shows.
"""

import itertools
from collections.abc import Iterator
from dataclasses import asdict, replace

from interlace.runtime.tuning.chips import shared_bytes
from interlace.runtime.tuning.configuration import SMALLEST_DOT, Configuration, check_values

MOST_ACCUMULATORS = 128  # fp32 numbers of a thread: half of the registers that it can have
WARP = 32
MOST_STAGES = 6
OUTPUT_BYTES = 2  # of a number; parts of fp32 leave without descriptors
BARRIERS = 16  # bytes of a stage, at most


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

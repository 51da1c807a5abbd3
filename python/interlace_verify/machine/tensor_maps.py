"""Tensor maps: TMA's description of a tensor in global memory, and the places of a box's elements.

A map takes 128 bytes. NVIDIA does not document their meaning; here they are a :data:`MAP`. On a device
``tensormap.replace`` makes maps, on the host :func:`tensor_map`. Dimension 0 is the innermost. Elements of
a box outside the tensor read as zeros or NaN, and are not stored.

The swizzle of tiles in shared memory: TMA and ``wgmma`` permute 16-byte pieces in the same way. Rows of 128
bytes follow each other. In eight rows, each row has its pieces at other places, so that a column of pieces
uses every bank once. The address alone decides: bits 4 to 6 are xor bits 7 to 9. These are all three bits
in the 128-byte mode, the lower two in the 64-byte mode, the lowest in the 32-byte mode.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from interlace_verify.machine.shared import PtxProgram, put_shared, shared_bits, take_shared
from interlace_verify.ptx.instruction import Action, Instruction, builders
from interlace_verify.ptx.memory import address_of, load_of, store_of
from interlace_verify.ptx.special import WARP, Threads
from interlace_verify.ptx.types import TYPES, Array, ScalarType


def swizzled(addresses: Array, nbytes: int, first_row: int = 0) -> Array:
    """Return the swizzled places, in bytes, of ``addresses`` in shared memory (of any integer dtype).

    ``nbytes``: the mode, 32, 64 or 128; 16 changes nothing. ``first_row``: the row of 128 bytes, modulo 8,
    in which a pattern begins; 0 if it is aligned to its own size.
    """
    kind = addresses.dtype.type
    rows = (addresses >> kind(7)) - kind(first_row)
    return addresses ^ (rows << kind(4) & kind(nbytes - 16))


TENSOR_MAPS, builds = builders()
NBYTES = 128
MAP = np.dtype(
    [
        ("global_address", "u8"),
        ("global_stride", "u8", 4),  # in bytes, from dimension 1 on
        ("global_dim", "u4", 5),
        ("box_dim", "u4", 5),
        ("element_stride", "u4", 5),
        ("rank", "u4"),  # minus one
        ("elemtype", "u4"),
        ("interleave_layout", "u4"),
        ("swizzle_mode", "u4"),
        ("fill_mode", "u4"),
    ]
)
ELEMENTS = ["u8", "u16", "u32", "s32", "u64", "s64"]
ELEMENTS += ["f16", "f32", "f32", "f64", "bf16", "f32", "f32"]
"""By ``elemtype``; numbers with .ftz and .tf32 are copied unchanged."""
SWIZZLES = (16, 32, 64, 128)
"""By ``swizzle_mode``, in bytes; 16 means no swizzle."""
_FILL = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0x7FFFFFFFFFFFFFFF}


class Box(NamedTuple):
    """The elements of a box, innermost dimension first. Each has an address in global memory, a flag
    whether it is inside the tensor, and an offset in shared memory. Elements are numbers of type ``number``
    with bits of type ``kind``; elements outside are ``fill``."""

    addresses: Array
    inside: Array
    offsets: Array
    kind: ScalarType
    number: ScalarType
    fill: int


def tensor_map(
    address: int,
    shape: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    elemtype: int,
    *,
    swizzle: int = 0,
    fill: int = 0,
) -> bytes:
    """Return a tensor map: ``shape`` and ``box`` in elements, ``strides`` in bytes from dimension 1 on."""
    made = np.zeros((), MAP)
    rank = len(shape)
    made["global_address"], made["rank"] = address, rank - 1
    made["global_dim"][:rank], made["box_dim"][:rank] = shape, box
    made["global_stride"][: rank - 1] = strides
    made["element_stride"][:rank] = 1
    made["elemtype"], made["swizzle_mode"], made["fill_mode"] = elemtype, swizzle, fill
    return made.tobytes().ljust(NBYTES, b"\0")


def box_of(raw: bytes, corner: Sequence[int], offset: int, instruction: Instruction) -> Box:
    """Return the box of a map at ``corner``, with its ``offset`` in shared memory."""
    given = np.frombuffer(raw, MAP, 1)[0]
    rank = int(given["rank"]) + 1
    elemtype, mode = int(given["elemtype"]), int(given["swizzle_mode"])
    known = rank == len(corner) and elemtype < len(ELEMENTS) and mode < len(SWIZZLES)
    if not known or given["interleave_layout"]:
        raise instruction.error(
            f"a tensor map of rank {rank}, element type {elemtype}, swizzle {mode} and interleave "
            f"{given['interleave_layout']} is not known or not valid"
        )
    named, span = TYPES[ELEMENTS[elemtype]], SWIZZLES[mode]
    kind = TYPES[f"b{named.bits}"]
    size = kind.bits // 8
    _check(given, rank, size, span, offset, instruction)
    steps = given["element_stride"][:rank].astype(np.int64)
    counts = -(-given["box_dim"][:rank].astype(np.int64) // steps)
    strides = [size, *given["global_stride"][: rank - 1].astype(np.int64).tolist()]
    row = int(counts[0]) * size
    pitch = max(row, span) if mode else row
    addresses = np.array(int(given["global_address"]), np.uint64)
    inside, offsets = np.array(True), np.array(offset, np.int64)
    for dim in range(rank):
        index = np.arange(counts[dim])
        at = corner[dim] + index * steps[dim]
        inside = inside & ((at >= 0) & (at < int(given["global_dim"][dim]))).reshape(-1, *[1] * dim)
        addresses = addresses + (at * strides[dim]).astype(np.uint64).reshape(-1, *[1] * dim)
        step = size if dim == 0 else pitch * int(np.prod(counts[1:dim], initial=1))
        offsets = offsets + (index * step).reshape(-1, *[1] * dim)
    flat = swizzled(offsets.ravel(), span)
    fill = _FILL.get(named.name, 0) if given["fill_mode"] else 0
    return Box(addresses.ravel(), inside.ravel(), flat, kind, named, fill)


def _check(
    given: Array, rank: int, size: int, span: int, offset: int, instruction: Instruction
) -> None:
    """Raise an error for a map that TMA refuses or handles wrongly."""
    row = int(given["box_dim"][0]) * size
    base, strides = int(given["global_address"]), given["global_stride"][: rank - 1].tolist()
    wrong = {
        f"its base, address {base:#x}, is not a multiple of 16 bytes": base % 16,
        f"its strides, {strides} bytes, are not multiples of 16": any(s % 16 for s in strides),
        f"a row of a box has {row} bytes, which TMA does not take": row % 16
        or (span > 16 and row > span),
        f"a box begins at byte {offset} of shared memory, not at a multiple of 128": offset % 128,
        f"a box is {given['box_dim'][:rank].tolist()}, which TMA does not take": not all(
            1 <= each <= 256 for each in given["box_dim"][:rank].tolist()
        ),
    }
    found = [text for text, bad in wrong.items() if bad]
    if found:
        raise ValueError(
            f"PTX: TMA cannot use this tensor map: {found[0]}; line {instruction.line}: {instruction.text}"
        )


@builds("tensormap")
def build_tensor_map(instruction: Instruction) -> Action:
    if instruction.flag("replace"):
        return _replace(instruction)
    if instruction.flag("cp_fenceproxy"):
        return _copy(instruction)
    known = ["tensormap.replace", "tensormap.cp_fenceproxy"]
    raise instruction.unknown(f"instruction '{instruction.opcode}'", known)


def _replace(instruction: Instruction) -> Action:
    """Replace a field of a map, which is a store to a word of the map."""
    instruction.flag("tile")
    fields: Any = MAP.fields
    name = instruction.choose(*fields)
    instruction.flag("b1024")
    kind = instruction.take_type(("b32", "b64"))
    if name is None:
        raise instruction.unknown(f"the field of '{instruction.opcode}'", fields)
    field, first = fields[name]
    if field.base.itemsize * 8 < kind.bits:
        raise instruction.error(f"'.{name}' has {field.base.itemsize * 8} bits")
    kind = TYPES[f"b{field.base.itemsize * 8}"]
    shared = "shared::cta" in instruction.qualifiers
    if shared:
        take_shared(instruction)
    else:
        instruction.flag("global")
    instruction.finish(3 if field.shape else 2)
    where, *ordinal, value = instruction.operands
    at = address_of(instruction, where, TYPES["b64"], shared=shared)
    number = instruction.literal(ordinal[0], TYPES["u32"]) if ordinal else 0
    if number is None or number >= max(1, *field.shape, 0):
        raise instruction.error(f"'.{name}' has no element {ordinal[0]}")
    offset = np.uint64(first + number * field.base.itemsize)
    read = instruction.reader(value, kind)

    def replace(threads: Threads) -> None:
        addresses, bits = at(threads) + offset, threads.active(read(threads))
        if shared:
            put_shared(threads, addresses, bits, kind)
        else:
            store_of(kind)(threads, addresses, bits)

    return replace


def _copy(instruction: Instruction) -> Action:
    """Copy a map from shared to global memory: each thread of a warp copies a word of it."""
    taken = ["global", "shared::cta", "tensormap::generic", "release", "sync", "aligned"]
    for name in taken:
        if not instruction.flag(name):
            raise instruction.error(f"'{instruction.mnemonic}.cp_fenceproxy' needs '.{name}'")
    instruction.choose("cta", "cluster", "gpu", "sys")
    instruction.finish(3)
    word = TYPES["b32"]
    to = address_of(instruction, instruction.operands[0], word)
    where = address_of(instruction, instruction.operands[1], word, shared=True)
    put = store_of(word)

    def copy(threads: Threads) -> None:
        numbers = threads.active(threads.numbers)
        for warp in np.unique(numbers // WARP):  # the lanes of a warp wait for each other
            threads.session.hooks.barrier(numbers[numbers // WARP == warp])
        offset = (numbers % WARP * 4).astype(np.uint64)
        put(threads, to(threads) + offset, shared_bits(threads, where(threads) + offset, word))

    return copy


def read_map(threads: Threads, address: int) -> bytes:
    """Return the map at ``address``, in the parameters or in memory, as the running thread reads it."""
    program: PtxProgram = threads.session
    if address in program.arrays:
        return bytes(program.arrays[address])
    words = np.arange(0, NBYTES, 4, dtype=np.uint64)[None] + np.uint64(address)
    return bytes(load_of(TYPES["b32"])(threads, words).tobytes())

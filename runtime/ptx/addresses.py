"""Addresses of PTX as operands: ``[register]``, ``[register+4]``, ``[name]``."""

import re

import numpy as np

from interlace.runtime.core.accesses import NULL
from interlace.runtime.ptx.instruction import Instruction
from interlace.runtime.ptx.special import Reader, Threads
from interlace.runtime.ptx.types import TYPES, Array, ScalarType

SPACES = ("shared", "shared::cta")
_VERBS = {"ld": "loads", "st": "stores"}
_ADDRESS = re.compile(r"\[ ?([^\s+\]]+) ?(?:\+ ?(-?\w+) ?)?\]")


def address_of(
    instruction: Instruction,
    text: str,
    kind: ScalarType,
    count: int = 1,
    *,
    shared: bool = False,
    window: Reader | None = None,
) -> Reader:
    """Where ``count`` elements start; checked, as the interpreter would not survive a wrong one.

    Those in shared memory, or in a ``window``, of 32 bits in PTX, become addresses of this process.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise instruction.error("an address is written in brackets, as [register+4]")
    if shared and not instruction.generic:
        window = _shared_base
    narrow = window is not None
    base = instruction.reader(match[1], TYPES["u32" if narrow else "u64"], wider=narrow)
    offset = instruction.literal(match[2] or "0", TYPES["u64"])
    if offset is None:
        raise instruction.error(f"the offset in '{text}' must be a whole number")
    align, null = np.uint64(kind.bits // 8 * count), np.uint64(NULL)
    mnemonic = instruction.mnemonic
    by, within = np.uint64(offset), align - np.uint64(1)  # a power of 2

    def at(threads: Threads) -> Array:
        addresses = threads.active(base(threads))
        if offset:
            addresses = addresses + by
        if window is not None:
            addresses = (addresses & np.uint64(0xFFFFFFFF)) + window(threads)
        if not addresses.size:
            return addresses
        if np.bitwise_or.reduce(addresses) & within or np.minimum.reduce(addresses) < null:
            wrong = (addresses % align != 0) | (addresses < null)
            address = int(addresses[wrong][0])
            what = "null" if address < NULL else f"not a multiple of {align}"
            what = f"{what}; line {instruction.line}: {instruction.text}"
            if window is None:
                does, count = _VERBS.get(mnemonic, mnemonic), int(wrong.sum())
                threads.session.hooks.misplaced(address, int(align), count, does, what)
            raise ValueError(f"PTX: address {address:#x} is {what}")
        return addresses

    return at


def _shared_base(threads: Threads) -> Array:
    return np.uint64(threads.session.base)

"""Machine code for the host, made by the LLVM inside Triton: no compiler and no assembler is needed.

``translate_to_asm`` of Triton's own extension module makes an object file of LLVM IR for any target that
its LLVM was built with, and the host is one. :func:`load` puts such an object into memory of its own,
applies its relocations, and makes the memory executable and no longer writable.

The code must be self-contained: addresses of functions that it calls are passed to it. Only x86-64 with
AVX2 (x86-64-v3); there is None elsewhere, and where a hardened kernel refuses to execute fresh memory.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
import struct
import sys
from collections.abc import Sequence

VARIABLE = "INTERLACE_HOST_CODE"
"""Set to 0, nothing is compiled for the host, and Python and torch do it all."""

_TRIPLE, _PROCESSOR = "x86_64-unknown-linux-gnu", "x86-64-v3"
_NEEDED = {
    "cx16", "lahf_lm", "popcnt", "pni", "ssse3", "sse4_1", "sse4_2", "avx", "avx2", "bmi1", "bmi2", "f16c",
    "fma", "abm", "movbe", "xsave",
}  # fmt: skip
# What x86-64-v3 is, as /proc/cpuinfo has it; "abm" is LZCNT, and without it that computes something else

_TRITONS = ("3.6.", "3.7.")
"""Where the IR was tried. LLVM ends the process, rather than raise, if it does not understand it."""

_ELF = b"\x7fELF\2\1"  # of 64 bits, the lowest byte first
_PROGBITS, _SYMTAB, _RELA, _NOBITS = 1, 2, 4, 8
_ALLOC = 2
_PC32, _PLT32, _ABSOLUTE = 2, 4, 1
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_PRIVATE, _ANONYMOUS = 0x02, 0x20
_PROT_EXEC = 4


@functools.cache
def supported() -> bool:
    """Whether code for this processor can be made, as far as is known before trying."""
    if os.environ.get(VARIABLE) == "0" or sys.platform != "linux":
        return False
    import triton

    if not triton.__version__.startswith(_TRITONS):
        return False
    return platform.machine() == "x86_64" and _flags() >= _NEEDED


def _flags() -> set[str]:
    try:
        with open("/proc/cpuinfo") as file:
            line = next((line for line in file if line.startswith("flags")), "")
    except OSError:
        return set()
    return set(line.split(":")[-1].split())


def assembled(ir: str) -> bytes:
    """The object file of LLVM IR, which must be right: LLVM ends the process if it cannot parse it.

    Raises RuntimeError if none is made.
    """
    from triton._C.libtriton import llvm

    llvm.init_targets()
    made = llvm.translate_to_asm(ir, _TRIPLE, _PROCESSOR, "", [], False, True)
    if not isinstance(made, bytes) or made[: len(_ELF)] != _ELF:
        raise RuntimeError(f"no object file was made, but {made[:16]!r}")
    return made


def load(made: bytes, names: Sequence[str]) -> list[int] | None:
    """The addresses of functions of an object file, which stays loaded; None if that is refused here.

    Raises ValueError for an object that is not self-contained, or lacks a name.
    """
    (offset,) = struct.unpack_from("<Q", made, 40)
    size, count = struct.unpack_from("<HH", made, 58)
    sections = [_SECTION.unpack_from(made, offset + size * i) for i in range(count)]
    places: dict[int, int] = {}  # of the sections that are loaded, in the memory
    end = 0
    for number, (_, kind, flags, _, _, length, _, _, alignment, _) in enumerate(sections):
        if flags & _ALLOC and kind in (_PROGBITS, _NOBITS) and length:
            places[number] = end = -(-end // max(1, alignment)) * max(1, alignment)
            end += length
    total = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
    base = _libc.mmap(None, total, mmap.PROT_READ | mmap.PROT_WRITE, _PRIVATE | _ANONYMOUS, -1, 0)
    if base in (None, ctypes.c_void_p(-1).value):
        return None
    try:
        addresses = _filled(made, sections, places, base, total)
        if missing := [name for name in names if name not in addresses]:
            raise ValueError(f"the object has no {missing}, only {sorted(addresses)}")
        stays = not _libc.mprotect(base, total, mmap.PROT_READ | _PROT_EXEC)
    except BaseException:
        _libc.munmap(base, total)
        raise
    if not stays:
        _libc.munmap(base, total)
        return None
    return [addresses[name] for name in names]


def _filled(
    made: bytes,
    sections: Sequence[tuple[int, ...]],
    places: dict[int, int],
    base: int,
    total: int,
) -> dict[str, int]:
    """Copy the sections to their places in the memory, relocate them; the addresses of all names."""
    image = memoryview((ctypes.c_char * total).from_address(base)).cast("B")
    for number, place in places.items():
        _, kind, _, _, start, length, *_ = sections[number]
        if kind == _PROGBITS:
            image[place : place + length] = made[start : start + length]
    symbols = _symbols(made, sections)
    for _, kind, _, _, start, length, link, target, _, _ in sections:
        if kind == _RELA and target in places:
            for at in range(start, start + length, _RELOCATION.size):
                _relocate(
                    image, base, places, places[target], symbols[link],
                    _RELOCATION.unpack_from(made, at),
                )  # fmt: skip
    return {
        name: base + places[section] + value
        for table in symbols.values()
        for name, section, value in table
        if name and section in places
    }


def _symbols(
    made: bytes, sections: Sequence[tuple[int, ...]]
) -> dict[int, list[tuple[str, int, int]]]:
    """Of each symbol table by its section's number: names, section numbers and values."""
    tables = {}
    for number, (_, kind, _, _, start, length, link, *_) in enumerate(sections):
        if kind == _SYMTAB:
            text = sections[link][4]
            table = []
            for at in range(start, start + length, _SYMBOL.size):
                name, _, _, section, value, _ = _SYMBOL.unpack_from(made, at)
                stop = made.index(b"\0", text + name)
                table.append((made[text + name : stop].decode(), section, value))
            tables[number] = table
    return tables


def _relocate(
    image: memoryview,
    base: int,
    places: dict[int, int],
    section: int,
    symbols: Sequence[tuple[str, int, int]],
    relocation: tuple[int, int, int],
) -> None:
    offset, info, addend = relocation
    name, defined_in, value = symbols[info >> 32]
    if defined_in not in places:
        raise ValueError(f"the object is not self-contained: it wants {name or 'a section'}")
    kind, at = info & 0xFFFFFFFF, section + offset
    target = base + places[defined_in] + value + addend
    if kind in (_PC32, _PLT32):
        struct.pack_into("<i", image, at, target - (base + at))
    elif kind == _ABSOLUTE:
        struct.pack_into("<Q", image, at, target)
    else:
        raise ValueError(f"the object has a relocation of kind {kind}")

"""PTX that branches by index or calls functions outside its text: ``call (result), name, (arguments);``.

The called functions are code of this process. A device function in :data:`FUNCTIONS` takes numbers and
returns a number or None; threads with the same arguments share a call. A function in :data:`TOGETHER` is
called once for all threads that come to it together, a C function once for each thread.
"""

import ctypes
import re
import struct
from collections.abc import Callable

import numpy as np

from interlace_verify.ptx.instruction import Action, Instruction, Write, builders, split
from interlace_verify.ptx.special import Reader, Threads
from interlace_verify.ptx.types import TYPES, Array, ScalarType

CALLS, builds = builders()
FUNCTIONS: dict[str, Callable[..., int | None]] = {}
TOGETHER: dict[str, Callable[[Threads], None]] = {}
_DIRECTIVE = re.compile(r"%([-+ #0]*[\d.]*)(?:hh|h|(ll|l|z|j|t))?([diouxXeEfFgGcsp%])")


def call_parts(instruction: Instruction) -> tuple[list[str], str, list[str]]:
    """Return the names of the results, the name of the function, and the arguments."""
    first, *rest = [operand.strip() for operand in instruction.operands] or [""]
    results = split(first[1:-1]) if first.startswith("(") else []
    name, *rest = (rest or [""]) if first.startswith("(") else (first, *rest)
    return results, name, split(rest[0].strip("() ")) if rest else []


@builds("call")
def build_call(instruction: Instruction) -> Action:
    instruction.flag("uni")
    results, name, argument_texts = call_parts(instruction)
    if name in instruction.registers:
        raise instruction.error(f"a call by the address in register '{name}' is not known")
    instruction.finish(1, 2, 3)
    if name in TOGETHER:
        return TOGETHER[name]
    function, of_c = FUNCTIONS.get(name), _OF_C.get(name)
    if function is None and (of_c is None or instruction.symbols is None):
        known = FUNCTIONS.keys() | (_OF_C if instruction.symbols is not None else {})
        raise instruction.unknown(f"the function '{name}'", known)
    reads = [_argument(instruction, each) for each in argument_texts]
    writes = [_result(instruction, result) for result in results]

    def call(threads: Threads) -> None:
        numbers = threads.active(threads.numbers).tolist()
        columns = [threads.active(read(threads)).tolist() for read in reads]
        rows = list(zip(*columns, strict=True)) if columns else [()] * len(numbers)
        if function is None:
            assert of_c is not None
            results_by_row = [of_c(threads, n, *row) for n, row in zip(numbers, rows, strict=True)]
        else:
            found = {row: function(*row) for row in dict.fromkeys(rows)}
            results_by_row = [found[row] for row in rows]
        for write, kind in writes:
            write(
                threads, np.array([int(each or 0) & kind.mask for each in results_by_row], kind.raw)
            )

    return call


def _kind(instruction: Instruction, name: str) -> tuple[ScalarType, int | None]:
    """Return the type of an operand, and its offset in a thread's memory if it is not a register."""
    symbol = instruction.symbol(name)
    if symbol is None:
        return TYPES[f"u{instruction.register(name).bits}"], None
    if symbol.space != "param" or symbol.nbytes not in (1, 2, 4, 8):
        raise instruction.error(f"'{name}' cannot be an argument of a call")
    return TYPES[f"u{8 * symbol.nbytes}"], symbol.offset


def _argument(instruction: Instruction, name: str) -> Reader:
    kind, offset = _kind(instruction, name)
    if offset is None:
        return instruction.reader(name, kind)
    return lambda threads: threads.session.local.column(offset, kind)


def _result(instruction: Instruction, name: str) -> tuple[Write, ScalarType]:
    kind, offset = _kind(instruction, name)
    if offset is None:
        return instruction.active_writer(name, kind), kind

    def write(threads: Threads, bits: Array) -> None:
        threads.session.local.column(offset, kind)[threads.everyone()] = bits

    return write, kind


# -- C functions -----------------------------------------------------------------------------------


def _text_at(threads: Threads, address: int) -> str:
    """Return a string of the module. It ends with its memory at the latest."""
    found = threads.session.hooks.memory.at(address)
    if found is None:
        return f"(no string at address {address:#x})"
    return (
        ctypes.string_at(address, found.end - address).partition(b"\0")[0].decode(errors="replace")
    )


def _print(threads: Threads, number: int, format: int, arguments: int) -> int:
    at, count = 0, 0

    def take(match: re.Match[str]) -> str:
        nonlocal at, count
        flags, wide, kind = match.groups()
        if kind == "%":
            return "%"
        size = 8 if wide or kind in "eEfFgGsp" else 4
        at = -(-at // size) * size
        raw = threads.session.local.bytes_of(number, arguments + at, size)
        at, count = at + size, count + 1
        code = (
            "d"
            if kind in "eEfFgG"
            else {4: "i", 8: "q"}[size]
            if kind in "di"
            else {4: "I", 8: "Q"}[size]
        )
        (value,) = struct.unpack("<" + code, raw)
        if kind == "s":
            value = _text_at(threads, value)
        if kind == "c":
            value = chr(value & 0xFF)
        return f"%{flags}{'#x' if kind == 'p' else kind}" % value if kind != "p" else f"{value:#x}"

    print(_DIRECTIVE.sub(take, _text_at(threads, format)), end="")
    return count


def _fail(
    threads: Threads, number: int, message: int, file: int, line: int, where: int, *_: int
) -> None:
    condition, path, function = (_text_at(threads, each) for each in (message, file, where))
    raise AssertionError(f"{path}:{line}, {function}: '{condition}' fails in thread {number}")


_OF_C: dict[str, Callable[..., int | None]] = {"vprintf": _print, "__assertfail": _fail}


@builds("brx")
def build_indexed_branch(instruction: Instruction) -> Action:
    """Build a jump of the machine. Threads branch apart if their indices differ."""
    instruction.flag("uni")
    if not instruction.flag("idx") or instruction.symbols is None:
        raise instruction.unknown(f"instruction '{instruction.opcode}'", ["brx.idx in a kernel"])
    instruction.finish(2)
    read = instruction.reader(instruction.operands[0], TYPES["u32"])

    def branch(threads: Threads) -> None:
        threads.session.branch = read(threads)

    return branch


@builds("bra")
def build_branch(instruction: Instruction) -> Action:
    instruction.flag("uni")
    instruction.finish(1)
    return lambda threads: instruction.target

"""PTX on the memory of a thread (local variables and function parameters) and on kernel parameters.

A thread's own addresses begin at 0. Generic addresses are addresses of this process, so an address of one
thread is not valid in another. No other thread sees this memory: other tasks do not run at an access, and
observers get no report.
"""

from dataclasses import replace

import numpy as np

from interlace_verify.ptx.instruction import Action, Instruction
from interlace_verify.ptx.memory import (
    loading,
    storing,
    take_access,
    take_accessed,
    take_cache_hints,
    take_parts,
    take_plain_ordering,
)
from interlace_verify.ptx.special import Threads
from interlace_verify.ptx.types import TYPES, Array, ScalarType

_ALIGN = 128
_FARTHEST = (1 << 31) - 1
POISON = 0xA5  # the contents of memory before a program writes it


class ThreadMemory:
    """``nbytes`` for each of ``count`` threads, in the order of their numbers."""

    def __init__(self, count: int, nbytes: int) -> None:
        stride = -(-nbytes // _ALIGN) * _ALIGN
        whole = np.full(count * stride + _ALIGN, POISON, np.uint8)
        skipped = -whole.ctypes.data % _ALIGN
        self.nbytes, self.bytes = nbytes, whole[skipped : skipped + count * stride]
        self._rows = self.bytes.reshape(count, stride)
        self.base = np.uint64(self.bytes.ctypes.data)
        self.starts = self.base + np.arange(count, dtype=np.uint64) * np.uint64(stride)

    def has(self, addresses: Array) -> Array:
        """Return which generic addresses are in this memory, of any thread."""
        return addresses - self.base < np.uint64(len(self.bytes))

    def places(
        self, threads: Threads, addresses: Array, kind: ScalarType, instruction: Instruction
    ) -> Array:
        """Return the indices of elements in an array of all memory; each must be in its thread's part."""
        starts, size = threads.active(self.starts), kind.bits // 8
        offsets = (addresses - (starts if addresses.ndim == 1 else starts[:, None])).view(np.int64)
        if offsets.size and (offsets.min() < 0 or offsets.max() + size > self.nbytes):
            where = tuple(np.argwhere((offsets < 0) | (offsets + size > self.nbytes))[0])
            offset = int(offsets[where])
            offset -= (offset > _FARTHEST) << 32  # sums of 32-bit addresses may wrap around
            number = int(threads.active(threads.numbers)[where[0]])
            row = int(addresses[where] - self.base) // self._rows.shape[1]
            other = row != number and self.has(addresses[where])
            whose = (
                f"which is in the memory of thread {row}"
                if other
                else f"which has {self.nbytes} bytes"
            )
            raise ValueError(
                f"PTX: byte {offset} of the local memory of thread {number}, {whose}; "
                f"line {instruction.line}: {instruction.text}"
            )
        return (addresses - self.base) // np.uint64(size)

    def column(self, offset: int, kind: ScalarType) -> Array:
        return self._rows.view(kind.raw)[:, offset // (kind.bits // 8)]

    def bytes_of(self, number: int, address: int, size: int) -> bytes:
        offset = address - int(self.starts[number])
        if not 0 <= offset <= self.nbytes - size:
            raise ValueError(f"PTX: address {address:#x} is not in the memory of thread {number}")
        return bytes(self._rows[number, offset : offset + size])

    def view(self, kind: ScalarType) -> Array:
        return self.bytes.view(kind.raw)


def build_local(instruction: Instruction, *, generic: bool = False) -> Action:
    """Build a load or a store of the running threads' memory."""
    take_plain_ordering(instruction)
    take_cache_hints(instruction)

    def starts(threads: Threads) -> Array:
        return threads.active(threads.session.local.starts)

    window = None if generic else starts
    parts, kind, addresses = take_access(instruction, window=window)

    def get(threads: Threads, where: Array) -> Array:
        memory = threads.session.local
        return memory.view(kind)[memory.places(threads, where, kind, instruction)]

    def put(threads: Threads, where: Array, bits: Array) -> None:
        memory = threads.session.local
        places, memory_words = memory.places(threads, where, kind, instruction), memory.view(kind)
        threads.session.changes += not (memory_words[places] == bits).all()
        memory_words[places] = bits

    if instruction.mnemonic == "ld":
        return loading(instruction, parts, kind, addresses, get)
    return storing(instruction, parts, kind, addresses, put)


def build_parameter(instruction: Instruction) -> Action:
    """Build a load or a store of a function parameter, or a load of a kernel parameter."""
    loads = instruction.mnemonic == "ld"
    inner = (instruction.operands or [""])[-1 if loads else 0]
    name, _, more = inner.strip("[] ").partition("+")
    if instruction.symbol(name) is not None:
        return build_local(instruction)
    if loads and name in instruction.registers:
        return _by_address(instruction)
    if not loads or name not in (instruction.parameters or {}):
        raise instruction.error(f"'{name}' is not a parameter of the kernel")
    vector, kind = take_accessed(instruction)
    instruction.finish(2)
    parts = take_parts(instruction, instruction.operands[0], vector)
    writes = [instruction.writer(part, kind, wider=True) for part in parts]
    offset, size = instruction.literal(more.strip() or "0", TYPES["u32"]) or 0, kind.bits // 8
    if not offset and (instruction.parameters or {})[name] is not TYPES["b8"] and len(parts) == 1:
        (write,) = writes
        return lambda threads: write(threads, threads.session.parameters[name].astype(kind.raw))

    def load(threads: Threads) -> None:
        value = threads.session.parameters[name]
        whole = threads.session.arrays.get(int(value)) or value.tobytes()
        if offset + size * len(parts) > len(whole):
            raise ValueError(f"PTX: byte {offset} of {name}, which has {len(whole)} bytes")
        for write, bits in zip(
            writes, np.frombuffer(whole, kind.raw, len(parts), offset), strict=True
        ):
            write(threads, bits)

    return load


def _by_address(instruction: Instruction) -> Action:
    """Build an access whose register holds an address in the threads' memory or in a kernel parameter."""
    opcode = ".".join([instruction.mnemonic, *instruction.qualifiers])
    local_action, kernels = (
        build(replace(instruction, opcode=opcode, operands=list(instruction.operands)))
        for build in (build_local, build_of_kernel)
    )
    name = instruction.operands[1].strip("[] ").partition("+")[0].strip()
    where = instruction.reader(name, TYPES["u64"])

    def load(threads: Threads) -> None:
        addresses = threads.active(where(threads))
        action = kernels if is_of_kernel(threads, addresses).any() else local_action
        action(threads)

    return load


def is_of_kernel(threads: Threads, addresses: Array) -> Array:
    found = np.zeros(addresses.shape, np.bool_)
    for at, value in threads.session.arrays.items():
        found |= addresses - np.uint64(at) < np.uint64(len(value))
    return found


def build_of_kernel(instruction: Instruction) -> Action:
    """Build a load from array parameters of the kernel by generic addresses."""
    take_plain_ordering(instruction)
    take_cache_hints(instruction)
    parts, kind, addresses = take_access(instruction)

    def get(threads: Threads, where: Array) -> Array:
        flat = [_of_kernel(threads, each, kind) for each in where.ravel().tolist()]
        return np.frombuffer(b"".join(flat), kind.raw).reshape(where.shape)

    return loading(instruction, parts, kind, addresses, get)


def _of_kernel(threads: Threads, address: int, kind: ScalarType) -> bytes:
    for at, value in threads.session.arrays.items():
        if 0 <= address - at <= len(value) - kind.bits // 8:
            return bytes(value[address - at : address - at + kind.bits // 8])
    raise ValueError(f"PTX: address {address:#x} is not in a parameter of the kernel")

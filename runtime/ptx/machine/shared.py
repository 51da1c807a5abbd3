"""PTX on state spaces that only a whole kernel has: parameters and shared memory; copies into the latter.

Shared memory of a program is memory of this process. Observers see its addresses like any others, so a
missing barrier shows. They see the store of an asynchronous copy twice, when it starts and when it ends:
from the one to the other nobody else may use that memory.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from interlace.runtime.ptx.instruction import Action, Instruction, builders
from interlace.runtime.ptx.machine.groups import (
    AsyncGroups,
    build_commit,
    build_wait,
    groups_of,
)
from interlace.runtime.ptx.memory import (
    MEMORY,
    address_of,
    load_of,
    loading,
    pointers_of,
    storing,
    take_cache_hints,
    take_parts,
)
from interlace.runtime.ptx.special import PtxSession, Threads
from interlace.runtime.ptx.types import TYPES, Array, ScalarType

SHARED, builds = builders()
_SPACES = ("shared", "shared::cta")
_TYPES = [name for name in TYPES if name not in ("pred", "f16", "bf16")]


@dataclass(eq=False)
class PtxProgram(PtxSession):
    """What the threads of one program share. ``groups``: asynchronous work by kind."""

    parameters: dict[str, Array] = field(default_factory=dict)
    shared: Any = None
    groups: dict[str, AsyncGroups] = field(default_factory=dict)

    @property
    def base(self) -> int:
        return int(self.shared.ctypes.data)


def take_shared(instruction: Instruction) -> None:
    if instruction.symbols is None or instruction.choose(*_SPACES) is None:
        raise instruction.unknown(f"the state space of '{instruction.opcode}'", _SPACES)


def _touched(
    threads: Threads,
    addresses: Array,
    kind: ScalarType,
    *,
    stores: bool,
    lanes: Array | None = None,
) -> Array:
    """Offsets of ``addresses``, which observers are told of."""
    program: Any = threads.session
    offsets = addresses.astype(np.int64) - program.base
    size = kind.bits // 8
    if offsets.size and (offsets.min() < 0 or offsets.max() + size > len(program.shared)):
        wrong = offsets[(offsets < 0) | (offsets + size > len(program.shared))].flat[0]
        raise ValueError(
            f"PTX: byte {wrong} of shared memory, which has {len(program.shared)} bytes"
        )
    if program.hooks.observed:
        program.hooks.shared(pointers_of(threads, addresses, kind, lanes), stores=stores)
    return offsets


def shared_bits(
    threads: Threads, addresses: Array, kind: ScalarType, lanes: Array | None = None
) -> Array:
    """``lanes``: the threads of ``addresses``' first dimension, if not those that run."""
    offsets = _touched(threads, addresses, kind, stores=False, lanes=lanes)
    return threads.session.shared.view(kind.raw)[offsets // (kind.bits // 8)]


def put_shared(
    threads: Threads, addresses: Array, bits: Array, kind: ScalarType, lanes: Array | None = None
) -> None:
    offsets = _touched(threads, addresses, kind, stores=True, lanes=lanes)
    threads.session.shared.view(kind.raw)[offsets // (kind.bits // 8)] = bits


@builds("ld", "st")
def build_access(instruction: Instruction) -> Action:
    if instruction.choose("param"):
        return _parameter(instruction)
    if instruction.symbols is None or instruction.choose(*_SPACES) is None:
        return MEMORY[instruction.mnemonic](instruction)
    loads = instruction.mnemonic == "ld"
    instruction.choose("weak", "volatile")
    vector = instruction.choose("v2", "v4")
    kind = instruction.take_type(_TYPES)
    instruction.finish(2)
    outer, inner = instruction.operands if loads else instruction.operands[::-1]
    parts = take_parts(instruction, outer, vector)
    at = address_of(instruction, inner, kind, len(parts), shared=True)

    def get(threads: Threads, addresses: Array) -> Array:
        return shared_bits(threads, addresses, kind)

    def put(threads: Threads, addresses: Array, bits: Array) -> None:
        put_shared(threads, addresses, bits, kind)

    if loads:
        return loading(instruction, parts, kind, lambda threads: [at(threads)], get)
    return storing(instruction, parts, kind, lambda threads: [at(threads)], put)


def _parameter(instruction: Instruction) -> Action:
    kind = instruction.take_type(_TYPES)
    instruction.finish(2)
    write = instruction.writer(instruction.operands[0], kind, wider=True)
    name = instruction.operands[1].strip("[] ")
    if name not in (instruction.parameters or {}):
        raise instruction.error(f"'{name}' is not a parameter of the kernel")
    return lambda threads: write(threads, threads.session.parameters[name].astype(kind.raw))


# -- asynchronous copies ---------------------------------------------------------------------------

_WORD = TYPES["b32"]


_load = load_of(_WORD, None, "cta")


@builds("cp")
def build_copy(instruction: Instruction) -> Action:
    if not instruction.flag("async") or instruction.choose("bulk"):
        raise instruction.unknown(f"instruction '{instruction.opcode}'", ["cp.async"])
    if instruction.flag("commit_group"):
        return build_commit(instruction, "cp.async")
    if instruction.flag("wait_group"):
        return build_wait(instruction, "cp.async")
    if instruction.flag("wait_all"):
        instruction.finish(0)

        def wait_all(threads: Threads) -> None:
            groups = groups_of(threads, "cp.async")
            groups.commit(threads)
            groups.wait(threads, 0)

        return wait_all
    return _start(instruction)


def _start(instruction: Instruction) -> Action:
    instruction.choose("ca", "cg")
    take_cache_hints(instruction)
    take_shared(instruction)
    instruction.flag("global")
    instruction.finish(3, 4)
    destination, source, given, *rest = instruction.operands
    size = instruction.literal(given, _WORD)
    if size not in (4, 8, 16):
        raise instruction.error("'cp.async' copies 4, 8 or 16 bytes")
    to = address_of(instruction, destination, _WORD, size // 4, shared=True)
    where = address_of(instruction, source, _WORD, size // 4)
    length = instruction.reader((rest or [str(size)])[0], _WORD)
    words = np.arange(0, size, 4, dtype=np.uint64)

    def start(threads: Threads) -> None:
        count, mask, everyone = len(threads.numbers), threads.mask, threads.everyone()
        lengths = np.broadcast_to(length(threads), count)
        reads = everyone & (lengths == size)
        if (lengths[everyone & ~reads] != 0).any():
            raise instruction.error("a 'cp.async' of a part of its bytes is not known")
        targets, sources = np.zeros(count, np.uint64), np.zeros(count, np.uint64)
        targets[everyone] = to(threads)
        _touched(threads, targets[everyone][:, None] + words, _WORD, stores=True)
        threads.mask = reads  # without a byte to read, an address need not be one
        sources[reads] = where(threads)
        threads.mask = mask

        def perform(threads: Threads) -> None:
            which = threads.everyone()
            for threads.mask in (which & reads, which & ~reads):
                if threads.mask.any():
                    into = targets[threads.mask][:, None] + words
                    bits = np.zeros(into.shape, np.uint32)
                    if reads[threads.mask].all():
                        bits = _load(threads, sources[threads.mask][:, None] + words)
                    put_shared(threads, into, bits, _WORD)

        groups_of(threads, "cp.async").start(threads, perform)

    return start

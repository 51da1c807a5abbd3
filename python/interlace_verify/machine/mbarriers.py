"""PTX on mbarriers: objects in shared memory at which threads and asynchronous copies arrive.

A phase is complete when all expected threads and all announced bytes have arrived; then the next phase
begins. A copy's data arrive at the latest when a thread waits for its mbarrier. A thread that waits by
``try_wait`` is suspended until the phase is complete, as PTX allows; ``test_wait`` does not wait.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from interlace_verify.machine.shared import (
    AsyncWork,
    PtxProgram,
    groups_of,
    put_shared,
    shared_bits,
    take_shared,
)
from interlace_verify.ptx.instruction import Action, Instruction, builders
from interlace_verify.ptx.memory import address_of
from interlace_verify.ptx.special import Reader, Threads
from interlace_verify.ptx.types import PREDICATE, TYPES, Array
from interlace_verify.ptx.waits import MBARRIER_WAIT

MBARRIERS, builds = builders()
AT_ONCE = 1 / 2  # the share of copies that arrive at once
_WORD, _STATE = TYPES["b32"], TYPES["b64"]


@dataclass(eq=False)
class MBarrier:
    """An mbarrier of ``count`` arrivals per phase. ``copies`` are actions that bring ``bytes``."""

    address: int
    count: int
    pending: int
    bytes: int = 0
    phase: int = 0
    copies: list[Callable[[], None]] = field(default_factory=list)

    def arrived(self, program: PtxProgram, count: int = 0) -> None:
        """Note ``count`` arrivals of threads, or the arrival of bytes; complete the phase if it is done."""
        program.changes += 1
        self.pending -= count
        if self.pending < 0:
            raise ValueError(f"PTX: more than {self.count} arrive at an mbarrier in one phase")
        if not self.pending and not self.bytes:
            self.phase, self.pending = self.phase + 1, self.count
            program.hooks.tell("on_phase", self.address)

    def is_over(self, parity: int) -> bool:
        """Return whether the phase of this parity is complete, after doing the copies for it."""
        while self.phase % 2 == parity and self.copies:
            self.copies.pop(0)()
        return self.phase % 2 != parity


def mbarrier_at(threads: Threads, address: int) -> MBarrier:
    found: MBarrier | None = threads.session.mbarriers.get(address)
    if found is None:
        offset = address - threads.session.base
        raise ValueError(f"PTX: byte {offset} of shared memory is not an initialised mbarrier")
    return found


def _mbarriers(threads: Threads, addresses: Array) -> list[MBarrier]:
    """Return the running threads' mbarriers, and report reads: their initialisation must come before."""
    found = [mbarrier_at(threads, each) for each in addresses.tolist()]
    shared_bits(threads, addresses, _STATE)
    return found


@builds("mbarrier")
def build_mbarrier(instruction: Instruction) -> Action:
    builder = _BUILDERS.get(instruction.qualifiers.pop(0) if instruction.qualifiers else "")
    if builder is None:
        known = [f"mbarrier.{name}" for name in _BUILDERS]
        raise instruction.unknown(f"instruction '{instruction.opcode}'", known)
    return builder(instruction)


def _target(instruction: Instruction, index: int = 0) -> Reader:
    take_shared(instruction)
    if not instruction.flag("b64"):
        raise instruction.error(f"'{instruction.opcode}' needs '.b64'")
    return address_of(instruction, instruction.operands[index], _STATE, shared=True)


def _build_init(instruction: Instruction) -> Action:
    at = _target(instruction)
    instruction.finish(2)
    read = instruction.reader(instruction.operands[1], _WORD)

    def init(threads: Threads) -> None:
        addresses, counts = at(threads), threads.active(read(threads))
        put_shared(threads, addresses, counts.astype(np.uint64), _STATE)
        for address, count in zip(addresses.tolist(), counts.tolist(), strict=True):
            threads.session.mbarriers[address] = MBarrier(address, count, count)

    return init


def _build_inval(instruction: Instruction) -> Action:
    at = _target(instruction)
    instruction.finish(1)

    def inval(threads: Threads) -> None:
        addresses = at(threads)
        put_shared(threads, addresses, np.zeros(len(addresses), np.uint64), _STATE)
        for address in addresses.tolist():
            mbarrier_at(threads, address)
            del threads.session.mbarriers[address]

    return inval


def _build_arrival(instruction: Instruction, *, arrives: bool) -> Action:
    expects = not arrives or instruction.flag("expect_tx")
    sem = instruction.choose("release", "relaxed") or "release"
    instruction.choose("cta", "cluster")
    at = _target(instruction, index=int(arrives))
    instruction.finish(*((3,) if arrives and expects else (2, 3)))
    counts_one = len(instruction.operands) == 2 and arrives
    read_count = None if counts_one else instruction.reader(instruction.operands[-1], _WORD)
    put = instruction.active_writer(instruction.operands[0], _STATE) if arrives else None

    def arrive(threads: Threads) -> None:
        program: PtxProgram = threads.session
        mbarriers = _mbarriers(threads, at(threads))
        numbers = threads.active(threads.numbers).tolist()
        counts = (
            [1] * len(numbers)
            if read_count is None
            else threads.active(read_count(threads)).tolist()
        )
        if put is not None:
            put(threads, np.array([each.phase for each in mbarriers], np.uint64))
        for mbarrier, thread, count in zip(mbarriers, numbers, counts, strict=True):
            if expects:
                mbarrier.bytes += count
            if arrives:
                if sem == "release":
                    program.hooks.arrival(mbarrier.address, [thread])
                mbarrier.arrived(program, 1 if expects else count)

    return arrive


def build_arrival_of_copies(instruction: Instruction) -> Action:
    """Build ``cp.async.mbarrier.arrive``: threads arrive when their earlier copies are done."""
    for name in ("async", "mbarrier", "arrive"):
        instruction.flag(name)
    expected = instruction.flag("noinc")
    at = _target(instruction)
    instruction.finish(1)

    def arrive(threads: Threads) -> None:
        program, everyone = threads.session, threads.everyone()
        mbarriers = _mbarriers(threads, at(threads))
        groups = groups_of(threads, "cp.async")
        for mbarrier in {id(each): each for each in mbarriers}.values():
            lanes = everyone.copy()
            lanes[everyone] = [each is mbarrier for each in mbarriers]
            numbers = threads.numbers[lanes]
            if not expected:
                mbarrier.pending += len(numbers)
            arrival = functools.partial(finish, threads, mbarrier, lanes, groups.started())
            if program.draw.random() < AT_ONCE:
                arrival()
            else:
                mbarrier.copies.append(arrival)

    def finish(threads: Threads, mbarrier: MBarrier, those: Array, copies: list[AsyncWork]) -> None:
        groups_of(threads, "cp.async").finish(threads, copies, those)
        numbers = threads.numbers[those]
        threads.session.hooks.arrival(mbarrier.address, numbers)
        mbarrier.arrived(threads.session, len(numbers))

    return arrive


def _build_wait(instruction: Instruction, *, blocks: bool) -> Action:
    """Build a wait for the present phase, by its parity or by the state that ``arrive`` returned."""
    by_parity = instruction.flag("parity")
    acquires = instruction.choose("acquire", "relaxed") != "relaxed"
    instruction.choose("cta", "cluster")
    at = _target(instruction, index=1)
    instruction.finish(3, *((4,) if blocks else ()))
    write = instruction.writer(instruction.operands[0], PREDICATE)
    read = instruction.reader(instruction.operands[2], _WORD if by_parity else _STATE)

    def wait(threads: Threads) -> int | None:
        program: PtxProgram = threads.session
        mbarriers = _mbarriers(threads, at(threads))
        parities = (threads.active(read(threads)) & 1).tolist()
        wanted = {id(m): (m, parity) for m, parity in zip(mbarriers, parities, strict=True)}

        def over() -> bool:
            return all(mbarrier.is_over(parity) for mbarrier, parity in wanted.values())

        if not over() and blocks:
            program.until = over
            return MBARRIER_WAIT
        done = np.array([m.is_over(p) for m, p in zip(mbarriers, parities, strict=True)])
        whole = np.zeros(len(threads.numbers), np.bool_)
        whole[slice(None) if threads.mask is None else threads.mask] = done
        write(threads, whole)
        numbers = threads.active(threads.numbers)
        for mbarrier in {id(m): m for m in mbarriers}.values() if acquires else ():
            lanes = np.array([each is mbarrier for each in mbarriers]) & done
            if lanes.any():
                program.hooks.tell("on_awaited", mbarrier.address, numbers[lanes])
        return None

    return wait


_BUILDERS: dict[str, Callable[[Instruction], Action]] = {
    "init": _build_init,
    "inval": _build_inval,
    "arrive": functools.partial(_build_arrival, arrives=True),
    "expect_tx": functools.partial(_build_arrival, arrives=False),
    "try_wait": functools.partial(_build_wait, blocks=True),
    "test_wait": functools.partial(_build_wait, blocks=False),
}


@builds("mapa")
def build_address_in_cluster(instruction: Instruction) -> Action:
    """Return the address unchanged: a cluster is one program, with rank 0."""
    instruction.flag("shared::cluster")
    kind = instruction.take_type(("u32", "u64"))
    return instruction.computes(lambda address, rank: address, kind, kind, TYPES["u32"])

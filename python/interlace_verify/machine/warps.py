"""PTX that lanes of a warp execute as one: ``shfl``, ``vote``, ``match``, ``redux``, ``elect``.

The last operand is a mask of the lanes that take part. ``machine.py`` waits until all of them have arrived.
Lanes with different masks form separate groups. Registers have the shape (warps, 32) here.
"""

from collections.abc import Callable

import numpy as np

from interlace_verify.ptx.arithmetic import REDUCTIONS
from interlace_verify.ptx.instruction import Action, Instruction, builders
from interlace_verify.ptx.special import WARP, Threads, constant
from interlace_verify.ptx.types import PREDICATE, TYPES, Array, ScalarType

WARPS, builds = builders()
_WORD = TYPES["b32"]
_LANE = np.arange(WARP)
_ONE = np.uint64(1) << _LANE.astype(np.uint64)
_NOBODYS = 0xA5A5A5A5  # the result for lanes that take no part, which PTX leaves undefined
EVERYBODY = constant(np.uint32(0xFFFFFFFF))


def of_warps(threads: Threads, values: Array) -> Array:
    """Return a register, or a scalar for all threads, as (warps, 32)."""
    return np.broadcast_to(values, threads.numbers.shape).reshape(-1, WARP)


def _present_lanes(threads: Threads) -> Array:
    return threads.everyone().reshape(-1, WARP)


def _ballot(lanes: Array) -> Array:
    return (lanes * _ONE).sum(axis=1, dtype=np.uint64).astype(np.uint32)


def complete(step: Instruction, threads: Threads, arrived: Array) -> bool:
    """Return whether all lanes in the member masks of the lanes that are ``arrived`` have arrived."""
    lanes = arrived.reshape(-1, WARP)
    named = of_warps(threads, (step.members or EVERYBODY)(threads))
    wanted = np.bitwise_or.reduce(np.where(lanes, named, np.uint32(0)), axis=1)
    never = (threads.numbers >= threads.block).reshape(-1, WARP)
    return not (wanted & ~_ballot(lanes | never)).any()


def tiles(step: Instruction, threads: Threads, arrived: Array) -> list[Array]:
    """Return the numbers of the threads that are ``arrived``, grouped by warp and member mask."""
    numbers = threads.numbers[arrived]
    named = np.broadcast_to((step.members or EVERYBODY)(threads), arrived.shape)[arrived]
    _check_own(step, numbers, named)
    keys = (numbers.astype(np.uint64) // WARP << np.uint64(32)) | named
    return [numbers[keys == key] for key in np.unique(keys)]


def _check_own(step: Instruction, numbers: Array, named: Array) -> None:
    """Raise an error for a thread whose mask leaves out its own lane; PTX does not define this."""
    missing = numbers[(named >> (numbers % np.uint32(WARP)) & np.uint32(1)) == 0]
    if missing.size:
        raise step.error(f"the member mask of thread {missing[0]} does not include its own lane")


def _by_group(instruction: Instruction, action: Callable[[Threads], None]) -> Action:
    """Return ``action`` for each group of lanes with the same members, which the last operand names."""
    members = instruction.members = instruction.reader(instruction.operands[-1], _WORD)

    def run(threads: Threads) -> None:
        named = members(threads)
        whole = threads.mask
        if np.ndim(named) or named != EVERYBODY(threads):
            _check_own(instruction, threads.active(threads.numbers), threads.active(named))
        if not np.ndim(named) or len(groups := np.unique(threads.active(named))) == 1:
            return action(threads)
        for group in groups:
            threads.mask = (named == group) if whole is None else whole & (named == group)
            action(threads)
        threads.mask = whole
        return None

    return run


def _targets(
    instruction: Instruction, kind: ScalarType
) -> tuple[Callable[..., None], Callable[..., None] | None]:
    """Return writers of the result and of the predicate after a '|', if there is one; for whole warps."""
    names = [each.strip() for each in instruction.operands[0].split("|")]
    writes: list[Callable[..., None]] = [
        instruction.writer(name, of) for name, of in zip(names, (kind, PREDICATE), strict=False)
    ]
    return writes[0], (writes[1] if len(writes) > 1 else None)


_MODES: dict[str, Callable[[Array, Array], Array]] = {
    "idx": lambda by, segment: (_LANE & segment) | (by & ~segment),
    "up": lambda by, segment: _LANE - by,
    "down": lambda by, segment: _LANE + by,
    "bfly": lambda by, segment: _LANE ^ by,
}


@builds("shfl")
def build_shuffle(instruction: Instruction) -> Action:
    instruction.flag("sync")
    mode = instruction.require("the mode", _MODES)
    kind = instruction.take_type(("b32",))
    instruction.finish(5)
    move = _MODES[mode]
    write, tell = _targets(instruction, kind)
    reads = [instruction.reader(operand, kind) for operand in instruction.operands[1:4]]

    def shuffle(threads: Threads) -> None:
        value, by, limits = (of_warps(threads, read(threads)).astype(np.int64) for read in reads)
        segment, clamp = limits >> 8 & 31, limits & 31
        last = (_LANE & segment) | (clamp & ~segment & 31)
        source = move(by & 31, segment)
        inside = source >= last if mode == "up" else source <= last
        source = np.where(inside, source, _LANE)
        moved = np.take_along_axis(value, source, axis=1)
        present = np.take_along_axis(_present_lanes(threads), source, axis=1)
        if not present.all():
            moved = np.where(present, moved, _NOBODYS)
            _tell_of_absent(threads, source, ~present & _present_lanes(threads))
        write(threads, moved.astype(np.uint32).ravel())
        if tell is not None:
            tell(threads, inside.ravel())

    return _by_group(instruction, shuffle)


def _tell_of_absent(threads: Threads, source: Array, absent: Array) -> None:
    """Report lanes that read a lane which takes no part."""
    if absent.any() and threads.session.hooks.observed:
        thread = int(np.flatnonzero(absent)[0])
        lane = int(source.ravel()[thread])
        problem = f"thread {thread} reads lane {lane}, which takes no part"
        count = int(np.count_nonzero(absent))
        threads.session.hooks.left_open("absent lane", "shfl", problem, count=count)


_VOTES = ("ballot", "all", "any", "uni")


@builds("vote")
def build_vote(instruction: Instruction) -> Action:
    instruction.flag("sync")
    form = instruction.require("the mode", _VOTES)
    ballot = form == "ballot"
    kind = instruction.take_type(("b32",) if ballot else ("pred",))
    instruction.finish(3)
    write = instruction.writer(instruction.operands[0], kind)
    read = instruction.reader(instruction.operands[1], PREDICATE)

    def vote(threads: Threads) -> None:
        present = _present_lanes(threads)
        yes = of_warps(threads, read(threads)) & present
        some, unanimous = yes.any(axis=1), (yes == present).all(axis=1)
        found = {"all": unanimous, "any": some, "uni": unanimous | ~some}
        write(threads, np.repeat(_ballot(yes) if ballot else found[form], WARP))

    return _by_group(instruction, vote)


@builds("match")
def build_match(instruction: Instruction) -> Action:
    """Find the lanes that have the same value; with ``.all``, all lanes or none."""
    instruction.flag("sync")
    everybody = instruction.choose("any", "all") == "all"
    kind = instruction.take_type(("b32", "b64"))
    instruction.finish(3)
    write, tell = _targets(instruction, _WORD)
    read = instruction.reader(instruction.operands[1], kind)

    def match(threads: Threads) -> None:
        value, present = of_warps(threads, read(threads)), _present_lanes(threads)
        same = (value[:, :, None] == value[:, None, :]) & present[:, None, :]
        found = (same * _ONE).sum(axis=2, dtype=np.uint64).astype(np.uint32)
        if everybody:
            agree = found == _ballot(present)[:, None]
            found = np.where(agree, found, np.uint32(0))
            if tell is not None:
                tell(threads, agree.ravel())
        write(threads, found.ravel())

    return _by_group(instruction, match)


@builds("activemask")
def build_active_mask(instruction: Instruction) -> Action:
    instruction.take_type(("b32",))
    instruction.finish(1)
    write = instruction.writer(instruction.operands[0], _WORD)
    return lambda threads: write(threads, np.repeat(_ballot(_present_lanes(threads)), WARP))


@builds("elect")
def build_election(instruction: Instruction) -> Action:
    """Elect the lowest lane of those that take part."""
    instruction.flag("sync")
    instruction.finish(2)
    write, tell = _targets(instruction, _WORD)

    def elect(threads: Threads) -> None:
        leader = _present_lanes(threads).argmax(axis=1)
        write(threads, np.repeat(leader.astype(np.uint32), WARP))
        if tell is not None:
            tell(threads, (leader[:, None] == _LANE).ravel())

    return _by_group(instruction, elect)


@builds("redux")
def build_reduction(instruction: Instruction) -> Action:
    instruction.flag("sync")
    name = instruction.choose(*REDUCTIONS)
    magnitude, spreads = instruction.flag("abs"), instruction.flag("NaN")
    kind = instruction.take_type(("u32", "s32", "b32", "f32"))
    instruction.finish(3)
    if name is None or (kind.is_float and name not in ("min", "max")):
        raise instruction.unknown(f"the operation of '{instruction.opcode}'", REDUCTIONS)
    write = instruction.writer(instruction.operands[0], kind)
    read = instruction.numbers(instruction.operands[1], kind)
    reduce = {"min": np.fmin, "max": np.fmax}[name] if kind.is_float else REDUCTIONS[name]
    if spreads:
        reduce = REDUCTIONS[name]

    def reduction(threads: Threads) -> None:
        values, present = of_warps(threads, read(threads)), _present_lanes(threads)
        if magnitude:
            values = np.abs(values)
        totals = np.zeros(len(values), values.dtype)
        for warp in np.flatnonzero(present.any(axis=1)):
            totals[warp] = reduce.reduce(values[warp][present[warp]], dtype=values.dtype)
        write(threads, np.repeat(kind.encode(totals), WARP))

    return _by_group(instruction, reduction)

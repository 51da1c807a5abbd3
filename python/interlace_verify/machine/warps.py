"""PTX that lanes of a warp execute as one: ``shfl``, ``vote``, ``match``, ``redux``, ``elect``.

The last operand is a mask of the lanes that take part. ``machine.py`` waits until all of them have arrived.
Lanes with different masks form separate groups. Registers have the shape (warps, 32) here.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from interlace_verify.ptx.arithmetic import REDUCTIONS
from interlace_verify.ptx.instruction import Action, Instruction, builders
from interlace_verify.ptx.special import WARP, Threads, constant
from interlace_verify.ptx.types import PREDICATE, TYPES, Array

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


# -- forms: a mode, a type, and operands -----------------------------------------------------------

_SOURCES: dict[str, Callable[[Array, Array], Array]] = {
    "idx": lambda by, segment: (_LANE & segment) | (by & ~segment),
    "up": lambda by, segment: _LANE - by,
    "down": lambda by, segment: _LANE + by,
    "bfly": lambda by, segment: _LANE ^ by,
}


def _shuffle(threads: Threads, mode: str, *operands: Array) -> tuple[Array, Array]:
    value, by, limits = (each.astype(np.int64) for each in operands)
    segment, clamp = limits >> 8 & 31, limits & 31
    last = (_LANE & segment) | (clamp & ~segment & 31)
    source = _SOURCES[mode](by & 31, segment)
    inside = source >= last if mode == "up" else source <= last
    source = np.where(inside, source, _LANE)
    moved = np.take_along_axis(value, source, axis=1)
    present = np.take_along_axis(_present_lanes(threads), source, axis=1)
    if not present.all():
        moved = np.where(present, moved, _NOBODYS)
        _tell_of_absent(threads, source, ~present & _present_lanes(threads))
    return moved.astype(np.uint32), inside


def _tell_of_absent(threads: Threads, source: Array, absent: Array) -> None:
    """Report lanes that read a lane which takes no part."""
    if absent.any() and threads.session.hooks.observed:
        thread = int(np.flatnonzero(absent)[0])
        lane = int(source.ravel()[thread])
        problem = f"thread {thread} reads lane {lane}, which takes no part"
        count = int(np.count_nonzero(absent))
        threads.session.hooks.left_open("absent lane", "shfl", problem, count=count)


def _vote(threads: Threads, mode: str, predicate: Array) -> tuple[Array]:
    present = _present_lanes(threads)
    yes = predicate & present
    some, unanimous = yes.any(axis=1), (yes == present).all(axis=1)
    found = {"all": unanimous, "any": some, "uni": unanimous | ~some, "ballot": _ballot(yes)}
    return (found[mode][:, None],)


def _match(threads: Threads, mode: str, value: Array) -> tuple[Array, ...]:
    """Find the lanes that have the same value; with ``.all``, all lanes or none."""
    present = _present_lanes(threads)
    same = (value[:, :, None] == value[:, None, :]) & present[:, None, :]
    found = (same * _ONE).sum(axis=2, dtype=np.uint64).astype(np.uint32)
    if mode != "all":
        return (found,)
    agree = found == _ballot(present)[:, None]
    return np.where(agree, found, np.uint32(0)), agree


def _elect(threads: Threads, mode: str) -> tuple[Array, Array]:
    """Elect the lowest lane of those that take part."""
    leader = _present_lanes(threads).argmax(axis=1)[:, None]
    return leader.astype(np.uint32), leader == _LANE


class LaneForm(NamedTuple):
    """An instruction with operands of ``kinds`` and one of the modes in ``types``, which says its types.

    ``kinds`` begin with the result's kind; "" stands for the instruction's type. ``function`` takes the
    mode and the operands' bits, and returns the result and perhaps a predicate, for lanes or whole warps.
    """

    function: Callable[..., tuple[Array, ...]]
    kinds: tuple[str, ...]
    types: Mapping[str, tuple[str, ...]]


FORMS = {
    "shfl": LaneForm(_shuffle, ("", "", "", ""), dict.fromkeys(_SOURCES, ("b32",))),
    "vote": LaneForm(
        _vote, ("", "pred"), {"ballot": ("b32",), **dict.fromkeys(("all", "any", "uni"), ("pred",))}
    ),
    "match": LaneForm(_match, ("b32", ""), dict.fromkeys(("any", "all"), ("b32", "b64"))),
    "elect": LaneForm(_elect, ("b32",), {}),
}


@builds(*FORMS)
def build_form(instruction: Instruction) -> Action:
    form = FORMS[instruction.mnemonic]
    instruction.flag("sync")
    mode = instruction.require("the mode", form.types) if form.types else ""
    kind = instruction.take_type(form.types[mode]) if form.types else _WORD
    instruction.finish(1 + len(form.kinds))
    result, *kinds = (TYPES[each] if each else kind for each in form.kinds)
    target, *sources = instruction.operands[:-1]
    # after a '|' stands a predicate
    writes = [
        instruction.writer(name.strip(), of)
        for name, of in zip(target.split("|"), (result, PREDICATE), strict=False)
    ]
    reads = [instruction.reader(*source) for source in zip(sources, kinds, strict=True)]

    def run(threads: Threads) -> None:
        operands = [of_warps(threads, read(threads)) for read in reads]
        results = form.function(threads, mode, *operands)
        for write, bits in zip(writes, results, strict=False):
            write(threads, np.broadcast_to(bits, (len(bits), WARP)).ravel())

    return _by_group(instruction, run)


@builds("activemask")
def build_active_mask(instruction: Instruction) -> Action:
    instruction.take_type(("b32",))
    instruction.finish(1)
    write = instruction.writer(instruction.operands[0], _WORD)
    return lambda threads: write(threads, np.repeat(_ballot(_present_lanes(threads)), WARP))


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

"""Reports of the race check: accesses, findings by their cause, and their text.

Detectors report every conflict of two accesses, for each element, program and schedule. Those with the same
cause (:attr:`Finding.cause`), which one change mends, become one finding.
"""

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from interlace.runtime.core.accesses import Numbers
from interlace.runtime.core.errors import SourceText
from interlace.runtime.places.sim.scheduler.allocations import Allocations, byte_of
from interlace_verify.schedule_check.interleaving import Story, in_words

# The kinds of findings and their meanings.
KINDS = {
    "write-read": "a load that is not ordered after the store whose value it needs",
    "write-write": "two stores to the same bytes that are not ordered",
    "read-write": "memory is overwritten while another program may still read it (buffer reuse)",
    "no barrier": "one thread signals or waits, and no barrier orders the other threads with it",
    "weak order": "the signal orders nothing: one side does not release, or the other not acquire",
    "narrow scope": "the scope of an atomic does not include the rank or program it must reach",
    "no proxy fence": "memory is also accessed by TMA, wgmma or a multicast address, without a proxy fence",
    "mixed access": "plain and atomic accesses of the same bytes that are not ordered",
    "out of bounds": "an access outside the allocation that its pointer came from",
    "uninitialised": "a load of memory that was not written since it was allocated",
    "use after free": "an access of memory that has been freed",
    "read-only": "a store to an input that is declared const, or whose elements share memory",
    "misaligned": "an address that is not a multiple of the alignment that the access needs",
    "stale load": "ld.global.nc of memory that is written while its kernel runs may load old values",
    "unfinished copy": "a thread loads the destination of its cp.async without a wait for the copy",
    "absent lane": "a shfl from a lane that takes no part in it: its result is undefined",
    "different values": "threads store different values to one address in one instruction",
}


@dataclass(frozen=True)
class Access:
    """One access: its ``rank``, ``who`` does it (program, stream or user code), its action and its lines.

    ``lines`` are "file.py:12 in function", innermost first. ``step`` is its number in the schedule's story.
    """

    rank: int
    who: str
    what: str
    lines: tuple[SourceText, ...]
    step: int | None = None

    def __str__(self) -> str:
        text = f"rank {self.rank} {self.who} {self.what}"
        return text + (f" at {', called from '.join(self.lines)}" if self.lines else "")


@dataclass(frozen=True)
class FailedSignal:
    """A word that one program wrote after its access and another read before its own, without an order.

    ``memory`` names the allocation, ``offset`` is the word's first byte and ``index`` its number in it;
    ``part``: see :class:`Finding`; ``writers`` is the number of its writers. ``ended``: whether the launch
    of the first access had ended then.
    """

    memory: str
    offset: int
    index: int
    writers: int
    written: Access
    seen: Access
    ended: bool = False
    part: str = ""

    def __str__(self) -> str:
        writers_text = f", one of {self.writers} writers" if self.writers > 1 else ""
        return (
            f"{byte_of(self.memory, self.offset, self.part)}, index {self.index}\n"
            f"  written {self.written}{writers_text}\n  seen    {self.seen}"
        )


WRITTEN = ("weak order", "narrow scope", "mixed access")
"""Kinds that are mended at the line with the order or the scope."""
EITHER, ORDERS = "either order", ("read-write", "write-read")
"""An unordered load and store: one schedule has the load first, another the store."""


@dataclass(frozen=True)
class Extent:
    """The extent of a cause. ``programs`` also counts streams and user code; ``seeds`` found it."""

    elements: int
    programs: int
    ranks: int
    seeds: tuple[int, ...]

    def __str__(self) -> str:
        counts = self.elements, self.programs, self.ranks
        elements, programs, ranks = map(in_words, counts, ("element", "program", "rank"))
        return f"{elements}, {programs} of {ranks}, {in_words(len(self.seeds), 'schedule')}"


@dataclass(frozen=True)
class Finding:
    """One cause: two accesses that conflict. ``first`` came before ``second`` in the schedule of ``seed``.

    ``memory`` names the allocation, ``offset`` is the first byte in it, and ``count`` is the number of
    affected elements of the second access. ``extent`` is the extent of the cause, and ``also`` lists other
    accesses with the same cause. ``kind`` is one of :data:`KINDS`; ``race`` is the kind that the two
    accesses alone would have. ``signal`` should have ordered them; or ``polled`` is the plain load that
    waited for a signal. ``hint`` says what to do, and ``change`` at which lines, each with its callers'
    lines. If a single access is wrong by itself, ``first`` is None, and ``index`` tells how the program
    computed that byte. ``part``: the element of a kernel's argument, if the memory is larger than that,
    like a heap. ``reverse``: the kind in schedules in which the other access comes first, if there are any.
    """

    kind: str
    first: Access | None
    second: Access
    memory: str
    offset: int
    count: int
    seed: int
    race: str = ""
    hint: str = ""
    index: str = ""
    signal: FailedSignal | None = None
    extent: Extent | None = None
    also: tuple[str, ...] = ()
    reverse: str = ""
    polled: Access | None = None
    change: tuple[tuple[SourceText, ...], ...] = ()
    part: str = ""

    @property
    def is_done(self) -> bool:
        """Whether the load's launch ended before the signal, and only a relaxed wait precedes the store.

        PTX allows the store before that wait. GPUs do not store before the wait has ended.
        """
        ended = self.race == "read-write" and self.signal is not None and self.signal.ended
        return ended and self.kind == "weak order"

    @property
    def kinds(self) -> set[str]:
        """Its kind, and its kind in the other order."""
        return {self.kind, self.reverse} - {""}

    @property
    def key(self) -> tuple[object, ...]:
        """A key, equal for the same fault on other ranks, programs and bytes, or at another line nearby."""
        if self.first is None:
            memory = re.sub(r" (of|on) rank \d+| program .*", "", self.memory)
            return (self.kind, self.second.what, self.second.lines, memory)
        functions = tuple(line.rpartition(" ")[2] for line in self.second.lines)
        return (self.race or self.kind, self.first.what, self.first.lines, functions)

    @property
    def cause(self) -> tuple[object, ...]:
        """A key, equal for findings that one change mends: a signal between two lines, or two lines.

        An order or a scope is changed at its own line, whatever the callers are.
        """
        if self.first is None:
            return self.key
        if self.kind in WRITTEN and self.change:
            return (self.kind, *sorted(lines[0] for lines in self.change if lines))
        at = (self.signal.written, self.signal.seen) if self.signal else (self.first, self.second)
        kind = EITHER if self.kind in ORDERS else self.kind
        return (kind, *sorted(access.lines for access in at))

    def __str__(self) -> str:
        race = f" ({self.race} race)" if self.race and self.race != self.kind else ""
        lines = [f"{self.kind}{race}: {KINDS[self.kind]}"]
        if self.first is not None:
            lines.append(f"  first   {self.first}")
        lines.append(f"  {'access' if self.first is None else 'second'}  {self.second}")
        elements = in_words(self.count, "element")
        if self.memory:
            lines.append(f"  on      {byte_of(self.memory, self.offset, self.part)}, {elements}")
        lines += [f"  and     {text}" for text in self.also]
        reverse = f"{self.reverse}, if the second runs before the first" if self.reverse else ""
        facts = (
            ("reverse", reverse),
            ("index", self.index),
            ("signal", self.signal),
            ("change", " and ".join(lines[0] for lines in self.change if lines)),
            ("hint", self.hint),
        )
        lines += [f"  {name:<7} {fact}" for name, fact in (*facts, ("in all", self.extent)) if fact]
        lines.append(f"  seed    {self.seed}; again with races(..., seeds=[{self.seed}])")
        return "\n".join(lines)


@dataclass(frozen=True)
class RaceReport:
    """The result of :func:`interlace.verify.races`. ``events`` counts the checked accesses.

    ``errors`` are exceptions of runs, by seed, as text. ``refusals`` are texts of operations that the
    simulator cannot run, so that a schedule was not checked. ``stories`` tell the schedules with findings.
    ``ordering`` are the lines of atomics and fences in kernels, ``loads`` the lines of loads. ``received``
    are the lines of loads of values that another program wrote since the kernel began. ``superfluous``: if
    nothing was found, the lines of barriers without which nothing would be found either, in programs whose
    threads are known. This holds for each line alone, because one barrier may replace another. ``done``:
    accesses that GPUs order although PTX does not promise it (:attr:`Finding.is_done`).
    """

    world_size: int
    seeds: tuple[int, ...]
    events: int
    findings: tuple[Finding, ...]
    errors: tuple[tuple[int, str], ...] = ()
    launches: tuple[Any, ...] = field(default=(), repr=False, compare=False)
    stories: tuple[Story, ...] = field(default=(), repr=False, compare=False)
    refusals: tuple[tuple[int, str], ...] = ()
    ordering: frozenset[SourceText] = field(default=frozenset(), repr=False, compare=False)
    superfluous: tuple[SourceText, ...] = ()
    loads: frozenset[SourceText] = field(default=frozenset(), repr=False, compare=False)
    received: frozenset[SourceText] = field(default=frozenset(), repr=False, compare=False)
    done: tuple[Finding, ...] = ()

    @property
    def notes(self) -> list[str]:
        """Texts about results that are not findings."""
        barriers = [
            f"superfluous: these schedules have no race without the barrier at {line}, either"
            for line in self.superfluous
        ]
        return barriers + [
            f"weak order: {each.second} is not ordered after {each.first}, whose launch had ended. It "
            f"fails only on a GPU that stores before the wait has ended; to be sure: {each.hint}"
            for each in self.done
        ]

    @property
    def clean(self) -> bool:
        """Whether there is no finding, no run with an error, and no run that could not be checked."""
        return not self.findings and not self.errors and not self.refusals

    def __str__(self) -> str:
        count = len(self.seeds)
        schedules = in_words(count, "schedule")
        head = f"{self.world_size} ranks, {schedules}, {self.events} accesses: "
        if self.clean:
            return "\n".join([head + "no findings", *self.notes])
        parts = [in_words(len(self.findings), "finding")]
        if self.errors:
            parts.append(f"{len(self.errors)} failed")
        if self.refusals:
            parts.append(f"{len(self.refusals)} not checked")
        lines = [head + ", ".join(parts)]
        lines += [str(finding) for finding in self.findings]
        lines += [f"seed {seed}: {text}" for seed, text in self.errors]
        lines += [f"seed {seed} is not checked: {text}" for seed, text in self.refusals]
        return "\n\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "world_size": self.world_size,
            "seeds": list(self.seeds),
            "events": self.events,
            "findings": [asdict(finding) for finding in self.findings],
            "errors": [{"seed": seed, "error": text} for seed, text in self.errors],
            "refusals": [{"seed": seed, "error": text} for seed, text in self.refusals],
            "superfluous": list(self.superfluous),
            "done": [asdict(finding) for finding in self.done],
        }


MOST_ACCESSES = 3  # listed for a cause besides the first two


@dataclass
class Reach:
    """The bytes that conflicts of one kind between some lines affect. ``marks``: bytes, by allocation."""

    size: int = 1
    marks: dict[str, Any] = field(default_factory=dict)
    programs: set[tuple[int, str]] = field(default_factory=set)
    seeds: set[int] = field(default_factory=set)
    accesses: dict[str, None] = field(default_factory=dict)

    def note(self, finding: Finding, bytes_: Numbers, size: int) -> None:
        """Note a conflict like ``finding`` at the offsets ``bytes_``, of elements of ``size`` bytes."""
        self.size = max(self.size, size)
        self.seeds.add(finding.seed)
        for access in filter(None, (finding.first, finding.second)):
            self.programs.add((access.rank, access.who.partition(" of launch ")[0]))
            self.accesses[_kind_of(access)] = None
        where = finding.memory if finding.first else f"{finding.memory}, byte {finding.offset}"
        marks = np.zeros(int(bytes_.max()) + 1, np.bool_)
        marks[bytes_] = True
        self._mark(where, marks)

    def join(self, other: "Reach") -> None:
        self.size = max(self.size, other.size)
        self.programs |= other.programs
        self.seeds |= other.seeds
        self.accesses |= other.accesses
        for memory, marks in other.marks.items():
            self._mark(memory, marks)

    def _mark(self, memory: str, marks: Numbers) -> None:
        longer, shorter = sorted((self.marks.get(memory, marks), marks), key=len, reverse=True)
        self.marks[memory] = longer.copy()
        self.marks[memory][: len(shorter)] |= shorter

    def extent(self) -> Extent:
        elements = sum(-(-int(marks.sum()) // self.size) for marks in self.marks.values())
        ranks = {rank for rank, _ in self.programs}
        return Extent(elements, len(self.programs), len(ranks), tuple(sorted(self.seeds)))


def by_cause(findings: Iterable[Finding], reaches: Mapping[object, Reach]) -> tuple[Finding, ...]:
    """Return the first finding of each cause; ``reaches`` by :attr:`Finding.key`.

    Findings that break a rule come first: a thread that did not wait is ordered with no other.
    """
    first: dict[object, Finding] = {}
    reach: dict[object, Reach] = {}
    reverse: dict[object, str] = {}
    for finding in findings:
        same = ((cause, each) for cause, each in first.items() if _is_part(finding, each))
        larger = ((cause, each) for cause, each in first.items() if _is_part(each, finding))
        cause, known = next(itertools.chain(same, larger), (finding.cause, finding))
        first.setdefault(cause, finding)
        # one is about the signal itself, or asks for more changes
        if bool(known.polled) > bool(finding.polled) or not _is_part(finding, known):
            first[cause] = finding
        if known.kind != finding.kind and known.kind in ORDERS:
            reverse[cause] = finding.kind
        reach.setdefault(cause, Reach()).join(reaches[finding.key])
    also = {cause: _other_accesses(finding, reach[cause]) for cause, finding in first.items()}
    for cause, finding in list(first.items()):
        races = (each for each, race in first.items() if race.first is not None)
        of = next((race for race in races if _too_early(finding, reach[cause], reach[race])), None)
        if of is not None:
            del first[cause]
            also[of] += (f"{finding.kind} if it runs first: {_kind_of(finding.second)}",)
    first_findings = [
        replace(each, extent=reach[at].extent(), also=also[at], reverse=reverse.get(at, ""))
        for at, each in first.items()
    ]
    explained = [each for each in first_findings if each.kind != each.race]
    perhaps = "; a finding above may also be the cause of this one" if explained else ""
    bare = [
        replace(each, hint=each.hint + perhaps) for each in first_findings if each.kind == each.race
    ]
    return (*explained, *bare)


def _too_early(finding: Finding, reach: Reach, race: Reach) -> bool:
    """Return whether ``finding`` loads unwritten memory, all of which ``race`` stores."""
    if finding.kind != "uninitialised" or _kind_of(finding.second) not in race.accesses:
        return False
    for where, marks in reach.marks.items():
        stored = race.marks.get(where.rpartition(", byte ")[0], np.zeros(0, np.bool_))
        missing = np.flatnonzero(marks)
        if len(missing) and (missing[-1] >= len(stored) or not stored[missing].all()):
            return False
    return True


def _other_accesses(finding: Finding, reach: Reach) -> tuple[str, ...]:
    shown_kinds = {_kind_of(each) for each in (finding.first, finding.second) if each is not None}
    other_texts = [text for text in reach.accesses if text not in shown_kinds]
    more = len(other_texts) - MOST_ACCESSES
    return (*other_texts[:MOST_ACCESSES], *([f"{more} more"] if more > 0 else []))


def _is_part(finding: Finding, whole: Finding) -> bool:
    """Return whether a change that mends ``whole`` also mends ``finding``."""
    if finding.kind in WRITTEN and whole.kind in WRITTEN:
        same = finding.kind == whole.kind or finding.hint in whole.hint
        return same and {*finding.cause[1:]} <= {*whole.cause[1:]}
    return finding.cause == whole.cause


def _kind_of(access: Access) -> str:
    return f"{access.what} at {', called from '.join(access.lines)}"


def on_more_ranks(finding: Finding, world_size: int) -> Finding:
    return replace(finding, also=(*finding.also, f"on {world_size} ranks"))


def with_names(finding: Finding, memory: Allocations) -> Finding:
    part, signal = memory.part(finding.memory, finding.offset), finding.signal
    if signal is not None:
        signal = replace(signal, part=memory.part(signal.memory, signal.offset))
    return replace(finding, part=part, signal=signal)

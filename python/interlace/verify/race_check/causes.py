"""Findings by their cause: one for what one change mends, with how far it reaches.

Detectors give what conflicts, access by access: every element, program and schedule anew. Here it is
counted, and what has the same cause (:attr:`Finding.cause`) becomes one finding.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from interlace.runtime.places.sim.scheduler.allocations import Allocations
from interlace.verify.race_check.findings import ORDERS, WRITTEN, Access, Extent, Finding

MOST_ACCESSES = 3  # of a cause that are told besides the first two


@dataclass
class Reach:
    """What conflicts of one kind between some lines have touched. ``marks``: bytes, by allocation."""

    size: int = 1
    marks: dict[str, Any] = field(default_factory=dict)
    programs: set[tuple[int, str]] = field(default_factory=set)
    seeds: set[int] = field(default_factory=set)
    accesses: dict[str, None] = field(default_factory=dict)

    def note(self, finding: Finding, bytes_: Any, size: int) -> None:
        """A conflict like ``finding`` at the offsets ``bytes_``, of elements of ``size`` bytes."""
        self.size = max(self.size, size)
        self.seeds.add(finding.seed)
        for access in filter(None, (finding.first, finding.second)):
            self.programs.add((access.rank, access.who.partition(" of launch ")[0]))
            self.accesses[_what(access)] = None
        where = finding.memory if finding.first else f"{finding.memory}, byte {finding.offset}"
        marks = self.marks.get(where, np.zeros(0, np.bool_))
        if (missing := int(bytes_.max()) + 1 - len(marks)) > 0:
            marks = np.concatenate([marks, np.zeros(missing, np.bool_)])
        marks[bytes_] = True
        self.marks[where] = marks

    def join(self, other: "Reach") -> None:
        self.size = max(self.size, other.size)
        self.programs |= other.programs
        self.seeds |= other.seeds
        self.accesses |= other.accesses
        for memory, marks in other.marks.items():
            mine = self.marks.get(memory, marks)
            longer, shorter = sorted((mine, marks), key=len, reverse=True)
            longer = longer.copy()
            longer[: len(shorter)] |= shorter
            self.marks[memory] = longer

    def extent(self) -> Extent:
        elements = sum(-(-int(marks.sum()) // self.size) for marks in self.marks.values())
        ranks = {rank for rank, _ in self.programs}
        return Extent(elements, len(self.programs), len(ranks), tuple(sorted(self.seeds)))


def by_cause(findings: Iterable[Finding], reaches: Mapping[Any, Reach]) -> tuple[Finding, ...]:
    """One finding of each cause, the first; ``reaches`` by :attr:`Finding.key`.

    Those for which a rule is the cause come first: a thread that did not wait is in order with nobody.
    """
    first: dict[Any, Finding] = {}
    reach: dict[Any, Reach] = {}
    reverse: dict[Any, str] = {}
    for finding in findings:
        same = ((cause, each) for cause, each in first.items() if _is_part(finding, each))
        larger = ((cause, each) for cause, each in first.items() if _is_part(each, finding))
        cause, known = next(itertools.chain(same, larger), (finding.cause, finding))
        first.setdefault(cause, finding)
        if _tells_more(finding, known):
            first[cause] = finding
        if known.kind != finding.kind and known.kind in ORDERS:
            reverse[cause] = finding.kind
        reach.setdefault(cause, Reach()).join(reaches[finding.key])
    also = {cause: _others(finding, reach[cause]) for cause, finding in first.items()}
    for cause, finding in list(first.items()):
        races = (each for each, race in first.items() if race.first is not None)
        of = next((each for each in races if _too_early(finding, reach[cause], reach[each])), None)
        if of is not None:
            del first[cause]
            also[of] += (f"{finding.kind} where it runs first: {_what(finding.second)}",)
    told = [
        replace(
            finding,
            extent=reach[cause].extent(),
            also=also[cause],
            reverse=reverse.get(cause, ""),
        )
        for cause, finding in first.items()
    ]
    others = [each for each in told if each.kind != each.race]
    perhaps = "; a finding above may be the cause of this one, too" if others else ""
    bare = [replace(each, hint=each.hint + perhaps) for each in told if each.kind == each.race]
    return (*others, *bare)


def _too_early(finding: Finding, reach: Reach, race: Reach) -> bool:
    """Whether ``finding`` is a load of what nobody has written yet, and all of it is stored in ``race``."""
    if finding.kind != "uninitialised" or _what(finding.second) not in race.accesses:
        return False
    for where, marks in reach.marks.items():
        stored = race.marks.get(where.rpartition(", byte ")[0], np.zeros(0, np.bool_))
        missing = np.flatnonzero(marks)
        if len(missing) and (missing[-1] >= len(stored) or not stored[missing].all()):
            return False
    return True


def _others(finding: Finding, reach: Reach) -> tuple[str, ...]:
    told = {_what(each) for each in (finding.first, finding.second) if each is not None}
    others = [text for text in reach.accesses if text not in told]
    more = len(others) - MOST_ACCESSES
    return (*others[:MOST_ACCESSES], *([f"{more} more"] if more > 0 else []))


def _tells_more(finding: Finding, known: Finding) -> bool:
    """Whether it is the signal's own finding, or there is more to do."""
    return bool(known.polled) > bool(finding.polled) or not _is_part(finding, known)


def _is_part(finding: Finding, whole: Finding) -> bool:
    """Whether what mends ``whole`` mends ``finding``, too; of words in lines it may be some of several."""
    if finding.kind in WRITTEN and whole.kind in WRITTEN:
        same = finding.kind == whole.kind or finding.hint in whole.hint
        return same and {*finding.cause[1:]} <= {*whole.cause[1:]}
    return finding.cause == whole.cause


def _what(access: Access) -> str:
    return f"{access.what} at {', called from '.join(access.lines)}"


def on_more_ranks(finding: Finding, world_size: int) -> Finding:
    """``finding``, which has been made on so many ranks, too."""
    return replace(finding, also=(*finding.also, f"on {world_size} ranks"))


def named(finding: Finding, memory: Allocations) -> Finding:
    """``finding`` with the names of the parts of ``memory``, the run's."""
    part, signal = memory.part(finding.memory, finding.offset), finding.signal
    if signal is not None:
        signal = replace(signal, part=memory.part(signal.memory, signal.offset))
    return replace(finding, part=part, signal=signal)

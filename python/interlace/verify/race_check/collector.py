"""Accesses of a run by number, its signals, and all that a detector has found in it."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from interlace.runtime.core.errors import SourceText
from interlace.runtime.scheduler.observer import Observer
from interlace.verify.race_check.agents import Agent
from interlace.verify.race_check.causes import Reach
from interlace.verify.race_check.findings import Access, FailedSignal, Finding
from interlace.verify.race_check.shadow import Conflict, Index, ShadowMemory, ShadowSegment
from interlace.verify.race_check.signals import SignalLog


class Collector(Observer):
    """``found``: the first finding of each :attr:`Finding.key`; ``reaches``: how far each goes.

    With ``asked`` it is only to say which of these keys it finds, and is ``done`` when it has them all.
    """

    _acting: Agent

    def __init__(self, seed: int, asked: Iterable[tuple[Any, ...]] | None = None) -> None:
        self.seed = seed
        self._missing = None if asked is None else set(asked)
        self._memory = ShadowMemory()
        self._owners: list[Agent] = []  # by component
        self._sites: dict[Access, int] = {}
        self._accesses: list[Access] = []  # by the number of the site
        self._signals = SignalLog()
        self.found: dict[tuple[Any, ...], Finding] = {}
        self.reaches: dict[tuple[Any, ...], Reach] = {}

    @property
    def done(self) -> bool:
        return self._missing == set()

    def _site(self, agent: Agent, what: str, lines: tuple[SourceText, ...]) -> int:
        """The number of an access, which stands for it in the shadow memory."""
        access = self._access_of(agent, what, lines)
        if access not in self._sites:
            self._sites[access] = len(self._accesses)
            self._accesses.append(access)
        return self._sites[access]

    def _access_of(self, agent: Agent, what: str, lines: tuple[SourceText, ...]) -> Access:
        return Access(agent.rank, agent.who, what, lines)

    def _report(
        self, kind: str, conflicts: Iterable[Conflict], site: int, segment: ShadowSegment, size: int
    ) -> None:
        for conflict in conflicts:
            offsets = segment.bytes_of(conflict.cells)
            count = segment.elements(int(offsets[0]), len(conflict.cells), size)
            where = segment.label, int(offsets[0]), count, self.seed
            first, second = self._accesses[conflict.site], self._accesses[site]
            self._found(Finding(kind, first, second, *where, kind), offsets, size, conflict)

    def _unwritten(self, segment: ShadowSegment, cells: Index, site: int, size: int) -> None:
        """Report a load of what nobody has written, if it is."""
        if len(unwritten := segment.unwritten(cells)):
            offsets = segment.bytes_of(unwritten)
            first = int(offsets[0])
            where = segment.label, first, segment.elements(first, len(unwritten), size), self.seed
            access, index = self._accesses[site], str(first // size)
            finding = Finding("uninitialised", None, access, *where, index=index)
            self._found(finding, offsets, size)

    def _found(
        self, finding: Finding, offsets: Any, size: int, conflict: Conflict | None = None
    ) -> None:
        key = finding.key
        if key not in self.found:
            signal = None if conflict is None else self._signal(conflict)
            self.found[key] = replace(finding, signal=signal)
            if self._missing is not None:
                self._missing.discard(key)
        self.reaches.setdefault(key, Reach()).note(finding, offsets, size)

    def _signal(self, conflict: Conflict) -> FailedSignal | None:
        """The signal that should have ordered the present access behind that of ``conflict``."""
        first = self._owners[conflict.component]
        seen = self._signals.between(first, conflict.component, conflict.time, self._acting)
        segment = None if seen is None else self._memory.at(seen.address)
        if seen is None or segment is None:
            return None
        offset = seen.address - segment.base
        writers = self._signals.writers(seen.address)
        accesses = self._accesses[seen.written], self._accesses[seen.seen]
        return FailedSignal(segment.label, offset, offset // seen.size, writers, *accesses)

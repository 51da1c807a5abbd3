"""Signals of a run: which words programs have written for each other, and who has seen which.

For the report of a race: between two accesses that nothing orders there often is a signal that was meant
to, and the finding names it.
"""

from typing import Any, NamedTuple

from interlace.verify.race_check.agents import Agent


class Seen(NamedTuple):
    """A word at ``address``, written at one site and seen at another.

    ``time``: of the writer then; ``known``: what it knew of everybody's.
    """

    address: int
    size: int
    written: int
    seen: int
    time: tuple[int, int]
    known: Any

    def is_behind(self, component: int, time: int) -> bool:
        """Whether the writer, another one, knew of what ``component`` did at ``time``."""
        return component < len(self.known) and time <= self.known[component]


class SignalLog:
    """What agents have written with atomics, and what others have read of it, the last of each pair."""

    def __init__(self) -> None:
        self._written: dict[int, dict[int, tuple[int, tuple[int, int], Any]]] = {}
        self._seen: dict[tuple[int, int], Seen] = {}
        self._by_rank: dict[tuple[int, int], Seen] = {}
        self._polled: dict[tuple[int, int], tuple[int, int]] = {}

    def note(self, agent: Agent, word: tuple[int, int], site: int, *, writes: bool) -> None:
        """``agent`` has read, and perhaps written, the ``word``: its address, its size."""
        address, size = word
        by_writer = self._written.setdefault(address, {})
        for writer, written in by_writer.items():
            if writer != agent.number:
                seen = Seen(address, size, written[0], site, *written[1:])
                self._seen[agent.number, writer] = self._by_rank[agent.rank, writer] = seen
        if writes:
            by_writer[agent.number] = site, agent.now(), agent.clock.copy()

    def note_poll(self, agent: Agent, writer: Agent, time: int, site: int) -> None:
        """``agent`` has loaded, without an order, a word that ``writer`` has written at ``time``."""
        self._polled[agent.number, writer.number] = site, time

    def polled(self, first: Agent, time: int, second: Agent) -> int | None:
        """The site at which ``second`` has so looked for what ``first`` wrote behind its access."""
        site, written = self._polled.get((second.number, first.number), (None, 0))
        return site if time <= written else None

    def between(self, first: Agent, component: int, time: int, second: Agent) -> Seen | None:
        """The last signal that ``first`` wrote behind its access, at ``time``, and ``second`` has seen.

        Or another one of its rank, for which it may have waited; or that somebody wrote for whom ``first``
        comes before, as for a kernel what its stream did.
        """
        by_rank = self._by_rank.get((second.rank, first.number))
        seen = self._seen.get((second.number, first.number), by_rank)
        if first is second:
            return None
        if seen is not None:
            lanes, thread = seen.time
            return seen if time <= (thread if component == first.thread else lanes) else None
        others = (each for (reader, _), each in self._seen.items() if reader == second.number)
        return next((each for each in others if each.is_behind(component, time)), None)

    def writers(self, address: int) -> int:
        """How many have written the word."""
        return len(self._written[address])

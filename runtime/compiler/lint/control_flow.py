"""Control flow of a list of instructions: the successors of each, and the order between them.

A graph over indices; ``ptx.py`` builds one from text. "Reaches" means along some path. "Before" means along
some path within one round of every loop, without back edges. So a load inside a loop is not before the wait
at the loop's top, but a load in front of the loop is.
"""

import functools
from collections.abc import Callable, Iterable, Sequence


class Flow:
    """The graph of ``successors``: for each instruction, those that may run directly after it."""

    def __init__(self, successors: Sequence[Sequence[int]]) -> None:
        self._next = successors
        self._back, order = _depth_first(successors)
        self.order = order[::-1]  # each before its successors, except along back edges
        self.loops = self._natural_loops()  # by the first instruction, inner loops included

    @functools.cached_property
    def _later(self) -> list[int]:
        later = [0] * len(self._next)
        for index in self.order[::-1]:
            for after in self._next[index]:
                if (index, after) not in self._back:
                    later[index] |= later[after] | 1 << after
        return later

    def following(self, index: int) -> Sequence[int]:
        """Return the instructions that may run directly after ``index``."""
        return self._next[index]

    def before(self, first: int, second: int) -> bool:
        """Return whether ``second`` may run after ``first`` in the same round of every loop."""
        return bool(self._later[first] >> second & 1)

    def reach(self, starts: Iterable[int], stop: Callable[[int], bool]) -> set[int]:
        """Return the indices that may run after any of ``starts``, up to but not including a ``stop``."""
        todo = [after for start in starts for after in self._next[start]]
        seen: set[int] = set()
        while todo:
            index = todo.pop()
            if index not in seen and not stop(index):
                seen.add(index)
                todo.extend(self._next[index])
        return seen

    def loop(self, index: int) -> set[int]:
        """Return the instructions of the innermost loop around ``index``; empty outside loops."""
        return min((body for body in self.loops.values() if index in body), key=len, default=set())

    def exits(self, loop: set[int]) -> list[int]:
        return sorted(i for i in loop if any(after not in loop for after in self._next[i]))

    def last(self, first: int) -> int:
        """Return the last instruction that jumps back to ``first``, the beginning of a loop."""
        return max(i for i in self.loops[first] if first in self._next[i])

    def _natural_loops(self) -> dict[int, set[int]]:
        before: list[list[int]] = [[] for _ in self._next]
        for index, following in enumerate(self._next):
            for after in following:
                before[after].append(index)
        bodies: dict[int, set[int]] = {}
        for end, head in self._back:
            body = bodies.setdefault(head, {head})
            todo = [end]
            while todo:
                index = todo.pop()
                if index not in body:
                    body.add(index)
                    todo.extend(before[index])
        return bodies


def _depth_first(successors: Sequence[Sequence[int]]) -> tuple[set[tuple[int, int]], list[int]]:
    """Return the back edges, and all indices in postorder (each after its successors)."""
    back: set[tuple[int, int]] = set()
    order: list[int] = []
    on_path: set[int] = set()
    seen: set[int] = set()
    path = [(-1, iter(range(len(successors))))]  # a virtual entry, from which all are roots
    while path:
        index, rest = path[-1]
        follower = next(rest, None)
        if follower is None:
            path.pop()
            on_path.discard(index)
            order.append(index)
        elif follower in on_path:
            back.add((index, follower))
        elif follower not in seen:
            seen.add(follower)
            on_path.add(follower)
            path.append((follower, iter(successors[follower])))
    return back, order[:-1]

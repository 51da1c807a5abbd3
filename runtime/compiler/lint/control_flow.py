"""Control flow of a list of instructions: what can run after what.

A pure graph over indices; ``ptx.py`` makes one of text. "Reaches" means along some path. "Before" means
along some path within one round of every loop: back edges are left out, so a load in a loop is not
before the wait at the top of it, but a load in front of the loop is.
"""

from collections.abc import Callable, Iterable, Sequence


class Flow:
    """The graph of ``successors``: for each instruction, those that may run directly after it."""

    def __init__(self, successors: Sequence[Sequence[int]]) -> None:
        self._next = successors
        back, order = _depth_first(successors)
        self.order = order[::-1]  # each before what follows, but for what comes by a back edge
        self._later = [0] * len(successors)  # bit sets of instructions
        for index in order:
            for after in successors[index]:
                if (index, after) not in back:
                    self._later[index] |= self._later[after] | 1 << after
        self.loops = self._natural_loops(back)  # by the first instruction, inner loops included

    def following(self, index: int) -> Sequence[int]:
        """What may run directly after ``index``."""
        return self._next[index]

    def before(self, first: int, second: int) -> bool:
        """Whether ``second`` may run after ``first`` in the same round of every loop."""
        return bool(self._later[first] >> second & 1)

    def reach(self, starts: Iterable[int], stop: Callable[[int], bool]) -> set[int]:
        """Indices of what may run after any of ``starts``, up to and without those where ``stop`` holds."""
        todo = [after for start in starts for after in self._next[start]]
        seen: set[int] = set()
        while todo:
            index = todo.pop()
            if index not in seen and not stop(index):
                seen.add(index)
                todo.extend(self._next[index])
        return seen

    def loop(self, index: int) -> set[int]:
        """The instructions of the innermost loop around ``index``; empty outside of loops."""
        return min((body for body in self.loops.values() if index in body), key=len, default=set())

    def exits(self, loop: set[int]) -> list[int]:
        return sorted(i for i in loop if any(after not in loop for after in self._next[i]))

    def last(self, first: int) -> int:
        """The last instruction that goes back to ``first``, with which a loop begins."""
        return max(i for i in self.loops[first] if first in self._next[i])

    def _natural_loops(self, back: set[tuple[int, int]]) -> dict[int, set[int]]:
        before: list[list[int]] = [[] for _ in self._next]
        for index, following in enumerate(self._next):
            for after in following:
                before[after].append(index)
        bodies: dict[int, set[int]] = {}
        for end, head in back:
            body = bodies.setdefault(head, {head})
            todo = [end]
            while todo:
                index = todo.pop()
                if index not in body:
                    body.add(index)
                    todo.extend(before[index])
        return bodies


def _depth_first(successors: Sequence[Sequence[int]]) -> tuple[set[tuple[int, int]], list[int]]:
    """Edges back to what is on the path from the entry, and all indices, each after its followers."""
    back: set[tuple[int, int]] = set()
    order: list[int] = []
    on_path: set[int] = set()
    seen: set[int] = set()
    path = [(-1, iter(range(len(successors))))]  # from outside, where all are roots
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

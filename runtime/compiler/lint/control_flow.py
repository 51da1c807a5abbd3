"""Control flow of a list of instructions: what can run after what.

A pure graph over indices; ``ptx.py`` makes one of text. "Reaches" means along some path. "Before" means
along some path within one round of every loop: back edges are left out, so a load in a loop is not
before the wait at the top of it, but a load in front of the loop is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


class Flow:
    """The graph of ``successors``: for each instruction, those that may run directly after it."""

    def __init__(self, successors: Sequence[Sequence[int]]) -> None:
        self._next = successors
        self._block, self._blocks = _blocks(successors)
        self._followers = [
            [self._block[i] for i in successors[block[-1]]] for block in self._blocks
        ]
        self._back, order = _depth_first(self._followers)
        self._later = [0] * len(self._blocks)  # bit sets of blocks
        for block in order:
            for follower in self._followers[block]:
                if (block, follower) not in self._back:
                    self._later[block] |= self._later[follower] | 1 << follower
        self._loops = self._natural_loops()

    def before(self, first: int, second: int) -> bool:
        """Whether ``second`` may run after ``first`` in the same round of every loop."""
        block, other = self._block[first], self._block[second]
        return first < second if block == other else bool(self._later[block] >> other & 1)

    def reach(self, starts: Iterable[int], stop: Callable[[int], bool]) -> set[int]:
        """What may run after any of ``starts``, up to and without those where ``stop`` holds."""
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
        around = [body for body in self._loops if self._block[index] in body]
        body = min(around, key=len, default=set())
        return {i for block in body for i in self._blocks[block]}

    def exits(self, loop: set[int]) -> list[int]:
        """The branches by which ``loop`` may be left."""
        return sorted(i for i in loop if any(after not in loop for after in self._next[i]))

    def _natural_loops(self) -> list[set[int]]:
        before: list[list[int]] = [[] for _ in self._blocks]
        for block, followers in enumerate(self._followers):
            for follower in followers:
                before[follower].append(block)
        bodies: dict[int, set[int]] = {}
        for end, head in self._back:
            body = bodies.setdefault(head, {head})
            todo = [end]
            while todo:
                block = todo.pop()
                if block not in body:
                    body.add(block)
                    todo.extend(before[block])
        return list(bodies.values())


def _blocks(successors: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Number of each instruction's straight-line block, and the instructions of each block."""
    inward = [0] * len(successors)
    for following in successors:
        for index in following:
            inward[index] += 1
    number: list[int] = []
    blocks: list[list[int]] = []
    for index in range(len(successors)):
        straight = index > 0 and list(successors[index - 1]) == [index] and inward[index] == 1
        if not straight:
            blocks.append([])
        blocks[-1].append(index)
        number.append(len(blocks) - 1)
    return number, blocks


def _depth_first(followers: Sequence[Sequence[int]]) -> tuple[set[tuple[int, int]], list[int]]:
    """Edges back to a block on the path from the entry, and all blocks, each after its followers."""
    back: set[tuple[int, int]] = set()
    order: list[int] = []
    open_blocks: set[int] = set()
    seen: set[int] = set()
    for root in range(len(followers)):
        if root in seen:
            continue
        seen.add(root)
        open_blocks.add(root)
        path = [(root, iter(followers[root]))]
        while path:
            block, rest = path[-1]
            for follower in rest:
                if follower in open_blocks:
                    back.add((block, follower))
                elif follower not in seen:
                    seen.add(follower)
                    open_blocks.add(follower)
                    path.append((follower, iter(followers[follower])))
                    break
            else:
                path.pop()
                open_blocks.discard(block)
                order.append(block)
    return back, order

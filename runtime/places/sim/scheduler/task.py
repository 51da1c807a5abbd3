"""Tasks, which the scheduler runs, and the place of a program's task in its launch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from interlace.runtime.core.errors import BlockedWait


@dataclass
class Program:
    """Where a task stands in a launch: the ``index``-th program, at ``position`` of ``grid``.

    ``threads``: how many it has, where accesses say which of them they are by; else 0.
    """

    kernel: str
    op: str
    index: int
    position: tuple[int, int, int]
    grid: tuple[int, int, int]
    threads: int = 0


@dataclass(eq=False)
class Task:
    """One coroutine. ``ready`` is None when it can run, else the condition it waits for.

    ``name`` is the same in every schedule; ``number`` counts the rank's tasks of the same ``who``.
    ``owner`` is the stream that the task works for. ``polls``: it is suspended in a poll, and may give up
    polling if it goes on; ``seen``: what it has polled and read since it changed memory, ``loads``: its
    plain loads since then; ``idled`` at how many points it could have been interrupted meanwhile.
    ``changes`` counts its changes of memory; if ``watched``, ``seen`` has all that it reads, for those who
    say when it waits (``ptx/machine/machine.py``).
    ``known``: what it has polled last, by addresses; ``busy``: steps since it last polled in vain, and
    ``looked``: its changes then.
    ``torch_state``: see ``torch_state.py``.
    """

    rank: int
    who: str
    name: str
    greenlet: Any
    number: int = 0
    program: Program | None = None
    owner: Any = None
    ready: Callable[[], bool] | None = None
    waiting: Callable[[], BlockedWait] | None = None
    polls: bool = False
    seen: list[Any] = field(default_factory=list)
    idled: int = 0
    loads: int = 0
    changes: int = 0
    watched: bool = False
    known: dict[bytes, bytes] = field(default_factory=dict)
    busy: int = 0
    looked: int = 0
    on_finish: Callable[[], None] | None = None
    torch_state: Any = None

    def can_run(self) -> bool:
        return self.ready is None or self.ready()

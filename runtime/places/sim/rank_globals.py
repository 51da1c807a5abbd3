"""Globals of modules, per rank: what is one module in this process is one in each process of a job.

A rank that goes on finds its modules' names, and the dictionaries, lists and sets that they hold, as it
has left them; it begins with what they were before the run, and so they are again after it. So caches,
workspaces and counters of a file are each rank's own, as where a rank is a process, and no run finds those
of the one before.

What is exchanged are contents: a dictionary stays the same object, whoever refers to it. Found are module
globals, attributes of classes and of objects whose class is of one of the modules, defaults and attributes
of functions, and what is in these. ``functools.cache`` keeps its results where nobody can reach: each
rank gets such functions anew, and locks. Not found: variables of closures, and modules imported during
a run.
"""

import functools
import sys
import threading
from collections import deque
from collections.abc import Sequence
from types import FunctionType, ModuleType
from typing import Any

from interlace.runtime.compat.triton_interpreter import triton_interpreter

_CACHED = type(functools.lru_cache(lambda: None))
_OF_PROCESSES: dict[Any, Any] = {
    type(make()): make for make in (threading.Lock, threading.RLock, threading.local)
}
_CONTAINERS = (dict, list, set, deque)


class RankGlobals:
    """The contents of all that ``modules`` hold, and of ``more``, by rank; the caller's under None."""

    def __init__(self, modules: Sequence[ModuleType], more: Sequence[Any] = ()) -> None:
        self._cells = _found(modules, more)
        self._kept: dict[int | None, list[Any]] = {}
        self._rank: int | None = None

    def turn_to(self, rank: int | None) -> None:
        if rank == self._rank or not self._cells:
            return
        self._kept[self._rank] = [_content(cell) for cell in self._cells]
        self._rank = rank
        if rank not in self._kept:
            self._kept[rank] = _anew(self._kept[None])
        for cell, content in zip(self._cells, self._kept[rank], strict=True):
            _put(cell, content)


def _found(modules: Sequence[ModuleType], more: Sequence[Any]) -> list[Any]:
    """Everything with contents that ``modules`` hold, and that ``more`` is."""
    names = {module.__name__ for module in modules}
    cells: dict[int, Any] = {id(sys.modules): None}  # which is nobody's own
    waiting: list[Any] = [*more, *modules]
    while waiting:
        each = waiting.pop()
        if id(each) in cells:
            continue
        kind = each if isinstance(each, (type, FunctionType)) else type(each)
        own = (each.__name__ if isinstance(each, ModuleType) else kind.__module__) in names
        if isinstance(each, FunctionType) and own:
            waiting += [each.__defaults__, each.__kwdefaults__, vars(each)]
        elif isinstance(each, tuple):
            waiting += each
        elif isinstance(each, _CONTAINERS) or (isinstance(each, (type, ModuleType)) and own):
            cells[id(each)] = each
            content = _content(each)
            waiting += content.values() if isinstance(content, dict) else content
        elif own and hasattr(each, "__dict__"):
            waiting.append(vars(each))
    return [cell for cell in cells.values() if cell is not None]


def _content(cell: Any) -> Any:
    if isinstance(cell, (type, ModuleType)):
        return {name: value for name, value in vars(cell).items() if not name.startswith("__")}
    return dict(cell) if isinstance(cell, dict) else list(cell)


def _put(cell: Any, content: Any) -> None:
    if isinstance(cell, (type, ModuleType)):
        now = _content(cell)
        for name in now.keys() - content.keys():
            if vars(triton_interpreter).get(name) is not now[name]:  # which kernels bring there
                delattr(cell, name)
        for name, value in content.items():
            if name not in now or now[name] is not value:
                setattr(cell, name, value)
        return
    cell.clear()
    (cell.update if isinstance(cell, (dict, set)) else cell.extend)(content)


def _anew(contents: list[Any]) -> list[Any]:
    """Contents for a rank that begins, with functions of ``functools.cache`` that remember nothing.

    Locks, too: ranks share a thread, and one that gives way within would hold it against all.
    """

    @functools.cache
    def forgetful(cached: Any) -> Any:
        if type(cached) in _OF_PROCESSES:
            return _OF_PROCESSES[type(cached)]()
        options = cached.cache_parameters()
        return functools.update_wrapper(
            functools.lru_cache(**options)(cached.__wrapped__), cached.__wrapped__
        )

    def changed(value: Any) -> Any:
        return forgetful(value) if type(value) in (_CACHED, *_OF_PROCESSES) else value

    return [
        {name: changed(value) for name, value in content.items()}
        if isinstance(content, dict)
        else list(content)
        for content in contents
    ]

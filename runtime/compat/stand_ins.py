"""Modules that stand for others, for as long as something is imported or runs."""

import contextlib
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

now: dict[str, str] = {}
"""What stands for what at present, by name: also for processes that import the same files."""


on_simulated_ranks: list[Callable[[], tuple[dict[str, Any], Mapping[str, Any]]]] = []
"""What has which names replaced while simulated ranks run, in one thread by turns."""


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """Within, ranks are simulated."""
    with contextlib.ExitStack() as leaving:
        for names, values in (each() for each in on_simulated_ranks):
            for name, value in values.items():
                put(leaving, names, name, value)
        yield


@contextlib.contextmanager
def installed(modules: Mapping[str, str]) -> Iterator[None]:
    """Let ``import`` find others by these names within: parents first, "" for an empty module."""
    with contextlib.ExitStack() as leaving:
        for real, name in modules.items():
            module = importlib.import_module(name) if name else types.ModuleType(real)
            if not name:
                module.__spec__ = importlib.machinery.ModuleSpec(real, None)
            parent, _, last = real.rpartition(".")
            put(leaving, sys.modules, real, module)
            if parent:
                # `import a.b as c` takes the attribute of a, not the entry of sys.modules
                put(leaving, vars(importlib.import_module(parent)), last, module)
            put(leaving, now, real, name)
        yield


def put(leaving: contextlib.ExitStack, where: dict[str, Any], key: str, value: Any) -> None:
    """Set an entry until ``leaving`` is left."""
    if key in where:
        leaving.callback(where.__setitem__, key, where[key])
    else:
        leaving.callback(where.pop, key, None)
    where[key] = value

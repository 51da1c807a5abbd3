"""``@ranks(2)``: a test whose body runs on every rank, in processes of their own or in one.

The body asserts on its rank, so what fails names the rank. A test of processes is found by its module's
name there: it is imported, not sent, so it must be at the top level of its file.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import interlace


def ranks(world_size: int = 2, *, place: str = "shm", **terms: Any) -> Callable[..., Any]:
    """Run a test's body by ``interlace.run`` on ``world_size`` ranks of ``place``.

    A parameter of the test named ``world_size`` or ``place`` counts instead. Parameters and fixtures are
    sent to processes. ``terms`` are those of ``interlace.run``.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**given: Any) -> None:
            where = given.get("place", place)
            on_rank = functools.partial(_on_rank, body.__module__, body.__qualname__, given)
            interlace.run(on_rank, given.get("world_size", world_size), place=where, **terms)

        test.body = body  # type: ignore[attr-defined]
        return test

    return decorate


def _on_rank(module: str, name: str, given: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).body(**given)

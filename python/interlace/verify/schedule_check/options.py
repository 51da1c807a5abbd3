"""Keyword arguments of checks, for type checkers: a check has its own, and ``**kwargs`` of what it runs.

A call that has only arguments of the function is checked against its parameters, and so is one that has
positional ones of it, and keyword arguments of the check besides. For both kinds of keyword arguments in a
call no type exists: there, ``functools.partial`` takes those of the function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ParamSpec, TypedDict

from interlace.runtime.places.sim.programs.choice import Rewrite

if TYPE_CHECKING:
    from typing_extensions import TypeVarTuple

    Ts = TypeVarTuple("Ts")

P = ParamSpec("P")


class VerificationOptions(TypedDict, total=False):
    """Of :func:`interlace.verify.check`."""

    seeds: int | Iterable[int]
    n: int
    check: Callable[[list[Any]], Any] | None
    deterministic: bool
    workers: int | None
    timeout: float


class RaceOptions(TypedDict, total=False):
    """Of :func:`interlace.verify.races`."""

    seeds: int | Iterable[int]
    store_buffers: bool
    arch: int | None
    rewrite: Rewrite
    timeout: float
    on_seed: Callable[[int], None]


class ScheduleOptions(TypedDict, total=False):
    """Of :func:`interlace.verify.schedules`."""

    n: int
    seeds: int | Iterable[int] | None
    store_buffers: bool
    arch: int | None
    check: Callable[[list[Any]], Any] | None
    deterministic: bool
    workers: int | None
    timeout: float
    shrink: bool
    on_progress: Callable[[int], None]

# Written by tests/stubs.py from the signatures of the functions.
from collections.abc import (
    Callable, Iterable,
)
from interlace.runtime.places.sim.choice import (
    Rewrite,
)
from interlace_verify.check import (
    VerificationError as VerificationError,
)
from interlace_verify.lint_check.check import (
    Fault as Fault, LintReport as LintReport, LintRequest as LintRequest, RULES as RULES,
    lint as lint, lint_many as lint_many,
)
from interlace_verify.machine.compiled import (
    launch_ptx as launch_ptx,
)
from interlace_verify.protocols.explorer import (
    CompareAndSwap as CompareAndSwap, Counterexample as Counterexample, Exploration as Exploration,
    Process as Process, Protocol as Protocol, Publish as Publish, StateLimitError as StateLimitError,
    Wait as Wait, explore as explore, read as read, write as write,
)
from interlace_verify.race_check.findings import (
    Access as Access, Finding as Finding, KINDS as KINDS, RaceReport as RaceReport,
)
from interlace_verify.schedule_check.check import (
    Failure as Failure, ScheduleReport as ScheduleReport, replay as replay,
)
from typing import (
    Any, overload,
)
from typing_extensions import (
    ParamSpec, TypeVarTuple, Unpack,
)

_P = ParamSpec("_P")
_Ts = TypeVarTuple("_Ts")
__all__ = [
    "KINDS", "RULES", "Access", "CompareAndSwap", "Counterexample", "Exploration", "Failure", "Fault",
    "Finding", "LintReport", "LintRequest", "Process", "Protocol", "Publish", "RaceReport",
    "ScheduleReport", "StateLimitError", "VerificationError", "Wait", "check", "explore",
    "launch_ptx", "lint", "lint_many", "races", "read", "replay", "schedules", "write",
]
@overload
def check(fn: Callable[_P, Any], world_size: int, *args: _P.args, **kwargs: _P.kwargs) -> None: ...
@overload
def check(
    fn: Callable[[Unpack[_Ts]], Any], world_size: int, *args: Unpack[_Ts],
    seeds: int | Iterable[int] = ..., n: int = ..., check: Callable[[list[Any]], Any] | None = None,
    deterministic: bool = True, workers: int | None = 1, timeout: float = ...,
) -> None: ...
@overload
def races(
    fn: Callable[_P, object], world_size: int, *args: _P.args, **kwargs: _P.kwargs,
) -> RaceReport: ...
@overload
def races(
    fn: Callable[[Unpack[_Ts]], object], world_size: int, *args: Unpack[_Ts],
    seeds: int | Iterable[int] = ..., store_buffers: bool = False, arch: int | None = None,
    rewrite: Rewrite | None = None, timeout: float = 300.0, on_seed: Callable[[int], None] = ...,
) -> RaceReport: ...
@overload
def schedules(
    fn: Callable[_P, object], world_size: int, *args: _P.args, **kwargs: _P.kwargs,
) -> ScheduleReport: ...
@overload
def schedules(
    fn: Callable[[Unpack[_Ts]], object], world_size: int, *args: Unpack[_Ts], n: int = 1000,
    seeds: int | Iterable[int] | None = None, store_buffers: bool = False, arch: int | None = None,
    check: Callable[[list[Any]], Any] | None = None, deterministic: bool = True,
    workers: int | None = None, timeout: float = ..., shrink: bool = True,
    on_progress: Callable[[int], None] = ...,
) -> ScheduleReport: ...

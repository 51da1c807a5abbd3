"""Lint of compiled kernels: memory ordering, registers, tensor cores, without a GPU.

:func:`lint` compiles a ``@triton.jit`` kernel for a GPU that need not be here, in a worker process, and
reads what the compiler made of it. What it looks for is :data:`RULES`; a finding names the line of the
source. The rules are those of the PTX memory model (PTX ISA, "Memory Consistency Model") as Triton's
lowering of ``tl.atomic_*`` meets it; the races of a protocol are for ``interlace.verify.races``.

A kernel is compiled for one signature, as one launch would. What Triton specialises on, a launch with
other types, alignments or constants may compile to something else: lint what you launch.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from interlace.runtime.compiler.lint.faults import NOWHERE, RULES, Fault, Frame, place, selected
from interlace.runtime.compiler.lint.sass import spilled, too_much_shared
from interlace.runtime.compiler.pool import compile_all
from interlace.runtime.compiler.request import (
    Compilation,
    Measurement,
    definition,
    jitted_function,
    specialised_arguments,
)
from interlace.runtime.core.errors import SourceText
from interlace.runtime.core.launch import KernelLaunch, specialised
from interlace.runtime.tuning.table import BUILDABLE

__all__ = ["RULES", "Fault", "LintReport", "LintRequest", "lint", "lint_many"]

ANY_ARCH = 90

MODELLED = ("narrow scope", "weak poll")
"""Rules that must guess what they cannot know, and that the race check follows exactly where it runs."""
OF_RECEIVED = ("unfenced descriptor load", "early load")
"""Rules about loads of what peers write, which the race check has seen."""


@dataclass(frozen=True, kw_only=True)
class LintReport(Measurement):
    """A compiled kernel's figures, and what is wrong with it.

    ``kernel`` is its name, ``arch`` as 90 for sm_90. ``registers`` are per thread, ``stack`` bytes per
    thread, ``spills`` instructions that access it, ``shared`` bytes of shared memory per program,
    ``tensor_cores`` matrix instructions, or None for a kernel without a dot that could use them.
    ``place`` is where it is defined. ``findings`` are in the order of :data:`RULES`. ``seconds`` is what it
    took to compile and read. ``loops`` are those of the SASS, with what a round of each does: barriers,
    loads in flight.
    """

    kernel: str
    arch: int
    findings: tuple[Fault, ...] = ()
    place: SourceText = NOWHERE

    @property
    def clean(self) -> bool:
        """Whether there is no finding."""
        return not self.findings

    def texts(self) -> tuple[str, ...]:
        """A line for each finding, with the kernel and what it was compiled for."""
        return tuple(f"{self.kernel} for sm_{self.arch}: {fault}" for fault in self.findings)

    def __str__(self) -> str:
        head = f"{self.kernel} for sm_{self.arch}: "
        if self.findings and self.findings[0].rule == "does not compile":
            return head + str(self.findings[0])
        head += (
            f"{self.registers} registers, {self.stack} bytes of stack, {self.spills} spill "
            f"instructions, {self.shared} bytes of shared memory"
        )
        if self.tensor_cores is not None:
            head += f", {self.tensor_cores} tensor-core instructions"
        return "\n".join([head, *(f"  {fault}" for fault in self.findings or ("clean",))])


@dataclass(frozen=True)
class LintRequest:
    """The arguments of one :func:`lint`, for :func:`lint_many`.

    >>> from interlace.kernels.signal import publish_kernel
    >>> LintRequest(publish_kernel, {"slot_byte": "i32"}, arch=100).num_warps
    4
    """

    kernel: Any
    signature: Mapping[str, object]
    constexprs: Mapping[str, object] = field(default_factory=dict)
    arch: int | str = 90
    divisible: Sequence[str] = ()
    num_warps: int = 4
    num_stages: int = 3
    ignore: Sequence[str] = ()


def lint(
    kernel: object,
    signature: Mapping[str, object],
    constexprs: Mapping[str, object] | None = None,
    arch: int | str = 90,
    *,
    divisible: Sequence[str] = (),
    num_warps: int = 4,
    num_stages: int = 3,
    ignore: Sequence[str] = (),
) -> LintReport:
    """Compile ``kernel`` for ``arch`` and look for broken rules in its PTX and SASS. Needs no GPU.

    ``kernel`` is a ``@triton.jit`` function at the top level of a file: it is loaded again in the worker
    process, which compiles also where this one interprets. Guard a script's own work with
    ``if __name__ == "__main__"``, or it runs there up to the first lint.

    ``signature`` maps arguments to Triton's types: "*bf16" a pointer, "i32" a number, "tensordesc<bf16[64,
    64]>" a host descriptor; of an argument that is a ``NamedTuple`` one of types. Constexprs may be left
    out. ``constexprs`` maps names to values (numbers,
    strings, None, ``tl.dtype``); one with a default may be left out. ``divisible`` names the arguments
    that are multiples of 16, pointers: 16-byte aligned. Tensors of torch nearly always are, and a
    launch specialises on it, so name them, or loads are narrower than in the launch, and not
    asynchronous. ``arch`` is 80, 86, 87, 89, 90, 100,
    103, 120 or 121, or "sm_90". ``ignore`` leaves rules out by name.

    A kernel that does not compile is a finding, "does not compile", with the compiler's last lines.
    ``ValueError`` and ``TypeError`` name an argument that is wrong, before anything is compiled.

    >>> from interlace.kernels.arguments import Peers
    >>> from interlace.kernels.signal import publish_kernel
    >>> peers = Peers("*i64", "i32", "i32")
    >>> report = lint(publish_kernel, {"peers": peers, "peer": "i32", "slot_byte": "i32"}, arch=90)
    >>> report.clean, report.spills, report.tensor_cores
    (True, 0, None)
    """
    request = LintRequest(
        kernel, signature, constexprs or {}, arch, divisible, num_warps, num_stages, ignore
    )
    return lint_many([request], workers=1)[0]


def lint_many(
    requests: Sequence[LintRequest],
    *,
    workers: int | None = None,
    on_report: Callable[[LintReport], None] = lambda report: None,
) -> list[LintReport]:
    """:func:`lint` for each of ``requests`` in parallel; reports in the same order.

    ``workers`` is how many processes compile, one per core by default. ``on_report`` is called with each
    report as it is ready, one at a time. All requests are checked before the first is compiled.

    Raises ValueError or TypeError naming an argument that is wrong.

    >>> from interlace.kernels.signal import publish_kernel
    >>> signature = {"peers.rank": "i32", "peer": "i32", "slot_byte": "i32"}
    >>> lint_many([LintRequest(publish_kernel, signature, arch=70)])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: arch ...
    """
    checked = [_checked(request) for request in requests]
    measured = compile_all(
        checked,
        workers=workers,
        on_result=lambda index, result: on_report(_report(checked[index], result)),
    )
    return [_report(request, result) for request, result in zip(checked, measured, strict=True)]


def _report(request: Compilation, measured: Measurement) -> LintReport:
    found = [*measured.faults]
    if measured.error is not None:
        found.append(Fault("does not compile", measured.error, measured.where))
    found += spilled(request.arch, measured.stack, measured.spills)
    found += too_much_shared(request.arch, measured.shared)
    findings = selected(found, request.ignore)
    return LintReport(
        kernel=request.kernel,
        arch=request.arch,
        findings=findings,
        place=definition(request.path, request.kernel),
        **vars(measured),
    )


def _checked(request: LintRequest) -> Compilation:
    """``request`` as a compilation, or the error that it is."""
    function = jitted_function(request.kernel)
    name = function.__name__
    if unknown := [rule for rule in request.ignore if rule not in RULES]:
        raise ValueError(f"ignore: no rule is called {unknown[0]!r}; there are {', '.join(RULES)}")
    if request.num_warps not in (1, 2, 4, 8, 16, 32):
        raise ValueError(f"num_warps of {name} is {request.num_warps}, not a power of 2 up to 32")
    if request.num_stages < 1:
        raise ValueError(f"num_stages of {name} is {request.num_stages}, not at least 1")
    arch, known = str(request.arch).removeprefix("sm_"), [str(each) for each in BUILDABLE]
    if arch not in known:
        raise ValueError(f"arch is {request.arch!r}; kernels are linted for {', '.join(known)}")
    types, constants = specialised_arguments(function, request.signature, request.constexprs)
    typed = [argument for argument in types if argument not in constants]
    for argument in request.divisible:
        if argument not in typed:
            raise ValueError(
                f"divisible names {argument!r}; the arguments of {name} that have a type are "
                f"{', '.join(typed)}"
            )
    return Compilation(
        function.__module__,
        name,
        os.path.abspath(function.__code__.co_filename),
        int(arch),
        types,
        constants,
        tuple(request.divisible),
        request.num_warps,
        request.num_stages,
        tuple(request.ignore),
    )


def settled(
    report: LintReport, ordering: Iterable[SourceText], private: Iterable[SourceText] = ()
) -> LintReport:
    """``report`` without guesses about lines that ran in a race check, which tells what is wrong there.

    Whether a peer uses a signal (``ordering``), whether a load needs what a poll has seen, and whether
    peers write what is loaded (``private``: they do not), is in no compiled code.
    """
    ran = {(rule, _statement(line)) for rule in MODELLED for line in ordering}
    ran |= {(rule, _statement(line)) for rule in OF_RECEIVED for line in private}
    kept = [fault for fault in report.findings if (fault.rule, _statement(fault.where)) not in ran]
    return replace(report, findings=tuple(kept))


def by_cause(reports: Sequence[LintReport]) -> list[LintReport]:
    """``reports`` with each fault once, in the first form of its kernel that has it, and how many do."""
    forms = Counter(
        key for report in reports for key in {_cause(report, f) for f in report.findings}
    )
    told = []
    for report in reports:
        mine = {key: f for f in report.findings if forms[key := _cause(report, f)]}
        others = {key: f" (and in {forms[key] - 1} more forms of it)" for key in mine}
        findings = (
            replace(f, message=f.message + others[k] * (forms[k] > 1)) for k, f in mine.items()
        )
        told.append(replace(report, findings=tuple(findings)))
        forms -= Counter(dict.fromkeys(mine, len(reports)))
    return told


def _cause(report: LintReport, fault: Fault) -> tuple[str, ...]:
    return report.kernel, fault.rule, fault.where or fault.message


def _statement(where: SourceText) -> tuple[str, str]:
    path, line = where.frames[0] if where.frames else ("", 0)
    return os.path.realpath(path), place(Frame(path, line))


def lint_request(launch: KernelLaunch, arch: int, ignore: Sequence[str] = ()) -> LintRequest:
    """Lint what ``launch`` runs, for ``arch``. TypeError, ValueError if it cannot be."""
    types, constexprs, divisible = specialised(launch.kernel, launch.arguments)
    how = launch.num_warps, launch.num_stages, tuple(ignore)
    request = LintRequest(launch.kernel, types, constexprs, arch, divisible, *how)
    _checked(request)
    return request


def specialisation(launch: KernelLaunch) -> str:
    """Equal for launches that Triton compiles to the same code."""
    try:
        request = lint_request(launch, ANY_ARCH)
    except (
        TypeError,
        ValueError,
    ) as error:  # an argument without a type for lint, which says so later
        return f"{launch.kernel.fn.__module__}.{launch.name}: {error}"
    parts = (request.signature, request.constexprs, request.divisible)
    compiled = (*parts, request.num_warps, request.num_stages)
    return f"{launch.kernel.fn.__module__}.{launch.name}: {compiled!r}"

"""Lint of compiled kernels: memory ordering, registers, tensor cores, without a GPU.

The rules follow the PTX memory model (PTX ISA, "Memory Consistency Model") for Triton's lowering of
``tl.atomic_*``. Triton specialises on types, alignments and constants, so another launch may compile to
other code: lint the form that you launch.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from interlace.runtime.compiler.lint.faults import (
    NOWHERE,
    RULES,
    Fault,
    Frame,
    place,
    select_faults,
)
from interlace.runtime.compiler.lint.sass import find_spills, too_much_shared
from interlace.runtime.compiler.pool import compile_all
from interlace.runtime.compiler.request import (
    Compilation,
    Measurement,
    definition,
    jitted_function,
    specialised_arguments,
)
from interlace.runtime.core.errors import SourceText
from interlace.runtime.core.launch import KernelLaunch, specialise
from interlace.runtime.tuning.table import BUILDABLE

__all__ = ["RULES", "Fault", "LintReport", "LintRequest", "lint", "lint_many"]

ANY_ARCH = 90

MODELLED = ("narrow scope", "weak poll")
"""Rules that have to guess. The race check knows the answer for lines that it has run."""
OF_RECEIVED = ("unfenced descriptor load", "early load")
"""Rules about loads of data that peers write; the race check sees these loads."""


@dataclass(frozen=True, kw_only=True)
class LintReport(Measurement):
    """A compiled kernel's figures and its findings.

    ``kernel`` is its name, ``arch`` is 90 for sm_90. ``registers`` and ``stack`` (in bytes) are per thread,
    ``spills`` counts instructions that access the stack, ``shared`` is the bytes of shared memory per
    program. ``tensor_cores`` counts matrix instructions, or is None for a kernel without a dot that could
    use them. ``place`` is the line where the kernel is defined. ``findings`` are in the order of
    :data:`RULES`. ``seconds`` is the time to compile and read. ``loops`` are the loops of the SASS, with
    the barriers and the loads in flight of one iteration.
    """

    kernel: str
    arch: int
    findings: tuple[Fault, ...] = ()
    place: SourceText = NOWHERE

    @property
    def clean(self) -> bool:
        """Whether there are no findings."""
        return not self.findings

    def texts(self) -> tuple[str, ...]:
        """Return a line for each finding, with the kernel and its architecture."""
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

    ``kernel`` is a ``@triton.jit`` function at the top level of a file. The worker process loads it again,
    and compiles it even if this process interprets kernels. Guard a script's main part with
    ``if __name__ == "__main__"``, or the worker runs the script up to the first lint.

    ``signature`` maps arguments to Triton's types: "*bf16" is a pointer, "i32" a number,
    "tensordesc<bf16[64, 64]>" a host descriptor. A ``NamedTuple`` argument takes a ``NamedTuple`` of types.
    Constexprs may be left out. ``constexprs`` maps names to values (numbers, strings, None, ``tl.dtype``);
    constexprs with a default may be left out.

    ``divisible`` names the arguments that are multiples of 16 (pointers: 16-byte aligned). Torch's tensors
    nearly always are, and a launch specialises on it. So name them; otherwise loads are narrower than in
    the launch, and not asynchronous. ``arch`` is 80, 86, 87, 89, 90, 100, 103, 120 or 121, or "sm_90".
    ``ignore`` names rules to leave out.

    A kernel that does not compile is a finding, "does not compile", with the compiler's last lines.
    A wrong argument raises ``ValueError`` or ``TypeError`` with its name, before anything is compiled.

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
    """Run :func:`lint` for each of ``requests`` in parallel; return the reports in the same order.

    ``workers`` is the number of compiling processes, one per core by default. ``on_report`` is called with
    each finished report, one at a time. All requests are checked before the first is compiled.

    Raises ValueError or TypeError with the name of a wrong argument.

    >>> from interlace.kernels.signal import publish_kernel
    >>> signature = {"peers.rank": "i32", "peer": "i32", "slot_byte": "i32"}
    >>> lint_many([LintRequest(publish_kernel, signature, arch=70)])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: arch ...
    """
    checked = [_check_request(request) for request in requests]
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
    found += find_spills(request.arch, measured.stack, measured.spills)
    found += too_much_shared(request.arch, measured.shared)
    findings = select_faults(found, request.ignore)
    return LintReport(
        kernel=request.kernel,
        arch=request.arch,
        findings=findings,
        place=definition(request.path, request.kernel),
        **vars(measured),
    )


def _check_request(request: LintRequest) -> Compilation:
    function = jitted_function(request.kernel)
    name = function.__name__
    if unknown := [rule for rule in request.ignore if rule not in RULES]:
        raise ValueError(f"ignore: {unknown[0]!r} is not a rule; the rules are {', '.join(RULES)}")
    if request.num_warps not in (1, 2, 4, 8, 16, 32):
        raise ValueError(
            f"num_warps of {name} is {request.num_warps}, must be a power of 2 up to 32"
        )
    if request.num_stages < 1:
        raise ValueError(f"num_stages of {name} is {request.num_stages}, must be at least 1")
    arch, known = str(request.arch).removeprefix("sm_"), [str(each) for each in BUILDABLE]
    if arch not in known:
        raise ValueError(f"arch is {request.arch!r}, must be one of {', '.join(known)}")
    types, constants = specialised_arguments(function, request.signature, request.constexprs)
    typed = [argument for argument in types if argument not in constants]
    for argument in request.divisible:
        if argument not in typed:
            raise ValueError(
                f"divisible names {argument!r}, must name arguments of {name} that have a type: "
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


def settle(
    report: LintReport, ordering: Iterable[SourceText], private: Iterable[SourceText] = ()
) -> LintReport:
    """Return ``report`` without guesses about lines that a race check has run; it reports errors there.

    Compiled code does not show whether a peer uses a signal (``ordering``) or whether a load needs the
    value that a poll has seen. Nor does it show whether peers write the loaded memory (not on lines in
    ``private``).
    """
    ran = {(rule, _statement(line)) for rule in MODELLED for line in ordering}
    ran |= {(rule, _statement(line)) for rule in OF_RECEIVED for line in private}
    kept = [fault for fault in report.findings if (fault.rule, _statement(fault.where)) not in ran]
    return replace(report, findings=tuple(kept))


def by_cause(reports: Sequence[LintReport]) -> list[LintReport]:
    """Return ``reports`` with each fault once: in its kernel's first form, with the count of others."""
    forms = Counter(
        key for report in reports for key in {_cause(report, f) for f in report.findings}
    )
    kept_reports = []
    for report in reports:
        first_findings = {key: f for f in report.findings if forms[key := _cause(report, f)]}
        suffixes = {key: f" (and in {forms[key] - 1} more forms of it)" for key in first_findings}
        findings = (
            replace(f, message=f.message + suffixes[k] * (forms[k] > 1))
            for k, f in first_findings.items()
        )
        kept_reports.append(replace(report, findings=tuple(findings)))
        forms -= Counter(dict.fromkeys(first_findings, len(reports)))
    return kept_reports


def _cause(report: LintReport, fault: Fault) -> tuple[str, ...]:
    return report.kernel, fault.rule, fault.where or fault.message


def _statement(where: SourceText) -> tuple[str, str]:
    path, line = where.frames[0] if where.frames else ("", 0)
    return os.path.realpath(path), place(Frame(path, line))


def lint_request(launch: KernelLaunch, arch: int, ignore: Sequence[str] = ()) -> LintRequest:
    """Return the request to lint ``launch`` for ``arch``. Raise TypeError or ValueError if it cannot be."""
    types, constexprs, divisible = specialise(launch.kernel, launch.arguments)
    options = launch.num_warps, launch.num_stages, tuple(ignore)
    request = LintRequest(launch.kernel, types, constexprs, arch, divisible, *options)
    _check_request(request)
    return request


def specialisation(launch: KernelLaunch) -> str:
    """Return equal texts for launches that Triton compiles to the same code."""
    try:
        request = lint_request(launch, ANY_ARCH)
    except (TypeError, ValueError) as error:
        # an argument without a type for lint, which reports it later
        return f"{launch.kernel.fn.__module__}.{launch.name}: {error}"
    parts = (request.signature, request.constexprs, request.divisible)
    compiled = (*parts, request.num_warps, request.num_stages)
    return f"{launch.kernel.fn.__module__}.{launch.name}: {compiled!r}"

"""Check kernels that communicate through symmetric memory, yours or interlace's, without a GPU.

===================  ==============================================================================
:func:`races`        find accesses that are not ordered, by vector clocks over a simulated run
:func:`schedules`    try many interleavings, optionally with late stores; shorten the first failure
:func:`lint`         check the compiled code of a kernel: ordering, registers, tensor cores
:func:`explore`      try every interleaving of a small model of a protocol
:func:`check`        run the first two in a test; raise an error for a finding
:func:`launch_ptx`   launch any PTX on a rank of ``interlace.run(place="ptx")``
===================  ==============================================================================

>>> from interlace import verify
>>> verify.races(lambda: None, 2, seeds=1).clean
True
"""

from interlace_verify.check import VerificationError, check
from interlace_verify.lint_check.check import RULES, Fault, LintReport, LintRequest, lint, lint_many
from interlace_verify.machine.compiled import launch_ptx
from interlace_verify.protocols.explorer import (
    CompareAndSwap,
    Counterexample,
    Exploration,
    Process,
    Protocol,
    Publish,
    StateLimitError,
    Wait,
    explore,
    read,
    write,
)
from interlace_verify.race_check.check import races
from interlace_verify.race_check.findings import KINDS, Access, Finding, RaceReport
from interlace_verify.schedule_check.check import Failure, ScheduleReport, replay, schedules

__all__ = [
    "KINDS",
    "RULES",
    "Access",
    "CompareAndSwap",
    "Counterexample",
    "Exploration",
    "Failure",
    "Fault",
    "Finding",
    "LintReport",
    "LintRequest",
    "Process",
    "Protocol",
    "Publish",
    "RaceReport",
    "ScheduleReport",
    "StateLimitError",
    "VerificationError",
    "Wait",
    "check",
    "explore",
    "launch_ptx",
    "lint",
    "lint_many",
    "races",
    "read",
    "replay",
    "schedules",
    "write",
]

"""Checks of kernels that communicate through symmetric memory: one's own and interlace's, without a GPU.

===================  ==============================================================================
:func:`races`        accesses that nothing orders, by vector clocks over a simulated run
:func:`schedules`    many interleavings, with late stores if wanted; the shortest that fails
:func:`lint`         what the compiler made of a kernel: ordering, registers, tensor cores
:func:`explore`      every interleaving of a small model of a protocol
:func:`check`        the first two, for a test: raises what they find
:func:`launch_ptx`   PTX of any origin, on a rank of ``interlace.run(place="ptx")``
===================  ==============================================================================

>>> from interlace import verify
>>> verify.races(lambda: None, 2, seeds=1).clean
True
"""

from interlace_verify.check import VerificationError, check
from interlace_verify.lint_check.check import RULES, Fault, LintReport, LintRequest, lint, lint_many
from interlace_verify.machine.launch import launch_ptx
from interlace_verify.protocols.explorer import (
    Counterexample,
    Exploration,
    StateLimitError,
    explore,
)
from interlace_verify.protocols.steps import (
    CompareAndSwap,
    Process,
    Protocol,
    Publish,
    Wait,
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

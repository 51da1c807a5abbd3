"""The rules for compiled kernels by name, and a fault as data.

Rules read text that the compiler leaves behind, Triton's IR, PTX and SASS, so they need no GPU. They
are in ``ptx_rules.py``, ``triton_ir.py`` and ``sass.py``; this table is what users see and name in
``ignore``. Names stay as they are: they stand in users' test suites.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from interlace.runtime.core.errors import SourceText

RULES = {
    "does not compile": "The compiler refused the kernel; its last lines are the message.",
    "release without barrier": (
        "Data stores reach a release without a barrier in between. One thread releases, and only its"
        " own stores are ordered. Call tl.debug_barrier() directly before the atomic."
    ),
    "narrow scope": (
        "An acquire, a release or a fence next to a signal, of gpu or cta scope; other ranks need not see"
        ' it. Atomics of tl have scope "gpu" and sem "acq_rel" unless told otherwise. Right for a counter'
        " that only this GPU uses: then ignore it."
    ),
    "weak poll": (
        "A loop polls a signal with a volatile, relaxed or plain load, and loads follow. What was published"
        " before the signal need not be visible to them. Poll with an atomic that acquires. Right where"
        " they need nothing of it: then ignore it."
    ),
    "dropped wait": (
        "The source waits, or acquires, and the SASS does not: the compiler removes a plain"
        " load that only ends its loop, and an acquire whose value nothing uses."
    ),
    "published descriptor store": (
        "A descriptor (TMA) store reaches a release without cp.async.bulk.wait_group 0. Triton waits"
        " until the tile has been read (.read), not until it is written. Use tl.store."
    ),
    "unfenced descriptor load": (
        "A wait reaches a descriptor (TMA) load without fence.proxy.async. TMA reads through another"
        " proxy, which the wait does not order. Right where no peer writes what is loaded: then"
        " ignore it."
    ),
    "early load": (
        "A load that stands after a wait in the source comes before it in the SASS: the"
        " pipeliner has moved it up. Use the value waited for in the load's address, or wait outside"
        " of the loop that is pipelined. Right where no peer writes what is loaded: then ignore it."
    ),
    "weakened by ptxas": (
        "A system-scope acquire or release of the PTX left no instruction of that strength in SASS."
    ),
    "spills": (
        "Registers do not suffice: values live on the stack. Judged on sm_90 and sm_100, which have"
        " wgmma, TMA and tensor memory to save registers."
    ),
    "shared memory": (
        "A program wants more shared memory than an SM gives to one: 163 KiB on sm_80, 227 KiB on sm_90"
        " and sm_100. The launch would be refused. Take fewer stages or smaller tiles."
    ),
    "no tensor cores": (
        "A dot, other than of fp32 in ieee precision or of fp64, was compiled to ordinary"
        " instructions, or a large one of 16-bit or fp8 operands to those of an older architecture or of"
        " wider operands."
    ),
}


NOWHERE = SourceText("")


@dataclass(frozen=True)
class Fault:
    """One broken rule.

    ``rule`` is a name in :data:`RULES`, ``where`` the line of the kernel's source, or empty if the
    compiler left none: ``signal.py:69 in publish, called at transfer.py:124 in push_chunks``.
    """

    rule: str
    message: str
    where: SourceText = NOWHERE

    def __str__(self) -> str:
        return f"{self.where}: {self.rule}: {self.message}" if self.where else self.short()

    def short(self) -> str:
        """The rule and the message, without the place."""
        return f"{self.rule}: {self.message}"


def selected(faults: Iterable[Fault], ignore: Collection[str] = ()) -> tuple[Fault, ...]:
    order = list(RULES)
    kept = [fault for fault in dict.fromkeys(faults) if fault.rule not in ignore]
    return tuple(sorted(kept, key=lambda fault: order.index(fault.rule)))

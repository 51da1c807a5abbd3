"""Build the catalogue: every kernel of interlace, for a GPU that need not be here, with a verdict."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from interlace.runtime.compiler.lint.sass import (
    STRICT_ARCHES as STRICT_ARCHES,
    find_spills,
    too_much_shared,
)
from interlace.runtime.compiler.pool import compile_all
from interlace.runtime.compiler.request import Entry, Measurement

# The only kernels that load data of peers by descriptor. The others wait for room or for sums, and
# their descriptors are of the caller's own operands.
_DESCRIPTORS_OF_PEERS = (
    "all_gather_attention_kernel",
    "all_gather_matmul_kernel",
    "all_gather_matmul_roles_kernel",
    "grouped_matmul_kernel",
    "counted_grouped_matmul_kernel",
)


@dataclass(frozen=True, kw_only=True)
class BuildReport(Measurement):
    name: str
    arch: int
    default: bool

    def problems(self) -> list[str]:
        """The reasons why this fails a build; empty if it does not."""
        if self.error is not None:
            return [f"does not compile: {self.error}"]
        found = [str(fault) for fault in self.faults]
        found += [fault.short() for fault in too_much_shared(self.arch, self.shared)]
        if self.default:
            found += [fault.short() for fault in find_spills(self.arch, self.stack, self.spills)]
        return found


def build(
    entries: Sequence[Entry],
    *,
    artifacts: Sequence[str] = (),
    workers: int | None = None,
    on_report: Callable[[BuildReport], None] = lambda report: None,
) -> list[BuildReport]:
    """Compile ``entries`` in worker processes, one per core by default; return reports in the same order.

    With ``artifacts``, one path per entry, the compiled files are kept there (``worker.py``).
    """
    stems = artifacts or [""] * len(entries)
    measured = compile_all(
        [_request(entry, stem) for entry, stem in zip(entries, stems, strict=True)],
        workers=workers,
        on_result=lambda index, result: on_report(_report(entries[index], result)),
    )
    return [_report(entry, result) for entry, result in zip(entries, measured, strict=True)]


def _request(entry: Entry, artifacts: str) -> Entry:
    is_exempt = entry.kernel not in _DESCRIPTORS_OF_PEERS
    ignore = (*entry.ignore, "unfenced descriptor load") if is_exempt else entry.ignore
    return replace(entry, artifacts=artifacts, ignore=ignore)


def _report(entry: Entry, measured: Measurement) -> BuildReport:
    return BuildReport(name=entry.name, arch=entry.arch, default=entry.default, **vars(measured))

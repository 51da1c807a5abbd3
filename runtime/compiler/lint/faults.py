"""The rules for compiled kernels by name, a fault as data, and the source lines that it is at.

Rules read text that the compiler leaves behind, Triton's IR, PTX and SASS, so they need no GPU. They
are in ``ptx_rules.py``, ``triton_ir.py`` and ``sass.py``; this table is what users see and name in
``ignore``. Names stay as they are: they stand in users' test suites.

An instruction of an inlined function has a *chain* of frames, innermost first: the line in the
function, the line that called it, and so on to the kernel. Order in the source is the order of the
lines in the outermost function in which two chains differ.
"""

import ast
import functools
import os
import tokenize
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from interlace.runtime.core.errors import SourceText


@dataclass(frozen=True)
class Frame:
    """A position in a file. Columns tell calls on one line apart."""

    path: str
    line: int
    column: int = 0


FrameChain = tuple[Frame, ...]


def later(chain: FrameChain, other: FrameChain) -> bool:
    """Whether ``chain`` stands after ``other`` in the source; False where the order is unknown."""
    for frame, against in zip(reversed(chain), reversed(other), strict=False):
        if frame != against:
            known = frame.line and against.line and frame.path == against.path
            return bool(known) and frame.line > against.line
    return False


def describe(chain: FrameChain) -> SourceText:
    """The innermost line and the kernel's: "a.py:69 in f, called at b.py:9"; no ``f`` if a file is gone."""
    if not chain or not chain[0].line:
        return SourceText("")
    text = place(chain[0], name_function=len(chain) > 1)
    if len(chain) > 1:
        text += f", called at {place(chain[-1], name_function=False)}"
    return SourceText(text, tuple((frame.path, frame.line) for frame in chain))


def place(frame: Frame, name_function: bool = True) -> str:
    """One frame: "signal.py:69 in publish"."""
    statement = _statements(frame.path).get(frame.line)
    line, function = statement or (frame.line, "")
    place = f"{os.path.basename(frame.path)}:{line}"
    return f"{place} in {function}" if function and name_function else place


@functools.lru_cache(maxsize=64)
def _statements(path: str) -> dict[int, tuple[int, str]]:
    """By line: the first line of its statement (calls are placed at their last), and the function."""
    try:
        with tokenize.open(path) as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return {}
    return dict(_spans(tree, ""))


def _spans(node: ast.AST, function: str) -> Iterator[tuple[int, tuple[int, str]]]:
    """The lines of every statement: outer ones first, so that a dictionary keeps the innermost."""
    for child in ast.iter_child_nodes(node):
        inside = function
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            inside = child.name
        if isinstance(child, ast.stmt):
            for line in range(child.lineno, (child.end_lineno or child.lineno) + 1):
                yield line, (child.lineno, inside)
        yield from _spans(child, inside)


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

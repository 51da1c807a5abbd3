"""The rules for compiled kernels by name, the class of a fault, and its source lines.

The rules read text that the compiler leaves behind (Triton's IR, PTX and SASS), so they need no GPU. Users
write the names of this table in ``ignore``, so the names do not change.

An instruction of an inlined function has a *chain* of frames, innermost first: the line in the function,
the line that called it, and so on up to the kernel. Source order is the order of the lines in the outermost
function in which two chains differ.
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
    """A position in a file. The column distinguishes calls on one line."""

    path: str
    line: int
    column: int = 0


FrameChain = tuple[Frame, ...]


def later(chain: FrameChain, other: FrameChain) -> bool:
    """Return whether ``chain`` is after ``other`` in the source; False if the order is unknown."""
    for frame, against in zip(reversed(chain), reversed(other), strict=False):
        if frame != against:
            known = frame.line and against.line and frame.path == against.path
            return bool(known) and frame.line > against.line
    return False


def describe(chain: FrameChain) -> SourceText:
    """Return the innermost line and the kernel's: "a.py:69 in f, called at b.py:9"."""
    if not chain or not chain[0].line:
        return SourceText("")
    text = place(chain[0], name_function=len(chain) > 1)
    if len(chain) > 1:
        text += f", called at {place(chain[-1], name_function=False)}"
    return SourceText(text, tuple((frame.path, frame.line) for frame in chain))


def place(frame: Frame, name_function: bool = True) -> str:
    """Return the text of one frame: "signal.py:69 in publish"."""
    statement = _statements(frame.path).get(frame.line)
    line, function = statement or (frame.line, "")
    place = f"{os.path.basename(frame.path)}:{line}"
    return f"{place} in {function}" if function and name_function else place


@functools.lru_cache(maxsize=64)
def _statements(path: str) -> dict[int, tuple[int, str]]:
    """Return, by line, the first line of its statement (calls have their last line) and its function."""
    try:
        with tokenize.open(path) as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return {}
    return dict(_spans(tree, ""))


def _spans(node: ast.AST, function: str) -> Iterator[tuple[int, tuple[int, str]]]:
    """Yield the lines of every statement, outer ones first, so that a dictionary keeps the innermost."""
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
        "An acquire, a release or a fence next to a signal has gpu or cta scope; other ranks may not see"
        ' it. Atomics of tl have scope "gpu" and sem "acq_rel" by default. For a counter that only this'
        " GPU uses, that is correct: then ignore it."
    ),
    "weak poll": (
        "A loop polls a signal with a volatile, relaxed or plain load, and loads follow. The data published"
        " before the signal may not be visible to them. Poll with an atomic that acquires. If they need"
        " none of that data, the code is correct: then ignore it."
    ),
    "dropped wait": (
        "The source waits or acquires, and the SASS does not. The compiler removes a plain load"
        " whose only use is to end its loop, and an acquire whose value is unused."
    ),
    "published descriptor store": (
        "A descriptor (TMA) store reaches a release without cp.async.bulk.wait_group 0. Triton waits"
        " until the tile has been read (.read), not until it is written. Use tl.store."
    ),
    "unfenced descriptor load": (
        "A wait reaches a descriptor (TMA) load without fence.proxy.async. TMA reads through another"
        " proxy, which the wait does not order. If no peer writes the loaded memory, the code is correct:"
        " then ignore it."
    ),
    "early load": (
        "A load that is after a wait in the source comes before it in the SASS: the"
        " pipeliner has moved it up. Use the awaited value in the load's address, or wait outside"
        " the pipelined loop. If no peer writes the loaded memory, the code is correct: then ignore it."
    ),
    "weakened by ptxas": (
        "A system-scope acquire or release of the PTX left no instruction of that strength in SASS."
    ),
    "spills": (
        "There are too few registers: values are on the stack. Checked on sm_90 and sm_100, which have"
        " wgmma, TMA and tensor memory to save registers."
    ),
    "shared memory": (
        "A program needs more shared memory than an SM gives to one: 163 KiB on sm_80, 227 KiB on sm_90"
        " and sm_100. The launch would fail. Use fewer stages or smaller tiles."
    ),
    "no tensor cores": (
        "A dot was compiled to ordinary instructions; dots of fp64, and of fp32 in ieee precision, may be."
        " Or a large dot of 16-bit or fp8 operands was compiled to tensor-core instructions of an older"
        " architecture or for wider operands."
    ),
}


NOWHERE = SourceText("")


@dataclass(frozen=True)
class Fault:
    """One broken rule.

    ``rule`` is a name in :data:`RULES`. ``where`` is the line of the kernel's source, or empty if the
    compiler kept none: ``signal.py:69 in publish, called at transfer.py:124 in push_chunks``.
    """

    rule: str
    message: str
    where: SourceText = NOWHERE

    def __str__(self) -> str:
        return f"{self.where}: {self.rule}: {self.message}" if self.where else self.short()

    def short(self) -> str:
        """Return the rule and the message, without the place."""
        return f"{self.rule}: {self.message}"


def select_faults(faults: Iterable[Fault], ignore: Collection[str] = ()) -> tuple[Fault, ...]:
    order = list(RULES)
    kept = [fault for fault in dict.fromkeys(faults) if fault.rule not in ignore]
    return tuple(sorted(kept, key=lambda fault: order.index(fault.rule)))

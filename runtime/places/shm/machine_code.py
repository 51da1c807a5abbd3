"""Steps of a collective, run by machine code: copies, sums, stores and waits on words of shared memory.

In an op of a few microseconds, most of the time is Python's own (docs/explanation/performance.md). So all
that an op does between its first and its last word is recorded once, as :class:`Steps`, and run by a call.

Steps stop where they need Python: a peer does not come (WAIT), or has sent another message (COMPARE).
:meth:`Steps.run` then returns the number of that step. The caller handles it and continues there.

Numbers that differ from run to run are in registers. An object is for one thread at a time.

llvmlite compiles LLVM IR (``machine_code.ll``); no compiler and no assembler is needed. Each sum is a
separate module, so that a process compiles only the sums that it uses::

    i64 run(i64 *words, i64 first)      the number of the step that stopped it, or -1 at the end
    void sum(i64 *registers, i64 *list, i64 length, i64 target, i64 count)
    i64 move(i64 *terms, i64 **pipes, i64 count, i64 *watched, i64 words)      see ``boxes.py``

llvmlite is imported when code is needed, because the import takes as long as compiling. There is no machine
code without llvmlite, on processors that are not in PROCESSORS, and where a hardened kernel refuses to
execute new memory.
"""

import array
import ctypes
import functools
import itertools
import os
import platform
import re
import string
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch

from interlace.runtime.processes import control

VARIABLE = "INTERLACE_MACHINE_CODE"
"""If set to 0, no machine code is made, and Python and torch do everything."""

OLDEST = (20,)
"""A release of LLVM with opaque pointers, splats, and intrinsics that need no declaration."""

PROCESSOR = platform.machine()
PROCESSORS = {
    "x86_64": ("call void @llvm.x86.sse2.pause()", "call void @llvm.x86.sse.sfence()"),
    "aarch64": ("call void @llvm.aarch64.hint(i32 1)", ""),
}
"""The instruction of a failed poll, and the one that orders stores past the caches before a release."""

# Words of a list of steps. The constant ones:
SPINS, YIELDS, PATIENCE, LONG_YIELD, CROWDED, CROWDED_UNTIL, ASLEEP = range(7)
REGISTERS = 7  # the word of register 0, which is always 0
FIRST = 149  # the word at which the steps begin
STEP = 9  # words of each step: kind, list, length, x, register, y, register, z, register
END, COPY, RELEASE, RING, WAIT, COMPARE, STREAM, PAST, SUM, STORE, STAMP = range(11)
_WORDS = {name: value for name, value in globals().items() if type(value) is int}
_WORDS |= {
    name: getattr(control, name)
    for name in ["ANYONE", "BELL", "EVERYONE", "FUTEX_WAIT", "FUTEX_WAKE"]
}
"""The kinds of steps by name; some take the words of sleeping ranks."""

Operand = int | tuple[int, int]
"""A number, or a number and the register to add to it."""

PAUSES = 400  # polls before the core is yielded, if no two ranks share a core
TURNS = 200  # yields before Python looks for the reason
PATIENCE_NS = 10_000_000  # the longest time for these yields
_never = ctypes.c_int64()
NO_CROWD = 1 << 62, 0, ctypes.addressof(_never)

_kept: list[object] = []  # code stays loaded as long as these live
_numbers = itertools.count()
_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Element:
    """A kind of elements: how they are loaded, added and stored."""

    name: str
    bits: int
    memory: str
    type: str  # in registers

    @property
    def lanes(self) -> int:
        """Elements of a block: 1024 bits, which LLVM divides into the processor's registers."""
        return 1024 // (self.bits if self.type == self.memory else 32)


ELEMENTS = (
    Element("float32", 32, "float", "float"),
    Element("float64", 64, "double", "double"),
    Element("float16", 16, "half", "float"),
    Element("bfloat16", 16, "i16", "float"),
    *(Element(f"int{bits}", bits, f"i{bits}", f"i{bits}") for bits in (8, 16, 32, 64)),
)
SUMS = {getattr(torch, element.name): element for element in ELEMENTS}
SUMS |= {getattr(torch, f"uint{n}"): SUMS[getattr(torch, f"int{n}")] for n in (8, 16, 32, 64)}
"""The dtypes that can be summed, with the same bits as ``reductions.fold`` for "sum": from left to right;
integers wrap around; 16-bit floats are summed in fp32 and rounded once."""


@functools.cache
def _sections() -> dict[str, string.Template]:
    """Return the parts of ``machine_code.ll`` by name."""
    text = (resources.files(__package__) / "machine_code.ll").read_text("ascii")
    names = re.split(r"^; === (.+)\n", text, flags=re.MULTILINE)[1:]
    return {name: string.Template(part) for name, part in zip(names[::2], names[1::2], strict=True)}


def _fill_in(section: str, **values: object) -> str:
    return _sections()[section].substitute(values)


def module_ir(function: str, processor: str = PROCESSOR, *, words: Mapping[str, int] = {}) -> str:
    """Return the module of ``run`` or ``move`` for one of PROCESSORS; ``words``: more numbers by name."""
    pause, fence = PROCESSORS[processor]
    longest = int(control.LONGEST_SLEEP * 1e9)
    return (
        _fill_in("base", futex=control.FUTEX_NUMBERS[processor], longest=longest, **_WORDS)
        + _fill_in("stream", name="through", hint="", fence="")
        + _fill_in("stream", name="past", hint=", !nontemporal !0", fence=fence)
        + _fill_in(function, pause=pause, **{**_WORDS, **words})
    )


def sum_ir(element: Element, processor: str = PROCESSOR) -> str:
    """Return the module of ``sum`` for such elements for one of PROCESSORS."""
    return _fill_in(
        "sum",
        lanes=element.lanes,
        blocks=_loop(element, "b", element.lanes, ("0", "%whole"), ("entry", "s")),
        single=_loop(element, "s", 1, ("%whole", "%count"), ("b", "end")),
        usual=_fill_in(f"usual mode {processor}"),
        before=_fill_in(f"mode before {processor}"),
    )


def _loop(e: Element, v: str, lanes: int, span: tuple[str, str], around: tuple[str, str]) -> str:
    """Return a loop over ``span``, ``lanes`` elements at a time, between the blocks ``around``."""

    def of(kind: str) -> str:
        return kind if lanes == 1 else f"<{lanes} x {kind}>"

    def one_step(kind: str, number: float) -> str:
        return str(number) if lanes == 1 else f"splat ({kind} {number})"

    real = e.type in ("float", "double")
    types = {
        "v": v,
        "memory": of(e.memory),
        "kind": of(e.type),
        "word": of("i32"),
        "bytes": e.bits // 8,
    }
    numbers = {"sixteen": 16, "one": 1, "half": 32767, "nan": 32704}
    types |= {name: one_step("i32", number) for name, number in numbers.items()}
    conversion = "plain" if e.memory == e.type else e.name
    return _fill_in(
        "loop",
        lanes=lanes,
        first=span[0],
        end=span[1],
        before=around[0],
        after=around[1],
        size=e.bits // 8,
        add="fadd" if real else "add",
        neutral=one_step(e.type, -0.0 if real else 0),
        load=_fill_in(f"load {conversion}", **types),
        store=_fill_in(f"store {conversion}", truth=of("i1"), **types),
        v=v,
        kind=of(e.type),
    )


@functools.cache
def is_supported() -> bool:
    """Return whether code for this processor can be made, as far as is known before trying."""
    if os.environ.get(VARIABLE) == "0" or sys.platform != "linux" or PROCESSOR not in PROCESSORS:
        return False
    try:
        from llvmlite import binding

        binding.check_jit_execution()
    except (ImportError, OSError):
        return False
    if binding.llvm_version_info < OLDEST:
        return False  # with an older llvmlite, ops run in Python instead of failing
    # without F16C, a library that may be missing would convert 16-bit numbers
    return PROCESSOR != "x86_64" or bool(binding.get_host_cpu_features().get("f16c"))


@functools.cache
def _jit() -> Any:
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(),
        features=binding.get_host_cpu_features().flatten(),
        codemodel="jitdefault",
        jit=True,
    )
    return binding.create_lljit_compiler(machine)


def compile_ir(ir: str, name: str) -> int:
    """Return the address of function ``name`` of LLVM IR, which stays loaded. Raises RuntimeError."""
    from llvmlite import binding

    module = binding.JITLibraryBuilder().add_ir(ir).export_symbol(name).add_current_process()
    with _one_at_a_time:
        library = module.link(_jit(), f"{name} {next(_numbers)}")
        _kept.append(library)
    address: int = library[name]
    return address


@functools.cache
def _run() -> Callable[[int, int], int] | None:
    if not is_supported():
        return None
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
    run: Callable[[int, int], int] = kind(compile_ir(module_ir("run"), "run"))
    return run


@functools.cache
def _summing(element: Element) -> int:
    return compile_ir(sum_ir(element), "sum")


def available() -> bool:
    return _run() is not None


class Steps:
    """A list of steps. Add them in order, then :meth:`run` them any number of times.

    ``words`` is the memory of the list, in which ``registers[r]`` is register r; register 0 is 0.
    ``memory`` are the registers as bytes. Addresses must stay mapped, and added lists must not change.
    """

    __slots__ = ("_code", "_rows", "_words", "kinds", "memory", "notes", "registers", "run")

    run: Callable[[int], int]

    def __init__(self) -> None:
        self._rows: list[tuple[int, Sequence[int], int, tuple[Operand, ...]]] = []
        self.kinds: list[int] = []
        self.notes: dict[int, Any] = {}
        self._words: ctypes.Array[ctypes.c_int64] | None = None
        code = _run()
        if code is None:
            raise RuntimeError("no machine code can be made for this processor")
        self._code = code

    def _add(self, kind: int, listed: Sequence[int], count: int, *operands: Operand) -> None:
        assert self._words is None, "steps are complete"
        self._rows.append((kind, listed, count, operands))
        self.kinds.append(kind)

    def copy(self, target: Operand, source: Operand, nbytes: Operand) -> None:
        """Copy ``nbytes`` from ``source`` to ``target``; they may overlap."""
        self._add(COPY, (), 0, target, source, nbytes)

    def stream(self, target: Operand, source: Operand, nbytes: Operand, *, past: bool) -> None:
        """Copy many bytes, ``past`` the caches or through them; they must not overlap."""
        self._add(PAST if past else STREAM, (), 0, target, source, nbytes)

    def release(self, address: int, value: Operand) -> None:
        """Store a word after all earlier writes."""
        self._add(RELEASE, (), 0, address, value)

    def store(self, target: Operand, first: int, nbytes: int) -> None:
        """Store ``nbytes`` of the registers from ``first`` on to ``target``."""
        self._add(STORE, (), 0, target, first, nbytes)

    def stamp(self, address: Operand) -> None:
        """Store the time of the clock's last tick, in ns of the monotonic clock."""
        self._add(STAMP, (), 0, address)

    def ring(self, asleep: Sequence[int], caller: int = control.ANYONE) -> None:
        """Wake ranks that have put ``caller``, or ANYONE, into these words (``processes/control.py``)."""
        self._add(RING, asleep, len(asleep), caller)

    def wait(
        self,
        addresses: Sequence[int],
        value: Operand,
        note: object = None,
        releasers: Sequence[int] = (),
    ) -> None:
        """Wait until each of these words is at least ``value``; stop with ``note`` if that takes long.

        ``releasers``: the rank that releases each word, as it names itself in :meth:`ring`.
        """
        self.notes[len(self.kinds)] = note
        listed = [*addresses, *(releasers or [control.ANYONE] * len(addresses))]
        self._add(WAIT, listed, len(addresses), 0, value)

    def compare(
        self, expected: Operand, addresses: Sequence[int], further: Operand, nbytes: Operand
    ) -> None:
        """Stop if one of ``addresses``, each ``further`` on, has other bytes than ``expected``."""
        self._add(COMPARE, addresses, len(addresses), expected, further, nbytes)

    def sum(
        self, dtype: torch.dtype, target: Operand, sources: Sequence[Operand], count: Operand
    ) -> None:
        """Compute ``target`` = the sum of all sources, ``count`` elements; ``target`` may be a source."""
        pairs = [word for source in sources for word in _pair(source)]
        self._add(SUM, pairs, len(sources), target, _summing(SUMS[dtype]), count)

    def complete(
        self, *, spin: bool, crowd: tuple[int, int, int] = NO_CROWD, asleep: int = 0
    ) -> "Steps":
        """Finish the list and return it. ``spin``: whether no two ranks share a core.

        ``crowd``: if a yield takes more ns than the first number, waits sleep instead of yielding for the
        second number times as long; the word at the third number, an address, is set to the end of that
        time. ``asleep``: the address of this rank's ASLEEP word; 0 if no rank would wake it.
        """
        self._add(END, (), 0)
        lists = FIRST + STEP * len(self._rows)
        words = [PAUSES if spin else 1, TURNS, PATIENCE_NS, *crowd, asleep]
        words += [0] * (lists - len(words))
        memory = (ctypes.c_int64 * (lists + sum(len(row[1]) for row in self._rows)))()
        address = ctypes.addressof(memory)
        for number, (kind, listed, count, operands) in enumerate(self._rows):
            at = FIRST + STEP * number
            words[at : at + 3] = kind, address + 8 * len(words), count
            for operand, place in zip(operands, (3, 5, 7), strict=False):
                words[at + place : at + place + 2] = _pair(operand)
            words += listed
        view = memoryview(memory).cast("B").cast("q")
        view[:] = memoryview(array.array("q", words))
        self._words, self.run = memory, functools.partial(self._code, address)
        self.registers = view[REGISTERS:FIRST]
        self.memory = self.registers.cast("B")
        self._rows = []
        return self

    @property
    def nbytes(self) -> int:
        assert self._words is not None
        return ctypes.sizeof(self._words)


class Copier:
    """A single copy: ``copier(target, source, nbytes)``, past the caches or through them."""

    def __init__(self, *, past: bool) -> None:
        self._steps = steps = Steps()
        steps.stream((0, 1), (0, 2), (0, 3), past=past)
        steps.complete(spin=False)

    def __call__(self, target: int, source: int, nbytes: int) -> None:
        registers = self._steps.registers
        registers[1], registers[2], registers[3] = target, source, nbytes
        self._steps.run(0)


def _pair(operand: Operand) -> tuple[int, int]:
    return operand if isinstance(operand, tuple) else (operand, 0)

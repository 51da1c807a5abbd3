"""Triton's IR of a kernel as text, before the compiler has removed anything from it.

Later stages lose two things: the matmuls of the source, and waits that the compiler considers unused.
So the dots are read from the first IR, and every acquire in it must exist in the PTX.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from interlace.runtime.compiler.lint.faults import Fault, Frame, FrameChain, describe
from interlace.runtime.compiler.lint.ptx import PtxModule
from interlace.runtime.compiler.lint.ptx_rules import is_acquire, polls

_ALIAS = re.compile(r"^(#loc\d*) = loc\((.*)\)$", re.MULTILINE)
_POSITION = re.compile(r'"([^"]*)":(\d+):(\d+)')
_CALL = re.compile(r"callsite\((#loc\d*) at (#loc\d*)\)")
_NAMED = re.compile(r'"[^"]*"\((#loc\d*)\)')
_FUSED = re.compile(r"fused(?:<.*>)?\[(#loc\d*)")
_AT = re.compile(r"loc\((#loc\d*)\)\s*$")
_DOT = re.compile(r"(tt\.dot(_scaled)?|ttng\.warp_group_dot)\b.*")
_TENSOR = re.compile(r"(?:tensor|memdesc)<((?:\d+x)+)([a-zA-Z]\w*)")
_ACQUIRE = re.compile(r"tt\.atomic_(?:rmw|cas)\b.*\b(?:acquire|acq_rel)\b")
_VALUE = re.compile(r"%[\w$.-]+")
_STRONGER = re.compile(r"isVolatile|atomic|inline_asm|extern")


@dataclass(frozen=True)
class Dot:
    """One matmul of tiles, or of a batch of them: extents of the result, type of the first operand.

    ``exact`` if no tensor core computes it as exactly as requested.
    """

    shape: tuple[int, ...]
    dtype: str
    exact: bool
    chain: FrameChain

    def __str__(self) -> str:
        return f"{self.dtype} dot of {' x '.join(str(extent) for extent in self.shape)}"


class TritonIR:
    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        self._aliases = dict(_ALIAS.findall(text))

    def chain(self, name: str) -> FrameChain:
        """Return the source lines of a location such as "#loc12", innermost first."""
        text = self._aliases.get(name, "")
        if found := _CALL.match(text):
            return self.chain(found.group(1)) + self.chain(found.group(2))
        if found := _NAMED.match(text) or _FUSED.match(text):
            return self.chain(found.group(1))
        if found := _POSITION.match(text):
            return (Frame(found.group(1), int(found.group(2)), int(found.group(3))),)
        return ()

    def _locate(self, pattern: re.Pattern[str]) -> Iterator[tuple[re.Match[str], FrameChain]]:
        for line in self._lines:
            found = pattern.search(line)
            if found and (at := _AT.search(line)):
                yield found, self.chain(at.group(1))

    def dots(self) -> list[Dot]:
        dots = []
        for found, chain in self._locate(_DOT):
            operand, *_, result = _TENSOR.findall(found.group(0))
            shape = tuple(int(extent) for extent in result[0].split("x") if extent)
            # fp32 dots that may round their operands, to TF32 or in parts, are marked.
            rounds = "inputPrecision" in found.group(0)
            exact = operand[1] == "f64" or (operand[1] == "f32" and not rounds)
            dots.append(Dot(shape, operand[1], exact, chain))
        return dots

    def dropped_waits(self, program: PtxModule) -> list[Fault]:
        kept = {one.chain[0] for one in program.instructions if one.chain and is_acquire(one)}
        lines = {(frame.path, frame.line) for frame in kept}
        unplaced = any(frame.line == 0 for frame in kept)
        message = "nothing uses the acquired value, so it is not read"
        found = [
            Fault("dropped wait", message, describe(at))
            for _, at in self._locate(_ACQUIRE)
            if at and not unplaced and (at[0].path, at[0].line) not in lines
        ]
        for start, line in enumerate(self._lines):
            if "scf.while" in line:
                found += self._plain_polls(start, _polling_lines(program))
        return found

    def _plain_polls(self, start: int, kept: set[tuple[str, int]]) -> Iterator[Fault]:
        """Find plain loads of one address that decide whether the loop at ``start`` continues.

        Loads that still end a loop, at one of the lines ``kept``, do not count: they are merely weak polls.
        """
        body = self._body(start)
        carried = re.findall(r"(%[\w$.-]+) = %", body[0].partition("scf.while")[2])
        varying = _varying(body)
        for line in body:
            of_one_address = varying.isdisjoint(_VALUE.findall(line.partition(" = ")[2]))
            at = _AT.search(line)
            if at and of_one_address and self._loads(line) and self._decides(body, line, carried):
                chain = self.chain(at.group(1))
                if chain and (chain[0].path, chain[0].line) not in kept:
                    message = "a plain load that only ends its loop is read once, or not at all"
                    yield Fault("dropped wait", message, describe(chain))

    def _loads(self, line: str) -> bool:
        """Return whether ``line`` is a plain load, or calls a function that does nothing stronger."""
        text = self._with_callee(line)
        return " = tt.load " in text and not _STRONGER.search(text)

    def _accesses(self, line: str) -> bool:
        """Return whether ``line`` reads memory: its result is not computed from an address alone."""
        text = self._with_callee(line)
        return " = tt.load " in text or _STRONGER.search(text) is not None

    def _with_callee(self, line: str) -> str:
        if call := re.search(r"= tt\.call @([^(]+)\(", line):
            called = f"@{call.group(1)}("
            starts = (
                i for i, text in enumerate(self._lines) if "tt.func" in text and called in text
            )
            return "".join(self._body(next(starts, len(self._lines))))
        return line

    def _body(self, start: int) -> list[str]:
        if start >= len(self._lines):
            return []
        indent = len(self._lines[start]) - len(self._lines[start].lstrip())
        for end in range(start + 1, len(self._lines)):
            line = self._lines[end]
            if line.startswith(" " * indent + "}") and not line.lstrip().startswith("} do {"):
                return self._lines[start : end + 1]
        return self._lines[start:]

    def _decides(self, body: list[str], load: str, carried: list[str]) -> bool:
        """Return whether the loop ends depending on ``load``, now or a round later, but not as a bound."""
        known, counters = _results(load), set(carried)
        for line in body[1:]:  # a loop waits for a value that it reads anew each round
            if _STRONGER.search(self._with_callee(line)):
                counters |= _results(line)
        while True:
            size = len(known) - len(counters)
            for line in body[1:]:
                read = _VALUE.findall(line.partition("=")[2] or line)
                if "scf.condition" in line and read[:1] and read[0] in known:
                    return True
                if "scf.yield" in line:
                    settled = {
                        to for to, value in zip(carried, read, strict=False) if value in known
                    }
                    known |= settled
                    counters -= settled
                elif not known.isdisjoint(read) and not (
                    (" arith.cmp" in line and not counters.isdisjoint(read)) or self._accesses(line)
                ):
                    known |= _results(line)
                    counters -= _results(line)
                elif not counters.isdisjoint(read):
                    counters |= _results(line)
            if len(known) - len(counters) == size:
                return False


def _polling_lines(program: PtxModule) -> set[tuple[str, int]]:
    """Return the lines of all loads that end a loop, and of the calls that lead to them."""
    frames = (frame for i in polls(program) for frame in program.instructions[i].chain)
    return {(frame.path, frame.line) for frame in frames}


def _varying(body: list[str]) -> set[str]:
    """Return the names that may change from round to round of a loop, without results of plain loads."""
    varying = set(_VALUE.findall("".join(line for line in body if "^bb" in line)))
    for line in body:
        changes = re.search(r"\bscf\.|tt\.call|atomic|inline_asm", line)
        if changes or not varying.isdisjoint(_VALUE.findall(line.partition(" = ")[2])):
            varying |= _results(line)
    return varying | set(re.findall(r"(%[\w$.-]+) = %", body[0].partition("scf.while")[2]))


def _results(line: str) -> set[str]:
    left, equals, _ = line.partition(" = ")
    return {name.split(":")[0] for name in _VALUE.findall(left)} if equals else set()

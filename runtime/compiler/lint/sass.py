"""SASS: its instructions, its loops, the rules over it, and all faults of a kernel's IR, PTX and SASS.

The order of loads and waits is checked in the PTX, not in the SASS: ptxas keeps loads after an acquire, and
the SASS has only the innermost line of inlined calls.

Instructions are read from the text of ``nvdisasm -g``. Threads that diverged meet again directly after a
BSYNC. A CALL of one of the kernel's own labels is a far jump, as sm_80 has them, and does not return; any
other CALL calls a function.

The instructions in one round of a loop show what limits the loop before any GPU has run it. A loop that
waits for each load right after issuing it is bound by latency. A loop that makes tensor maps in every round
pays for them every time.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from interlace.runtime.compiler.lint.control_flow import Flow
from interlace.runtime.compiler.lint.faults import Fault, Frame, describe, place
from interlace.runtime.compiler.lint.ptx import PtxModule
from interlace.runtime.compiler.lint.ptx_rules import PTX_RULES, is_acquire, is_release
from interlace.runtime.compiler.lint.triton_ir import Dot, TritonIR
from interlace.runtime.core.limits import shared_bytes

_TEXT = re.compile(
    r'^\s*(?://## File "(?P<path>[^"]*)", line (?P<line>\d+)|(?P<label>\.L_x_\w+):|/\*[0-9a-f]+\*/\s+'
    r"(?:@(?P<predicate>!?U?P\w+) )?(?P<name>[A-Z0-9]+)(?P<modifiers>[.\w]*)(?P<operands>[^;\n]*))",
    re.MULTILINE,
)
_TARGET = re.compile(r"`\((\.L_x_\w+)\)")


class Operation(NamedTuple):
    """One instruction: "HGMMA", its modifiers, the rest of its text, and where it comes from."""

    name: str
    modifiers: frozenset[str]
    operands: str
    predicate: str
    frame: Frame


def operations(sass: str) -> tuple[list[Operation], dict[str, int]]:
    """Return the instructions in order, and by label the index of the first instruction after it."""
    code: list[Operation] = []
    labels: dict[str, int] = {}
    frame = Frame("", 0)
    for found in _TEXT.finditer(sass):
        path, line, label, predicate, name, modifiers, operands = found.groups(default="")
        if line:
            frame = Frame(path, int(line))
        elif label:
            labels[label] = len(code)
        else:
            words = frozenset(modifiers.split("."))
            code.append(Operation(name, words, operands.strip(), predicate, frame))
    return code, labels


def control_flow(code: list[Operation], labels: dict[str, int]) -> Flow:
    """Return the control flow: which instruction may run after which."""

    def successors(index: int) -> list[int]:
        one, following = code[index], [index + 1][: len(code) - index - 1]
        target = _TARGET.match(one.operands)
        if one.name in ("EXIT", "RET") or (target and one.name in ("BRA", "CALL")):
            following = following if one.predicate else []
        elif one.name == "BRA":  # "BRA.U UP0, `(.L_x_3)": the condition is among the operands
            target = _TARGET.search(one.operands)
        else:
            target = None  # where threads meet again
        return [*([labels[target.group(1)]] if target else []), *following]

    return Flow([successors(index) for index in range(len(code))])


_REGISTER = re.compile(r"\bR(\d+)")
_SIZES = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}  # bytes; default 4
_KEPT = re.compile(r"SB0, (0x[0-9a-f]+)")  # how many groups of copies may be in flight after a wait
_ROUNDS = 16  # more than can be in flight


@dataclass(frozen=True)
class Loop:
    """One loop of the SASS, or the code outside all loops, which has no name and depth 0.

    ``where`` is the line of the branch back; docs/reference/kernel-counts.md explains the counts. They are
    of this loop without the loops inside it. ``fences`` are of system scope: each waits until all earlier
    stores have arrived. Loads by descriptor are in flight between two waits, which is one stage of a
    pipeline. Polls of signals do not count as loads. ``products``, ``conversions`` and ``loads`` count
    for a whole round.
    """

    where: str
    depth: int
    instructions: int
    tensor_maps: int = 0
    barriers: int = 0
    fences: int = 0
    wgmma_waits: int = 0
    loads_in_flight: int = 0
    loaded_bytes: int = 0
    bytes_in_flight: int = 0
    products: int = 0
    conversions: int = 0
    loads: int = 0


_PRODUCT = re.compile(r"[HIQD]?MMA|[HIQ]GMMA|UTC\w*MMA")


def loops(sass: str) -> tuple[Loop, ...]:
    """Return the loops of ``nvdisasm -g``'s text in code order, after the code outside all loops."""
    code, labels = operations(sass)
    flow = control_flow(code, labels)
    found = [_count_loop("", 0, [one for i, one in enumerate(code) if not flow.loop(i)], 1)]
    for first, body in sorted(flow.loops.items()):
        instructions = [code[i] for i in sorted(body) if flow.loop(i) is body]
        depth = sum(first in other for other in flow.loops.values())
        if len(body) > 1:  # otherwise a jump to itself after the end, which is never reached
            found.append(
                _count_loop(place(code[flow.last(first)].frame), depth, instructions, _ROUNDS)
            )
    return tuple(found)


def _count_loop(where: str, depth: int, code: list[Operation], rounds: int) -> Loop:
    def count(name: str, modifier: str = "") -> int:
        return sum(one.name == name and modifier in one.modifiers for one in code)

    # A tensor map is written like any memory, and then made visible to the unit that reads maps.
    counts = (
        count("UTMACCTL", "IV"),
        count("BAR"),
        count("MEMBAR", "SYS"),
        count("WARPGROUP", "DEPBAR"),
    )
    loaded = sum(_bytes(one) for one in code)
    most, size = _in_flight(code, rounds)
    products = sum(_PRODUCT.fullmatch(one.name) is not None for one in code)
    conversions = count("F2F") + count("F2FP") + count("HADD2", "F32")
    loads = sum(_bytes(one) > 0 or one.name == "UTMALDG" for one in code)
    sums = products, conversions, loads
    return Loop(where, depth, len(code), *counts, most, loaded, size, *sums)


def _bytes(one: Operation) -> int:
    if one.name not in ("LDG", "LDGSTS") or "STRONG" in one.modifiers:
        return 0
    return next((size for word, size in _SIZES.items() if word in one.modifiers), 4)


def _in_flight(code: list[Operation], rounds: int) -> tuple[int, int]:
    """Return the largest number of loads in flight at once, and of bytes of one thread."""
    registers: list[tuple[set[int], int]] = []  # loads that are not used yet: registers, bytes
    groups: list[list[int]] = [[]]  # bytes of copies into shared memory by group, the last one open
    most = most_bytes = 0
    waits = any(one.name == "DEPBAR" and _KEPT.match(one.operands) for one in code)
    for _ in range(rounds):
        stage = 0
        groups = groups if waits else [[]]
        for one in code:
            named = [int(number) for number in _REGISTER.findall(one.operands)]
            registers = [load for load in registers if load[0].isdisjoint(named)]
            if one.name == "LDG" and (size := _bytes(one)):
                registers.append((set(range(named[0], named[0] + max(1, size // 4))), size))
            if one.name == "LDGSTS":
                groups[-1].append(_bytes(one))
            stage += one.name == "UTMALDG"
            if one.name == "LDGDEPBAR":
                groups.append([])
            elif one.name == "SYNCS" and "PHASECHK" in one.modifiers:
                stage = 0
            elif one.name == "DEPBAR" and (kept := _KEPT.match(one.operands)):
                groups = groups[-1 - int(kept.group(1), 16) :]
            sizes = [size for _, size in registers] + [size for group in groups for size in group]
            most, most_bytes = max(most, len(sizes) + stage), max(most_bytes, sum(sizes))
    return most, most_bytes


# No default may spill on these; older chips have no tensor memory, TMA or wgmma to save registers.
STRICT_ARCHES = (90, 100)

_FP8 = {9: "QGMMA", 10: "UTCQMMA"}


def instruction_counts(sass: str) -> Counter[str]:
    """Count each instruction of the disassembly, without modifiers: {"HGMMA": 4}."""
    return Counter(one.name for one in operations(sass)[0])


def tensor_core_instructions(counts: Counter[str], arch: int, *, any_kind: bool = False) -> int:
    """Count HGMMA on 9.0 and UTC*MMA on 10.x. ``any_kind``: also older ones, which small tiles use."""
    older = r"[HIQD]?MMA"
    kinds = {9: r"[HIQ]GMMA", 10: r"UTC\w*MMA"}
    kind = kinds.get(arch // 10, older)
    wanted = re.compile(f"{kind}|{older}" if any_kind else kind)
    return sum(count for name, count in counts.items() if wanted.fullmatch(name))


def spills(counts: Counter[str]) -> int:
    """Count the accesses to local memory: spilled registers, or arrays that are indexed."""
    return counts["LDL"] + counts["STL"]


def find_spills(arch: int, stack: int, spill_instructions: int) -> list[Fault]:
    """Return a fault if an architecture that should need no stack uses it."""
    if arch not in STRICT_ARCHES or not (stack or spill_instructions):
        return []
    message = f"{stack} bytes of stack, {spill_instructions} spill instructions"
    return [Fault("spills", message)]


def too_much_shared(arch: int, shared: int) -> list[Fault]:
    """Return a fault if a program needs more shared memory than there is: the launch would fail."""
    most = shared_bytes(arch)
    if shared <= most:
        return []
    return [Fault("shared memory", f"{shared} bytes, of {most} on sm_{arch}")]


def without_tensor_cores(
    dots: Sequence[Dot], counts: Counter[str], arch: int, num_warps: int
) -> list[Fault]:
    """Find matmuls compiled to ordinary instructions, and large ones to older or wider instructions."""
    wanted = [dot for dot in dots if not dot.exact]
    large = [dot for dot in wanted if _fits(dot, num_warps)]
    narrow = [dot for dot in large if dot.dtype.startswith("f8")]
    if wanted and not tensor_core_instructions(counts, arch, any_kind=True):
        missed, problem = wanted, "no matrix instruction"
    elif large and not tensor_core_instructions(counts, arch):
        missed, problem = large, f"no matrix instruction of sm_{arch}"
    elif narrow and arch // 10 in _FP8 and not counts[_FP8[arch // 10]]:
        missed, problem = narrow, f"no matrix instruction of sm_{arch} for fp8"
    else:
        return []
    return [
        Fault("no tensor cores", f"{problem} for a {dot}", describe(dot.chain)) for dot in missed
    ]


def _fits(dot: Dot, num_warps: int) -> bool:
    """Return whether the matmul certainly fits the instructions of 9.0 and 10.x (4 warps, 64 rows)."""
    whole = len(dot.shape) == 2 and dot.shape[0] % 64 == 0 and dot.shape[1] % 16 == 0
    return whole and dot.dtype in ("bf16", "f16", "f8E4M3FN", "f8E5M2") and num_warps in (4, 8)


def find_weakened(program: PtxModule, sass: str) -> list[Fault]:
    """Find system-scope acquires and releases whose source line has no such instruction in the SASS.

    ``sass`` is the text of ``nvdisasm -g``. If the value of an acquire is unused, its load is removed, but
    the CCTL.IVALL stays, which keeps later loads from older cached values and so orders them. The barrier
    of a release may have the line before it, because it also belongs to the next access.
    """
    strength: dict[tuple[str, int], set[str]] = {}
    behind_barrier = False
    for each in operations(sass)[0]:
        words = strength.setdefault((each.frame.path, each.frame.line), set())
        barrier = each.name in ("MEMBAR", "FENCE")
        if "SYS" in each.modifiers:
            words.add("release" if barrier else "acquire")
            words |= {"release"} if behind_barrier else set()
            behind_barrier = barrier
        elif not each.modifiers.isdisjoint(("STRONG", "IVALL")):
            words.add("narrower" if "STRONG" in each.modifiers else "invalidated")
        behind_barrier &= not each.name.startswith(("LD", "ST", "ATOM", "RED"))
    for words in strength.values():
        if "invalidated" in words and "narrower" not in words:
            words.add("acquire")
    found_faults = []
    for one in program.instructions:
        if "sys" not in one.parts or not one.chain:
            continue
        kept = strength.get((one.chain[0].path, one.chain[0].line))
        lost = [
            kind
            for kind, test in (("acquire", is_acquire), ("release", is_release))
            if kept is not None and test(one) and kind not in kept
        ]
        if lost:
            message = f"{one.operation} has no {' and no '.join(lost)} of scope SYS in SASS"
            found_faults.append(Fault("weakened by ptxas", message, describe(one.chain)))
    return found_faults


def faults(ir: TritonIR, ptx: str, sass: str, arch: int, num_warps: int) -> list[Fault]:
    """Apply all rules but those on registers to the first IR, the PTX, and the SASS with its lines."""
    program = PtxModule(ptx)
    found = [fault for rule in PTX_RULES for fault in rule(program)]
    found += ir.dropped_waits(program)
    found += find_weakened(program, sass)
    return found + without_tensor_cores(ir.dots(), instruction_counts(sass), arch, num_warps)

"""Rules over SASS, instruction counts, and all faults of a kernel's IR, PTX and SASS.

Pure functions over text, so that each rule is tested on text that it must flag. The rules of memory
ordering are in ``ptx_rules.py`` and ``triton_ir.py``; :func:`faults` asks all of them.

Why the order of loads and waits is judged in the PTX and not in the SASS: ptxas keeps loads behind an
acquire, and of inlined calls only the innermost line is left in the SASS.
"""

import re
from collections import Counter
from collections.abc import Sequence

from interlace.runtime.compiler.lint.faults import Fault
from interlace.runtime.compiler.lint.lines import describe
from interlace.runtime.compiler.lint.ptx import PtxModule
from interlace.runtime.compiler.lint.ptx_rules import PTX_RULES, is_acquire, is_release
from interlace.runtime.compiler.lint.sass_program import operations
from interlace.runtime.compiler.lint.triton_ir import Dot, TritonIR
from interlace.runtime.core.launch import shared_bytes

# On these no default may spill; older chips have no tensor memory, TMA or wgmma to save registers.
STRICT_ARCHES = (90, 100)

_FP8 = {9: "QGMMA", 10: "UTCQMMA"}


def instruction_counts(sass: str) -> Counter[str]:
    """Counts of each instruction in the disassembly, modifiers left out: {"HGMMA": 4}."""
    return Counter(one.name for one in operations(sass)[0])


def tensor_core_instructions(counts: Counter[str], arch: int, *, any_kind: bool = False) -> int:
    """HGMMA on 9.0, UTC*MMA on 10.x; ``any_kind``: older ones too, which small tiles are compiled to."""
    older = r"[HIQD]?MMA"
    kinds = {9: r"[HIQ]GMMA", 10: r"UTC\w*MMA"}
    kind = kinds.get(arch // 10, older)
    wanted = re.compile(f"{kind}|{older}" if any_kind else kind)
    return sum(count for name, count in counts.items() if wanted.fullmatch(name))


def spills(counts: Counter[str]) -> int:
    """Accesses to local memory: registers that did not fit, or arrays that were indexed."""
    return counts["LDL"] + counts["STL"]


def spilled(arch: int, stack: int, spill_instructions: int) -> list[Fault]:
    """A fault where an architecture that should need no stack uses it."""
    if arch not in STRICT_ARCHES or not (stack or spill_instructions):
        return []
    message = f"{stack} bytes of stack, {spill_instructions} spill instructions"
    return [Fault("spills", message)]


def too_much_shared(arch: int, shared: int) -> list[Fault]:
    """A fault where a program wants more shared memory than there is: the launch would be refused."""
    most = shared_bytes(arch)
    if shared <= most:
        return []
    return [Fault("shared memory", f"{shared} bytes, of {most} on sm_{arch}")]


def without_tensor_cores(
    dots: Sequence[Dot], counts: Counter[str], arch: int, num_warps: int
) -> list[Fault]:
    """Matmuls that became ordinary instructions, or large ones those of older chips or wider operands."""
    wanted = [dot for dot in dots if not dot.exact]
    large = [dot for dot in wanted if _fits(dot, num_warps)]
    narrow = [dot for dot in large if dot.dtype.startswith("f8")]
    if wanted and not tensor_core_instructions(counts, arch, any_kind=True):
        missed, what = wanted, "no matrix instruction"
    elif large and not tensor_core_instructions(counts, arch):
        missed, what = large, f"no matrix instruction of sm_{arch}"
    elif narrow and arch // 10 in _FP8 and not counts[_FP8[arch // 10]]:
        missed, what = narrow, f"no matrix instruction of sm_{arch} for fp8"
    else:
        return []
    return [Fault("no tensor cores", f"{what} for a {dot}", describe(dot.chain)) for dot in missed]


def _fits(dot: Dot, num_warps: int) -> bool:
    """Whether the instructions of 9.0 and 10.x, by groups of 4 warps and 64 rows, are certainly for it."""
    whole = len(dot.shape) == 2 and dot.shape[0] % 64 == 0 and dot.shape[1] % 16 == 0
    return whole and dot.dtype in ("bf16", "f16", "f8E4M3FN", "f8E5M2") and num_warps in (4, 8)


def weakened(program: PtxModule, sass: str) -> list[Fault]:
    """System-scope acquires and releases whose line, where the SASS (``nvdisasm -g``) has it, has none.

    Of an acquire whose value nothing uses the load goes, and the CCTL.IVALL stays that keeps later loads
    from what was cached before: it orders them after whatever was read. Of a release the barrier may be
    of the line before: it is of the next access, too.
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
    """All that the rules say, but of registers, of the first IR, PTX, and SASS with line information."""
    program = PtxModule(ptx)
    found = [fault for rule in PTX_RULES for fault in rule(program)]
    found += ir.dropped_waits(program)
    found += weakened(program, sass)
    return found + without_tensor_cores(ir.dots(), instruction_counts(sass), arch, num_warps)

"""The GPU that an instruction needs, to refuse instructions that the target of a text does not have.

The table lists instructions that came after sm_80, up to sm_90. Assemblers agree with it, see
``tests/sim/ptx/test_targets.py``. Later instructions are not in it: they run if the interpreter knows them.
"""

import re

_TARGET = re.compile(r"^\s*\.target\s+(sm_\d+[af]?)", re.MULTILINE)
_NUMBER = re.compile(r"sm_(\d+)")
_BEFORE = re.compile(r"\s*(@\s*!?\s*\S+\s+)?")  # a guard

_SINCE = {
    "sm_90a": r"(wgmma|setmaxnreg|tensormap\.replace)\b",
    "sm_90": r"""
        (elect|mapa|getctarank|multimem|griddepcontrol|stmatrix|tensormap)\b
        |barrier\.cluster\b
        |cp\.(reduce\.)?async\.bulk\b |(st|red)\.async\b
        |mbarrier\.(try_wait|expect_tx|complete_tx|arrive\S*\.expect_tx)\b
        |mbarrier\.arrive(_drop)?(?!\S*noComplete)\S*\s[^,]+,[^,]+,  # a count
        |fence\.(mbarrier_init|proxy\.(async|tensormap))\b
        |prefetch\S*\.tensormap\b
        |\S*(?<!barrier)\.cluster\b |\S*::cluster\b
        |\S+\s[^;]*%(n?clusterid|cluster_\w+|is_explicit_cluster)\b
        |(add|sub|mul|setp?|ex2|tanh)\.\S*\bbf16(x2)?\b
        |(add|min|max)\.\S*\b[us]16x2\b
        |(min|max)\.(?=\S*\brelu\b)\S*\bs32\b
        |cvt\.(?!rna)\S*\btf32\.f32\b |cvt\.\S*\bbf16\.[us]\d+\b
        |(atom|red)\.\S*\b(bf16(x2)?|b128|v[248])\b
        |mma\.\S*\bm16n8k\d+\.\S*\bf64\b
    """,
    "sm_89": r"cvt\.\S*\be[45]m[23]x[24]\b |mma\.\S*\be[45]m[23]\b",
    "sm_86": r"(min|max)\.\S*\bxorsign\b",
}
_PATTERNS = [(target, re.compile(each, re.VERBOSE)) for target, each in _SINCE.items()]


def target_of(ptx: str) -> str:
    """Return the target of a module, such as "sm_90a", or "" if the text does not say."""
    found = _TARGET.search(ptx)
    return found[1] if found else ""


def number_of(target: str) -> int:
    found = _NUMBER.match(target)
    return int(found[1]) if found else 0


def first_target(statement: str) -> str:
    """Return the first GPU that has an instruction with these operands, or "" if all have it."""
    statement = statement[_BEFORE.match(statement).end() :]  # type: ignore[union-attr]
    return next((target for target, known in _PATTERNS if known.match(statement)), "")


def needed_by(asm: str) -> int:
    """Return the number of the first GPU that has all instructions of a piece of PTX; 0 for any GPU."""
    statements = re.split(r"[;{}\n]", asm)
    return max(number_of(first_target(statement)) for statement in statements)


def has(target: str, wanted: str) -> bool:
    """Return whether ``target`` has instructions of ``wanted``. One with a letter has only its own."""
    if wanted[-1:].isalpha():
        return target == wanted
    return number_of(target) >= number_of(wanted)

"""SASS as instructions with source lines and control flow, from the text of ``nvdisasm -g``.

Threads that part meet again right behind a BSYNC. A CALL of one of the kernel's own labels is a far jump,
as sm_80 has them, and does not return; any other is of a function.
"""

import re
from typing import NamedTuple

from interlace.runtime.compiler.lint.control_flow import Flow
from interlace.runtime.compiler.lint.lines import Frame

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
    """The instructions in order, and by label the first behind it."""
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
    """The control flow: which instruction may run after which."""

    def successors(index: int) -> list[int]:
        one, following = code[index], [index + 1][: len(code) - index - 1]
        target = _TARGET.match(one.operands)
        if one.name in ("EXIT", "RET") or (target and one.name in ("BRA", "CALL")):
            following = following if one.predicate else []
        elif one.name == "BRA":  # "BRA.U UP0, `(.L_x_3)": its condition is among the operands
            target = _TARGET.search(one.operands)
        else:
            target = None  # where threads meet again
        return [*([labels[target.group(1)]] if target else []), *following]

    return Flow([successors(index) for index in range(len(code))])

"""PTX that calls device functions: ``call (result), name, (arguments);``, with registers for all of them.

What is called is code of this process, by its name in :data:`FUNCTIONS`: numbers in, a number or None out.
It acts for the program that runs. Threads with the same arguments share a call.
"""

from collections.abc import Callable

import numpy as np

from interlace.runtime.ptx.instruction import Action, Instruction, builders, split
from interlace.runtime.ptx.special import Threads
from interlace.runtime.ptx.types import TYPES, ScalarType

CALLS, builds = builders()
FUNCTIONS: dict[str, Callable[..., int | None]] = {}


@builds("call")
def build_call(instruction: Instruction) -> Action:
    instruction.flag("uni")
    instruction.finish(1, 2, 3)
    results = split(instruction.operands[0].strip("()")) if len(instruction.operands) == 3 else []
    name = instruction.operands[-2 if len(instruction.operands) > 1 else 0]
    given = split(instruction.operands[-1].strip("()")) if len(instruction.operands) > 1 else []
    function = FUNCTIONS.get(name)
    if function is None:
        raise instruction.unknown(f"the function '{name}'", FUNCTIONS)

    def kind(register: str) -> ScalarType:
        return TYPES[f"u{instruction.register(register).bits}"]

    reads = [instruction.reader(each, kind(each)) for each in given]
    writes = [(instruction.active_writer(each, kind(each)), kind(each)) for each in results]

    def call(threads: Threads) -> None:
        count = len(threads.active(threads.numbers))
        columns = [threads.active(read(threads)).tolist() for read in reads]
        rows = list(zip(*columns, strict=True)) if columns else [()] * count
        found = {row: function(*row) for row in dict.fromkeys(rows)}
        for write, kind in writes:
            bits = [int(found[row] or 0) & kind.mask for row in rows]
            write(threads, np.array(bits, kind.raw))

    return call

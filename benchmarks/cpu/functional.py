"""The cost of one eager functional all_reduce for its caller, in a world of one, where nothing is moved.

``torch`` is ``torch.distributed._functional_collectives.all_reduce`` and the first use of its result, over
gloo; ``interlace`` is ``interlace.functional.all_reduce`` and the first use. "first use" is ``result + 1``;
"wait" calls ``wait_tensor`` or :func:`interlace.functional.wait` instead; "gradient" is the first use, of
an input that requires gradients, without its backward. ``add`` is the addition alone, a part of every
first use.

Protocol: blocks of CALLS calls, candidates alternate block by block, medians over blocks.
"""

from typing import Any

import torch
import torch.distributed as dist
from cpu.measure import Candidates, Case, Measurement, Shape, gloo, measure, on_ranks

CALLS = 500
BYTES = 4


def _candidates() -> dict[str, Candidates]:
    import torch.distributed._functional_collectives as torchs

    from interlace import functional

    group: Any = dist.group.WORLD
    x = torch.zeros(BYTES // 4)
    leaf = torch.zeros(BYTES // 4, requires_grad=True)
    return {
        "first use": {
            "torch": lambda: torchs.all_reduce(x, "sum", group) + 1,
            "interlace": lambda: functional.all_reduce(x, "sum", group=group) + 1,
            "add": lambda: x + 1,
        },
        "wait": {
            "torch": lambda: torchs.wait_tensor(  # type: ignore[no-untyped-call]
                torchs.all_reduce(x, "sum", group)
            ),
            "interlace": lambda: functional.wait(functional.all_reduce(x, "sum", group=group)),
        },
        "gradient": {
            "torch": lambda: torchs.all_reduce(leaf, "sum", group) + 1,
            "interlace": lambda: functional.all_reduce(leaf, "sum", group=group) + 1,
        },
    }


def on_rank(path: str, repetitions: int) -> list[Measurement]:
    torch.set_num_threads(1)
    with gloo(path):
        shape: Shape = {"bytes": BYTES, "dtype": "float32"}
        cases = [
            Case(f"functional all_reduce, {name}", shape, "torch", candidates)
            for name, candidates in _candidates().items()
        ]
        return [measure(case, repetitions, calls=CALLS, warm_up=1) for case in cases]


def measurements(world_size: int, repetitions: int) -> list[Measurement]:
    return on_ranks(on_rank, 1, repetitions) if world_size == 1 else []

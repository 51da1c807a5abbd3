"""The cost of one eager functional all_reduce for its caller, in a world of one, where nothing is moved.

``torch`` is ``torch.distributed._functional_collectives.all_reduce`` and the first use of its result, over
gloo; ``interlace`` is ``interlace.functional.all_reduce`` and the first use. "first use" is ``result + 1``;
"wait" calls ``wait_tensor`` or :func:`interlace.functional.wait` instead; "gradient" is the first use, of
an input that requires gradients, without its backward. ``add`` is the addition alone, a part of every
first use.

Protocol: blocks of CALLS calls, candidates alternate block by block, medians over blocks.
"""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from cpu.measure import Case, Measurement, measure

import interlace

CALLS = 500
BYTES = 4


def _candidates() -> dict[str, dict[str, Callable[[], object]]]:
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
    """All measurements, in microseconds per call."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    try:
        shape: dict[str, int | str] = {"bytes": BYTES, "dtype": "float32"}
        cases = [
            Case(f"functional all_reduce, {name}", shape, "torch", candidates)
            for name, candidates in _candidates().items()
        ]
        return [measure(case, repetitions, calls=CALLS, warm_up=1) for case in cases]
    finally:
        dist.destroy_process_group()


def measurements(world_size: int, repetitions: int) -> list[Measurement]:
    """All of a world of one; nothing for other sizes."""
    if world_size != 1:
        return []
    with tempfile.TemporaryDirectory() as folder:
        found: list[Measurement] = interlace.run(
            on_rank, 1, f"{folder}/store", repetitions, place="shm", timeout=600.0
        )[0]
    return found

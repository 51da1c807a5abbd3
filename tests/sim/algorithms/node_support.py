"""Ranks of one simulated run as if they were on several nodes, and calls of theirs that are in flight."""

from collections.abc import Callable
from typing import Any

import torch

import interlace
from interlace.groups.groups import default_group
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.places.sim.place import separate_nodes
from support import payload

SMALL = {"block_elements": 16, "programs": 2, "chunks": 2, "copiers": 2}
TILES = {**SMALL, "block_m": 16, "block_n": 16, "block_k": 16}
TWO = (0, 0, 1, 1)


def on_nodes(nodes: tuple[int, ...], put: str = "stores") -> Communicator:
    """Return the group of all ranks as if they were on ``nodes``."""
    ranks = tuple(range(len(nodes)))
    place = default_group().place.subgroup(ranks, 99)
    return Communicator(separate_nodes(place, nodes, put), ranks)


Started = tuple[Any, Any, torch.Tensor]
"""What to wait for, the output that the call was given if any, and what is right."""


def _all_gather(group: Communicator, call: int) -> Started:
    parts = _inputs(group, call, 40)
    out = torch.empty(40 * group.world_size)
    work = interlace.all_gather(out, parts[group.rank], group=group, async_op=True)
    return work, out, torch.cat(parts)


def _reduce_scatter(group: Communicator, call: int) -> Started:
    out, inputs = torch.empty(20), _inputs(group, call, group.world_size, 20)
    work = interlace.reduce_scatter(out, inputs[group.rank], group=group, async_op=True)
    return work, out, torch.stack(inputs).sum(0)[group.rank]


def _all_reduce(group: Communicator, call: int) -> Started:
    inputs = _inputs(group, call, 70)
    out = inputs[group.rank].clone()
    work = interlace.all_reduce(out, group=group, async_op=True)
    return work, out, torch.stack(inputs).sum(0)


def _all_to_all(group: Communicator, call: int) -> Started:
    out, inputs = torch.empty(group.world_size, 9), _inputs(group, call, group.world_size, 9)
    work = interlace.all_to_all_single(out, inputs[group.rank], group=group, async_op=True)
    return work, out, torch.stack([each[group.rank] for each in inputs])


def _all_gather_matmul(group: Communicator, call: int) -> Started:
    inputs, options = _inputs(group, call, 20, 8), {"group": group, "algorithm": "fused"}
    work = interlace.all_gather_matmul(inputs[group.rank], torch.eye(8), async_op=True, **options)  # type: ignore[call-overload]
    return work, None, torch.cat(inputs)


def _matmul_reduce_scatter(group: Communicator, call: int) -> Started:
    inputs, options = _inputs(group, call, 17 * group.world_size, 8), {"algorithm": "fused"}
    work = interlace.matmul_reduce_scatter(
        inputs[group.rank], torch.eye(8), group=group, async_op=True, **options
    )  # type: ignore[call-overload]
    return work, None, torch.stack(inputs).sum(0).split(17)[group.rank]


def _inputs(group: Communicator, call: int, *shape: int) -> list[torch.Tensor]:
    return [payload(source, call, shape) for source in range(group.world_size)]


OPS: dict[str, Callable[[Communicator, int], Started]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "all_gather_matmul": _all_gather_matmul,
    "matmul_reduce_scatter": _matmul_reduce_scatter,
}


def check_in_flight(op: str, group: Communicator, calls: int) -> None:
    """Workspaces come round again while some rank is far behind."""
    started = []
    for call in range(calls):
        started.append(OPS[op](group, call))
        # only rank 0 waits for data of this one: nobody else learns how far the others are
        one: Any = torch.ones(1, 4), torch.ones(4, 1)
        interlace.matmul_reduce_scatter(*one, group=group, async_op=True, algorithm="fused")
    for call, (work, out, right) in enumerate(started):
        result = work.wait()
        if not torch.equal(result if out is None else out, right):
            raise AssertionError(f"wrong result on rank {group.rank} in call {call}")

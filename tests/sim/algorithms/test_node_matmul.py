"""Fused matmul + reduce-scatter over nodes, simulated: results, bits, races, schedules, and mutants."""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import interlace
from interlace.runtime.tuning.configuration import override
from interlace.verify import races
from mutants.first_fault import first_fault
from mutants.mutant_checks import filled
from mutants.mutations import Edit, Mutant, mutated
from ranks import ranks
from sim.algorithms.node_support import TILES, TWO, check_in_flight, on_nodes
from support import noise, payload, poisoned
from tiers import few, thorough

THREE_TWO, TWO_THREE, TWO_FOUR = (0, 0, 0, 1, 1, 1), (0, 0, 1, 1, 2, 2), (0, 0, 0, 0, 1, 1, 1, 1)
FILE = "kernels/matmul/node_matmul_reduce_scatter.py"


def fused(group: Any, *operands: Any, **options: Any) -> Any:
    return interlace.matmul_reduce_scatter(*operands, group=group, algorithm="fused", **options)


# -- results -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of", "put", "dtype"),
    few(
        [
            (TWO, "late", torch.float32),
            (THREE_TWO, "stores", torch.bfloat16),
            (TWO_THREE, "late", torch.float16),
            (TWO_FOUR, "stores", torch.float32),
            ((1, 0, 0, 1, 0), "late", torch.bfloat16),
            ((0, 1), "stores", torch.float32),
            ((0, 0), "stores", torch.float32),
        ],
        (TWO, "late", torch.float32),
        ((1, 0, 0, 1, 0), "late", torch.bfloat16),
        ((0, 1), "stores", torch.float32),
    ),
    ids=str,
)
def test_results(of: tuple[int, ...], put: str, dtype: torch.dtype) -> None:
    world, ranks = len(of), range(len(of))

    def on_rank() -> None:
        group = on_nodes(of, put)
        rank = group.rank
        inputs = [payload(source, 0, (17 * world, 8), dtype) for source in ranks]
        weights = [payload(source + 20, 0, (8, 24), dtype) for source in ranks]
        bias = payload(9, 0, (24,), dtype)
        products = [(x @ w).float() for x, w in zip(inputs, weights, strict=True)]
        total = sum(products[1:], products[0])
        own = total[17 * rank : 17 * rank + 17]
        mean = fused(group, inputs[rank], weights[rank], reduce_op="avg")
        assert torch.equal(mean, (own / world).to(dtype))
        out = fused(group, inputs[rank], weights[rank], bias=bias, activation="relu")
        assert torch.equal(out, (own + bias.float()).relu().to(dtype))
        # fewer rows than ranks, and along the other dimension
        few, options = world - 1, {"group": group, "algorithm": "fused"}
        whole = interlace.matmul_all_reduce(
            inputs[rank][:few], weights[rank], bias=bias, activation="relu", **options
        )
        assert torch.equal(whole, (total[:few] + bias.float()).relu().to(dtype))
        wide = weights[rank].repeat(1, world)[:, : 2 * world]
        across = fused(group, inputs[rank][:5], wide, scatter_dim=1)
        right = total.repeat(1, world)[:5, 2 * rank : 2 * rank + 2]
        assert torch.equal(across, right.to(dtype))

    with override(**{**TILES, "block_elements": 1024}), poisoned():
        interlace.run(on_rank, world)


@ranks(4, place="sim")
def test_torch_matmuls_between_nodes_activate_too() -> None:
    group = on_nodes(TWO)
    x, weight = payload(group.rank, 0, (8, 4)) - 20, torch.eye(4)
    total = sum(payload(rank, 0, (8, 4)) - 20 for rank in range(4))
    for algorithm in ("pipelined", "unfused"):
        out = interlace.matmul_reduce_scatter(
            x, weight, activation="relu", group=group, algorithm=algorithm
        )
        right = total[2 * group.rank : 2 * group.rank + 2].relu()
        assert torch.equal(out, right) and not torch.equal(right, total[:2])


@thorough
def test_bits_do_not_depend_on_timing() -> None:
    """Sums are by nodes, and within a node by ranks."""
    inputs = [noise(rank, 0, (4 * 17, 1)) for rank in range(4)]
    weights = [noise(rank, 1, (1, 24)) for rank in range(4)]
    parts = [x * w for x, w in zip(inputs, weights, strict=True)]
    right = (parts[0] + parts[1]) + (parts[2] + parts[3])
    assert not torch.equal(right, sum(parts[1:], parts[0]))  # the order matters

    def on_rank(put: str) -> torch.Tensor:
        group = on_nodes(TWO, put)
        out: torch.Tensor = fused(group, inputs[group.rank], weights[group.rank])
        return out

    with override(**{**TILES, "block_elements": 1024}), poisoned():
        for seed in range(3):
            for put in ("stores", "late"):
                found = interlace.run(on_rank, 4, put, seed=seed)
                assert torch.equal(torch.cat(found), right)


# -- races and schedules -----------------------------------------------------------------------------


def in_flight(of: tuple[int, ...], put: str = "stores", calls: int = 4) -> Callable[[], None]:
    def on_rank() -> None:
        group = on_nodes(of, put)
        with override(**TILES):
            check_in_flight("matmul_reduce_scatter", group, calls)

    return on_rank


@pytest.mark.parametrize(
    ("of", "put"),
    few([(THREE_TWO, "stores"), (TWO_THREE, "late"), ((0, 1, 1, 0, 1), "late")]),
    ids=str,
)
def test_no_races(of: tuple[int, ...], put: str) -> None:
    report = races(in_flight(of, put, 3), len(of), seeds=1)
    assert report.clean, str(report)
    assert report.events > 1000


_FINAL = "        wait_node(workspace, node, workspace.slot_offset + tile * 8, slots_each, epoch)\n"
_LANDED = (
    "            wait_slots(workspace, source, workspace.slot_offset + slot * 8, valid, epoch)\n"
)
MUTANTS = {
    "a sum without all members": (
        "missing = wait_node(workspace, node,",
        "seen = wait_node(workspace, node._replace(num_members=node.num_members - 1),",
    ),
    "put without the owner's credit": (
        "ready = wait_credit(workspace, owner, epoch)", "ready = epoch"
    ),
    "tiles without the taker's credit": (
        "if wait_credit(workspace, taker, epoch) >= epoch - 1:", "if epoch >= 0:"
    ),
    "own tiles without the members": (_FINAL, ""),
    "own tiles without the other nodes": (_LANDED, "            pass\n"),
    "passed on before it has landed": (
        "                seen = land(",
        "                early = workspace.slot_offset + (slots.landed_slot + landing) * 8\n"
        "                publish(peer_pointer(workspace, workspace.rank, early), epoch)\n"
        "                seen = land(",
    ),
    "one region for all members": (
        "part = tl.load(segment + 4) * node.num_members + node.own_member",
        "part = tl.load(segment + 4) * node.num_members + node.own_member * 0",
    ),
    "one landing place for all nodes": (
        "                landing = node.own_node * slots_each + tile\n",
        "                landing = tile + node.num_nodes // 2 * slots_each\n",
    ),
    "one partial sum for all tiles": (
        "place = number * slots_each + tile", "place = number * slots_each"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str, tmp_path: pathlib.Path) -> None:
    mutant = Mutant(name, FILE, (Edit(*MUTANTS[name]),))
    with mutated(mutant, tmp_path), filled():
        assert first_fault(in_flight(TWO), 4, range(6))

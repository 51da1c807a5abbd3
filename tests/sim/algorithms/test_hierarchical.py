"""Ranks on several nodes, simulated: puts are stores, or fetched as late as may be; races, schedules."""

import itertools
import pathlib
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, strategies as st

import interlace
from cases import api_cases
from interlace.groups.groups import default_group, install
from interlace.kernels import node_order as order
from interlace.ops.collectives.stream_engine import HierarchicalEngine
from interlace.runtime.tuning.configuration import override
from interlace.verify import races, schedules
from mutants.first_fault import first_fault
from mutants.mutant_checks import filled
from mutants.mutations import mutant_of, mutated
from ops.test_contract import cells, check_values
from ranks import ranks
from sim.algorithms.node_support import SMALL, TILES, TWO, check_in_flight, on_nodes
from support import noise, poisoned
from tiers import few, thorough

PUTS = ("stores", "late")
LAYOUTS = [(0, 0), (0, 1), TWO, (0, 1, 0, 1), (0, 0, 0, 1), (0, 1, 2, 0), (5, 2, 2, 5)]


# -- orders ------------------------------------------------------------------------------------------

NODES = st.lists(st.integers(0, 2), min_size=1, max_size=7)


def carried_out(
    nodes: list[int], lines: list[list[list[int]]], rows: int
) -> tuple[list[list[set[int]]], Counter[tuple[int, int, int]]]:
    """Do all ranks' moves, line by line; return the elements of each rank, and the traffic between nodes.

    ``[rank][row]`` of the first are the input elements, ``rank * 10000 + row``, that have been there.
    """
    held: list[list[set[int]]] = [[set() for _ in range(rows)] for _ in nodes]
    published: set[tuple[int, int]] = set()
    crossed: Counter[tuple[int, int, int]] = Counter()
    left = [list(each) for each in lines]
    while any(left):
        moved = False
        for rank, mine in enumerate(left):
            while mine and (mine[0][6] < 0 or (rank, mine[0][6]) in published):
                kind, peer, _, begin, to, count, _, slot = mine.pop(0)
                moved = True
                assert (kind == order.PUT) == (nodes[peer] != nodes[rank])
                for row in range(count if kind != order.LAND else 0):
                    if kind == order.SEND:
                        what = {rank * 10000 + begin + row}
                    else:
                        what = set(held[rank][begin + row])
                    held[peer][to + row] |= what
                    if kind == order.PUT:
                        crossed.update((element, nodes[rank], nodes[peer]) for element in what)
                assert (peer, slot) not in published
                published.add((peer, slot))
        assert moved, [each[0] for each in left if each]
    return held, crossed


@given(
    nodes=NODES, rows=st.lists(st.integers(0, 9), min_size=7, max_size=7), chunk=st.integers(1, 4)
)
def test_gather_moves_bring_everything_once(nodes: list[int], rows: list[int], chunk: int) -> None:
    rows = rows[: len(nodes)]
    ranks, total = range(len(nodes)), sum(rows)
    lines = [order.gather_moves(rank, nodes, rows, chunk)[0] for rank in ranks]
    held, crossed = carried_out(nodes, lines, total)
    whole = [source * 10000 + row for source in ranks for row in range(rows[source])]
    for rank in ranks:
        for row, element in enumerate(whole):
            if element // 10000 != rank:
                assert held[rank][row] == {element}
    others = {(a, b) for a in set(nodes) for b in set(nodes) if a != b}
    expected = {(e, a, b): 1 for e in whole for a, b in others if nodes[e // 10000] == a}
    assert crossed == expected


@given(nodes=NODES, data=st.data())
def test_exchange_moves_bring_every_part(nodes: list[int], data: st.DataObject) -> None:
    ranks = range(len(nodes))
    some = st.lists(st.integers(0, 3), min_size=len(nodes), max_size=len(nodes))
    sizes = [data.draw(some) for _ in ranks]
    made = [order.exchange_moves(rank, nodes, sizes) for rank in ranks]
    held, crossed = carried_out(nodes, [lines for lines, *_ in made], made[0][2])
    assert len({(rows, slots) for _, _, rows, slots in made}) == 1
    assert all(count == 1 for count in crossed.values())
    for rank, (lines, firsts, rows, slots) in enumerate(made):
        assert all(0 <= line[7] < slots and line[4] + line[5] <= rows for line in lines)
        for source in ranks:
            first = sum(sizes[source][:rank])
            for row in range(sizes[source][rank] if source != rank else 0):
                assert held[rank][firsts[source] + row] == {source * 10000 + first + row}


@given(nodes=NODES)
def test_orders_are_permutations_and_relations_are_mutual(nodes: list[int]) -> None:
    ranks = range(len(nodes))
    for rank in ranks:
        gathered = order.gather_order(rank, nodes, [2] * len(nodes))
        assert sorted(gathered) == [(source, chunk) for source in ranks for chunk in (0, 1)]
        own = len(order.members(nodes, nodes[rank]))
        assert {nodes[source] for source, _ in gathered[: 2 * own]} == {nodes[rank]}
        scattered = order.scatter_order(rank, nodes)
        assert sorted(scattered) == list(ranks) and scattered[-1] == rank
        assert {nodes[owner] for owner in scattered[-own:]} == {nodes[rank]}
        for target in order.put_targets(rank, nodes):
            assert rank in order.put_sources(target, nodes)
        for owner in ranks:
            by = order.reducer(rank, owner, nodes)
            assert nodes[by] == nodes[rank] and owner in order.reduced_owners(by, nodes)


# -- results -----------------------------------------------------------------------------------------


MOVING = (
    "all_gather", "all_gather_v", "gather", "scatter", "broadcast", "all_to_all", "all_to_all_single",
)  # fmt: skip
REDUCING = "all_reduce", "reduce", "reduce_scatter"
QUICK_OPS = (
    "distributed_decode", "context_parallel_attention", "matmul_all_to_all", "all_to_all_matmul",
    "scaled_matmul_reduce_scatter",
)  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "put"),
    few(
        [*((nodes, "stores") for nodes in LAYOUTS), (TWO, "late"), (LAYOUTS[-1], "late")],
        ((0, 0), "stores"),
        ((0, 1, 0, 1), "stores"),
        (LAYOUTS[-1], "late"),
    ),
    ids=str,
)
def test_collectives(nodes: tuple[int, ...], put: str) -> None:
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    if nodes == TWO:
        dtypes += (torch.bool, torch.int64, torch.float16, torch.float64)

    def on_rank() -> None:
        install(on_nodes(nodes, put).place)
        assert isinstance(default_group().engine, HierarchicalEngine)
        with override(**{**SMALL, "block_elements": 4}):
            for dtype in dtypes:
                for name in MOVING:
                    getattr(api_cases, name)(dtype, False)
                for name, op in itertools.product(REDUCING, ("sum", "max")):
                    if dtype != torch.bool:
                        getattr(api_cases, name)(dtype, op, False)

    with poisoned():
        interlace.run(on_rank, len(nodes))


@pytest.mark.parametrize(
    ("op", "put"),
    few(itertools.product(cells("values"), PUTS), *((op, "late") for op in QUICK_OPS)),
)
@ranks(3, place="sim")
def test_every_op(op: str, put: str) -> None:
    """Ops without a kernel of their own for nodes use plain collectives; decoding has its kernels too."""
    with override(**SMALL):
        group = on_nodes((0, 1, 1), put)
        check_values(op, group=group)
        if op in ("distributed_decode", "scaled_matmul_reduce_scatter"):
            check_values(op, group=group, algorithm="fused")
        if op in ("matmul_all_to_all", "all_to_all_matmul"):
            with pytest.raises(ValueError, match="works within one node"):
                check_values(op, group=group, algorithm="fused")


@ranks(4, place="sim")
def test_sums_round_once_and_are_the_same_everywhere() -> None:
    """Partial sums of bfloat16 are in fp32; all copies of a part have equal bits."""
    group, inputs = (
        on_nodes(TWO, "stores"),
        [noise(r, 0, (4, 33), torch.bfloat16) for r in range(4)],
    )
    wide = [each.float() for each in inputs]
    right = ((wide[0] + wide[1]) + (wide[2] + wide[3])).bfloat16()
    x, part = inputs[group.rank].clone(), torch.empty(33, dtype=torch.bfloat16)
    interlace.reduce_scatter(part, x, group=group)
    interlace.all_reduce(x, group=group)
    assert torch.equal(part, right[group.rank]) and torch.equal(x, right)


@ranks(4, place="sim")
def test_memory_of_another_node_cannot_be_touched() -> None:
    place = on_nodes(TWO).place
    buffer = place.allocate(64)
    other = 3 - place.rank
    assert buffer.mapped(place.rank) and not buffer.mapped(other)
    assert buffer.peers.tolist()[other] == 0 and all(buffer.peers.tolist()[4:])
    with pytest.raises(AssertionError, match="is on another node"):
        buffer.view(other, 0, (1,), torch.int64)


# -- races and schedules -------------------------------------------------------------------------------


def in_flight(op: str, nodes: tuple[int, ...] = TWO, put: str = "stores") -> Callable[[], None]:
    """Run four calls of an op in flight, so that workspaces and slots come round again."""

    def on_rank() -> None:
        group = on_nodes(nodes, put)
        with override(**TILES):
            check_in_flight(op, group, 4)

    return on_rank


@thorough
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_to_all"])
def test_no_races_on_nodes_that_differ_in_size(op: str) -> None:
    report = races(in_flight(op, (0, 1, 1, 0, 1), "late"), 5, seeds=1)
    assert report.clean, str(report)


# -- negative controls ---------------------------------------------------------------------------------


_MOVES, _REDUCTION = "collectives/node_moves", "collectives/node_reduction"
_QUIET = '    if PUT == "late":\n        epoch = current'
_PUT_WAIT = "seen = wait(workspace, source, waited_byte, epoch)"
_LAND_WAIT = "seen = wait(peers, source, slot_byte, epoch)"
_CREDIT = "ready = wait_credit(workspace, peer, epoch) + 1"
_OWNER = "ready = wait_credit(workspace, owner, epoch)"
_SUMMER = "if wait_credit(workspace, summing, epoch) >= epoch - 1:"
MUTANTS = {
    "nobody waits to land": ("all_gather", _MOVES, _LAND_WAIT, "seen = epoch"),
    "passed on at once": ("all_gather", _MOVES, _PUT_WAIT, "seen = epoch"),
    "no credit of the peer": ("all_gather", _MOVES, _CREDIT, "ready = epoch"),
    "not quiet": ("all_gather", _MOVES, _QUIET, _QUIET.replace("late", "")),
    "signalled before it is put": (
        "all_gather", _MOVES, '        if PUT == "stores":\n',
        "        publish(peer_pointer(peers, peers.world_size + peer, slot_byte), epoch)\n"
        '        if PUT == "stores":\n',
    ),
    "one member not waited for": (
        "reduce_scatter", _REDUCTION,
        "valid = member < node.num_members", "valid = member < node.num_members - 1",
    ),
    "one region for all members": ("reduce_scatter", _REDUCTION, " + own_member * stride", ""),
    "one landing place for all nodes": (
        "reduce_scatter", _REDUCTION,
        "landing_offset + (node.own_node * stride + element) * 4",
        "landing_offset + ((node.own_node * 0 + 1) * stride + element) * 4",
    ),
    "no credit of the owner": ("reduce_scatter", _REDUCTION, _OWNER, "ready = epoch"),
    "no credit of who sums": ("reduce_scatter", _REDUCTION, _SUMMER, "if epoch >= 0:"),
}  # fmt: skip


QUICK = ("one member not waited for", "nobody waits to land", "passed on at once")


@pytest.mark.parametrize("name", few(MUTANTS, *QUICK))
def test_mutant_is_caught(name: str, tmp_path: pathlib.Path) -> None:
    op, file, old, new = MUTANTS[name]
    put = "late" if name == "not quiet" else "stores"
    with mutated(mutant_of(f"kernels/{file}.py", name, (old, new)), tmp_path), filled():
        assert first_fault(in_flight(op, put=put), 4, range(6))


@thorough
def test_a_credit_that_is_not_put_blocks(tmp_path: pathlib.Path) -> None:
    all_of_them = "for number in range(partners.count):"
    kept_back = all_of_them.replace("(par", "(1, par")
    mutant = mutant_of(f"kernels/{_MOVES}.py", "a credit kept back", (all_of_them, kept_back))
    with mutated(mutant, tmp_path), filled():
        report = schedules(in_flight("all_gather"), 4, n=2, workers=1, shrink=False)
    assert "deadlock: nothing can run" in str(report), str(report)

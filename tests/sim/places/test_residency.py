"""Kernels of two groups on one GPU: side by side if they fit, else in the order of the calls."""

from typing import Any

import pytest
import torch

import interlace
from interlace.groups.new import new_group
from interlace.runtime.places.gpu.device_place import Residency
from stand_ins import fake_host
from stand_ins.fake_cuda import DeviceHang, FakeGpu
from stand_ins.replaced import Replacement

A, B, C = 1, 2, 3


def admitted(known: Residency, group: int, programs: int, *, end: bool = True) -> list[int]:
    """Return the streams for which an op of ``group``, on stream ``group``, has to wait."""
    waited = [point.target[0] for point in known.admit(group, programs, (group, 0))]
    if end:
        known.ended(group, (group, 0))
    return waited


def test_what_fits_runs_side_by_side() -> None:
    known = Residency(10)
    assert [admitted(known, group, 3) for group in (A, B, C)] == [[], [], []]
    assert admitted(known, A, 4) == []


def test_what_does_not_fit_waits_for_the_oldest() -> None:
    known = Residency(10)
    assert admitted(known, A, 6) == [] and admitted(known, B, 4) == []
    assert admitted(known, C, 3) == [A]
    assert admitted(known, A, 1) == [B]  # C counts 6, as it may still wait for A's


def test_one_group_waits_for_nobody() -> None:
    known = Residency(10)
    assert all(admitted(known, A, 10) == [] for _ in range(5))


def test_who_waited_counts_for_whom_it_waited() -> None:
    """C fits beside B, but not beside A, for which B still waits."""
    known = Residency(10)
    admitted(known, A, 8)
    assert admitted(known, B, 3) == [A]
    assert admitted(known, C, 3) == [B]


def test_kernels_of_one_op_add_up() -> None:
    known = Residency(10)
    admitted(known, A, 3, end=False)
    admitted(known, A, 3)
    assert admitted(known, B, 5) == [A]


def test_a_closed_group_is_forgotten() -> None:
    known = Residency(10)
    admitted(known, A, 8)
    known.forget(A)
    assert admitted(known, B, 8) == []


# -- on the fake GPU ---------------------------------------------------------------------------------


def two_groups() -> bool:
    """Run asynchronous ops of two groups of the same ranks in flight together, known kinds too."""
    rank, other = interlace.get_rank(), new_group([0, 1])
    seen = []
    for number in range(4):
        x = torch.full((64, 16), 10.0 * number + rank + 1)
        works = [
            interlace.matmul_reduce_scatter(
                x, torch.eye(16), group=group, algorithm="fused", async_op=True
            )
            for group in (None, other)
        ]
        seen += [(work, 20.0 * number + 3) for work in works]
    results = [(work.wait(), value) for work, value in seen]
    torch.cuda.current_stream().synchronize()
    return all(bool((out == value).all()) for out, value in results)


def holds(seed: int, *faults: Replacement) -> bool:
    try:
        gpu = FakeGpu(seed, eager=0.05, multiprocessors=3)
        return all(fake_host.run(two_groups, 2, gpu, *faults))
    except DeviceHang:
        return False


@pytest.mark.parametrize("seed", range(4))
def test_two_groups_do_not_block(seed: int) -> None:
    assert holds(seed)


def test_without_an_order_they_block() -> None:
    def nothing(self: Residency, group: int, programs: int, where: Any) -> list[Any]:
        return []

    assert not all(holds(seed, (Residency, "admit", nothing)) for seed in range(8))

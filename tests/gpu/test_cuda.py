"""The kernels compiled, virtual ranks on one GPU. Skipped where there is none (see tests/conftest.py)."""

import pytest
import torch

import interlace
from cases import device_ranks as ranks, linear_cases
from interlace.cli.commands.check import CheckCase, cases, run_case


@pytest.mark.parametrize(
    "case",
    [case for case in cases("cuda", has_roles=False) if case.world_size in (2, 4)],
    ids=lambda case: case.title.replace(", ", "-"),
)
def test_case(case: CheckCase) -> None:
    verdict = run_case(case, "cuda", seed=0)
    if verdict.skipped:
        pytest.skip(verdict.skipped)
    assert verdict.passed, (verdict.ratio, verdict.error)


def test_results_are_bit_identical_from_run_to_run() -> None:
    def product() -> torch.Tensor:
        torch.manual_seed(interlace.get_rank())
        x = torch.randn(512, 256, device=interlace.device(), dtype=torch.bfloat16)
        w = torch.randn(256, 512, device=interlace.device(), dtype=torch.bfloat16)
        return interlace.matmul_reduce_scatter(x, w, algorithm="fused").cpu()

    first = interlace.run(product, 4, place="cuda")
    for _ in range(5):
        again = interlace.run(product, 4, place="cuda")
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_an_error_on_one_rank_leaves_the_gpu_usable() -> None:
    def fails() -> None:
        if interlace.get_rank() == 1:
            raise KeyError("lost")
        interlace.all_gather_matmul(
            torch.ones(64, 64, device=interlace.device()),
            torch.ones(64, 64, device=interlace.device()),
        )

    with pytest.raises(KeyError):
        interlace.run(fails, 3, place="cuda")
    assert float((torch.ones(8, device="cuda") * 2).sum()) == 16.0


@pytest.mark.parametrize("name", ranks.REPLAYED)
@pytest.mark.parametrize("world_size", [2, 4])
def test_replays_of_graphs(name: str, world_size: int) -> None:
    assert interlace.run(ranks.replays, world_size, name, 100, place="cuda") == [[]] * world_size


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_operations(world_size: int) -> None:
    wrong = interlace.run(
        ranks.operations, world_size, list(ranks.OPS), 5, True, True, place="cuda"
    )
    assert wrong == [[]] * world_size


def test_inputs_may_be_dropped_at_once() -> None:
    assert interlace.run(ranks.dropped_inputs, 4, 20, place="cuda") == [[]] * 4


def test_cupy_arrays() -> None:
    pytest.importorskip("cupy")
    expected = [3.0 * 16, 2.0 * 16**3]
    assert interlace.run(ranks.cupy_arrays, 2, place="cuda") == [expected] * 2


@pytest.mark.parametrize("tile", [{}, {"num_stages": 3, "epilogue_subtile": 2}])
@pytest.mark.parametrize("transposed", [False, True])
def test_warps_with_roles_give_what_the_reference_gives(
    transposed: bool, tile: dict[str, int]
) -> None:
    """No tile divides the rows, and there are more tiles than programs."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("its kernel is for 9.x")
    wanted, found = (
        interlace.run(linear_cases.products, 2, warp_roles, transposed, tile, place="cuda")
        for warp_roles in (False, True)
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)  # bits

"""interlace's parallel styles give what torch's give: outputs, gradients, state dicts, steps."""

import pathlib
from typing import Any

import pytest

import interlace
from multi.tensor import shared_gather_ranks, style_ranks
from tiers import thorough


@pytest.fixture(
    scope="module",
    params=[
        ("interlace", 2),
        *(
            pytest.param(each, marks=thorough)
            for each in (("gloo", 2), ("interlace", 4), ("gloo", 4))
        ),
    ],
)
def failures(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, str]]:
    """Of all cases, run in one process group; by rank."""
    backend, world_size = request.param
    store = str(tmp_path_factory.mktemp("styles") / "store")
    found: Any = interlace.run(style_ranks.run_all, world_size, backend, store, place="shm")
    return list(found)


@pytest.mark.parametrize("name", style_ranks.cases(2))
def test_as_torchs(failures: list[dict[str, str]], name: str) -> None:
    for rank, failure in enumerate(failures):
        assert not failure[name], f"rank {rank}: {failure[name]}"


@thorough
def test_a_graph_has_one_gather_of_a_prepared_input(tmp_path: pathlib.Path) -> None:
    for fused in interlace.run(
        shared_gather_ranks.compiled, 2, str(tmp_path / "store"), place="shm"
    ):
        assert ("all_gather_matmul", 3) in fused, fused


def test_refused_modules(tmp_path: pathlib.Path) -> None:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    import interlace.tensor as styles

    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    with pytest.raises(NotImplementedError, match="only support"):
        styles.ColwiseParallel()._apply(nn.Conv1d(1, 1, 1), mesh)
    with pytest.raises(NotImplementedError, match="only support"):
        styles.RowwiseParallel()._apply(nn.Conv1d(1, 1, 1), mesh)
    assert not hasattr(nn.Conv1d(1, 1, 1), "_interlace_style")

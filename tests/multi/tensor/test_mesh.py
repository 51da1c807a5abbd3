"""interlace.tensor's collectives on ranks that are processes: as torch's, and differentiable."""

from pathlib import Path

import pytest
import torch
import torch.distributed.tensor._collective_utils as torch_utils
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import interlace
import interlace.tensor as tensor
from multi.process_group.backend_ranks import world
from multi.tensor.meshes import expected_chunk
from ranks import ranks
from support import payload


@pytest.mark.parametrize("columns", [4, 5])
@ranks()
def test_gradients(columns: int) -> None:
    """Of even and of uneven chunks: those of the gather and the chunk, computed in one process."""
    rank = interlace.get_rank()
    mesh = DeviceMesh("cpu", [0, 1], _init_backend=False, _rank=rank)
    parts = [payload(each, 0, (3, columns)).requires_grad_() for each in range(2)]
    for each in range(2):
        (expected_chunk(parts, 0, 1, each).square().sum() * (2 + each)).backward()
    for async_op in (False, True):
        mine = parts[rank].detach().clone().requires_grad_()
        made = tensor.shard_dim_alltoall(mine, 0, 1, mesh, 0, async_op=async_op)
        (made.square().sum() * (2 + rank)).backward()
        assert torch.equal(mine.grad, parts[rank].grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["interlace", "gloo"])
@ranks(4)
def test_beside_torchs_functions(tmp_path: Path, backend: str) -> None:
    rank = interlace.get_rank()
    with world(tmp_path / "store", backend):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for dim in (0, 1):
            for source in (0, 1):
                check_scatter_and_broadcast(mesh, dim, source)
            for gather_dim, shard_dim in ((0, 1), (1, 0), (0, 2), (2, 1)):
                x = payload(rank, 30, (2, 3, 5))
                mine = tensor.shard_dim_alltoall(x, gather_dim, shard_dim, mesh, dim)
                theirs = torch_utils.shard_dim_alltoall(x, gather_dim, shard_dim, mesh, dim)
                assert mine.stride() == theirs.stride() and torch.equal(mine, theirs)
        tensor.check_tensor_meta(torch.ones(2 + rank // 2), True, group=mesh.get_group(1))


def check_scatter_and_broadcast(mesh: DeviceMesh, dim: int, source: int) -> None:
    rank = interlace.get_rank()
    whole = [payload(rank, 10 * dim + r, (2, 3)) for r in range(2)]
    found = []
    for kind in (tensor, torch_utils):
        part, sent = torch.empty(2, 3), payload(rank, 7, (2,))
        first = kind.mesh_scatter(part, whole, mesh, dim, True, group_src=source)
        second = kind.mesh_broadcast(sent, mesh, dim, True, group_src=source)
        first.wait()
        second.wait()
        found.append((part, sent))
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs), (dim, source)

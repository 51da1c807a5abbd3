"""Ranks of test_mesh.py: interlace.tensor's collectives beside torch's, and their gradients."""

import os
import pathlib
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor._collective_utils as torch_utils
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import interlace
import interlace.tensor as tensor
from interlace.runtime.tuning import calibration
from multi.tuning.calibration_ranks import measurement
from support import payload


def expected_chunk(parts: list[torch.Tensor], gather_dim: int, shard_dim: int, rank: int) -> Any:
    """As torch defines it: all-gather, chunk, and empty chunks at the end."""
    chunks = list(torch.cat(parts, gather_dim).chunk(len(parts), shard_dim))
    missing = len(parts) - len(chunks)
    chunks = torch_utils.fill_empty_tensor_to_shards(chunks, shard_dim, missing)
    return chunks[rank].contiguous()


def gradients(columns: int) -> list[bool]:
    """Those of the gather and the chunk, computed in one process."""
    rank, shape = interlace.get_rank(), (3, columns)
    mesh = DeviceMesh("cpu", [0, 1], _init_backend=False, _rank=rank)
    parts = [payload(each, 0, shape).requires_grad_() for each in range(2)]
    for each in range(2):
        (expected_chunk(parts, 0, 1, each).square().sum() * (2 + each)).backward()
    same = []
    for async_op in (False, True):
        mine = payload(rank, 0, shape).requires_grad_()
        made = tensor.shard_dim_alltoall(mine, 0, 1, mesh, 0, async_op=async_op)
        (made.square().sum() * (2 + rank)).backward()
        same.append(torch.equal(mine.grad, parts[rank].grad))  # type: ignore[arg-type]
    return same


def beside_torch(backend: str, path: str) -> list[str]:
    """On a mesh 2 x 2 of a process group: what differs from torch's functions."""
    rank, size = interlace.get_rank(), interlace.get_world_size()
    dist.init_process_group(backend, rank=rank, world_size=size, store=dist.FileStore(path, size))
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        wrong = [f"{each} on rank {rank}" for each in _differences(mesh, rank)]
        tensor.check_tensor_meta(torch.ones(2 + rank // 2), True, group=mesh.get_group(1))
        wrong += _measured_for(mesh, backend, path + ".json")
        return wrong
    finally:
        dist.destroy_process_group()


def _differences(mesh: DeviceMesh, rank: int) -> list[str]:
    wrong = []
    for dim in (0, 1):
        for source in (0, 1):
            whole = [payload(rank, 10 * dim + r, (2, 3)) for r in range(2)]
            found = {}
            for kind in (tensor, torch_utils):
                part, sent = torch.empty(2, 3), payload(rank, 7, (2,))
                first = kind.mesh_scatter(part, whole, mesh, dim, True, group_src=source)
                second = kind.mesh_broadcast(sent, mesh, dim, True, group_src=source)
                first.wait()
                second.wait()
                found[kind] = part, sent
            for mine, theirs in zip(*found.values(), strict=True):
                if not torch.equal(mine, theirs):
                    wrong.append(f"dim {dim}, source {source}: {mine} is not {theirs}")
        for gather_dim, shard_dim in ((0, 1), (1, 0), (0, 2), (2, 1)):
            x = payload(rank, 30, (2, 3, 5))
            mine = tensor.shard_dim_alltoall(x, gather_dim, shard_dim, mesh, dim)
            theirs = torch_utils.shard_dim_alltoall(x, gather_dim, shard_dim, mesh, dim)
            if mine.stride() != theirs.stride() or not torch.equal(mine, theirs):
                wrong.append(f"{gather_dim} -> {shard_dim}: {mine} is not {theirs}")
    return wrong


def _measured_for(mesh: DeviceMesh, backend: str, file: str) -> list[str]:
    """A calibration of "interlace" is for that backend only."""
    if mesh.get_rank() == 0:
        calibration.add(measurement(10.0, (2, 2)), pathlib.Path(file))
    dist.barrier()
    os.environ[calibration.VARIABLE] = file
    try:
        sources = [tensor.MeshTopoInfo.build_from_mesh(each).source for each in (mesh, mesh["tp"])]
    finally:
        os.environ[calibration.VARIABLE] = "off"
    expected = "measured" if backend == "interlace" else "torch"
    return [f"topology from {each}" for each in sources if not each.startswith(expected)]

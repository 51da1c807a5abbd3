"""Mesh and placements under which a DTensor lies as a sharded parameter does."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist

from interlace.groups import rank_lists
from interlace.nn.parameters.sharding import Sharding


def layout(sharding: Sharding, device_type: str) -> tuple[Any, tuple[Any, ...]]:
    """The mesh and the placements under which a DTensor lies as a parameter of ``sharding``."""
    from torch.distributed.tensor import Replicate, Shard

    placements: tuple[Any, ...] = (Replicate() if sharding.dim is None else Shard(sharding.dim),)
    if sharding.copies > 1:
        placements += (Replicate(),)
    meshes = sharding.held.meshes
    key = (sharding.copies, device_type)
    if key not in meshes:
        meshes[key] = _mesh(sharding, device_type)
    return meshes[key], placements


def _mesh(sharding: Sharding, device_type: str) -> Any:
    """Of the group's ranks: the caller's own mesh, else one that makes no process groups."""
    from torch.distributed.device_mesh import DeviceMesh

    named, ranks = sharding.held.named, list(sharding.group.ranks)
    if not dist.is_initialized() or dist.get_world_size() <= max(ranks):
        raise ValueError(
            f"sharded_state_dict: a group of the ranks {ranks} needs torch.distributed to be initialized "
            "with them"
        )
    if sharding.copies > 1:
        rows = torch.tensor(ranks).view(-1, sharding.copies)
        return DeviceMesh(device_type, rows, _init_backend=False)
    if isinstance(named, DeviceMesh):
        return named
    if isinstance(named, str) and named != rank_lists.DEFAULT_NAME:
        with contextlib.suppress(RuntimeError, LookupError, ValueError):
            named = dist.distributed_c10d._resolve_process_group(named)  # type: ignore[attr-defined,arg-type]
    if isinstance(named, dist.ProcessGroup):
        return DeviceMesh.from_group(named, device_type)
    if ranks == list(range(dist.get_world_size())):
        return DeviceMesh.from_group(dist.group.WORLD, device_type)  # type: ignore[arg-type]
    if isinstance(named, tuple) and isinstance(named[0], DeviceMesh):
        mesh, dim = named
        names = mesh.mesh_dim_names
        if isinstance(dim, int) and names is None:
            return DeviceMesh.from_group(mesh.get_group(dim), device_type)
        return mesh[dim if isinstance(dim, str) else names[dim]]
    # torch's ops on such DTensors, full_tensor() among them, need a group of torch: name one
    return DeviceMesh(device_type, torch.tensor(ranks), _init_backend=False)

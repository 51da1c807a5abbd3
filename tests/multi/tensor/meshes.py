"""Tests on meshes of processes, and what torch makes of shards along another dimension."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor._collective_utils as torch_utils
from torch.distributed.device_mesh import init_device_mesh

from multi.process_group.backend_ranks import world
from ranks import ranks
from tiers import few

FEW = few(
    [("interlace", 2), ("gloo", 2), ("interlace", 4), ("gloo", 4)],
    ("interlace", 2),
)


def on_meshes(body: Callable[..., None]) -> Callable[..., Any]:
    """A test whose body runs on every rank of a mesh of one dim, which it gets as ``mesh``."""

    def in_world(tmp_path: Path, backend: str, world_size: int, **given: Any) -> None:
        with world(tmp_path / "store", backend):
            body(mesh=init_device_mesh("cpu", (world_size,)), **given)

    own = list(inspect.signature(in_world).parameters.values())[:3]
    more = [each for name, each in inspect.signature(body).parameters.items() if name != "mesh"]
    functools.update_wrapper(in_world, body)
    in_world.__signature__ = inspect.Signature([*own, *more])  # type: ignore[attr-defined]
    return pytest.mark.parametrize(("backend", "world_size"), FEW)(ranks()(in_world))


def expected_chunk(parts: list[torch.Tensor], gather_dim: int, shard_dim: int, rank: int) -> Any:
    """As torch defines it: all-gather, chunk, and empty chunks at the end."""
    chunks = list(torch.cat(parts, gather_dim).chunk(len(parts), shard_dim))
    missing = len(parts) - len(chunks)
    chunks = torch_utils.fill_empty_tensor_to_shards(chunks, shard_dim, missing)
    return chunks[rank].contiguous()

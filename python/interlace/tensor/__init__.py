"""Tensors over device meshes and groups: DTensor's utilities and costs, parallel styles, unequal parts."""

from interlace.ops import local_tensor as local_tensor  # registers the ops
from interlace.tensor.costs import (
    MeshTopoInfo,
    allgather_cost,
    allreduce_cost,
    alltoall_cost,
    one_step_redistribute_cost,
    redistribute_cost,
    reduce_scatter_cost,
)
from interlace.tensor.mesh_collectives import (
    all_gather_v,
    check_tensor_meta,
    fill_empty_tensor_to_shards,
    gather_v,
    indexed_all_to_all_v,
    mesh_broadcast,
    mesh_scatter,
    pad_tensor,
    scatter_v,
    shard_dim_alltoall,
    spec_to_bytes,
    unpad_tensor,
)
from interlace.tensor.placeholder import Placeholder, PlaceholderError
from interlace.tensor.sharded import ShardedTensor, from_dtensor, from_local, scatter
from interlace.tensor.styles import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    explain,
)

__all__ = [
    "ColwiseParallel",
    "MeshTopoInfo",
    "Placeholder",
    "PlaceholderError",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "ShardedTensor",
    "all_gather_v",
    "allgather_cost",
    "allreduce_cost",
    "alltoall_cost",
    "check_tensor_meta",
    "explain",
    "fill_empty_tensor_to_shards",
    "from_dtensor",
    "from_local",
    "gather_v",
    "indexed_all_to_all_v",
    "mesh_broadcast",
    "mesh_scatter",
    "one_step_redistribute_cost",
    "pad_tensor",
    "redistribute_cost",
    "reduce_scatter_cost",
    "scatter",
    "scatter_v",
    "shard_dim_alltoall",
    "spec_to_bytes",
    "unpad_tensor",
]

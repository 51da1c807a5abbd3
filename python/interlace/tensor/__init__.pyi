# Written by tests/stubs.py from the signatures of the functions.
from interlace.ops import (
    local_tensor as local_tensor,
)
from interlace.runtime.core.work import (
    Work,
)
from interlace.tensor.costs import (
    MeshTopoInfo as MeshTopoInfo, allgather_cost as allgather_cost, allreduce_cost as allreduce_cost,
    alltoall_cost as alltoall_cost, one_step_redistribute_cost as one_step_redistribute_cost,
    redistribute_cost as redistribute_cost, reduce_scatter_cost as reduce_scatter_cost,
)
from interlace.tensor.mesh_collectives import (
    all_gather_v as all_gather_v, check_tensor_meta as check_tensor_meta,
    fill_empty_tensor_to_shards as fill_empty_tensor_to_shards, gather_v as gather_v,
    indexed_all_to_all_v as indexed_all_to_all_v, pad_tensor as pad_tensor, scatter_v as scatter_v,
    shard_dim_alltoall as shard_dim_alltoall, spec_to_bytes as spec_to_bytes,
    unpad_tensor as unpad_tensor,
)
from interlace.tensor.placeholder import (
    Placeholder as Placeholder, PlaceholderError as PlaceholderError,
)
from interlace.tensor.sharded import (
    ShardedTensor as ShardedTensor, from_dtensor as from_dtensor, from_local as from_local,
    scatter as scatter,
)
from interlace.tensor.styles import (
    ColwiseParallel as ColwiseParallel, PrepareModuleInput as PrepareModuleInput,
    PrepareModuleInputOutput as PrepareModuleInputOutput, PrepareModuleOutput as PrepareModuleOutput,
    RowwiseParallel as RowwiseParallel, SequenceParallel as SequenceParallel, explain as explain,
)
from torch import (
    Tensor,
)
from torch.distributed.device_mesh import (
    DeviceMesh,
)
from typing import (
    Literal, overload,
)

__all__ = [
    "ColwiseParallel", "MeshTopoInfo", "Placeholder", "PlaceholderError", "PrepareModuleInput",
    "PrepareModuleInputOutput", "PrepareModuleOutput", "RowwiseParallel", "SequenceParallel",
    "ShardedTensor", "all_gather_v", "allgather_cost", "allreduce_cost", "alltoall_cost",
    "check_tensor_meta", "explain", "fill_empty_tensor_to_shards", "from_dtensor", "from_local",
    "gather_v", "indexed_all_to_all_v", "mesh_broadcast", "mesh_scatter",
    "one_step_redistribute_cost", "pad_tensor", "redistribute_cost", "reduce_scatter_cost", "scatter",
    "scatter_v", "shard_dim_alltoall", "spec_to_bytes", "unpad_tensor",
]
@overload
def mesh_broadcast(
    tensor: Tensor, mesh: DeviceMesh, mesh_dim: int = 0, *, async_op: Literal[True],
    group_src: int | None = 0,
) -> Work: ...
@overload
def mesh_broadcast(
    tensor: Tensor, mesh: DeviceMesh, mesh_dim: int = 0, async_op: bool = False, *,
    group_src: int | None = 0,
) -> Work | None: ...
@overload
def mesh_scatter(
    output: Tensor, scatter_list: list[Tensor] | None, mesh: DeviceMesh, mesh_dim: int = 0, *,
    async_op: Literal[True], group_src: int | None = 0,
) -> Work: ...
@overload
def mesh_scatter(
    output: Tensor, scatter_list: list[Tensor] | None, mesh: DeviceMesh, mesh_dim: int = 0,
    async_op: bool = False, *, group_src: int | None = 0,
) -> Work | None: ...

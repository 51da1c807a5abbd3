"""Tensors over device meshes: collectives along a dimension, costs, parallel styles.

``mesh_collectives.py`` and ``shards.py`` have the utilities of DTensor's ``_collective_utils.py``,
``topology.py`` and ``redistribute_cost.py`` its cost model, by torch's figures or by measured ones
(``python -m interlace calibrate``), ``styles.py`` what ``parallelize_module`` takes.
"""

from interlace.tensor.mesh_collectives import mesh_broadcast, mesh_scatter, shard_dim_alltoall
from interlace.tensor.redistribute_cost import (
    allgather_cost,
    allreduce_cost,
    alltoall_cost,
    one_step_redistribute_cost,
    redistribute_cost,
    reduce_scatter_cost,
)
from interlace.tensor.shards import (
    check_tensor_meta,
    fill_empty_tensor_to_shards,
    pad_tensor,
    spec_to_bytes,
    unpad_tensor,
)
from interlace.tensor.styles import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    explain,
)
from interlace.tensor.topology import MeshTopoInfo

__all__ = [
    "ColwiseParallel",
    "MeshTopoInfo",
    "RowwiseParallel",
    "SequenceParallel",
    "allgather_cost",
    "allreduce_cost",
    "alltoall_cost",
    "check_tensor_meta",
    "explain",
    "fill_empty_tensor_to_shards",
    "mesh_broadcast",
    "mesh_scatter",
    "one_step_redistribute_cost",
    "pad_tensor",
    "redistribute_cost",
    "reduce_scatter_cost",
    "shard_dim_alltoall",
    "spec_to_bytes",
    "unpad_tensor",
]

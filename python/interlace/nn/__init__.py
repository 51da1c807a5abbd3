"""Layers whose communication runs inside their matmuls, and the functions that these layers use.

The layers implement Megatron-style tensor and sequence parallelism: linear layers split over a group, and
the layers between them. Weights, initialisation and checkpoints are those from the unsharded layers of
``torch.nn``, for any number of ranks. See docs/how-to/train/layers.md.
"""

from interlace.nn import functional as functional
from interlace.nn.attention import ContextParallelAttention, UlyssesAttention
from interlace.nn.checkpoints import (
    full_state_dict,
    load_optimizer_state_dict,
    sharded_optimizer_state_dict,
    sharded_state_dict,
    shardings,
)
from interlace.nn.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    SequenceParallelMLP,
)
from interlace.nn.linear_functions import (
    DeferredWeightGradients,
    column_parallel_linear,
    row_parallel_linear,
)
from interlace.nn.moe import LoadBalance, MoE
from interlace.nn.norm import LayerNorm, RMSNorm
from interlace.nn.regions import (
    copy_to_group,
    gather_from_group,
    gather_from_sequence,
    reduce_from_group,
    reduce_scatter_to_sequence,
    scatter_to_group,
)
from interlace.nn.sharding import ShardedModule, Sharding
from interlace.nn.vocabulary import (
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from interlace.ops import local_tensor as local_tensor  # registers the ops

__all__ = [
    "ColumnParallelLinear",
    "ContextParallelAttention",
    "DeferredWeightGradients",
    "LayerNorm",
    "LoadBalance",
    "MoE",
    "QKVParallelLinear",
    "RMSNorm",
    "RowParallelLinear",
    "SequenceParallelMLP",
    "ShardedModule",
    "Sharding",
    "UlyssesAttention",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "column_parallel_linear",
    "copy_to_group",
    "full_state_dict",
    "gather_from_group",
    "gather_from_sequence",
    "load_optimizer_state_dict",
    "reduce_from_group",
    "reduce_scatter_to_sequence",
    "row_parallel_linear",
    "scatter_to_group",
    "sharded_optimizer_state_dict",
    "sharded_state_dict",
    "shardings",
    "vocab_parallel_cross_entropy",
]

"""The three projections of attention: one gather, split by heads."""

from typing import Any

import torch

from interlace.arguments.words import Group
from interlace.nn.functions.regions import copy_to_group
from interlace.nn.functions.weight_gradients import DeferredWeightGradients
from interlace.nn.layers.linear import (
    InitMethod,
    LinearParameters,
    check_features,
    gathering_linear,
)
from interlace.nn.parameters.sharding import OnGroup, divisible, positive
from interlace.runtime.compat.torch_modes import disable
from interlace.runtime.core.communicator import Communicator

Tensor = torch.Tensor


class QKVParallelLinear(OnGroup):
    """Queries, keys and values of this rank's heads, from one gather of the input.

    Parameters
    ----------
    hidden_size : features of the input.
    num_heads : query heads, a multiple of the group's size.
    num_kv_heads : heads of keys and values, by default ``num_heads``, of which they are a divisor; a
        multiple of the group's size, or a divisor: then ``world size / num_kv_heads`` neighbouring ranks
        hold and compute the same head, and its gradient is summed over them.
    head_dim : features of a head, by default ``hidden_size / num_heads``.
    other parameters : as for :class:`ColumnParallelLinear`. Where heads are replicated,
        ``gradient_accumulation_fusion`` and ``deferred`` are refused, which would leave that sum out.

    Forward: ``input`` ``[s / world size, b, hidden]`` gives ``(q, k, v)``, ``[s, b, local heads *
    head_dim]`` each. This rank has query heads ``rank * n .. (rank + 1) * n - 1``, and the key-value heads
    that these look at. State dicts have ``q.weight``, ``k.weight``, ``v.weight`` and their biases, as a
    module that has ``q``, ``k`` and ``v`` as ``nn.Linear`` made in this order, which is also how they are
    initialised.

    Raises ValueError or TypeError naming the argument, the values and the rank.

    >>> def forward():
    ...     with torch.no_grad():
    ...         return [tuple(y.shape) for y in nn.QKVParallelLinear(8, 4, 2)(torch.ones(3, 1, 8))]
    >>> interlace.run(forward, 2)[0]
    [(6, 1, 4), (6, 1, 2), (6, 1, 2)]
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        *,
        group: Group = None,
        sequence_parallel: bool = True,
        batch_first: bool = False,
        init_method: InitMethod | None = None,
        gradient_accumulation_fusion: bool = False,
        save_gathered: bool = False,
        deferred: DeferredWeightGradients | None = None,
        out_dtype: torch.dtype | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(group)
        communicator = self.group
        with communicator.accepting("QKVParallelLinear"):
            kv = _checked_heads(hidden_size, num_heads, num_kv_heads, head_dim, communicator)
        self.hidden_size, self.num_heads, self.num_kv_heads = hidden_size, num_heads, kv
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        self.copies = max(1, communicator.world_size // kv)
        self.sequence_parallel, self.batch_first = sequence_parallel, batch_first
        self.gradient_accumulation_fusion = gradient_accumulation_fusion
        self.save_gathered, self.deferred, self.out_dtype = save_gathered, deferred, out_dtype

        def projection(heads: int, copies: int) -> LinearParameters:
            features, made = heads * self.head_dim, (init_method, device, dtype, copies)
            return LinearParameters(hidden_size, features, 0, bias, self._held, *made)

        self.q = projection(num_heads, 1)
        self.k = projection(kv, self.copies)
        self.v = projection(kv, self.copies)

    @disable
    def forward(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.q, self.k, self.v
        check_features(self, input, self.hidden_size, "hidden_size", q.weight, "q.weight")
        q._check_alike(self.group, layer=self)  # k and v are drawn after it
        shared: tuple[Any, ...] = (k.weight, v.weight, k.bias, v.bias)
        if self.copies > 1:
            with self.group.accepting("QKVParallelLinear"):
                for name in ("gradient_accumulation_fusion", "deferred"):
                    if getattr(self, name) not in (None, False):
                        raise ValueError(
                            f"{name} needs a key-value head per rank or more: num_kv_heads is "
                            f"{self.num_kv_heads}, the group's size {self.group.world_size}"
                        )
            replicas = self._held.of_replicas(self.copies)
            for part in (k, v):
                part._check_alike(replicas, "weight", "bias", layer=self)
            shared = copy_to_group(*shared, group=replicas)
        k_weight, v_weight, k_bias, v_bias = shared
        weights, biases = [q.weight, k_weight, v_weight], [q.bias, k_bias, v_bias]
        outputs = gathering_linear(self, input, weights, biases, "qkv")
        return outputs[0], outputs[1], outputs[2]

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, "
            f"world_size={self.group.world_size}"
        )


def _checked_heads(
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int | None,
    head_dim: int | None,
    communicator: Communicator,
) -> int:
    """The number of key-value heads; raises unless the ranks can share all heads."""
    world_size = communicator.world_size
    divisible("num_heads", num_heads, communicator)
    kv = num_heads if num_kv_heads is None else num_kv_heads
    positive(hidden_size=hidden_size, num_kv_heads=kv, head_dim=1 if head_dim is None else head_dim)
    if num_heads % kv:
        raise ValueError(f"num_kv_heads must divide num_heads {num_heads}, got {kv}")
    if kv % world_size and world_size % kv:
        raise ValueError(
            f"num_kv_heads must be a multiple or a divisor of the group's size {world_size}, got {kv}"
        )
    if head_dim is None and hidden_size % num_heads:
        raise ValueError(
            f"head_dim: hidden_size {hidden_size} is not a multiple of num_heads {num_heads}, so give one"
        )
    return kv

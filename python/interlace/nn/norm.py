"""Layer norms on sequence shards: torch's norms, with the weights' gradients summed over the group."""

import numbers
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch.types import Device

from interlace.arguments.words import Group
from interlace.nn.regions import copy_to_group
from interlace.nn.sharding import ShardedModule

Tensor = torch.Tensor


class _Norm(ShardedModule):
    eps: float | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        names: tuple[str, ...],
        group: Group,
        sequence_parallel: bool,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(group)
        whole = isinstance(normalized_shape, numbers.Integral)
        self.normalized_shape: tuple[int, ...] = (
            (int(normalized_shape),) if whole else tuple(normalized_shape)  # type: ignore[arg-type]
        )
        self.sequence_parallel = sequence_parallel
        for name in ("weight", "bias"):
            if name in names:
                self._add_parameter(name, self.normalized_shape, None, device=device, dtype=dtype)
            else:
                self.register_parameter(name, None)
        self.reset_parameters()

    def _initial(self, device: torch.device, dtype: torch.dtype) -> Iterable[tuple[str, object]]:
        for name, fill in (("weight", torch.ones), ("bias", torch.zeros)):
            if self._parameters[name] is not None:
                yield name, fill(self.normalized_shape, device=device, dtype=dtype)

    def _share(self) -> tuple[torch.Tensor | None, ...]:
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        if not self.sequence_parallel:
            return weight, bias
        return copy_to_group(weight, bias, group=self.group)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, world_size={self.group.world_size}"


class LayerNorm(_Norm):
    """``torch.nn.LayerNorm`` for inputs that are this rank's shard of the sequence.

    Parameters
    ----------
    normalized_shape, eps, elementwise_affine, bias : as for ``torch.nn.LayerNorm``.
    sequence_parallel : ranks have different rows, so the gradients of the weight and the bias are summed
        over the group, in one all-reduce and at least fp32. Otherwise all ranks have all rows, and
        gradients are already complete.

    Forward: ``input`` ``[..., *normalized_shape]``; the output has the same shape. Raises RuntimeError
    (torch's) for another shape; ValueError or TypeError for a ``group`` that is not a group.

    >>> interlace.run(lambda: nn.LayerNorm(2)(torch.tensor([[1.0, 3.0]])).tolist(), 1)
    [[[-0.9999949932098389, 0.9999949932098389]]]
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        group: Group = None,
        sequence_parallel: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        names: tuple[str, ...] = ("weight", "bias") if bias else ("weight",)
        names = names if elementwise_affine else ()
        super().__init__(normalized_shape, names, group, sequence_parallel, device, dtype)
        self.eps: float = eps

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self._share()
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class RMSNorm(_Norm):
    """``torch.nn.RMSNorm`` for inputs that are this rank's shard of the sequence.

    ``sequence_parallel`` is as for :class:`LayerNorm`, the other parameters as for ``torch.nn.RMSNorm``.

    Forward: ``input`` ``[..., *normalized_shape]``; the output has the same shape. Raises as
    :class:`LayerNorm` does.

    >>> interlace.run(lambda: nn.RMSNorm(2, eps=0.0)(torch.tensor([[3.0, 3.0]])).tolist(), 1)
    [[[1.0, 1.0]]]
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        *,
        group: Group = None,
        sequence_parallel: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        names = ("weight",) if elementwise_affine else ()
        super().__init__(normalized_shape, names, group, sequence_parallel, device, dtype)
        self.eps = eps

    def forward(self, input: Tensor) -> Tensor:
        return F.rms_norm(input, self.normalized_shape, self._share()[0], self.eps)

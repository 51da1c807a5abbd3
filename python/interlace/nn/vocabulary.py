"""The vocabulary split over a group: ``torch.nn.Embedding``, and cross entropy of logits.

The logits are never gathered. Ranks exchange three numbers per token, in two all-reduces: the largest
logit, then the sum of exponentials, the target's logit and, for label smoothing, the sum of logits.
Backward needs no communication. Forward and backward process rows in pieces, which bounds their fp32
memory.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.types import Device

from interlace.arguments import checks
from interlace.arguments.words import Group
from interlace.groups.groups import resolve
from interlace.kernels.tiling import split_rows
from interlace.nn import regions
from interlace.nn.linear import InitMethod
from interlace.nn.linear_functions import on_all_ranks
from interlace.nn.sharding import OnGroup, ShardedModule, positive
from interlace.ops.collectives.rootless import _all_reduce
from interlace.runtime.compat.torch_modes import disable
from interlace.runtime.core.communicator import Communicator

Tensor = torch.Tensor


class VocabParallelEmbedding(ShardedModule):
    """``torch.nn.Embedding`` whose rows are split over the group; the ranks' partial results are summed.

    Parameters
    ----------
    num_embeddings : size of the vocabulary, any number. Rows are split as ``torch.chunk`` does, so the last
        ranks may have fewer or none. Nothing is padded, and state dicts are those from ``nn.Embedding``.
    embedding_dim, padding_idx : as for ``torch.nn.Embedding``.
    sequence_parallel : the output is this rank's shard of the sequence, and the group's size must divide
        its length; otherwise the output is the whole, on all ranks.
    batch_first : indices are ``[b, s]``, the output ``[b, s, h]``, instead of ``[s, b]`` and ``[s, b, h]``.
    init_method : called on the unsharded weight in place of ``nn.Embedding``'s own initialisation.

    Forward: ``[s, b] -> [s / world size, b, h]``. ``input`` has int indices for the whole sequence, the
    same on all ranks. The weight's gradient is for this rank's rows only, and complete. Semantics:
    ``torch.nn.functional.embedding``, Megatron-core's ``VocabParallelEmbedding``. Raises ValueError or
    TypeError on every rank, and IndexError for indices outside the vocabulary. On a GPU such indices are
    not detected and give zeros.

    >>> def forward():
    ...     torch.manual_seed(0)
    ...     layer = nn.VocabParallelEmbedding(5, 2, sequence_parallel=False)
    ...     whole = layer.weight.sharding.full(layer.weight)
    ...     return torch.equal(layer(torch.tensor([4, 0])), whole[[4, 0]])
    >>> with torch.no_grad():
    ...     interlace.run(forward, 2)
    [True, True]
    """

    weight: torch.nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        group: Group = None,
        sequence_parallel: bool = True,
        batch_first: bool = False,
        init_method: InitMethod | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group)
        with self.group.accepting(type(self).__name__):
            positive(num_embeddings=num_embeddings, embedding_dim=embedding_dim)
            if padding_idx is not None:
                padding_idx = checks.index("padding_idx", padding_idx, num_embeddings)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx, self.init_method = padding_idx, init_method
        self.sequence_parallel, self.batch_first = sequence_parallel, batch_first
        shape = (num_embeddings, embedding_dim)
        self._add_parameter("weight", shape, 0, device=device, dtype=dtype)
        self.reset_parameters()

    def _initial(self, device: torch.device, dtype: torch.dtype) -> Iterable[tuple[str, object]]:
        shape = (self.num_embeddings, self.embedding_dim)
        if self.init_method is None:
            whole = torch.nn.Embedding(*shape, self.padding_idx, device=device, dtype=dtype)
            return [("weight", whole.weight)]
        weight = torch.empty(shape, device=device, dtype=dtype)
        self.init_method(weight)
        return [("weight", weight)]

    @disable
    def forward(self, input: Tensor) -> Tensor:
        with self.group.on(self.weight).accepting("VocabParallelEmbedding"):
            self._check(input)
        self._check_alike(self.group)
        output = self._found(input)
        if self.group.world_size == 1:
            return output
        if not self.sequence_parallel:
            return regions.reduce_from_group(output, group=self.group)
        dim = regions.sequence_dim(output, self.batch_first)
        return regions.reduce_scatter_to_sequence(output, dim, group=self.group)

    def _check(self, input: object) -> None:
        if not isinstance(input, Tensor) or input.dtype not in (torch.int64, torch.int32):
            found = input.dtype if isinstance(input, Tensor) else type(input).__name__
            raise TypeError(f"input must be an int32 or int64 tensor, got {found}")
        if input.is_cpu and input.numel():
            low, high = int(input.min()), int(input.max())
            if low < 0 or high >= self.num_embeddings:
                raise IndexError(
                    f"input must be within 0..{self.num_embeddings - 1}, got {low}..{high}"
                )

    def _found(self, input: Tensor) -> Tensor:
        """Look up the rows that this rank has; the others are zeros."""
        first, count = self._shardings["weight"].part()
        if not count:  # keep this rank in the graph like the others
            return self.weight.sum() + self.weight.new_zeros(*input.shape, self.embedding_dim)
        is_local = (input >= first) & (input < first + count)
        padding = None if self.padding_idx is None else self.padding_idx - first
        if padding is not None and not 0 <= padding < count:
            padding = None
        rows = F.embedding(torch.where(is_local, input - first, 0), self.weight, padding)
        return rows.masked_fill(~is_local.unsqueeze(-1), 0)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, world_size={self.group.world_size}"


ELEMENTS_AT_ONCE = 1 << 22  # elements that are copied to fp32 at once
REDUCTIONS = ("mean", "sum", "none")
NAME = "vocab_parallel_cross_entropy"


@disable
def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: Group = None,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """``torch.nn.functional.cross_entropy`` for logits whose classes are split over the ranks.

    Parameters
    ----------
    logits : ``[..., local classes]``, float, the classes last; all tokens on all ranks.
    target : int64 classes ``[...]``, the same on all ranks.
    vocab_size : number of classes, if ranks have different numbers of them, split as ``torch.chunk`` does.
        The default is the group's size times this rank's number.
    label_smoothing, ignore_index, reduction : as for ``torch.nn.functional.cross_entropy``.

    Returns the loss, a scalar or ``[...]`` for ``reduction="none"``, in fp32 (fp64 for fp64 logits), the
    same on all ranks. Sums have that dtype. The gradient has the logits' dtype; each rank has the complete
    gradient for its classes. "mean" divides by the number of tokens that are not ignored; if all are
    ignored, the loss is nan.

    Raises ValueError or TypeError naming the argument, the values and the rank, on all ranks. Targets out
    of range are detected on the CPU only. Class probabilities and weights are not supported.

    >>> def loss():
    ...     logits = torch.zeros(3, 4)  # each rank has 4 of 8 classes
    ...     return round(nn.vocab_parallel_cross_entropy(logits, torch.tensor([1, 7, 2])).item(), 4)
    >>> interlace.run(loss, 2)  # log(8)
    [2.0794, 2.0794]
    """
    communicator = resolve(group).on(logits)
    with communicator.accepting(NAME):
        classes, first = _check_classes(logits, target, vocab_size, ignore_index, communicator)
        checks.one_of("reduction", reduction, REDUCTIONS)
        if not 0.0 <= label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing must be within 0..1, got {label_smoothing}")
    counted = target != ignore_index
    local = torch.where(counted, target - first, -1)
    losses: Tensor = _VocabParallelCrossEntropyFunction.apply(  # type: ignore[no-untyped-call]
        communicator, logits, local, counted, classes, float(label_smoothing)
    )
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / counted.sum()


def _check_classes(
    logits: Any, target: Any, vocab_size: Any, ignore_index: int, communicator: Communicator
) -> tuple[int, int]:
    """Return the number of classes on all ranks, and this rank's first class."""
    rank, size = communicator.rank, communicator.world_size
    for name, value in (("logits", logits), ("target", target)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    checks.float_dtype("logits", logits.dtype)
    if target.dtype != torch.int64:
        raise TypeError(f"target must be an int64 tensor, got {target.dtype}")
    if not logits.dim() or logits.shape[:-1] != target.shape:
        raise ValueError(
            f"target must have shape {tuple(logits.shape[:-1])} for logits of shape {tuple(logits.shape)}, "
            f"got {tuple(target.shape)}"
        )
    here = logits.shape[-1]
    classes = here * size if vocab_size is None else vocab_size
    first, count = split_rows(classes, size)[rank]
    if here != count:
        raise ValueError(f"logits must have {count} of vocab_size {classes} classes, got {here}")
    if target.is_cpu:
        outside = target[(target != ignore_index) & ((target < 0) | (target >= classes))]
        if len(outside):
            found = int(outside[0])
            raise ValueError(f"target must be within 0..{classes - 1}, got {found}")
    return classes, first


class _VocabParallelCrossEntropyFunction(torch.autograd.Function):
    """Losses of ``logits`` in fp32. ``local`` are classes of this rank if they are in its range."""

    @staticmethod
    @on_all_ranks(NAME)
    def forward(
        ctx: Any,
        group: Communicator,
        logits: Tensor,
        local: Tensor,
        counted: Tensor,
        classes: int,
        smoothing: float,
    ) -> Tensor:
        rows = logits.detach().reshape(local.numel(), logits.shape[-1])
        wide = torch.promote_types(logits.dtype, torch.float32)
        tokens, here = rows.shape
        highest = rows.new_full((tokens,), -torch.inf, dtype=wide)
        if here and tokens:
            highest.copy_(rows.amax(1))
        _all_reduce(group, (highest,), ("max",))
        sums = rows.new_zeros((3 if smoothing else 2, tokens), dtype=wide)
        targets = local.flatten()
        for at in _pieces(tokens, here):
            part = rows[at].to(wide) - highest[at, None]
            is_local = (targets[at] >= 0) & (targets[at] < here)
            index = torch.where(is_local, targets[at], 0)
            found = part.gather(1, index[:, None]).squeeze(1)
            sums[1, at] = torch.where(is_local, found, 0)
            if smoothing:
                torch.sum(part, 1, out=sums[2, at])
            torch.sum(part.exp_(), 1, out=sums[0, at])
        _all_reduce(group, (sums,))
        log_sum = sums[0].log()  # without the highest logit, which would round small values
        losses = (1 - smoothing) * (log_sum - sums[1])
        if smoothing:
            losses += smoothing * (log_sum - sums[2] / classes)
        ctx.save_for_backward(logits, highest, log_sum, local, counted)
        ctx.classes, ctx.smoothing = classes, smoothing
        return losses.view(local.shape).masked_fill(~counted, 0)

    @staticmethod
    @once_differentiable
    @on_all_ranks(f"{NAME}, backward")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, highest, log_sum, local, counted = ctx.saved_tensors
        result = torch.empty_like(logits, memory_format=torch.contiguous_format)
        tokens, here = local.numel(), logits.shape[-1]
        rows, into = logits.reshape(tokens, here), result.view(tokens, here)
        targets = local.flatten()
        factor = grad.masked_fill(~counted, 0).flatten()
        even = ctx.smoothing / ctx.classes
        for at in _pieces(tokens, here):
            part = rows[at].to(log_sum.dtype) - highest[at, None]
            part = part.sub_(log_sum[at, None]).exp_()
            if even:
                part -= even
            is_local = ((targets[at] >= 0) & (targets[at] < here)).to(part.dtype)
            index = targets[at].clamp(0, here - 1)[:, None]
            part.scatter_add_(1, index, (is_local * (ctx.smoothing - 1))[:, None])
            into[at] = part.mul_(factor[at, None])
        return None, result, None, None, None, None


def _pieces(tokens: int, here: int) -> list[slice]:
    step = max(1, ELEMENTS_AT_ONCE // max(1, here))
    return [slice(first, first + step) for first in range(0, tokens if here else 0, step)]


class VocabParallelCrossEntropy(OnGroup):
    """:func:`vocab_parallel_cross_entropy` as a module, with the options of ``torch.nn.CrossEntropyLoss``.
    Forward: ``logits`` ``[..., local classes]`` and ``target`` ``[...]`` as for the function. Raises
    ValueError or TypeError in forward, as the function does.

    >>> def loss():
    ...     return nn.VocabParallelCrossEntropy(reduction="sum")(torch.zeros(1, 2), torch.tensor([0]))
    >>> interlace.run(loss, 1)
    [tensor(0.6931)]
    """

    def __init__(
        self,
        *,
        group: Group = None,
        vocab_size: int | None = None,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__(group)
        self.vocab_size, self.label_smoothing = vocab_size, label_smoothing
        self.ignore_index, self.reduction = ignore_index, reduction

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        names = ("group", "vocab_size", "label_smoothing", "ignore_index", "reduction")
        options = {name: getattr(self, name) for name in names}
        return vocab_parallel_cross_entropy(logits, target, **options)

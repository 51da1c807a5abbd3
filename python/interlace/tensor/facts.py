"""Facts that the ranks of an uneven collective exchange, forward and backward, and checks that they agree.

Backward is collective. torch's engine decides when it runs, so ranks whose graphs differ may reach two ops
in different order. The ops of a group are counted, and before a gradient moves the ranks compare the number
of their current op.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from interlace.arguments import checks
from interlace.arguments.checks import check_not_quantized
from interlace.ops.collectives.all_to_all import one_length_per_rank
from interlace.ops.op.sim_backward import in_rank
from interlace.runtime.core import plain
from interlace.runtime.core.call import Call, Terms
from interlace.runtime.core.communicator import Communicator
from interlace.tensor import blocks
from interlace.tensor.placeholder import Placeholder

Sizes = Sequence[int] | None
Check = Callable[[Any], object]
Gradient = Callable[[torch.Tensor | None], torch.Tensor | None]


def exchange(
    communicator: Communicator, op: str, terms: Terms, part: object, check: Check | None = None
) -> list[Any]:
    """Return every rank's ``part``, by rank, with one small message before any tensor moves. Collective.

    Values of ``terms`` that differ between ranks raise ValueError, or TypeError if the name begins with
    "dtype". ``check`` gets all parts, and raises the same error on every rank.
    """
    call = Call(op, terms, part=part, match=check)
    parts: list[object] = []

    def start() -> None:
        parts.extend(communicator.engine.agree(call))

    in_rank(lambda: communicator.run(op, start, async_op=False))
    return parts


@plain.record
@dataclass(frozen=True)
class TensorFacts:
    """Facts that a rank sends about its tensor; ``shape`` is None if it has no tensor."""

    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    requires_grad: bool = False
    device: str = ""  # the type of device: a process group may serve several
    dim: int = 0
    sizes: Any = None


def facts_of(tensor: torch.Tensor, dim: int = 0, sizes: object = None) -> TensorFacts:
    needs = tensor.requires_grad and torch.is_grad_enabled()
    return TensorFacts(tuple(tensor.shape), tensor.dtype, needs, tensor.device.type, dim, sizes)


def checked_facts(
    tensor: torch.Tensor | None, dim: object, sizes: Sizes, communicator: Communicator
) -> TensorFacts:
    lengths = None
    if sizes is not None:
        lengths = one_length_per_rank("sizes", sizes, communicator.world_size)
    if tensor is None:
        return TensorFacts(dim=checks.integer("dim", dim), sizes=lengths)
    if not tensor.dim():
        raise ValueError("tensor must have dimensions to be cut along")
    return facts_of(tensor, checks.index("dim", dim, tensor.dim()), lengths)


def source_tensor(tensor: object, root: int, communicator: Communicator) -> torch.Tensor | None:
    """Return ``tensor`` if it is readable on ``root``, and a Placeholder or None elsewhere."""
    if communicator.rank == root:
        return with_data("tensor", tensor, communicator.on(tensor))
    if tensor is not None and not isinstance(tensor, Placeholder):
        raise TypeError(
            "tensor must be None or a Placeholder on ranks other than the source, which is group rank "
            f"{root}, got a {type(tensor).__name__}"
        )
    return tensor


def with_data(name: str, tensor: Any, communicator: Communicator) -> torch.Tensor:
    """Return ``tensor`` if an op can read it; raise an error otherwise."""
    if isinstance(tensor, Placeholder):
        raise tensor._refuse(name)
    checks.source(name, tensor, communicator)
    check_not_quantized(name, tensor.dtype)
    return tensor  # type: ignore[no-any-return]


def check_accumulate(accumulate: object) -> None:
    if accumulate is not None:
        checks.one_of("accumulate", accumulate, ("fp32",))


def gradient_mode() -> tuple[str, bool]:
    return "torch.is_grad_enabled()", torch.is_grad_enabled()


def _same_sizes(parts: Sequence[TensorFacts], expected: Sequence[int], but: str) -> None:
    for rank, facts in enumerate(parts):
        if facts.sizes is not None and facts.sizes != tuple(expected):
            raise ValueError(f"sizes is {list(facts.sizes)} on rank {rank}, but {but}")


def check_like_source(parts: Sequence[TensorFacts], root: int) -> None:
    """Raise ValueError unless Placeholders have the shape and the dtype of the source's tensor."""
    source = parts[root]
    for rank, facts in enumerate(parts):
        if facts.shape is not None and (facts.shape, facts.dtype) != (source.shape, source.dtype):
            raise ValueError(
                f"tensor is {facts.shape} of {facts.dtype} on rank {rank}, but {source.shape} of "
                f"{source.dtype} on the source, group rank {root}"
            )


def check_source(parts: list[TensorFacts], root: int) -> None:
    source = parts[root]
    assert source.shape is not None
    ndim, total = len(source.shape), source.shape[source.dim]
    lengths = source.sizes or blocks.chunk_lengths(total, len(parts))
    if sum(lengths) != total:
        raise ValueError(
            f"sizes {list(lengths)} add up to {sum(lengths)} on rank {root}, but its tensor of shape "
            f"{source.shape} has {total} along dim {source.dim}"
        )
    check_like_source(parts, root)
    for rank, facts in enumerate(parts):
        if facts.dim not in (source.dim, source.dim - ndim):
            raise ValueError(
                f"dim is {facts.dim} on rank {rank}, {source.dim} of {ndim} on the source, rank {root}"
            )
    _same_sizes(parts, lengths, f"{list(lengths)} on the source, rank {root}")


def share_facts(
    op: str, tensor: Any, sizes: Sizes, dim: int, communicator: Communicator, terms: Terms = ()
) -> tuple[blocks.CutTensor, bool]:
    """Return the whole of the parts of all ranks, and whether any part requires gradients."""
    with communicator.accepting(op):
        own_facts = checked_facts(
            with_data("tensor", tensor, communicator), dim, sizes, communicator
        )
    terms = (("dtype of tensor", own_facts.dtype), ("dim", own_facts.dim), *terms, gradient_mode())
    parts: list[TensorFacts] = exchange(communicator, op, terms, own_facts, _check_parts)
    shapes = [facts.shape for facts in parts if facts.shape is not None]
    lengths = [shape[own_facts.dim] for shape in shapes]
    whole = (*shapes[0][: own_facts.dim], sum(lengths), *shapes[0][own_facts.dim + 1 :])
    needs = any(facts.requires_grad for facts in parts)
    cuts = blocks.along(whole, own_facts.dim, lengths)
    return blocks.CutTensor(communicator, whole, tensor.dtype, cuts), needs


def _check_parts(parts: list[TensorFacts]) -> None:
    dim, shapes = check_equal_beside(parts)
    found = [shape[dim] for shape in shapes]
    _same_sizes(parts, found, f"the tensors have {found} along dim {dim}, by rank")


def check_equal_beside(parts: Sequence[TensorFacts]) -> tuple[int, list[tuple[int, ...]]]:
    """Return the dim and all shapes; raise ValueError unless shapes are equal except along the dim."""
    dim, shapes = parts[0].dim, [facts.shape for facts in parts if facts.shape is not None]
    first = shapes[0]
    for rank, shape in enumerate(shapes):
        same_rest = (*shape[:dim], *shape[dim + 1 :]) == (*first[:dim], *first[dim + 1 :])
        if len(shape) != len(first) or not same_rest:
            raise ValueError(
                f"tensor must have the same shape on all ranks except along dim {dim}, got {first} on rank "
                f"0, {shape} on rank {rank}"
            )
    return dim, shapes


def gradient_here(
    communicator: Communicator,
    op: str,
    grad: torch.Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the gradient of a result on this rank, with its data, or zeros if the result was not used."""
    if grad is None:
        return torch.zeros(tuple(shape), dtype=dtype, device=communicator.place.device)
    with communicator.accepting(op):
        return with_data(f"the gradient of {op}'s result", grad, communicator)


_count: weakref.WeakKeyDictionary[Communicator, int] = weakref.WeakKeyDictionary()


class _Recorded(torch.autograd.Function):
    """A node that communicates only in backward: its forward returns an existing result."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        result: list[torch.Tensor],
        gradient: Gradient,
        of_input: bool,
    ) -> torch.Tensor:
        ctx.gradient, ctx.own = gradient, of_input
        ctx.set_materialize_grads(False)  # zeros for a placeholder would be as large as the whole
        return result[0]  # passed in a list, otherwise the returned tensor would be a view of it

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[object, ...]:
        of_input = ctx.gradient(grad)
        return of_input if ctx.own else None, None, None, None


def record(
    communicator: Communicator,
    op: str,
    result: torch.Tensor,
    input: torch.Tensor | None,
    gradient: Gradient,
) -> torch.Tensor:
    """Return ``result`` with a node whose backward calls ``gradient`` on every rank, for ``input``."""
    learns = input is not None and input.requires_grad
    anchor = input if learns else torch.empty(0, requires_grad=True)
    communicator.check_recordable(anchor)
    number = _count[communicator] = _count.get(communicator, 0) + 1
    terms = (("the op, by count,", number),)

    def compared(grad: torch.Tensor | None) -> torch.Tensor | None:
        exchange(communicator, f"backward of {op}", terms, None)
        return gradient(grad)

    output: torch.Tensor = _Recorded.apply(anchor, [result], compared, learns)  # type: ignore[no-untyped-call]
    return output

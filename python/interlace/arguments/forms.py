"""One tensor per rank: a list, or one tensor whose shape says whether it is the concatenation or a stack.

For tensors of shape ``(n, ...)`` and world size W the concatenation has shape ``(W * n, ...)``, the stack
``(W, n, ...)``. Tensors without dimensions have only the stack, ``(W,)``.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from interlace.arguments import checks
from interlace.runtime.core.communicator import Communicator

Tensors = Sequence[torch.Tensor]


def parts(
    name: str,
    whole: Any,
    like_name: str,
    like: torch.Tensor,
    communicator: Communicator,
    *,
    written: bool,
) -> list[torch.Tensor]:
    """The tensors of all ranks in ``whole``, of the dtype of ``like``, this rank's; ``written``: by the op.

    Raises unless this rank's has the shape of ``like``, and is the only one that may share its memory.
    """
    rank = communicator.rank
    if type(whole) is not list:
        whole = checks.imported(name, whole)
    if isinstance(whole, torch.Tensor):
        tensor = (checks.target if written else checks.source)(name, whole, communicator)
        if tensor.dtype is not like.dtype:
            checks.same_dtype(name, tensor.dtype, like_name, like.dtype)
        tensors = _cut(name, tensor, like.shape, communicator)
    else:
        tensors = one_per_rank(name, whole, like_name, like.dtype, communicator, written=written)
        if tensors[rank].shape != like.shape:
            raise ValueError(
                f"{name}[{rank}] has shape {tuple(tensors[rank].shape)}, {like_name} has "
                f"{tuple(like.shape)}"
            )
    apart(name, tensors, like_name, [like], rank, written=written)
    return tensors


def _cut(
    name: str, tensor: torch.Tensor, shape: torch.Size, communicator: Communicator
) -> list[torch.Tensor]:
    world_size, given = communicator.world_size, tensor.shape
    if given == (world_size, *shape):
        return list(tensor.unbind(0))
    if shape and given == (world_size * shape[0], *shape[1:]):
        return list(tensor.tensor_split(world_size))
    forms = [str((world_size, *shape))]
    if shape:
        forms.insert(0, str((world_size * shape[0], *shape[1:])))
    raise ValueError(
        f"{name} must have shape {' or '.join(forms)} for tensors of {tuple(shape)} and world size "
        f"{world_size}, got {tuple(given)}"
    )


def one_per_rank(
    name: str,
    whole: Any,
    like_name: str,
    dtype: torch.dtype,
    communicator: Communicator,
    *,
    written: bool,
) -> list[torch.Tensor]:
    """The list ``whole``, if it has a tensor of ``dtype`` for every rank."""
    world_size = communicator.world_size
    if type(whole) is not list and (not isinstance(whole, Sequence) or isinstance(whole, str)):
        raise TypeError(f"{name} must be a tensor or a list of tensors, got {type(whole).__name__}")
    if len(whole) != world_size:
        raise ValueError(f"{name} must have one tensor per rank, {world_size}, got {len(whole)}")
    take = checks.target if written else checks.source
    try:
        tensors = [take(name, each, communicator) for each in whole]
    except (TypeError, ValueError):  # errors alone need the names of entries, which take time
        tensors = [take(f"{name}[{r}]", each, communicator) for r, each in enumerate(whole)]
    for r, tensor in enumerate(tensors):
        if tensor.dtype is not dtype:
            checks.same_dtype(f"{name}[{r}]", tensor.dtype, like_name, dtype)
    return tensors


def disjoint(tensors: Tensors) -> bool:
    """Whether no two of ``tensors`` that are dense share memory; it may say so of others, too."""
    spans = sorted([(tensor.data_ptr(), tensor.nbytes) for tensor in tensors])
    return all([start + nbytes <= end for (start, nbytes), (end, _) in pairwise(spans)])


def _dense(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int, int]]:
    """Address, number and bytes of those that are dense and not empty."""
    return [
        (tensor.data_ptr(), number, nbytes)
        for number, tensor in enumerate(tensors)
        if (nbytes := tensor.nbytes) and tensor.is_contiguous()
    ]


def apart(
    name: str, tensors: Tensors, like_name: str, likes: Tensors, rank: int, *, written: bool
) -> None:
    """Raise if one of ``likes`` shares memory with another entry than its own, or with a part of that.

    What is written there would change what peers have still to read. And if two that are ``written``
    share memory: the second would overwrite the first. Looks at dense tensors only.
    """
    if disjoint([*tensors, *likes]):
        return
    spans = _dense(tensors)
    for (start, first, nbytes), (following, second, _) in pairwise(sorted(spans) * written):
        if following < start + nbytes:
            one, other = sorted((first, second))
            raise ValueError(f"{name}[{one}] and {name}[{other}] share memory")
    for start, _, nbytes in _dense(likes):
        for other, number, size in spans:
            shared = start < other + size and other < start + nbytes
            if shared and not (number == rank and other == start):
                raise ValueError(
                    f"{like_name} shares memory with {name}[{number}]; it may be the same "
                    f"memory as {name}[{rank}], or none of it"
                )


def either(name: str, value: Any, alias: str, other: Any, function: str) -> Any:
    """An argument that has two names; TypeError as Python's own if both or neither are given."""
    if other is None:
        if value is None:
            raise TypeError(f"{function}() missing required argument: {name!r}")
        return value
    if value is not None:
        raise TypeError(f"{function}() got both {name!r} and {alias!r}")
    return other

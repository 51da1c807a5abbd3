"""The short forms of a process group's methods: ``group.allreduce(tensor, ReduceOp.MAX)``.

``torch.distributed`` calls the methods with lists and an options object. ``ProcessGroup`` also takes single
tensors, and an op or a root in place of the options. A method of interlace's group that is called so calls
itself again with what :func:`long_form` makes of the arguments.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def long_form(kind: type, short: Sequence[Any], args: Sequence[Any]) -> tuple[Any, ...]:
    """Lists of ``short``, which are tensors or lists, and options of ``kind`` with what ``args`` say.

    ``args``: a root, a ReduceOp, a timeout, or options, in any order, as torch's forms have them. A list
    beside a tensor is one per rank, which the long forms have in a list of its own.
    """
    single = any(isinstance(each, torch.Tensor) for each in short)
    lists = [[each] if single else list(each) for each in short]
    given = next((each for each in args if isinstance(each, kind)), None)
    options: Any = kind() if given is None else given
    for value in args:
        if isinstance(value, timedelta):
            options.timeout = value
        elif isinstance(value, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
            options.reduceOp = value
        elif isinstance(value, int):
            options.rootRank = value
        elif value is not None and not isinstance(value, kind):
            raise TypeError(f"expected {kind.__name__}, a root, ReduceOp or timeout, got {value!r}")
    return (*lists, options)


def flat(long: torch.Tensor, short: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """torch lets a flat tensor stand for one of the same length; 0-dim and stacked ones stay."""
    if long.dim() in (short.dim(), short.dim() + 1) or not long.is_contiguous():
        return long, short
    return long.view(-1), short.reshape(-1)


def all_flat(
    longs: list[torch.Tensor], shorts: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    pairs = [flat(long, short) for long, short in zip(longs, shorts, strict=True)]
    return [long for long, _ in pairs], [short for _, short in pairs]

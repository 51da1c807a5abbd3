"""Torch operators of a rank's own code and of streams, as accesses: a mode around a simulated run.

Kernels' accesses come from the interpreter. What user code does with tensors goes through torch's
dispatcher, and there every operator says in its schema what it reads and what it writes. So an output
that is used before its op was waited for is a race like any other.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from interlace.runtime.compat.torch_modes import DispatchMode
from interlace.runtime.places.sim.scheduler.scheduler import Scheduler

# operators whose result is poison in a check, see ``sampling.poisoned_memory``
_UNDEFINED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# and those that ask their argument for its shape and dtype alone, or for its op
_SHAPES_ONLY = _UNDEFINED | {
    "wait_tensor",
    *("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_zeros", "new_ones", "new_full"),
}


class TorchAccesses(DispatchMode):
    """Tells ``detector`` what each operator touches, and on behalf of which task of ``scheduler``."""

    def __init__(self, scheduler: Scheduler, detector: Any) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._detector = detector

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._scheduler.inside and self._scheduler.current.program is None:
            self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        task, detector = self._scheduler.current, self._detector
        name = func.overloadpacket.__name__
        given = list(_given(func, args, kwargs))
        if name == "lift_fresh":  # the last step of torch.tensor(...) and torch.from_numpy(...)
            for tensor, _ in given:
                detector.new(task, tensor, "tensor")
            return
        if _is_view(func):
            return
        storages = set()
        for tensor, writes in given:
            storages.add(tensor.untyped_storage().data_ptr())
            detector.know(tensor, task.rank)
            if name not in _SHAPES_ONLY:
                detector.touch(task, tensor, name, stores=writes)
        for tensor in _tensors(result):
            if tensor.untyped_storage().data_ptr() not in storages:
                detector.new(task, tensor, name, writes=name not in _UNDEFINED)


@cache
def _is_view(func: Any) -> bool:
    """Whether the operator returns an alias and touches no data."""
    return torch.Tag.inplace_view in func.tags or any(
        value.alias_info is not None and not value.alias_info.is_write
        for value in func._schema.returns
    )


def _given(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[torch.Tensor, bool]]:
    """Tensors among the arguments, and whether the operator writes them."""
    for position, argument in enumerate(func._schema.arguments):
        if position < len(args):
            value = args[position]
        elif argument.name in kwargs:
            value = kwargs[argument.name]
        else:
            continue
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors(value):
            yield tensor, writes


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and value.device.type == "cpu":
            yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)

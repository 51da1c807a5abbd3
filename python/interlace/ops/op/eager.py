"""Eager calls whose gradients are recorded: they start as in ``interlace.functional``, which records them.

All ranks' tensors must require gradients alike: it is in what ranks agree on before they start.
"""

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from interlace.ops.op import pending, registry
from interlace.runtime.compat.torch_groups import Work as TorchWork
from interlace.runtime.compat.torch_modes import modes_active
from interlace.runtime.core.call import Terms
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.context import needing
from interlace.runtime.core.stream import Outcome

FIRST: Terms = (("whether ranks agree before they record", True),)
"""In what they agree on then, if it has the op's own terms: who does not record goes on to the op."""


def agreed(
    communicator: Communicator, op: str, operands: Sequence[Any], agree: Callable[[], Any]
) -> Any:
    """What ``agree`` gives, which all ranks call before they record ``op``: who needs no gradient is told.

    ``operands``: the first arguments of the op, by its schema.
    """
    record = registry.op(op)
    needs = record.needs(dict(zip(record.kinds, operands, strict=False))) or "another tensor"

    def start() -> Outcome:
        with needing(needs):
            return Outcome(agree(), None)

    return communicator.run(op, start)


def matrices(*tensors: Any) -> bool:
    """Whether a call with these is one that autograd can know of."""
    return not modes_active() and all(
        isinstance(each, torch.Tensor) and each.dim() > 1 for each in tensors
    )


def started(
    op: str,
    async_op: bool,
    operands: tuple[Any, ...],
    then: Callable[[Any], Any] = lambda result: result,
    **how: Any,
) -> Any:
    """What ``then`` makes of the result of ``op`` of ``interlace.functional``, as :func:`record`."""
    call = functools.partial(registry.functional(op), *operands, **how)
    return record(op, async_op, call, then)


def record(op: str, async_op: bool, call: Callable[[], Any], then: Callable[[Any], Any]) -> Any:
    """What ``then`` makes of ``call()``, which starts ``op`` and records it; a Work if ``async_op``."""
    with pending.watched() as works:
        result = call()
    work = RecordedWork(op, result, works, then)
    return work if async_op else work.wait()


class RecordedWork(TorchWork):
    """The handle of an op whose result has a history."""

    def __init__(self, op: str, result: Any, works: list[Any], then: Callable[[Any], Any]) -> None:
        super().__init__()
        self._op, self._result, self._works, self._then = op, result, works, then
        self._waited = False

    def wait(self, timeout: timedelta | float | None = None) -> Any:
        """The result, complete. Raises what the op failed with."""
        from interlace.ops.op.async_tensor import wait

        if not self._waited:
            for work in self._works:
                work.wait(timeout)
            self._result = self._then(tree_map_only(torch.Tensor, wait, self._result))
            self._waited = True
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Any:
        return self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        found = [work.exception() for work in self._works]
        return next((error for error in found if error is not None), None)

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        if not self._works:
            future.set_result(self._result)
            return future
        return self._works[-1].get_future().then(lambda _: self.wait())  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"<Work {self._op}: {'completed' if self.is_completed() else 'in progress'}>"

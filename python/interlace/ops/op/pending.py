"""A started op: tensors that are not complete yet, and the Work to wait for."""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from interlace.runtime.compat.torch_groups import Work as TorchWork, _register_work
from interlace.runtime.core.work import ZERO, Work


class Started(NamedTuple):
    """The ``outputs`` of an op, complete after ``work``; None for an op that was done at once."""

    outputs: Sequence[torch.Tensor]
    work: Work | None


class _Together(TorchWork):
    """The Work of an op with several outputs: who waits for one takes all out of torch's registry, which
    would keep those that nobody uses, and in a graph nobody waits for."""

    def __init__(self, work: Work, outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._work = work
        self._outputs = [output.detach() for output in outputs]

    def wait(self, timeout: timedelta = ZERO) -> Any:
        outputs, self._outputs = self._outputs, []
        for output in outputs:
            with contextlib.suppress(Exception):  # it is raised below, too
                _wait_tensor(output)
        return self._work.wait(timeout)


_wait_tensor: Any = torch.ops._c10d_functional.wait_tensor.default
_watching: ContextVar[list[Work] | None] = ContextVar("watching", default=None)


@contextlib.contextmanager
def watched() -> Iterator[list[Work]]:
    """The Works of the ops that are called through the dispatcher within the block."""
    works: list[Work] = []
    token = _watching.set(works)
    try:
        yield works
    finally:
        _watching.reset(token)


def register(started: Started) -> None:
    """Let torch's ``wait_tensor`` find the Work by each of the outputs."""
    work: Any = started.work
    if work is None:
        return
    watching = _watching.get()
    if watching is not None:
        watching.append(work)
    if work.is_success():
        work.wait()
        return
    findable = [output for output in started.outputs if output.numel()]
    if not findable and watching is None:
        work.wait()  # nobody could, and this rank might leave before the others are through
    if len(findable) > 1:
        work = _Together(work, findable)
    for output in findable:
        _register_work(output, work)


def finish(started: Started) -> Sequence[torch.Tensor]:
    """Wait here and now, where an op must be complete when it returns; the outputs."""
    if started.work is not None:
        started.work.wait()
    return started.outputs

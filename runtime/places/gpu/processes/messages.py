"""Messages between two ranks on GPUs that are processes: through the memory of their hosts.

A copy off the GPU, the message as ``processes`` moves it, a copy back. Right for every tag and order,
also from whoever sends first; not fast, and the sender's host waits for its GPU. The receiver's does not:
its ``Work.wait()`` waits for the message, as that cannot be enqueued, and then only orders the stream.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from interlace.runtime.core.call import Call
from interlace.runtime.core.engine import Engine
from interlace.runtime.core.stream import Continued, Event, Outcome

Bring = Callable[[torch.Tensor, torch.Tensor], Event | None]


class HostMessages:
    """Sends and receives by ``engine``, the host's. ``bring(to, source)`` copies to the GPU; its end."""

    def __init__(self, engine: Engine, bring: Bring) -> None:
        self._engine, self._bring = engine, bring

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Future[Outcome]:
        """Send ``tensor`` as ``Engine.send`` does; waits for what makes ``tensor``."""
        return self._engine.send(
            _call("send", tensor), tensor.detach().to("cpu", copy=True), peer, tag
        )

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Future[Outcome]:
        """Receive into ``tensor`` as ``Engine.recv`` does."""
        arrived: Any = torch.empty(tensor.shape, dtype=tensor.dtype)

        def then(outcome: Outcome) -> Outcome:
            return Outcome(None, self._bring(tensor.detach(), arrived), outcome.source)

        return Continued(self._engine.recv(_call("recv", tensor), arrived, peer, tag), then)


def _call(op: str, tensor: torch.Tensor) -> Call:
    return Call(op, (("dtype", tensor.dtype), ("shape", tuple(tensor.shape))))

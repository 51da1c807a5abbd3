"""A count of the kernels that ran."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.places.sim.place import SimStream


@contextmanager
def launches(
    change: Callable[[KernelLaunch], None] = lambda launch: None,
) -> Iterator[Counter[str]]:
    """List the kernels of ops by name, without those that end an op; ``change`` gets each launch first."""
    seen: Counter[str] = Counter()
    launch = SimStream.launch

    def noting(stream: SimStream, made: KernelLaunch) -> None:
        if made.name != "finish_kernel":
            seen[made.name] += 1
            change(made)
        launch(stream, made)

    with mock.patch.object(SimStream, "launch", noting):
        yield seen

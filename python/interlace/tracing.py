"""``interlace.trace``: the file of ``demo --trace`` for programs of one's own."""

import functools
import logging
import os
import pathlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from interlace.arguments.paths import refuse_unwritable
from interlace.runtime.places.sim.scheduler import recording as recorder
from interlace.runtime.places.sim.scheduler.recording import Recording, merge, write_trace

Runs = list[tuple[str, Recording]]
"""Runs of ranks in their order, each with the name of its function."""

log = logging.getLogger("interlace")
_collecting: dict[int, Runs] = {}  # of all threads: runs may be started in others than the block's


@contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """Write what kernels and streams do in :func:`interlace.run` to a file for https://ui.perfetto.dev.

    For a block, or as a decorator. The file has the runs of the block one behind the other, whichever
    thread starts them, one that failed in "sim" as far as it came: a process for each rank, a thread for
    each program or stream; tiles, sums, copies and waits, and an arrow from each publish to the wait that
    it ended. Kernels are seen where they are interpreted, in place "sim" (time counts schedule steps) and
    "shm" (microseconds, interpreted). Of collectives without a kernel, and of compiled kernels, there is
    nothing to see, nor of ranks that ``interlace.run`` has not started, as torchrun does: take a profile. A
    file without events is logged.

    Raises TypeError for what is no path and ValueError for a file that cannot be written, before the block
    runs; OSError if writing fails after it, which is logged if the block fails too.

    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "steps.json")
    >>> one = torch.ones(1, 1)
    >>> with interlace.trace(path):
    ...     interlace.run(lambda: interlace.all_gather_matmul(one, one).tolist(), 1)
    [[[1.0]]]
    >>> os.path.getsize(path) > 1000
    True
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must name a file, got {path!r}")
    refuse_unwritable("path", os.fspath(path))
    file = pathlib.Path(path).absolute()  # the block may change the folder
    with collected() as runs:
        try:
            yield
        except BaseException:
            try:
                write_trace(file, runs)
            except OSError as error:
                log.warning("the trace of a block that failed is not written: %s", error)
            raise
    if not any(recording.spans for _, recording in runs):
        text = "%s has no events: no kernel was interpreted in interlace.run meanwhile"
        if dist.is_initialized() or "RANK" in os.environ:
            text += (
                "; ranks of a job, as torchrun starts them, are not traced: take a profile there"
            )
        log.warning(text, file)
    write_trace(file, runs)


@contextmanager
def collected() -> Iterator[Runs]:
    """The runs of a block, which grow as they end. Blocks within it have their own list besides."""
    runs: Runs = []
    _collecting[id(runs)] = runs
    try:
        yield runs
    finally:
        del _collecting[id(runs)]


def around(
    start: Callable[[Callable[..., Any]], list[Any]], fn: Callable[..., object], *, place: str
) -> list[Any]:
    """``start(fn)``, which runs ``fn`` on ranks of ``place``; recorded, if somebody collects."""
    collecting, name = tuple(_collecting.values()), getattr(fn, "__name__", type(fn).__name__)
    if not collecting or place == "cuda":
        return start(fn)

    def collect(parts: list[Recording]) -> None:
        run = name, merge(parts)
        for runs in collecting:
            runs.append(run)

    if place == "sim":
        with recorder.recording() as made:
            try:
                return start(fn)
            finally:
                collect([made.recording()])
    both = start(functools.partial(_recorded, fn))
    collect([part for _, part in both])
    return [result for result, _ in both]


def _recorded(fn: Callable[..., object], *args: Any, **kwargs: object) -> tuple[object, Recording]:
    """In a rank of its own process: what ``fn`` returns, and its part of the recording."""
    with recorder.recording() as made:
        result = fn(*args, **kwargs)
    return result, made.recording()

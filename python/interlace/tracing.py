"""``interlace.trace`` writes the file of ``demo --trace`` for the user's own programs."""

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
_collecting: dict[int, Runs] = {}  # for all threads: the block may start runs in others


@contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """Write what kernels and streams do in :func:`interlace.run` to a file for https://ui.perfetto.dev.

    Use it for a block, or as a decorator. The file has the runs of the block one after another, whichever
    thread starts them. A run that failed in "sim" is included up to the error. A rank is shown as a
    process, a program or stream as a thread, with tiles, sums, copies and waits. Arrows lead from each
    publish to the wait that it ended.

    Kernels are recorded where they are interpreted: in place "sim" (time counts schedule steps) and "shm"
    (microseconds, interpreted). Collectives without a kernel and compiled kernels are not recorded, and
    neither are ranks that torchrun started; use a profiler there. A file without events is logged.

    Raises TypeError if ``path`` is not a path and ValueError for a file that cannot be written, before the
    block runs. Raises OSError if writing fails after the block; if the block fails too, that is logged.

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
    with collect_runs() as runs:
        try:
            yield
        except BaseException:
            try:
                write_trace(file, runs)
            except OSError as error:
                log.warning("the trace of the failed block could not be written: %s", error)
            raise
    if not any(recording.spans for _, recording in runs):
        text = "%s has no events: no kernel was interpreted in interlace.run in this block"
        if dist.is_initialized() or "RANK" in os.environ:
            text += (
                "; ranks of a job, as torchrun starts them, are not traced: use a profiler there"
            )
        log.warning(text, file)
    write_trace(file, runs)


@contextmanager
def collect_runs() -> Iterator[Runs]:
    """Yield the runs of a block, a list that grows as they end. Each nested block has its own list."""
    runs: Runs = []
    _collecting[id(runs)] = runs
    try:
        yield runs
    finally:
        del _collecting[id(runs)]


def around(
    start: Callable[[Callable[..., Any]], list[Any]], fn: Callable[..., object], *, place: str
) -> list[Any]:
    """Call ``start(fn)``, which runs ``fn`` on ranks of ``place``; record it if a block collects."""
    collecting, name = tuple(_collecting.values()), getattr(fn, "__name__", type(fn).__name__)
    if not collecting or place == "cuda":
        return start(fn)

    def collect(parts: list[Recording]) -> None:
        run = name, merge(parts)
        for runs in collecting:
            runs.append(run)

    if place == "sim":
        with recorder.recording() as recording:
            try:
                return start(fn)
            finally:
                collect([recording.recording()])
    both = start(functools.partial(_record, fn))
    collect([part for _, part in both])
    return [result for result, _ in both]


def _record(fn: Callable[..., object], *args: Any, **kwargs: object) -> tuple[object, Recording]:
    """Return the result of ``fn`` and its part of the recording, in a rank with its own process."""
    with recorder.recording() as recording:
        result = fn(*args, **kwargs)
    return result, recording.recording()

"""Processes that a test starts as ranks, kills and stops, and what they say through pipes."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from guard import MOST as WAIT


@contextmanager
def started(
    function: Callable[..., Any], world_size: int, folder: Path | str, *rest: Any
) -> Iterator[tuple[list[Any], list[Any]]]:
    """Start processes of ``function(rank, world_size, folder, end, *rest)``, and return their ends."""
    context = multiprocessing.get_context("forkserver")
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    processes = []
    for rank, (_, end) in enumerate(pipes):
        arguments = (rank, world_size, str(folder), end, *rest)
        processes.append(context.Process(target=function, args=arguments, daemon=True))
        processes[-1].start()
        end.close()
    try:
        yield processes, [mine for mine, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()
        for mine, _ in pipes:
            mine.close()


def heard(end: Any, seconds: float = WAIT) -> Any:
    assert end.poll(seconds), "it says nothing"
    return end.recv()

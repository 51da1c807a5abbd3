"""Compile kernels in another process, for one that may interpret them.

In a process that interprets kernels, ``@triton.jit`` has already made interpreted functions of them, so
others compile: ``server.py``, without ``TRITON_INTERPRET``, and forks of it. They end with the call, also
when it is interrupted; should this process be killed, they end when they find their input closed.
"""

import contextlib
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence

from interlace.runtime.compiler.request import Compilation, Measurement
from interlace.runtime.compiler.server import ended_with
from interlace.runtime.compiler.worker import COMPILING, ReenteredError

_PROGRAM = pathlib.Path(__file__).with_name("start.py")


def compile_all(
    requests: Sequence[Compilation],
    *,
    workers: int | None = None,
    on_result: Callable[[int, Measurement], None] = lambda index, measurement: None,
) -> list[Measurement]:
    """Compile and measure ``requests``; results in the same order.

    ``workers``: how many at a time, one per core by default. ``on_result`` is called with the number of
    each request as it is done, in the caller's thread.
    """
    if os.environ.get(COMPILING):
        raise ReenteredError(
            "a file that is loaded for its kernel compiles kernels before it defines that one"
        )
    results: dict[int, Measurement] = {}
    count = min(len(requests), workers or os.cpu_count() or 1)
    while len(results) < len(requests):  # a file that ends the server is one result
        left = [index for index in range(len(requests)) if index not in results]
        for place, measurement in _compiled([requests[index] for index in left], count):
            results[left[place]] = measurement
            on_result(left[place], measurement)
    return [results[index] for index in range(len(requests))]


def _compiled(requests: Sequence[Compilation], count: int) -> Iterator[tuple[int, Measurement]]:
    """What a server makes of ``requests``, until it has ended by itself: then that of the last file."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    settings = {
        "TRITON_INTERPRET": "0",
        "TRITON_DISABLE_LINE_INFO": "0",
        "PYTHONPATH": paths,
        COMPILING: "1",
    }
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(
            [sys.executable, str(_PROGRAM), str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            env={**os.environ, **settings},
            start_new_session=True,  # to be ended together with its forks
        ) as server,
    ):
        assert server.stdin and server.stdout
        done, loading = 0, 0
        try:
            with contextlib.suppress(BrokenPipeError, EOFError, pickle.UnpicklingError):
                pickle.dump(requests, server.stdin)
                server.stdin.flush()
                while done < len(requests):
                    index, measurement = pickle.load(server.stdout)
                    if measurement is None:
                        loading = index
                    else:
                        done += 1
                        yield index, measurement
            if done < len(requests):
                said.seek(0)
                words = said.read().decode(errors="replace")
                yield loading, Measurement(error=ended_with(server.wait(), words))
        finally:
            with contextlib.suppress(ProcessLookupError, BrokenPipeError):
                os.killpg(server.pid, signal.SIGKILL)

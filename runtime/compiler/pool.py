"""Compile kernels in another process, for a process that may interpret them.

In a process that interprets kernels, ``@triton.jit`` has already turned them into interpreted functions.
Therefore ``server.py`` compiles them, without ``TRITON_INTERPRET``, in forks of itself. These processes end
with the call, even if it is interrupted; if this process is killed, they end when their input is closed.
Kernels that are about to run are compiled one at a time, by a server that stays for the next ones.
"""

import atexit
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
    """Compile and measure ``requests``. Return the results in the same order.

    ``workers``: the number of parallel compilations, one per core by default. ``on_result`` is called with
    the index of each finished request, in the caller's thread.
    """
    _refuse_reentry()
    results: dict[int, Measurement] = {}
    count = min(len(requests), workers or os.cpu_count() or 1)
    while len(results) < len(requests):  # a file that ends the server counts as one result
        left = [index for index in range(len(requests)) if index not in results]
        with contextlib.closing(_Server(count)) as server:
            for place, measurement in server.compiled([requests[index] for index in left]):
                results[left[place]] = measurement
                on_result(left[place], measurement)
    return [results[index] for index in range(len(requests))]


def compile_one(request: Compilation) -> Measurement:
    """Compile one request, in the server that stays until a file that it has loaded changes."""
    global _staying
    _refuse_reentry()
    path = os.path.realpath(request.path)
    # a forked process must not read the answers of its parent's server
    places = tuple(dict.fromkeys(sys.path))  # naming a folder twice makes no difference
    fits = os.getpid(), os.getcwd(), places, repr(request.stand_ins)
    read_at = os.stat(path).st_mtime_ns
    if _staying is None or _staying.fits != fits or _staying.files.get(path, read_at) != read_at:
        _end_staying()
        _staying = _Server(1, fits)
    _staying.files[path] = read_at
    try:
        ((_, measurement),) = _staying.compiled([request])
    except BaseException:  # an interrupt: otherwise an unread answer would be left over
        _end_staying()
        raise
    if _staying.process.poll() is not None:
        _end_staying()
    return measurement


@atexit.register
def _end_staying() -> None:
    global _staying
    if _staying is not None and _staying.fits[0] == os.getpid():
        _staying.close()
    _staying = None


def _refuse_reentry() -> None:
    if os.environ.get(COMPILING):
        raise ReenteredError(
            "a file that is loaded for its kernel compiles kernels before it defines that one"
        )


class _Server:
    """A compiling process.

    For one that stays, ``fits`` is the state it was started for, and ``files`` are the times at which its
    loaded files were last changed.
    """

    def __init__(self, count: int, fits: tuple[object, ...] = ()) -> None:
        self.fits = fits
        self.files: dict[str, int] = {}
        settings = {
            "TRITON_INTERPRET": "0",
            "TRITON_DISABLE_LINE_INFO": "0",
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            COMPILING: "1",
        }
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # outlives this function
        self.process = subprocess.Popen(
            [sys.executable, str(_PROGRAM), str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env={**os.environ, **settings},
            start_new_session=True,  # so that it can be ended together with its forks
        )

    def compiled(self, requests: Sequence[Compilation]) -> Iterator[tuple[int, Measurement]]:
        """Yield the results of ``requests``. A server that ends by itself is the error of its last file."""
        server = self.process
        assert server.stdin and server.stdout
        done, loading = 0, 0
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
            self._said.seek(0)
            words = self._said.read().decode(errors="replace")
            yield loading, Measurement(error=ended_with(server.wait(), words))

    def close(self) -> None:
        """End the server and its forks."""
        with contextlib.suppress(ProcessLookupError, BrokenPipeError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError), self.process:
            pass
        self._said.close()


_staying: _Server | None = None

"""The process in which a block of a page runs: see pages.py. Imports little, it is forked often."""

import ctypes
import multiprocessing.forkserver
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from unittest import mock

_PR_SET_PDEATHSIG = 1


def run_python(
    folder: str, arguments: list[str], variables: dict[str, str], output: str, errors: str
) -> None:
    """``python *arguments`` in ``folder``, in this process, with what it prints in two files."""
    for number, path in ((1, output), (2, errors)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(folder)
    os.environ.update(variables)
    # Triton's cache would give lint what was compiled from the same text in another folder.
    os.environ["TRITON_CACHE_DIR"] = os.path.join(folder, ".triton")
    from interlace.runtime.places import pool

    # Ranks are forked from what this process is now, with torch imported and one thread: what the
    # block will have run by then, threads of ranks and of stores, may hold locks in a fork of it.
    pool.START_METHOD = "forkserver"
    with mock.patch("multiprocessing.util.spawnv_passfds", _forked):
        multiprocessing.forkserver.ensure_running()
    try:
        if arguments[0] == "-m":
            sys.path.insert(0, folder)
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            script = os.path.join(folder, arguments[0])
            sys.path.insert(0, os.path.dirname(script))
            sys.argv = list(arguments)
            runpy.run_path(script, run_name="__main__")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _forked(_program: str, arguments: Sequence[str], _descriptors: Sequence[int]) -> int:
    """A process that runs ``python -c`` as multiprocessing wants it, without a new interpreter; it
    ends with this one."""
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            exec(arguments[-1], {})
        finally:
            os._exit(1)
    return child

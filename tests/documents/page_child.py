"""The process in which a block of a page runs: see pages.py. Imports little, it is forked often."""

import os
import runpy
import sys


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
    from interlace.runtime.start import pool

    # Forked from here, ranks have this __main__ and need no import; that a script works where they are
    # spawned is shown by the blocks that commands run.
    pool.START_METHOD = "fork"
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

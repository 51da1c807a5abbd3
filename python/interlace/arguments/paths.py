"""Files to write later: an early check that it will be possible."""

import os
import pathlib


def refuse_unwritable(option: str, path: str) -> None:
    """Raise ValueError naming ``option`` unless a file can be written at ``path``; leaves what is there."""
    refuse_empty(option, path)
    target, where = pathlib.Path(path), f"{option} {path}"
    if target.is_dir():
        raise ValueError(f"{where}: is a folder")
    if not target.absolute().parent.is_dir():
        raise ValueError(f"{where}: the folder does not exist")
    if target.exists() and not target.is_file():  # a pipe or a device, which opening may change
        if not os.access(target, os.W_OK):
            raise ValueError(f"{where}: cannot be written")
        return
    new = not target.exists()
    try:
        with target.open("ab"):
            pass
    except OSError as error:
        raise ValueError(f"{where}: cannot be written: {error}") from None
    if new:
        target.unlink()


def refuse_empty(option: str, path: str) -> None:
    """Raise ValueError naming ``option`` if the path is empty, as that of an unset variable is."""
    if not path:
        raise ValueError(f"{option} '': the path is empty")

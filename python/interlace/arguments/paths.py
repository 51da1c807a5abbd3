"""Early checks that a file can be written later."""

import os
import pathlib


def refuse_unwritable(option: str, path: str) -> None:
    """Raise ValueError naming ``option`` unless a file can be written at ``path``; keep existing files."""
    refuse_empty(option, path)
    target, where = pathlib.Path(path), f"{option} {path}"
    if target.is_dir():
        raise ValueError(f"{where}: is a folder")
    if not target.absolute().parent.is_dir():
        raise ValueError(f"{where}: the folder does not exist")
    if target.exists() and not target.is_file():  # opening a pipe or device may change it
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
    """Raise ValueError naming ``option`` if the path is empty, for example from an unset variable."""
    if not path:
        raise ValueError(f"{option} '': the path is empty")

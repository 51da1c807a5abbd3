"""Files of what was measured on this machine, as JSON: found, read, and replaced under a lock.

Reading never fails: a file that is damaged, or that this version did not write, is left alone, with one
warning that names it. Writing replaces the file at once, under a lock (``FILE.lock``, which stays), and
keeps what others have written meanwhile; a file that cannot be read is then an error, and stays.
"""

import contextlib
import fcntl
import json
import math
import os
import pathlib
import secrets
import stat
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

OFF = ("off", "0", "")
MOST_BYTES = 64 << 20  # of a file; a row has less than 2000
MOST_COUNT = 1 << 62
Content = TypeVar("Content")


class NotOursError(ValueError):
    """A file that this version of interlace has not written. The message says why, and names it."""


def require(name: str, value: object, right: bool) -> None:
    """Raise ValueError, which says name and value, unless it is ``right``."""
    if not right:
        raise ValueError(f"{name} is {str(value)[:100]!r}")


def is_count(value: object) -> bool:
    return type(value) is int and 1 <= value <= MOST_COUNT


def is_figure(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


@dataclass(frozen=True)
class MeasuredFile(Generic[Content]):
    """The file that ``interlace COMMAND`` writes; ``title`` is its name in warnings.

    ``variable`` of the environment names it, or is "off". ``parse`` makes its content of the JSON: it
    raises NotOursError for what is not of this machine, any other error for what is damaged.
    """

    command: str
    title: str
    format: str
    version: int
    variable: str
    parse: Callable[[dict[str, Any]], Content]

    def path(self, usual: Callable[[], str]) -> pathlib.Path | None:
        """The file, by default ``usual()`` in the user's cache folder; None if the user wants none."""
        named = os.environ.get(self.variable)
        if named is None:
            return _cache_folder() / "interlace" / usual()
        if named.strip().lower() in OFF:
            return None
        return pathlib.Path(os.path.expanduser(named))  # as it is, where there is no such user

    def content(self, file: pathlib.Path) -> Content:
        """The file's content. Raises NotOursError, FileNotFoundError and other OSErrors."""
        try:
            about = file.stat()  # before it is opened: that of a pipe may never end
            if not stat.S_ISREG(about.st_mode):
                raise NotOursError("is no regular file")
            if about.st_size > MOST_BYTES:
                raise NotOursError(f"has {about.st_size} bytes, more than {MOST_BYTES}")
            whole = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(whole, dict) or whole.get("format") != self.format:
                raise NotOursError(f"is no file of interlace {self.command}")
            if whole.get("version") != self.version:
                raise NotOursError(
                    f"has version {whole.get('version')!r} of the format, this interlace has {self.version}"
                )
            return self.parse(whole)
        except OSError:
            raise
        except NotOursError as error:
            raise NotOursError(f"{file}: {error}") from None
        except Exception as error:
            raise NotOursError(f"{file}: is damaged: {type(error).__name__}: {error}") from None

    def read(self, file: pathlib.Path) -> Content | None:
        """The file's content; None if there is none, or with a warning if it cannot be used."""
        try:
            return self.content(file)
        except FileNotFoundError:
            return None
        except (NotOursError, OSError) as error:
            text = str(error) if isinstance(error, NotOursError) else f"{file}: {error}"
            warnings.warn(f"{self.title} not used: {text}", RuntimeWarning, stacklevel=3)
            return None

    def _to_change(self, file: pathlib.Path) -> Content | None:
        """None if there is nothing. Raises NotOursError for anything else, which would be lost."""
        try:
            return self.content(file)
        except FileNotFoundError:
            return None
        except NotOursError as error:
            raise NotOursError(
                f"{error}; it is left as it is, name another with {self.variable}"
            ) from None

    def refuse_unwritable(self, file: pathlib.Path) -> None:
        """Make the folder; raise NotOursError or OSError if :meth:`change` would."""
        self._to_change(file)
        target = _target(file)
        try:
            if target.exists() and not os.access(target, os.W_OK):
                raise PermissionError("it is read-only")
            with _locked(target):
                handle, name = _new_file(target)
                os.close(handle)
                os.unlink(name)
        except OSError as error:
            raise OSError(f"{file}: cannot be written: {error}") from None

    def change(
        self, file: pathlib.Path, changed: Callable[[Content | None], dict[str, Any]]
    ) -> None:
        """Put ``changed(content)`` into the file, where None is the content of none.

        Several processes may do so at once: each waits for the others, and none loses what another wrote.
        Raises NotOursError if there is something else, and OSError.
        """
        target = _target(file)
        with _locked(target):
            whole = {"format": self.format, "version": self.version}
            whole.update(changed(self._to_change(file)))
            text = json.dumps(whole, indent=1)
            # all of it or nothing: a reader sees the old file or the new one
            handle, name = _new_file(target)
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as out:
                    out.write(text + "\n")
                    out.flush()
                    os.fsync(out.fileno())
                os.replace(name, target)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise


def _cache_folder() -> pathlib.Path:
    """The user's, by the conventions of the system; without platformdirs, which torch does not bring."""
    if os.environ.get("XDG_CACHE_HOME"):
        return pathlib.Path(os.environ["XDG_CACHE_HOME"])
    home = pathlib.Path(os.path.expanduser("~"))
    if sys.platform == "darwin":
        return home / "Library" / "Caches"
    if sys.platform == "win32":
        return pathlib.Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    return home / ".cache"


def _target(file: pathlib.Path) -> pathlib.Path:
    """Where links lead, so that the link stays and all its names share a lock."""
    return pathlib.Path(os.path.realpath(file))


@contextlib.contextmanager
def _locked(target: pathlib.Path) -> Iterator[None]:
    """One process at a time. The lock ends with its holder, so nobody waits for one that died.

    The lock's file is opened where it is, never through a link, and nothing is written into it: somebody
    else's link there must not have another file emptied.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(target.with_name(target.name + ".lock"), flags, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _new_file(target: pathlib.Path) -> tuple[int, str]:
    """Beside it, open for writing; its mode is that of ``target``, or what the umask leaves of 0o666."""
    name = f"{target.parent}/.{target.name}.{os.getpid()}-{secrets.token_hex(4)}"
    handle = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    with contextlib.suppress(FileNotFoundError):
        os.chmod(name, stat.S_IMODE(target.stat().st_mode))
    return handle, name

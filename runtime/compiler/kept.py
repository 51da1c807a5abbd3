"""A cache of PTX to run on a CPU, so that no compiling process has to be started.

The files are in the folder in which Triton caches the compilations of the kernel's file. A file's name is a
digest of the request, of Triton, of this compiler package, and of the kernel: the texts and values of all
names that its code uses. Each process computes the digest from what it has loaded. So nothing is found
after a test has changed a constant.
"""

import contextlib
import functools
import hashlib
import inspect
import json
import os
import pathlib
import re
import secrets
import types

from interlace.runtime.compat.triton_launcher import named_objects, version_and_settings
from interlace.runtime.compiler.request import Compilation, Measurement
from interlace.runtime.core.launch import KernelFunction

_NOT_OURS = re.compile(r"(builtins|triton|torch|numpy)(\.|$)")
_COMPILER = ("worker.py", "../compat/triton_launcher.py", "../core/launch.py")


def folder(path: str) -> pathlib.Path:
    """Return the folder of the cache for the kernels of file ``path``.

    Each file, and each copy of this package, has a separate folder. Triton's cache is keyed by text, not by
    place, and would report lines of another file, which may no longer exist.
    """
    root = os.environ.get("TRITON_CACHE_DIR") or os.path.expanduser("~/.triton/cache")
    place = os.path.realpath(path or __file__)
    name = hashlib.blake2b(place.encode(), digest_size=8).hexdigest()
    return pathlib.Path(root, f"interlace-{name}")


def file_of(request: Compilation, kernel: KernelFunction) -> pathlib.Path | None:
    """Return the cache file of ``request``, or None if something relevant is known only by its address."""
    parts = [_compiler(), version_and_settings(), repr(sorted(vars(request).items()))]
    with contextlib.suppress(OSError):  # raised for a function without a file
        parts += map(_description, named_objects(kernel, _NOT_OURS))
        if not any(" at 0x" in part for part in parts[2:]):
            digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
            return folder(request.path) / f"{digest}.json"
    return None


def read(file: pathlib.Path) -> Measurement | None:
    with contextlib.suppress(OSError, LookupError, ValueError, TypeError):
        values = json.loads(file.read_bytes())
        found = Measurement(**{**values, "descriptors": tuple(values["descriptors"])})
        if found.ptx and type(found.shared) is type(found.scratch) is int:
            return found
    return None


def write(file: pathlib.Path, measurement: Measurement) -> None:
    """Write the file, safely while other processes read or write it."""
    values = {
        name: getattr(measurement, name) for name in ("ptx", "shared", "scratch", "descriptors")
    }
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        whole = file.with_suffix(f".{secrets.token_hex(8)}")
        whole.write_text(json.dumps(values))
        os.replace(whole, file)


@functools.cache
def _compiler() -> str:
    here = pathlib.Path(__file__).parent
    return "".join((here / name).read_text() for name in _COMPILER)


def _description(part: object) -> str:
    text = None
    while hasattr(part, "fn"):
        text, part = getattr(part, "raw_src", None), part.fn  # the text at the time of loading
    if isinstance(part, types.ModuleType):
        return os.path.realpath(getattr(part, "__file__", None) or part.__name__)
    if not isinstance(part, (type, types.FunctionType)):
        return repr(part)
    if _NOT_OURS.match(str(part.__module__)):
        return f"{part.__module__}.{part.__qualname__}"
    code = getattr(part, "__code__", None)
    place = f"{os.path.realpath(code.co_filename)} {code.co_firstlineno}" if code else ""
    return "".join([place, *(text or inspect.getsourcelines(part)[0])])

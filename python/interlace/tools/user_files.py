"""Functions in files of users, which commands take as "path/to/file.py::function"."""

import importlib.util
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from interlace.runtime.compat.triton_launcher import driver_of


def load_function(
    text: str, hint: Callable[[BaseException], str] = lambda error: ""
) -> Callable[..., Any]:
    """Return the function of "path/to/file.py::function"; errors name the fault of the text or the file."""
    path_text, _, name = text.partition("::")
    path = pathlib.Path(path_text)
    if not name or path.suffix != ".py":
        raise ValueError(f"{text}: must be like path/to/file.py::function")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    module_name = path.stem
    known = sys.modules.get(module_name)
    if known is not None and getattr(known, "__file__", None) != str(path.resolve()):
        module_name = f"verified_{path.stem}"
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(module_name, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    own_arguments, sys.argv = sys.argv, [str(path)]  # a script may parse its own
    try:
        with driver_of(90):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{path}: importing it fails: {type(error).__name__}: {error}{hint(error)}"
        ) from error
    finally:
        sys.argv = own_arguments
    fn = getattr(module, name, None)
    if not callable(fn):
        public = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ValueError(f"{path}: has no function {name!r}; it has {', '.join(public) or 'none'}")
    # like jit functions of Triton, interpreted or not
    if hasattr(fn, "fn") and hasattr(fn, "run"):
        raise ValueError(f"{path}: {name!r} is a kernel; name a function that launches it")
    return fn  # type: ignore[no-any-return]

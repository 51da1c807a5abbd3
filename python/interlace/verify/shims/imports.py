"""The modules that shims stand for, and the time for which ``import`` finds them."""

import contextlib
import importlib
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

_HERE = "interlace.verify.shims"
_EXTRA = "triton_dist.language.extra"
_TORCH = "torch.distributed._symmetric_memory"

# By name: the module that is stood for, and the module that does; parents first, "" for an empty one.
SHIMS: dict[str, dict[str, str]] = {
    "iris": {
        "iris": f"{_HERE}.iris",
        "iris.mem": "",
        "iris.mem.triton": "",
        "iris.mem.triton.context": f"{_HERE}.iris",
    },
    "triton_dist": {
        "triton_dist": f"{_HERE}.triton_dist",
        "triton_dist.language": f"{_HERE}.triton_dist_language",
        _EXTRA: "",
        f"{_EXTRA}.libshmem_device": f"{_HERE}.nvshmem",
        f"{_EXTRA}.language_extra": f"{_HERE}.language_extra",
        "triton_dist.utils": f"{_HERE}.triton_dist_utils",
        "nvshmem": "",
        "nvshmem.core": "",
    },
    "torch": {
        _TORCH: "interlace.symmetric_memory",
        f"{_TORCH}._nvshmem_triton": f"{_HERE}.torch_nvshmem",
    },
}


@contextlib.contextmanager
def installed(*names: str) -> Iterator[None]:
    """Let ``import`` find the shims of ``names`` within, whether the real packages are there or not.

    Raises ValueError for a name that is none of :data:`SHIMS`.

    >>> from interlace.verify import shims
    >>> with shims.installed("iris"):
    ...     import iris
    >>> iris.__name__
    'interlace.verify.shims.iris'
    """
    for name in names:
        if name not in SHIMS:
            raise ValueError(f"names: there is no shim {name!r}; there are {', '.join(SHIMS)}")
    with contextlib.ExitStack() as leaving:
        for name in names:
            for real, shim in SHIMS[name].items():
                _stand_in(leaving, real, shim)
        yield


def calls_a_shim(kernel: Any) -> bool:
    """Whether a ``@triton.jit`` function, or one that it calls, calls a device function of a shim."""
    todo, seen = [kernel.fn], set()
    while todo:
        function = todo.pop()
        seen.add(function)
        for name in function.__code__.co_names:
            named = function.__globals__.get(name)
            called = getattr(named, "fn", named)
            home = (
                called.__name__ if inspect.ismodule(called) else getattr(called, "__module__", "")
            )
            if str(home).startswith(f"{_HERE}."):
                return True
            if inspect.isfunction(called) and called is not named and called not in seen:
                todo.append(called)
    return False


def _stand_in(leaving: contextlib.ExitStack, real: str, shim: str) -> None:
    module = importlib.import_module(shim) if shim else types.ModuleType(real)
    parent, _, last = real.rpartition(".")
    _put(leaving, sys.modules, real, module)
    if parent:
        # `import a.b as c` takes the attribute of a, not the entry of sys.modules
        _put(leaving, vars(sys.modules[parent]), last, module)


def _put(
    leaving: contextlib.ExitStack, where: dict[str, Any], key: str, module: types.ModuleType
) -> None:
    """Set an entry until ``leaving`` is left."""
    if key in where:
        leaving.callback(where.__setitem__, key, where[key])
    else:
        leaving.callback(where.pop, key, None)
    where[key] = module

"""Names of Triton-distributed that are not simulated. A file may import them; a call raises an error.

This module replaces modules of manual shared memory and TMA, whose types and operations need the package's
compiler, and modules that measure times.
"""

from collections.abc import Callable
from typing import Any

# attributes by which code tells kernels, constants, aggregates and test plugins from other values
_ASKED_OF_ALL = {"fn", "run", "value", "hash_attrs", "raw_src", "pytest_plugins", "pytestmark"}


def of(module: str) -> Callable[[str], Any]:
    def find(name: str) -> Any:
        if name in _ASKED_OF_ALL or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")

        def missing(*args: object, **kwargs: object) -> Any:
            raise NotImplementedError(f"the shim of {module} has no {name}")

        missing.__name__ = missing.__qualname__ = name
        missing.__triton_builtin__ = True  # type: ignore[attr-defined]  # kernels may also name it
        return missing

    return find


__getattr__ = of("triton_dist")

"""Names of Triton-distributed that are not simulated: a file may import them, and calling them says so.

It stands for modules of shared memory and TMA by hand, whose types and operations need the compiler of the
package, and for modules that measure times.
"""

from collections.abc import Callable
from typing import Any

# by which code tells kernels, constants, aggregates and plugins of tests from other values
_ASKED_OF_ALL = {"fn", "run", "value", "hash_attrs", "raw_src", "pytest_plugins", "pytestmark"}


def of(module: str) -> Callable[[str], Any]:
    """``__getattr__`` of what stands for ``module``."""

    def find(name: str) -> Any:
        if name in _ASKED_OF_ALL or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")

        def missing(*args: object, **kwargs: object) -> Any:
            raise NotImplementedError(f"the shim of {module} has no {name}")

        missing.__name__ = missing.__qualname__ = name
        missing.__triton_builtin__ = True  # type: ignore[attr-defined]  # kernels may name it, too
        return missing

    return find


__getattr__ = of("triton_dist")

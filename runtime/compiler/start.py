"""The program of a compiling process, which starts without the modules that only communication needs.

Compiling needs Triton and a few files of this package. ``import interlace`` also imports torch, which takes
ten times as long. So the package is an empty module until a file of kernels uses more than its folders.
"""

import sys
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any


class Unfilled(ModuleType):
    """A package whose own code has not run."""

    def __getattr__(self, name: str) -> Any:
        self.__class__ = ModuleType  # type: ignore[assignment]
        spec = self.__spec__
        assert spec is not None and spec.loader is not None
        spec.loader.exec_module(self)
        return getattr(self, name)


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):  # PYTHONSAFEPATH leaves the folder out
        del sys.path[0]  # this folder: its files must not be found by their bare names
    spec = find_spec("interlace")
    assert spec is not None
    package = sys.modules["interlace"] = module_from_spec(spec)
    package.__class__ = Unfilled
    from interlace.runtime.compiler.pool import main

    main()

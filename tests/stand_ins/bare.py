"""Python as on a machine for GPUs, where little is installed: the rest is hidden from this project."""

import builtins
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = ("torch", "triton", "numpy", "pytest", "_pytest")
OWN = {
    path.stem for folder in ("python", "benchmarks", "tests") for path in ROOT.glob(f"{folder}/*")
}
"""Found by PYTHONPATH, or beside the script."""


def _is_there(name: str) -> bool:
    top = name.partition(".")[0]
    return top in INSTALLED or top in OWN or top in sys.stdlib_module_names


def refuse() -> None:
    """Let further imports of other packages by this project fail, and hide its installation."""
    take, find = builtins.__import__, importlib.util.find_spec
    distribution = importlib.metadata.distribution

    def importing(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        file = str((globals or {}).get("__file__", ""))
        ours = file.startswith(str(ROOT)) and "site-packages" not in file
        if ours and not level and not _is_there(name):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return take(name, globals, locals, fromlist, level)

    def finding(name: str, package: str | None = None) -> Any:
        return find(name, package) if _is_there(name) else None

    def distributed(name: str) -> Any:
        if not _is_there(name) or name.startswith("interlace"):
            raise importlib.metadata.PackageNotFoundError(name)
        return distribution(name)

    builtins.__import__, importlib.util.find_spec = importing, finding
    importlib.metadata.distribution = distributed

"""matplotlib, which is not there for everybody."""

from __future__ import annotations

import pathlib
from typing import Any


def refuse_format(path: str) -> None:
    """Raise ValueError unless matplotlib writes files whose names end so."""
    known = require_matplotlib()().canvas.get_supported_filetypes()
    suffix = pathlib.Path(path).suffix.lstrip(".").lower() or "png"
    if suffix not in known:
        raise ValueError(f"--plot {path}: {suffix!r} is none of {', '.join(sorted(known))}")


def require_matplotlib() -> Any:
    """matplotlib's Figure. Raises ValueError saying how to get it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "--plot needs matplotlib, which is not installed: pip install 'interlace[plot]'"
        ) from None
    return Figure

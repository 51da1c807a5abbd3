"""Groups of ranks: every way to name or make one."""

from __future__ import annotations

from interlace.groups.groups import resolve as resolve

"""Groups of ranks: every way to name or make one."""

from interlace.groups.groups import resolve as resolve

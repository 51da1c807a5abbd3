"""The place ``cuda`` for one process per rank: symmetric memory, agreement, messages."""

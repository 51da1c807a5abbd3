"""Processes of one host that form a group: shared segments, messages, waits, deaths."""

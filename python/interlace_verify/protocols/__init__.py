"""Protocols as state machines, explored completely."""

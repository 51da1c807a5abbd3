"""Protocols as state machines, and a complete search of them, see docs/how-to/check/protocols.md."""

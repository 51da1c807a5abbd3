"""Protocols as state machines, and a complete search of their states."""

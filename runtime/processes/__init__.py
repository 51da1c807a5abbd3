"""Processes of one host: how they join, wait, share memory, and end; the flight recorder."""

"""Consoles, files, plots, progress, facts about the machine."""

"""Ranks on GPUs: streams, launches, residency, watchdog, plans; and virtual ranks."""

"""Ranks on GPUs: streams, launches, residency, watchdog and plans; and virtual ranks."""

"""Host runtime: memory, streams, places, launches, algorithms."""

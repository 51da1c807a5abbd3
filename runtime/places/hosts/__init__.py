"""The place ``hosts``: processes on several hosts, TCP between them."""

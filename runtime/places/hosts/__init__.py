"""The place ``hosts``: processes on several hosts, connected by TCP."""

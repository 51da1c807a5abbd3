"""The place ``hosts``: processes on several hosts, gloo between them."""

"""The place ``shm``: one process per rank on one host, with an engine on shared memory."""

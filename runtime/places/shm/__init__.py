"""The place ``shm``: one process per rank on one host, and its engine on shared memory."""

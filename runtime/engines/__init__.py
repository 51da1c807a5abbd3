"""The plain collectives on a rank's streams, each call by one of ``algorithms/``."""

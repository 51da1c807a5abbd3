"""Ranks of one simulated run as if they were on several nodes."""

from interlace.groups.groups import default_group
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.places.sim.place import separate_nodes

SMALL = {"block_elements": 16, "programs": 2, "chunks": 2, "copiers": 2}
TILES = {**SMALL, "block_m": 16, "block_n": 16, "block_k": 16}
TWO = (0, 0, 1, 1)


def on_nodes(nodes: tuple[int, ...], put: str = "stores") -> Communicator:
    """The group of all ranks again, as if they were on ``nodes``."""
    ranks = tuple(range(len(nodes)))
    place = default_group().place.subgroup(ranks, 99)
    return Communicator(separate_nodes(place, nodes, put), ranks)

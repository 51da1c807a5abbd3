"""Several nodes on one: puts are emulated where all memory is mapped, and so their protocol is checked."""

from collections.abc import Sequence

from interlace.runtime.core.memory import SymmetricBuffer
from interlace.runtime.core.place import Nodes, Place, table


def separate_nodes(place: Place, of: Sequence[int], put: str = "stores") -> Place:
    """Let ``place``, where all memory is mapped, work as if each node's were mapped on that node only.

    For tests on one node, or in ``sim``: what would be put is stored ("stores"), or fetched by the
    receiver ("late"). ``of`` is the node of every rank. Before a communicator is made of ``place``.
    """
    assert len(of) == place.world_size, (of, place.world_size)
    place.nodes = Nodes(tuple(of), put)
    allocate = place.allocate
    here = of[place.rank]

    def separated(nbytes: int) -> SymmetricBuffer:
        whole = allocate(nbytes)
        addresses = whole.peers.tolist()
        near = [address if of[rank] == here else 0 for rank, address in enumerate(addresses)]
        return SymmetricBuffer(
            whole.rank,
            nbytes,
            table(near, addresses).to(whole.peers.device),
            # an empty part keeps the memory alive
            [part if of[rank] == here else part[:0] for rank, part in enumerate(whole.peer_bytes)],
        )

    place.allocate = separated  # type: ignore[method-assign]
    return place

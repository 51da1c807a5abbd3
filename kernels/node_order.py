"""Orders for ranks on several nodes, as pure integer functions: the order of moves, and their links.

Within a node a rank reaches its peers' memory; to another node it can only put. ``nodes`` lists the node
of every rank, in any numbering: ``[0, 0, 1, 1]``. Nodes may differ in size. A rank is tied to one rank of
every other node, its *counterpart* there: the one at the same place within the node. Between two nodes
data travels once, from a rank to its counterpart, which hands it on within its node::

    node 0   0 --stage--> 0 --put--> 2                 node 1   2 --land--> 2 --forward--> 3
             0 --send---> 1                                     3 --land--> 3 --forward--> 2
             1 --stage--> 1 --put--> 3

The work of a rank is a list of *moves*, one line of integers each, see ``MOVE_COLUMNS``. A kernel's
programs take the lines in turn. A line waits only for an earlier line of its own rank, for a SEND, or for a
put. A SEND waits for no line, and a put only for SENDs. So any number of programs makes progress.

Why may a line wait for another line of the same rank? A put reads this rank's workspace, never the
caller's tensor, because a network card may not be able to read that. So rows are staged first, once for
all nodes. And this rank publishes arrived data again before it is read, so that readers need not know how
it arrived.
"""

SEND = 0  # rows of the input go to a peer's workspace, or to the own one, for puts
FORWARD = 1  # rows of the own workspace go to a peer of this node
PUT = 2  # rows of the own workspace are put to a rank of another node
LAND = 3  # rows that another node has put here are passed on to this rank's readers

# kind, peer, source, from, to, rows, slot to wait for, slot to publish
MOVE_COLUMNS = 8
NO_SLOT = -1


def members(nodes, node):
    """The ranks of a node: ``members([0, 1, 0, 1], 1) == [1, 3]``."""
    return [rank for rank, each in enumerate(nodes) if each == node]


def counterpart(rank, node, nodes):
    """Return the rank of ``node`` that ``rank`` puts to.

    ``counterpart(1, 1, [0, 0, 1, 1]) == 3``. If nodes differ in size, several ranks may share one:
    ``counterpart(2, 1, [0, 0, 0, 1, 1]) == 3``.
    """
    own, theirs = members(nodes, nodes[rank]), members(nodes, node)
    return theirs[own.index(rank) % len(theirs)]


def other_nodes(rank, nodes):
    """Return the other nodes, the next one first: at any time all nodes put to different ones."""
    names = sorted(set(nodes))
    own = names.index(nodes[rank])
    return names[own + 1 :] + names[:own]


def node_peers(rank, nodes):
    """Return the other ranks of the own node, the next first: ``node_peers(1, [0, 0, 0]) == [2, 0]``."""
    ranks = members(nodes, nodes[rank])
    own = ranks.index(rank)
    return ranks[own + 1 :] + ranks[:own]


def put_targets(rank, nodes):
    """Return the ranks that a rank puts to, in order: its counterpart on every other node."""
    return [counterpart(rank, node, nodes) for node in other_nodes(rank, nodes)]


def put_sources(rank, nodes):
    """Return the ranks that put to a rank, in order of arrival: the node before this one first."""
    return [
        source
        for node in reversed(other_nodes(rank, nodes))
        for source in members(nodes, node)
        if counterpart(source, nodes[rank], nodes) == rank
    ]


def gather_order(rank, nodes, chunk_counts):
    """Return the order in which a rank takes chunks of an all-gather: [(source, chunk), ...].

    First its own chunks; then its node's, as they arrive over the fast link; then other nodes' chunks,
    chunk by chunk, node by node as they land. Of each node it first takes the chunk that lands on this
    rank: a node's chunks land on all ranks of this one at about the same time, and are forwarded at once.
    ``gather_order(0, [0, 0, 1, 1, 2, 2], [1] * 6)`` takes the sources 0, 1, 4, 5, 2, 3.
    """
    near = list(reversed(node_peers(rank, nodes)))
    by_node: dict[int, list[int]] = {}
    for holder in (rank, *near):
        for source in put_sources(holder, nodes):
            by_node.setdefault(nodes[source], []).append(source)
    far = [source for sources in by_node.values() for source in sources]
    order = [(rank, chunk) for chunk in range(chunk_counts[rank])]
    for sources in (near, far):
        for chunk in range(max(chunk_counts, default=0)):
            order += [(source, chunk) for source in sources if chunk < chunk_counts[source]]
    return order


def gather_moves(rank, nodes, rows, chunk_rows):
    """Return the moves of an all-gather, one chunk of ``chunk_rows`` rows after the other, and its slots.

    ``rows`` by rank. Workspace rows are rows of the whole. Chunk c of all chunks, in rank order, has slot
    c where it can be read, and slot (number of chunks) + c where it lands. Returns (moves, slots).
    """
    counts = [-(-each // chunk_rows) for each in rows]
    first_rows = [sum(rows[:source]) for source in range(len(rows))]
    first_slots = [sum(counts[:source]) for source in range(len(rows))]
    slots = sum(counts)

    def chunk_of(source, chunk):
        begin = chunk * chunk_rows
        count = min(chunk_rows, rows[source] - begin)
        return begin, first_rows[source] + begin, count, first_slots[source] + chunk

    moves = []
    targets, near = put_targets(rank, nodes), node_peers(rank, nodes)
    for chunk in range(counts[rank]):
        begin, row, count, slot = chunk_of(rank, chunk)
        # Staged once for all nodes: a put reads the workspace, as a network card may not read the input.
        if targets:
            moves.append([SEND, rank, rank, begin, row, count, NO_SLOT, slot])
        for peer in targets:
            moves.append([PUT, peer, rank, row, row, count, slot, slots + slot])
        for peer in near:
            moves.append([SEND, peer, rank, begin, row, count, NO_SLOT, slot])
    for source, chunk in gather_order(rank, nodes, counts):
        if nodes[source] != nodes[rank] and counterpart(source, nodes[rank], nodes) == rank:
            _, row, count, slot = chunk_of(source, chunk)
            # LAND before FORWARD: a line may wait for earlier lines of its rank only.
            moves.append([LAND, rank, source, row, row, count, slots + slot, slot])
            for peer in near:
                moves.append([FORWARD, peer, source, row, row, count, slot, slot])
    return moves, 2 * slots


def exchange_moves(rank, nodes, sizes):
    """Return the moves of an all-to-all: ``sizes[source][destination]`` rows, one part after the other.

    A part for another node goes first to the rank of this one that is its destination's counterpart
    (``reducer``), which puts it. Workspace: arrived parts, in the order of the sources; then parts to be
    put. From source s to destination d, slot s says that a part can be read, W + s that it has landed, 2 W
    + s W + d that it can be put.

    Returns (moves, first row of each source's part, rows of the workspace, slots).
    """
    world_size = len(nodes)
    arrivals = max(sum(size[owner] for size in sizes) for owner in range(world_size))
    relayed = {by: relay_places(by, nodes, sizes) for by in range(world_size)}

    def arrived(owner, source):
        return sum(sizes[each][owner] for each in range(source))

    def slot_of(source, owner):
        return (2 + source) * world_size + owner

    moves = []
    for owner in scatter_order(rank, nodes):
        count, begin = sizes[rank][owner], sum(sizes[rank][:owner])
        by = reducer(rank, owner, nodes)
        if count and by == owner and owner != rank:
            row = arrived(owner, rank)
            moves.append([SEND, owner, rank, begin, row, count, NO_SLOT, rank])
        elif count and owner != rank:
            row, slot = arrivals + relayed[by][0][rank, owner], slot_of(rank, owner)
            moves.append([SEND, by, rank, begin, row, count, NO_SLOT, slot])
    for (source, owner), place in relayed[rank][0].items():
        if count := sizes[source][owner]:
            to_row, slot = arrived(owner, source), slot_of(source, owner)
            row = arrivals + place
            moves.append([PUT, owner, source, row, to_row, count, slot, world_size + source])
    for source in range(world_size):
        count = sizes[source][rank]
        if count and nodes[source] != nodes[rank]:
            by, row = reducer(source, rank, nodes), arrived(rank, source)
            from_row = arrivals + relayed[by][0][source, rank]
            moves.append([LAND, rank, by, from_row, row, count, world_size + source, source])
    firsts = [arrived(rank, source) for source in range(world_size)]
    total = arrivals + max(rows for _, rows in relayed.values())
    return moves, firsts, total, slot_of(world_size, 0)


def relay_places(by, nodes, sizes):
    """Return rows in ``by``'s workspace of parts to put: ({(source, destination): row}, rows in all)."""
    places, row = {}, 0
    for owner in reduced_owners(by, nodes)[1:]:
        for source in members(nodes, nodes[by]):
            places[source, owner] = row
            row += sizes[source][owner]
    return places, row


def reducer(rank, owner, nodes):
    """Return the rank that sums contributions of ``rank``'s node to ``owner``; maybe ``owner`` itself."""
    return owner if nodes[owner] == nodes[rank] else counterpart(owner, nodes[rank], nodes)


def reduced_owners(rank, nodes):
    """Return the owners whose parts a rank sums for its node, itself first: one region each, in order."""
    others = [
        owner
        for node in other_nodes(rank, nodes)
        for owner in members(nodes, node)
        if reducer(rank, owner, nodes) == rank
    ]
    return [rank, *others]


def scatter_order(rank, nodes):
    """Return the order in which a rank produces parts for their owners.

    Other nodes' parts come first, because they are summed here and then travel. The next node is first, and
    within a node the parts that the next rank of this one sums. Then the own node's follow, the own part
    last. ``scatter_order(0, [0, 0, 1, 1]) == [3, 2, 1, 0]``.
    """
    near = node_peers(rank, nodes)
    order = []
    for node in other_nodes(rank, nodes):
        for who in [*near, rank]:
            order += [o for o in members(nodes, node) if reducer(rank, o, nodes) == who]
    return [*order, *near, rank]

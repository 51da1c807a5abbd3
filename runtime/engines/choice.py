"""The engine of a group whose ranks work on streams: on one node, or on several."""

from __future__ import annotations

from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.engine import Engine
from interlace.runtime.engines.nodes import HierarchicalEngine
from interlace.runtime.engines.streams import StreamEngine


def on_streams(communicator: Communicator) -> Engine:
    """The engine for the ``communicator``'s place."""
    nodes = communicator.place.nodes
    return StreamEngine(communicator) if nodes is None else HierarchicalEngine(communicator, nodes)

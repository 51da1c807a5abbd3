"""An op of ranks on several hosts: how the ranks agree on it, and the pieces in which it is done.

Legend: as in ``engine.py``. Every rank receives a *frame* from its twin on each other host, and sends its
own to the ranks whose twin it is. All ranks of a host know the host's messages before. So each rank knows
the messages of all ranks after one frame from each host, and no rank has to pass anything on.

A frame is a head of numbers, the messages of a host (one for all, if they are equal), and data::

    int64: bytes of messages, negative if one stands for all    int64: bytes of data
    int64: which ranks send more, int64: to which ranks         messages    data

The sender of data knows only that the receiver's host has called *some* op. The receiver copies the data to
its destination once the messages of all hosts equal its own; otherwise it drops the data. The same holds
for data to ranks that get no frame from the sender: its length goes before it, and the frames say which
ranks of the host send such data to which ranks of the other. If the messages of an op fitted together last
time without being equal, nothing is sent before all ranks agree.

A :class:`OpPiece` is the work of an op in the host, between hosts, and in the host again. An op of one
piece begins with its first step in the host, which compares the caller's call there, and sends its data
with the frames. So no rank waits twice. Before all ranks agree, it writes only into memory of the engine: a
mismatch is an error before a byte of the caller's memory changes. A larger op is agreed on first. While its
pieces are on the wire, the next ones are prepared and the last ones are shared in the host. Later steps
have calls of the engine's own, which agree by construction.
"""

from __future__ import annotations

import functools
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from interlace.runtime.core import plain
from interlace.runtime.core.call import Call
from interlace.runtime.core.context import name_algorithm
from interlace.runtime.core.engine import ALL, Engine
from interlace.runtime.core.memory import bytes_of
from interlace.runtime.places.hosts.host_map import HostMap
from interlace.runtime.places.hosts.links import HostLinks
from interlace.runtime.places.hosts.wires import Buffer, Wires
from interlace.runtime.processes import dump as record
from interlace.runtime.processes.control import LARGEST_MESSAGE

MIDDLE_BYTES = 4 << 20
PIECE_BYTES = 4 << 20
NOBODY = -2  # in place of a rank
Route = tuple[int, int]
"""Which ranks send, and to which, data without a frame before all ranks agree."""
NO_ROUTE = NOBODY, NOBODY
LAG = 1  # pieces on the wire while the next is prepared
KEPT_FROM = 128 << 10  # bytes from which malloc asks the kernel
_MOST_CALLS = 256
_HEAD, _LENGTH = struct.Struct("<qqqq"), struct.Struct("<q")
_AROUND = 64  # bytes around each message, at most
_NOTHING: Mapping[int, Buffer] = {}


class Frames:
    """One rank's view of which ranks send frames to which."""

    def __init__(self, hosts: HostMap, rank: int) -> None:
        self._rank, self._hosts = rank, hosts.hosts
        self.mine = hosts.hosts[hosts.index(rank)]
        self.index = self.mine.index(rank)
        self.others = [ranks for ranks in hosts.hosts if ranks is not self.mine]
        self.twins = [ranks[self.index % len(ranks)] for ranks in self.others]
        """The rank from which frames come, by other host."""
        step = len(self.mine)
        self.receivers = [rank for ranks in self.others for rank in ranks[self.index :: step]]
        """The ranks to which this rank's frames go: those whose twin it is."""
        self._world_size = sum(map(len, hosts.hosts))

    def trade(self, wires: Wires, messages: Sequence[bytes]) -> list[bytes]:
        """Return the messages of all ranks, by rank. ``messages`` are this host's."""
        found = self.swap(wires, messages)
        wires.flush()
        return [messages[0]] * self._world_size if found is None else found

    def swap(
        self,
        wires: Wires,
        messages: Sequence[bytes],
        sends: Mapping[int, Buffer] = _NOTHING,
        receives: Mapping[int, Buffer] = _NOTHING,
        route: Route = NO_ROUTE,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> list[bytes] | None:
        """Send the messages of this host and this data; receive the messages and data of the others.

        Returns None if all messages are equal: then ``meanwhile`` was called and the data was received.
        Otherwise it returns all messages, by rank. Without a ``route``, data for ranks that get no frame is
        sent only after all messages are known to be equal.
        """
        alike = messages.count(messages[0]) == len(messages)
        text = messages[0] if alike else plain.dumps(list(messages))
        length, posted = -len(text) if alike else len(text), dict[int, int]()
        for peer in self.receivers:
            data = sends.get(peer, b"")
            head = _HEAD.pack(length, len(data), *route) + text
            posted[peer] = wires.posted[peer] + len(head)
            wires.post(peer, head, data)
        besides = {peer: data for peer, data in sends.items() if peer not in posted}
        if route != NO_ROUTE:
            self._post(wires, besides)
        heads: list[tuple[Any, ...]] = []
        same = alike
        for twin in self.twins:
            theirs, nbytes, *where = self._taken(wires, twin, _HEAD)
            most = self._world_size * (LARGEST_MESSAGE + _AROUND)
            if not (-most <= theirs <= most and nbytes >= 0):
                raise plain.UnreadableError(f"rank {twin} announces {theirs} and {nbytes} bytes")
            content = bytearray(abs(theirs))
            wires.take(twin, content)
            same = same and theirs == length and content == text
            heads.append((theirs, nbytes, *where, content))
        wires.flush(posted)  # so that other ranks can begin their ``meanwhile``
        if not same:
            for twin, ranks, (_, nbytes, sender, receiver, _) in zip(
                self.twins, self.others, heads, strict=True
            ):
                wires.drop(twin, nbytes)
                if receiver in (ALL, self._rank):
                    for peer in ranks:
                        if sender in (ALL, peer) and peer != twin:
                            wires.drop(peer, self._taken(wires, peer, _LENGTH)[0])
            return self._by_rank(messages, heads)
        if route == NO_ROUTE:
            self._post(wires, besides)
        meanwhile()
        for twin, (_, nbytes, *_) in zip(self.twins, heads, strict=True):
            into = receives.get(twin, b"")
            self._check(twin, nbytes, into)
            wires.take(twin, into)
        for peer, into in receives.items():
            if peer not in self.twins:
                before = bytearray(_LENGTH.size)
                wires.take(peer, before, into)
                self._check(peer, _LENGTH.unpack(before)[0], into)
        return None

    def _post(self, wires: Wires, besides: Mapping[int, Buffer]) -> None:
        for peer, data in besides.items():
            wires.post(peer, _LENGTH.pack(len(data)), data)

    def _check(self, peer: int, nbytes: int, into: Buffer) -> None:
        if len(into) != nbytes:
            raise plain.UnreadableError(f"rank {peer} sends {nbytes} bytes, not {len(into)}")

    def _taken(self, wires: Wires, peer: int, layout: struct.Struct) -> tuple[int, ...]:
        found = bytearray(layout.size)
        wires.take(peer, found)
        return layout.unpack(found)

    def _by_rank(
        self, own_messages: Sequence[bytes], heads: Sequence[Sequence[Any]]
    ) -> list[bytes]:
        found = dict(zip(self.mine, own_messages, strict=True))
        for ranks, (length, *_, text) in zip(self.others, heads, strict=True):
            one = bytes(text)
            contents = [one] * len(ranks) if length <= 0 else _messages(one, len(ranks))
            found |= dict(zip(ranks, contents, strict=True))
        return [found[rank] for rank in range(self._world_size)]


WithinHost = Callable[[Call], object]
"""A step within the host, of the call that is passed to it."""


@dataclass
class OpPiece:
    """A part of an op: work within the host, then sending and receiving, then work within the host.

    ``meanwhile`` needs nothing from other hosts. ``near``, a step of all ranks of the host, may produce the
    data to be sent; it writes only into memory of the engine.
    """

    near: WithinHost | None = None
    sends: Mapping[int, torch.Tensor] = field(default_factory=dict)
    receives: Mapping[int, torch.Tensor] = field(default_factory=dict)
    meanwhile: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None
    route: Route = NO_ROUTE
    """The ranks that exchange data without a frame before all agree; alike on all ranks of a host."""
    uneven: Callable[[], OpPiece] | None = None
    """The piece to use if messages fit together but are not equal; alike on all ranks."""


MakePiece = Callable[[], OpPiece]


class UnlikeError(Exception):
    """The ranks of this host have called with different ``messages``, by local rank."""

    def __init__(self, messages: Sequence[bytes]) -> None:
        super().__init__("calls differ")
        self.messages = messages


class DisagreementError(Exception):
    """The calls of all ranks do not fit together; ``error`` is the same on all."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class _CallersCall(Call):
    """The call of the op's caller, in a step within the host: raises UnlikeError unless all are equal."""

    def verify(self, messages: Sequence[bytes]) -> None:
        if any(message != self.message for message in messages):
            raise UnlikeError(messages)


class HostsOps:
    """One rank's ops, one at a time. ``place``: local engine, lock, failures."""

    def __init__(self, place: Any, links: HostLinks) -> None:
        self._place, self._links, self._wires = place, links, links.wires
        self.frames: Frames = place.frames
        self._calls: dict[object, Call] = {}
        self._equal = True  # whether the messages of this op are equal
        self._unlike: set[str] = set()  # ops whose messages were not equal last time
        self._pools: list[list[torch.Tensor]] = [[] for _ in range(LAG + 1)]
        self._pool, self._used = self._pools[0], 0

    @property
    def local(self) -> Engine:
        engine: Engine = self._place.local_engine()
        return engine

    def run(self, call: Call, pieces: Sequence[MakePiece]) -> None:
        """Run an op in these pieces. Each is made when it begins."""
        place, refused = self._place, None
        with place.lock:
            number = record.began(place.group, call.message)
            name_algorithm("hosts")
            with place.guarded(call.op), self._links.moving(call.op):
                try:
                    self._run(call, pieces)
                except DisagreementError as found:  # not a failure of the group
                    refused = found.error
            if refused is not None:
                raise refused from None
            record.ended(place.group, number)

    def _run(self, call: Call, pieces: Sequence[MakePiece]) -> None:
        self._equal = True
        if len(pieces) > 1:
            self._agree(call, OpPiece())
            self._pipelined(call, pieces)
            return
        piece = self._begin(0, pieces[0])
        if self._agree(call, piece):
            piece.after()
        else:
            self._pipelined(call, [piece.uneven or pieces[0]])

    def _pipelined(self, call: Call, pieces: Sequence[MakePiece]) -> None:
        under_way: deque[tuple[OpPiece, Mapping[int, int]]] = deque()
        for number in range(len(pieces) + LAG):
            if number < len(pieces):
                piece = self._begin(number, pieces[number])
                if piece.near is not None:
                    piece.near(self.within(call.op))
                self._post(piece.sends)
                under_way.append((piece, dict(self._wires.posted)))
                piece.meanwhile()
            if number >= LAG:
                piece, posted = under_way.popleft()
                self._take(piece.receives)
                self._wires.flush(posted)  # before this rank waits for others of its host
                piece.after()

    def _begin(self, number: int, make: MakePiece) -> OpPiece:
        self._pool, self._used = self._pools[number % len(self._pools)], 0
        return make()

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory for the piece that is being made, of the size of ``like``.

        It is kept, because getting it from the kernel for each op costs as much as filling it.
        """
        if like.nbytes < KEPT_FROM:
            return torch.empty_like(like)
        pool, number = self._pool, self._used
        self._used += 1
        if number == len(pool):
            pool.append(like.new_empty(0, dtype=torch.uint8))
        if pool[number].numel() < like.nbytes:
            pool[number] = torch.empty(like.nbytes, dtype=torch.uint8)
        return pool[number][: like.nbytes].view(like.dtype).view(like.shape)

    def _post(self, tensors: Mapping[int, torch.Tensor]) -> None:
        for peer, tensor in tensors.items():
            self._wires.post(peer, _view(tensor))

    def _take(self, tensors: Mapping[int, torch.Tensor]) -> None:
        for peer, tensor in tensors.items():
            self._wires.take(peer, _view(tensor))

    def _agree(self, call: Call, piece: OpPiece) -> bool:
        """If all calls are equal, do ``piece`` without its last step. If they only fit, return False."""
        frames, wires, payloads = self.frames, self._wires, [call.message] * len(self.frames.mine)
        early = call.equal_fits and call.op not in self._unlike
        try:
            (piece.near or self.local.barrier)(self._callers(call))
        except UnlikeError as unlike:
            payloads, early = list(unlike.messages), False
        if early:
            sends, receives = _views(piece.sends), _views(piece.receives)
            messages = frames.swap(wires, payloads, sends, receives, piece.route, piece.meanwhile)
        else:
            messages = frames.swap(wires, payloads)
        wires.flush()
        if messages is None and early:
            return True
        try:
            call.verify(messages or payloads[:1] * self._place.world_size)
        except Exception as error:
            raise DisagreementError(error) from None
        if messages is not None:
            self._equal = False
            self._unlike.add(call.op)
            return False
        self._unlike.discard(call.op)
        self._post(piece.sends)
        piece.meanwhile()
        self._take(piece.receives)
        wires.flush()
        return True

    def _callers(self, call: Call) -> Call:
        def make() -> Call:
            made = _CallersCall(call.op, match=call.match, equal_fits=True)
            made.message = call.message
            return made

        return self._kept(call.message, make)

    def within(self, op: str, *, even: bool = False) -> Call:
        """Return the call for a later step in the host; ``even``: equal messages have parts of one size."""
        match = _equal_parts if even and self._equal else None
        doing = f"{self._links.doing} within the host ({op})"
        return self._kept((op, match), lambda: Call(doing, match=match, equal_fits=True))

    def _kept(self, key: object, make: Callable[[], Call]) -> Call:
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) >= _MOST_CALLS:
                self._calls.clear()
            call = self._calls[key] = make()
        return call


def _messages(blob: bytes, count: int) -> list[bytes]:
    found = plain.loads(blob)
    if not isinstance(found, list) or list(map(type, found)) != [bytes] * count:
        raise plain.UnreadableError(f"{len(blob)} bytes are not the messages of {count} ranks")
    return found


def in_pieces(make: Callable[[slice], OpPiece], longest: torch.Tensor) -> list[MakePiece]:
    """Return the pieces of tensors whose longest is ``longest``; one if it is not large."""
    per = PIECE_BYTES // longest.element_size()
    if longest.nbytes <= MIDDLE_BYTES:
        per = max(1, longest.numel())
    return [
        functools.partial(make, slice(first, first + per))
        for first in range(0, max(1, longest.numel()), per)
    ]


def _equal_parts(parts: Sequence[object]) -> None:
    """Accept ``parts``: the calls are equal, so their sizes are."""


def _views(tensors: Mapping[int, torch.Tensor]) -> dict[int, memoryview]:
    return {peer: _view(tensor) for peer, tensor in tensors.items()}


def _view(tensor: torch.Tensor) -> memoryview:
    array: Any = bytes_of(tensor).numpy()
    return memoryview(array)

"""An op of ranks on several hosts: how they agree on it, and in which pieces it is done.

Legend: rank (h, l) is the l-th of the L_h ranks of host h. Its *twin* on host k is (k, l mod L_k), which is
(k, l) where hosts have equally many ranks. Every rank takes a *frame* from its twin on each other host, and
so sends its own to those whose twin it is. All ranks of a host know the host's messages before: so each
rank knows those of all ranks after one frame from each host, and nobody has to hand on anything.

A frame is two lengths, the messages of a host (one for all, where they are equal), and data::

    int64: bytes of messages, negative if one stands for all    int64: bytes of data    messages    data

Data is for a receiver of which the sender knows nothing but that its host has called *something*. The
receiver puts it where it belongs once the messages of all hosts are equal to its own, and drops it else.

A :class:`OpPiece` is what an op does in the host, between hosts, and in the host again. An op of at most
MIDDLE_BYTES is one: its first step in the host has the caller's call, which is compared there, and its data
goes with the frames. So nothing is waited for twice. It writes into memory of the engine only: a mismatch
is an error before a byte of the caller's changes. A larger op is agreed on first; while its pieces are on
the wire, the next are made and the last are shared in the host. Steps that do not come with the caller's
call have calls of the engine's own, which agree by construction.
"""

from __future__ import annotations

import functools
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from interlace.runtime.core import plain
from interlace.runtime.core.call import Call
from interlace.runtime.core.engine import Engine
from interlace.runtime.core.hooks import profiled_op
from interlace.runtime.core.memory import bytes_of
from interlace.runtime.places.hosts.host_map import HostMap
from interlace.runtime.places.hosts.links import HostLinks
from interlace.runtime.places.hosts.wires import Buffer, Wires
from interlace.runtime.places.one_host.control import LARGEST_MESSAGE
from interlace.runtime.record import dump as record

MIDDLE_BYTES = 4 << 20
PIECE_BYTES = 4 << 20
LAG = 1  # pieces on the wire while the next is made
KEPT_FROM = 128 << 10  # bytes from which malloc asks the kernel
_MOST_CALLS = 256
_LENGTHS = struct.Struct("<qq")
_AROUND = 64  # bytes around each message, at most


class Frames:
    """One rank's view of who sends frames to whom."""

    def __init__(self, hosts: HostMap, rank: int) -> None:
        self._rank, self._hosts = rank, hosts.hosts
        self.mine = hosts.hosts[hosts.index(rank)]
        self.index = self.mine.index(rank)
        self.others = [ranks for ranks in hosts.hosts if ranks is not self.mine]
        self.twins = [ranks[self.index % len(ranks)] for ranks in self.others]
        """From whom frames come, by other host."""
        self.receivers = [
            rank for ranks in self.others for rank in ranks[self.index :: len(self.mine)]
        ]
        """To whom they go: the ranks whose twin this one is."""
        self._world_size = sum(map(len, hosts.hosts))

    def trade(self, wires: Wires, own: Sequence[bytes]) -> list[bytes]:
        """The messages of all ranks, by rank. ``own`` are those of this host."""
        found = self.swap(wires, own, {}, {})
        wires.flush()
        return [own[0]] * self._world_size if found is None else found

    def swap(
        self,
        wires: Wires,
        own: Sequence[bytes],
        sends: Mapping[int, Buffer],
        receives: Mapping[int, Buffer],
    ) -> list[bytes] | None:
        """Tell the messages of this host, with data for receivers of frames; take those of the others.

        None if all messages are equal: then data was received, too. Else all messages, by rank.
        """
        alike = own.count(own[0]) == len(own)
        text = own[0] if alike else plain.dumps(list(own))
        length = -len(text) if alike else len(text)
        for peer in self.receivers:
            data = sends.get(peer, b"")
            wires.post(peer, _LENGTHS.pack(length, len(data)) + text, data)
        lengths, texts = [], []
        for twin in self.twins:
            header = bytearray(_LENGTHS.size)
            wires.take(twin, header)
            theirs, nbytes = _LENGTHS.unpack(header)
            most = self._world_size * (LARGEST_MESSAGE + _AROUND)
            if not (-most <= theirs <= most and nbytes >= 0):
                raise plain.UnreadableError(f"rank {twin} announces {theirs} and {nbytes} bytes")
            said = bytearray(abs(theirs))
            wires.take(twin, said)
            lengths.append((theirs, nbytes))
            texts.append(said)
        same = alike and all(said == text for said in texts)
        same = same and all(theirs == length for theirs, _ in lengths)
        for twin, (_, nbytes) in zip(self.twins, lengths, strict=True):
            into = receives.get(twin, b"") if same else bytearray(nbytes)
            if len(into) != nbytes:
                raise plain.UnreadableError(f"rank {twin} sends {nbytes} bytes, not {len(into)}")
            wires.take(twin, into)
        return None if same else self._by_rank(own, lengths, texts)

    def _by_rank(
        self, own: Sequence[bytes], lengths: Sequence[tuple[int, int]], texts: Sequence[bytearray]
    ) -> list[bytes]:
        messages = [b""] * self._world_size
        for rank, message in zip(self.mine, own, strict=True):
            messages[rank] = message
        for ranks, (length, _), text in zip(self.others, lengths, texts, strict=True):
            one = bytes(text)
            said = [one] * len(ranks) if length <= 0 else _messages(one, len(ranks))
            for rank, message in zip(ranks, said, strict=True):
                messages[rank] = message
        return messages


WithinHost = Callable[[Call], object]
"""A step within the host, of the call that it is passed."""


@dataclass
class OpPiece:
    """A part of an op: what is done within the host, then sent and received, and then done within the host.

    ``meanwhile`` needs nothing of other hosts. What is sent may be made by ``near``, a step of all ranks of
    the host, which writes into memory of the engine only.
    """

    near: WithinHost | None = None
    sends: Mapping[int, torch.Tensor] = field(default_factory=dict)
    receives: Mapping[int, torch.Tensor] = field(default_factory=dict)
    meanwhile: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None
    rides: bool = True
    """Whether data goes with frames, as far as these go where it does; the rest waits for them."""
    uneven: Callable[[], OpPiece] | None = None
    """In place of this one, where messages fit together but are not equal; alike on all ranks."""


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
        self._calls: dict[Any, Call] = {}
        self._pools: list[list[torch.Tensor]] = [[] for _ in range(LAG + 1)]
        self._pool, self._used = self._pools[0], 0

    @property
    def local(self) -> Engine:
        engine: Engine = self._place.local_engine()
        return engine

    def run(self, call: Call, pieces: Sequence[Callable[[], OpPiece]], nbytes: int) -> None:
        """An op of ``nbytes``, in these pieces. Each is made when it begins; one if it is not large."""
        with self._op(call):
            if nbytes > MIDDLE_BYTES:
                self._agree(call, OpPiece())
                self._pipelined(call, pieces)
                return
            (make,) = pieces
            piece = self._begin(0, make)
            if self._agree(call, piece):
                piece.after()
            else:
                self._pipelined(call, [piece.uneven or make])

    def _pipelined(self, call: Call, pieces: Sequence[Callable[[], OpPiece]]) -> None:
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

    def _begin(self, number: int, make: Callable[[], OpPiece]) -> OpPiece:
        self._pool, self._used = self._pools[number % len(self._pools)], 0
        return make()

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Memory for the piece that is being made, of the size of ``like``.

        It is kept: what malloc would fetch from the kernel for each op anew costs as much as to fill it.
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

    # -- agreeing ------------------------------------------------------------------------------

    @contextmanager
    def _op(self, call: Call) -> Iterator[None]:
        """Around an op."""
        place = self._place
        with place.lock, record.recorded(place.group, call.message):
            if op_ranges := profiled_op.get():
                op_ranges.begin("hosts")
            refused: Exception | None = None
            with place.guarded(call.op), self._links.moving(call.op):
                try:
                    yield
                except DisagreementError as found:  # which is no failure of the group
                    refused = found.error
            if refused is not None:
                raise refused from None

    def _agree(self, call: Call, piece: OpPiece) -> bool:
        """Compare the calls of all ranks. If all are equal, ``piece`` is done but for its end.

        False if they fit together all the same; then nothing is done.
        """
        frames, wires, own = self.frames, self._wires, [call.message]
        try:
            (piece.near or self.local.barrier)(self._callers(call))
        except UnlikeError as unlike:
            own = list(unlike.messages)
        later = dict(piece.sends), dict(piece.receives)
        riding: Any = ({}, {})
        if len(own) == 1 and call.equal_fits and piece.rides:
            for data, peers, found in zip(
                later, (frames.receivers, frames.twins), riding, strict=True
            ):
                found.update({peer: _view(data.pop(peer)) for peer in peers if peer in data})
        messages = frames.swap(wires, own * len(frames.mine) if len(own) == 1 else own, *riding)
        wires.flush()
        if messages is not None or not call.equal_fits:
            try:
                call.verify(messages or own * self._place.world_size)
            except Exception as error:
                raise DisagreementError(error) from None
        if messages is not None:
            return False
        self._post(later[0])
        piece.meanwhile()
        self._take(later[1])
        wires.flush()
        return True

    def _callers(self, call: Call) -> Call:
        """``call`` for a step within the host."""
        return self._kept(call.message, lambda: _callers_call(call))

    def within(self, op: str, *key: Any) -> Call:
        """The call for a later step within the host; ``key`` is all that it depends on."""
        return self._kept((op, key), lambda: Call(self._doing(op), (("its share", repr(key)),)))

    def _doing(self, step: str) -> str:
        return f"{self._links.doing} within the host ({step})"

    def _kept(self, key: Any, make: Callable[[], Call]) -> Call:
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) >= _MOST_CALLS:
                self._calls.clear()
            call = self._calls[key] = make()
        return call


def _messages(blob: bytes, count: int) -> list[bytes]:
    """The ``count`` messages that another rank has put together."""
    found = plain.loads(blob)
    if not isinstance(found, list) or list(map(type, found)) != [bytes] * count:
        raise plain.UnreadableError(f"{len(blob)} bytes are not the messages of {count} ranks")
    return found


def _callers_call(call: Call) -> Call:
    made = _CallersCall(call.op)
    made.message = call.message
    return made


def in_pieces(
    make: Callable[[slice], OpPiece], longest: torch.Tensor
) -> list[Callable[[], OpPiece]]:
    """Pieces of tensors of which ``longest`` is the longest; one if it is not large."""
    per = PIECE_BYTES // longest.element_size()
    if longest.nbytes <= MIDDLE_BYTES:
        per = max(1, longest.numel())
    return [
        functools.partial(make, slice(first, first + per))
        for first in range(0, max(1, longest.numel()), per)
    ]


def _view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor."""
    array: Any = bytes_of(tensor).numpy()
    return memoryview(array)

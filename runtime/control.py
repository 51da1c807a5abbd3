"""The control segments of a place ``shm``: small messages, abort and leave, in shared memory.

Every rank owns one segment and maps all of them. After the header page::

       0 SEQUENCE  int64, released by the owner: number of its last message
      64 ABORTED   int64, released by anyone: 1 + the rank that aborted the group, or 0
     128 LEFT      int64, released by the owner: 1 once it has closed the place
     192 REASON    length (int64) and text of the owner's own abort; written once, before ABORTED
    4096 message area for even numbers: length (int64), then at byte 64 the payload
    4096 + AREA    the same for odd numbers

A message is written into the owner's segment only; everyone reads it there. So an all-gather is one
release and W - 1 acquires per rank, whatever W is.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from interlace.runtime.atomics import Cells
from interlace.runtime.segment import Mapping

LARGEST_MESSAGE = 64 << 10
LONGEST_REASON = 1 << 10

_SEQUENCE, _ABORTED, _LEFT, _REASON = 0, 64, 128, 192
_AREAS = 4096
_TEXT = 64
_AREA = _TEXT + LARGEST_MESSAGE
_INT64 = struct.Struct("<q")
CONTROL_BYTES = _AREAS + 2 * _AREA


class Control:
    """All control segments of a group, as one rank sees them. Keeps them mapped while it lives."""

    def __init__(self, rank: int, mappings: Sequence[Mapping]) -> None:
        self._rank = rank
        self._bytes = [mapping.array().data for mapping in mappings]
        bases = [mapping.data_address for mapping in mappings]
        self.peers = [peer for peer in range(len(bases)) if peer != rank]
        self._own_sequence = Cells((bases[rank] + _SEQUENCE,))
        self._peer_sequences = Cells([bases[peer] + _SEQUENCE for peer in self.peers])
        self._own_aborted = Cells((bases[rank] + _ABORTED,))
        self._all_aborted = Cells([base + _ABORTED for base in bases])
        self._own_left = Cells((bases[rank] + _LEFT,))
        self._left = [Cells((base + _LEFT,)) for base in bases]

    def send(self, sequence: int, payload: bytes) -> None:
        """Write message ``sequence`` and release it."""
        own, area = self._bytes[self._rank], _AREAS + (sequence & 1) * _AREA
        _INT64.pack_into(own, area, len(payload))
        own[area + _TEXT : area + _TEXT + len(payload)] = payload
        self._own_sequence.store_release(sequence)

    def missing(self, sequence: int) -> list[int]:
        """Peers that have not sent message ``sequence`` yet."""
        seen = self._peer_sequences.load_acquire()
        return [peer for peer, last in zip(self.peers, seen, strict=True) if last < sequence]

    def message(self, peer: int, sequence: int) -> bytes:
        """Message ``sequence`` of ``peer``; it must have been sent, and not be two messages old."""
        area = _AREAS + (sequence & 1) * _AREA
        (length,) = _INT64.unpack_from(self._bytes[peer], area)
        return bytes(self._bytes[peer][area + _TEXT : area + _TEXT + length])

    def abort(self, reason: str) -> None:
        """Tell every rank. The first abort of the group keeps its reason."""
        if self.reason(self._rank):
            return
        own = self._bytes[self._rank]
        text = (reason or "no reason given").encode()[:LONGEST_REASON]
        own[_REASON + _TEXT : _REASON + _TEXT + len(text)] = text
        _INT64.pack_into(own, _REASON, len(text))
        if not self._own_aborted.load_acquire()[0]:
            self._all_aborted.store_release(self._rank + 1)

    def aborted_by(self) -> tuple[int, str] | None:
        """Which rank aborted the group, and why."""
        (word,) = self._own_aborted.load_acquire()
        return (word - 1, self.reason(word - 1)) if word else None

    def reason(self, rank: int) -> str:
        """Why ``rank`` aborted the group; empty if it did not."""
        (length,) = _INT64.unpack_from(self._bytes[rank], _REASON)
        text = bytes(self._bytes[rank][_REASON + _TEXT : _REASON + _TEXT + length])
        return text.decode(errors="replace")

    def leave(self) -> None:
        """Say that this rank takes part in nothing any more."""
        self._own_left.store_release(1)

    def has_left(self, rank: int) -> bool:
        return bool(self._left[rank].load_acquire()[0])

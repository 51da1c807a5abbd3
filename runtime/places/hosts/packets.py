"""The packets that ranks of several hosts send each other, beside bytes of collectives and messages."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import torch

from interlace.runtime.core import plain

PACKET_BYTES = 2048
LONGEST_REASON = PACKET_BYTES - 256  # bytes
LEFT, ABORT, ASKED, AWAITS, ROW, VALUE = range(1, 7)
_CONTENTS = {
    LEFT: type(None),
    ABORT: bytes,
    ASKED: type(None),
    AWAITS: type(None),
    ROW: (int, int, int),
    VALUE: (bytes, bytes, bytes),
}
_LENGTH = struct.Struct("<I")


@dataclass
class Packet:
    """One control packet: what it is, and the fields that its kind uses."""

    kind: int
    tag: int = 0
    number: int = 0
    content: Any = None

    def pack(self) -> torch.Tensor:
        raw = plain.dumps((self.kind, self.tag, self.number, self.content))
        assert len(raw) <= PACKET_BYTES - _LENGTH.size, len(raw)
        whole = (_LENGTH.pack(len(raw)) + raw).ljust(PACKET_BYTES, b"\0")
        return torch.frombuffer(bytearray(whole), dtype=torch.uint8)

    @staticmethod
    def unpack(packet: torch.Tensor) -> Packet:
        """The packet in these bytes; UnreadableError unless it is one that :meth:`pack` makes."""
        raw = packet.numpy().tobytes()
        (length,) = _LENGTH.unpack_from(raw)
        fields = plain.loads(raw[_LENGTH.size : _LENGTH.size + length])
        if isinstance(fields, tuple) and len(fields) == 4:
            found = Packet(*fields)
            known = _CONTENTS.get(found.kind) if isinstance(found.kind, int) else None
            content = found.content
            types = tuple(map(type, content)) if isinstance(content, tuple) else type(content)
            numbers = isinstance(found.tag, int) and isinstance(found.number, int)
            if known == types and numbers and found.number >= 0:
                return found
        raise plain.UnreadableError(f"a packet of {length} bytes no rank sends: {fields!r:.99}")

"""Agreement of ranks on what they call, without holding the host up once it has been reached.

Where streams make ops asynchronous, a host that waits for its peers at every call loses its head start on
the GPU. So a call on which all ranks have agreed before is not waited for again: a rank notes what it
calls where the peers see it, and goes on. That is checked afterwards, at the rank's next calls and by its
watchdog, and a difference is named as it would have been, on all ranks, and fails the group.

Only what leaves nothing open is taken for granted: calls that are equal on all ranks and have no part of
the rank's own (``Call.part``), such as the length of a shard, which may differ the next time. Those, and
every call that a rank makes for the first time, are waited for::

    n-th call      noted (number, digest)      known on this rank    go on, with the answer of last time
                   with its text               not known, or a part  wait until all have noted their n-th

Nobody waits for a rank that has gone on: its note is there, and its text is known, because it has been
equal on all ranks once. A call's text is written once: who waited then has kept it. Numbers count all
calls, so a rank that calls something else, or one more, is found at the first number at which the notes
differ.

Notes are in memory that the processes of a host share. Ranks of several hosts have none, and wait at
every call (``Place.exchange`` of the host's place).

A rank's board, in int64 words behind a workspace's header, which an abort writes into::

    0 POSTED   number of its last note       1 CHECKED   up to where it has compared all peers' notes
    16 ...     notes, by number modulo NOTES: number, digest, text (0, or 1 + which area has it, + 2
               if the peers keep it)
    then       two areas for texts, used in turn: length, bytes

A note is overwritten NOTES calls later, and a rank waits rather than overwrite one that a peer has not
compared. An area is written again two texts later: by then everybody has noted the call of the text in
between, hence has done with the one before.
"""

from __future__ import annotations

import hashlib
import threading
from typing import Any

from interlace.kernels.signal import HEADER_WORDS
from interlace.runtime.atomics import load_acquire, store_release
from interlace.runtime.call import Call, compare
from interlace.runtime.errors import InterlaceError
from interlace.runtime.memory import WORD
from interlace.runtime.place import Place
from interlace.runtime.words import ORDERED

NOTES = 256
LARGEST_TEXT = 64 << 10
MOST_KEPT = 1024
AREAS = 2
_POSTED, _CHECKED = HEADER_WORDS, HEADER_WORDS + 1
_NOTES, _NOTE_WORDS = HEADER_WORDS + 16, 4
_TEXTS = _NOTES + NOTES * _NOTE_WORDS
_AREA_WORDS = 1 + LARGEST_TEXT // WORD
BOARD_BYTES = (_TEXTS + AREAS * _AREA_WORDS) * WORD


class Agreement:
    """One rank's side. Making it is collective; ``host`` is the group's place on the host."""

    def __init__(self, host: Place) -> None:
        self._host: Any = host
        self._rank, self._world_size = host.rank, host.world_size
        self._peers = [rank for rank in range(self._world_size) if rank != self._rank]
        self._boards: list[memoryview] = []
        if self._peers and host.direct_access:
            buffer = host.allocate(BOARD_BYTES)
            self._bases = buffer.addresses
            self._memory = [part.numpy() for part in buffer.peer_bytes]
            self._bytes = [part.data.cast("B") for part in self._memory]
            self._boards = [part.cast("q") for part in self._bytes]
        self._number = self._texts = 0
        self._agreed: dict[bytes, tuple[int, list[bytes]]] = {}
        self._said = {_digest(b""): b""}  # what has been equal on all ranks, by digest
        self._digests: dict[bytes, int] = {}  # of calls whose text the peers have
        self._heard: list[dict[int, bytes]] = [{} for _ in range(self._world_size)]
        self._open: dict[int, tuple[int, Call]] = {}  # numbers that are not compared with all peers
        self._compared = dict.fromkeys(self._peers, 0)
        self._lock = threading.RLock()

    # -- the two ways of a call ----------------------------------------------------------------

    def agree(self, call: Call) -> list[bytes]:
        """Every rank's message of ``call``, by rank, to be compared by the caller. Collective."""
        if not self._boards:
            return list(self._host.exchange(call.message, call.op))
        known = self._agreed.get(call.message)
        if known is not None:
            digest, answers = known
            with self._lock:
                self._open[self._number + 1] = (digest, call)
            self._post(digest, b"", call.op)
            return answers
        answers = self._exchange(call.message, call.op, keep=True)
        if call.part is None and all(answer == call.message for answer in answers):
            digest = _digest(call.message)
            self._said[digest] = call.message
            self._agreed[call.message] = (digest, answers)
        return answers

    def exchange(self, payload: bytes, doing: str) -> list[bytes]:
        """Every rank's ``payload``, by rank, at most 64 KiB. Collective; waits for all ranks."""
        if not self._boards:
            return list(self._host.exchange(payload, doing))
        return self._exchange(payload, doing, keep=False)

    def _exchange(self, payload: bytes, doing: str, *, keep: bool) -> list[bytes]:
        """``keep``: the same is likely to be said again."""
        if len(payload) > LARGEST_TEXT:
            raise ValueError(
                f"rank {self._rank}: payload of {doing} has {len(payload)} bytes, an exchange takes at "
                f"most {LARGEST_TEXT}"
            )
        known = self._digests.get(payload)
        if known is None:
            digest, keep = _digest(payload), keep and len(self._digests) < MOST_KEPT
            self._post(digest, payload, doing, keep=keep)
            if keep:
                self._digests[payload] = digest
        else:
            digest = known
            self._post(digest, b"", doing)
        number = self._number
        answers = [payload] * self._world_size
        for peer in self._peers:
            if self._word(peer, _POSTED) < number:
                self._host.wait_until(
                    lambda peer=peer: self._word(peer, _POSTED) >= number,
                    doing,
                    (peer,),
                )
            theirs, area = self._note(peer, number)
            if theirs != digest:
                answers[peer] = self._text(peer, theirs, area, number)
            if area > AREAS:
                self._heard[peer][theirs] = answers[peer]
        return answers

    # -- notes ---------------------------------------------------------------------------------

    def _post(self, digest: int, text: bytes, doing: str, *, keep: bool = False) -> None:
        """Note the next call, with its text if there is one, which the peers ``keep``."""
        number = self._number + 1
        self._make_room(number, doing)
        board, area = self._boards[self._rank], 0
        if text:
            area = 1 + self._texts % AREAS
            self._texts += 1
            first = _TEXTS + (area - 1) * _AREA_WORDS
            board[first] = len(text)
            at = (first + 1) * WORD
            self._bytes[self._rank][at : at + len(text)] = text
            area += AREAS * keep
        note = _NOTES + number % NOTES * _NOTE_WORDS
        board[note], board[note + 1], board[note + 2] = number, digest, area
        self._number = number
        self._release(_POSTED, number)

    def _make_room(self, number: int, doing: str) -> None:
        if number % (NOTES // 4) == 0:
            self.mismatch()  # lets the peers go on; what it finds it finds again
        for peer in self._peers:
            if self._boards[peer][_CHECKED] < number - NOTES:
                self._host.wait_until(
                    lambda peer=peer: self._word(peer, _CHECKED) >= number - NOTES,
                    doing,
                    (peer,),
                )

    def _note(self, peer: int, number: int) -> tuple[int, int]:
        board = self._boards[peer]
        note = _NOTES + number % NOTES * _NOTE_WORDS
        assert board[note] == number, (peer, number, board[note])
        return board[note + 1], board[note + 2]

    def _text(self, peer: int, digest: int, area: int, number: int) -> bytes:
        """What ``peer`` noted under ``number``."""
        if area:
            first = _TEXTS + (area - 1) % AREAS * _AREA_WORDS
            at, length = (first + 1) * WORD, self._boards[peer][first]
            text = self._bytes[peer][at : at + length].tobytes()
            if _digest(text) == digest:
                return text
        for known in (self._said, self._heard[peer]):
            if digest in known:
                return known[digest]
        raise InterlaceError(
            f"rank {self._rank}: ranks call different things: call {number} of rank {peer} is another one "
            f"than that of rank {self._rank}"
        )

    def _word(self, peer: int, index: int) -> int:
        if ORDERED:
            return self._boards[peer][index]
        return load_acquire(self._bases[peer] + index * WORD)

    def _release(self, index: int, value: int) -> None:
        if ORDERED:
            self._boards[self._rank][index] = value
        else:
            store_release(self._bases[self._rank] + index * WORD, value)

    # -- afterwards ----------------------------------------------------------------------------

    def mismatch(self) -> Exception | None:
        """Compare what the peers have noted since the last time. From any thread; never waits."""
        if not self._boards:
            return None
        with self._lock:
            last = self._number
            for peer in self._peers:
                upto = min(self._word(peer, _POSTED), last)
                for number in range(self._compared[peer] + 1, upto + 1):
                    mine = self._open.get(number)
                    if mine is not None and self._note(peer, number)[0] != mine[0]:
                        return self._difference(peer, mine[1], number)
                self._compared[peer] = upto
            done = min(self._compared.values())
            if done > self._boards[self._rank][_CHECKED]:
                for number in [number for number in self._open if number <= done]:
                    del self._open[number]
                self._release(_CHECKED, done)
        return None

    def _difference(self, peer: int, call: Call, number: int) -> Exception:
        """The error that an exchange would have raised."""
        messages = [call.message] * self._world_size
        try:
            for other in self._peers:
                if other == peer or self._word(other, _POSTED) >= number:
                    messages[other] = self._text(other, *self._note(other, number), number)
            compare(messages)
        except Exception as error:
            return error
        return InterlaceError(f"rank {self._rank}: call {number} of rank {peer} differs")


def _digest(message: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little", signed=True)

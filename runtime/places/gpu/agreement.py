"""Agreement of ranks on what they call, without delaying the host once they have agreed.

Streams make ops asynchronous. A host that waits for its peers at every call would lose its head start on
the GPU. So a rank does not wait again for a call on which all ranks have agreed before. It writes a note of
the call where the peers see it, and continues. The notes are compared afterwards, at the rank's next calls
and by its watchdog. A difference is then reported as at the call, on all ranks, and fails the group.

Only calls that are equal on all ranks and have no part of the rank's own (``Call.part``) are assumed to
agree again. A part, such as the length of a shard, may differ the next time. A rank waits for calls with a
part, and for every call that it makes for the first time::

    n-th call      noted (number, digest)      known on this rank    continue with the last answers
                   with its text               not known, or a part  wait until all have noted their n-th

No rank waits for a rank that has continued: its note is there, and its text is known, because it was equal
on all ranks once. A call's text is written once; the ranks that waited then have kept it. Numbers count all
calls, so a rank that calls something else, or makes one call more, is found at the first number at which
the notes differ.

Notes are in memory that the processes of a host share. Ranks of several hosts have no such memory and wait
at every call (``Place.exchange`` of ``processes``).

The notes of one call are adjacent, on rank 0's board, so that all of them are compared at once with their
values of the last time. This costs the same for 2 ranks and for 64. A row, in int64 words::

    number of rank 0, 1, ...    digest of rank 0, 1, ...    text of rank 0, 1, ...

``text`` is 0, or 1 + the area of the rank that has it, + 2 if the peers keep it. A note is complete once
its number is written. Every rank's own board, after a workspace's header, into which an abort writes::

    0 CHECKED  the number up to which it has compared all peers' notes
    16 ...     two areas for texts, used in turn: length, bytes
    then       on rank 0: the rows of NOTES calls, by number modulo NOTES

A row is overwritten NOTES calls later. A rank waits before it overwrites a note that a peer has not
compared. An area is overwritten two texts later. By then all ranks have noted the call of the text in
between, so they have finished with the one before.
"""

import hashlib
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from interlace.kernels.signal import HEADER_WORDS
from interlace.runtime.core.call import CALLS, Call, compare
from interlace.runtime.core.errors import CollectiveTimeoutError, InterlaceError
from interlace.runtime.core.memory import WORD
from interlace.runtime.core.place import Place
from interlace.runtime.processes import dump as record
from interlace.runtime.processes.atomics import Words
from interlace.runtime.processes.control import LARGEST_MESSAGE, check_size
from interlace.runtime.processes.recorder import ENTRIES


class OpRecord:
    """The ops of one rank in the record of its host's ranks, which outlives the rank: ``recorder.py``.

    docs/how-to/run/record.md says when an op begins and ends there. The device writes EPOCH in the header
    of the workspace in which the op's last part was enqueued, and the watchdog copies it to the host. From
    the first graph capture on, a replay may increment an EPOCH that this host has not enqueued. So then
    only ops that enqueue nothing have an end. ``processes``: the place without the GPU.
    """

    def __init__(self, processes: Any) -> None:
        self._group = processes.group
        self._open: deque[tuple[int, int, int]] = deque(maxlen=ENTRIES)
        self._last = self._enqueued = self._launched = 0  # numbers of entries
        self.agreed: bytes | None = None
        """An op on which the host agreed without asking; it is about to begin."""

    def begins(self, op: bytes | str) -> None:
        """Record that the host is about to ask about ``op``, or to enqueue it, after all earlier ops."""
        self.agreed = None
        self.launched()
        self._last = record.began(self._group, op)

    def enqueued(self, address: int, epoch: int | None) -> None:
        """Record that a part of the op ends when the memory at ``address`` reaches ``epoch``, if known."""
        self._begin()
        self._enqueued = self._last
        if epoch is not None and self._last:
            self._open.append((self._last, address, epoch))

    def launched(self) -> None:
        """Record that the host has enqueued all of the op; if that is nothing, the op has ended."""
        self._begin()
        if self._last != self._launched:
            if self._last != self._enqueued:
                record.ended(self._group, self._last)
            self._launched = self._last

    def _begin(self) -> None:
        if self.agreed is not None:
            self.begins(self.agreed)

    def reached(self, epochs: Mapping[int, int]) -> None:
        """Record how far the device has come, by address of the memory. Only the watchdog calls this."""
        while self._open:
            number, address, epoch = self._open[0]
            if number > self._launched or epochs.get(address, 0) < epoch:
                return
            self._open.popleft()
            if not self._open or self._open[0][0] != number:
                record.ended(self._group, number)

    def failed(self, error: Exception) -> None:
        """Record that the group has failed and for which rank this rank waited, and write the records."""
        late = error.waited_for if isinstance(error, CollectiveTimeoutError) else ()
        blamed = [rank for rank, name in enumerate(self._group.names) if name in late]
        if blamed and (control := self._group.control) is not None:
            control.waits(blamed[0], time.monotonic())
        self._group.abort(str(error), blamed)


NOTES = 256
MOST_KEPT = 1024
AREAS = 2
STEP = NOTES // 4  # calls between two checks of how far the peers have compared
GLANCES = 8  # at a row, before ``processes`` is asked to wait for it
_CHECKED = HEADER_WORDS
_TEXTS = HEADER_WORDS + 16
_AREA_WORDS = 1 + LARGEST_MESSAGE // WORD
_ROWS = _TEXTS + AREAS * _AREA_WORDS
_FIELDS = 3  # fields of a note
_word = struct.Struct("=q").pack


@dataclass(frozen=True, slots=True)
class _AgreedCall:
    """Peers' answers to a call. ``row``: their digests as noted. ``settled``: the call is not a misuse."""

    digest: int
    row: bytes
    answers: list[bytes]
    settled: bool


class Agreement:
    """One rank's side. ``number``: of its last call; ``differs``: of the first mismatch."""

    def __init__(self, processes: Place) -> None:
        self._processes: Any = processes
        self._rank, self._world_size = processes.rank, processes.world_size
        self._peers = [rank for rank in range(self._world_size) if rank != self._rank]
        self._boards: list[Words] = []
        if self._peers and processes.direct_access:
            buffer = processes.allocate((_ROWS + NOTES * _FIELDS * self._world_size) * WORD)
            self._memory = [part.numpy() for part in buffer.peer_bytes]
            self._bytes = [part.data.cast("B") for part in self._memory]
            self._boards = list(map(Words, buffer.addresses, self._bytes))
            self._shared, self._row_bytes = self._boards[0], self._bytes[0]
        self.number = self._texts = 0
        self._known: dict[bytes, _AgreedCall] = {}
        self._digests: dict[bytes, int] = {}  # digests of calls whose text the peers have
        self._heard = [{_digest(b""): b""} for _ in range(self._world_size)]  # texts, by digest
        # by number modulo NOTES: what to compare with the peers' notes, or None
        self._open: list[tuple[_AgreedCall, Call] | None] = [None] * NOTES
        self._waited = 0  # number of the call whose answers this rank waits for
        self._compared = 0
        self._room = STEP  # up to this number, no note is overwritten before it is compared
        self._problem: Exception | None = None
        self.differs = 0
        self._lock = threading.Lock()
        self.ops = OpRecord(processes)

    def agree(self, call: Call) -> list[bytes]:
        """Return every rank's message of ``call``, by rank; the caller compares them. Collective."""
        message = call.message
        known = self._known.get(message)
        if known is None:
            self.ops.begins(message)
            if not self._boards:
                return list(self._processes.exchanged(message, call.op))
            answers = self._exchange(message, call.op, keep=True)
            self._learn(call, answers)
            return answers
        self.ops.agreed = message
        if not known.settled:
            return self._asked_again(call, known)
        number = self._next(call.op, (known, call))
        self._note(number, known.digest, 0)
        return known.answers

    def _next(self, doing: str, compared: tuple[_AgreedCall, Call] | None) -> int:
        number = self.number + 1
        if number > self._room:
            self._make_room(number, doing)
        self._open[number % NOTES] = compared
        return number

    def _asked_again(self, call: Call, known: _AgreedCall) -> list[bytes]:
        """Wait for the answers to ``call``, which are most likely the same as last time."""
        self._waited = number = self._next(call.op, None)
        self._note(number, known.digest, 0)
        row = self._expected_message(number, known)
        for _ in range(GLANCES):
            if self._row(number) == row:
                self._waited = 0
                return known.answers
        self.ops.begins(call.message)
        answers = self._answers(number, call.message, known.digest, call.op)
        if answers == known.answers:
            return known.answers
        self._learn(call, answers)
        return answers

    def _learn(self, call: Call, answers: list[bytes]) -> None:
        """Remember the other ranks' answers to this rank's ``call``."""
        digest = self._digests.get(call.message)
        if digest is None:
            return
        same = all(answer == call.message for answer in answers)
        digests = [digest if same else _digest(answer) for answer in answers]
        row = struct.pack(f"={self._world_size}q", *digests)
        settled = same and call.part is None
        self._known[call.message] = _AgreedCall(digest, row, answers, settled)

    def exchange(self, payload: bytes, doing: str) -> list[bytes]:
        """Return every rank's ``payload``, by rank, at most 64 KiB. Collective; waits for all ranks."""
        if not self._boards:
            return list(self._processes.exchange(payload, doing))
        op = payload if payload.startswith(CALLS) else doing
        with record.recording_op(self._processes.group, op):
            return self._exchange(payload, doing, keep=False)

    def _exchange(self, payload: bytes, doing: str, *, keep: bool) -> list[bytes]:
        """See :meth:`exchange`. ``keep``: the same payload is likely to come again."""
        check_size(payload, self._rank, doing)
        number = self._next(doing, None)
        digest, area = self._digests.get(payload), 0
        if digest is None:
            digest, keep = _digest(payload), keep and len(self._digests) < MOST_KEPT
            if keep:
                self._digests[payload] = digest
            area = self._written(payload) + AREAS * keep if payload else 0
        self._waited = number
        self._note(number, digest, area)
        return self._answers(number, payload, digest, doing)

    def _answers(self, number: int, payload: bytes, digest: int, doing: str) -> list[bytes]:
        """Return all ranks' notes under ``number``, once they are complete; this rank's is ``payload``."""
        answers = [payload] * self._world_size
        for peer in self._peers:
            if not self._is_noted(number, peer):
                self._processes.group.wait_until(
                    partial(self._is_noted, number, peer), doing, (peer,)
                )
            theirs, area = self._note_of(number, peer)
            if theirs != digest:
                answers[peer] = self._text(peer, theirs, area, number)
            if area > AREAS:
                self._heard[peer][theirs] = answers[peer]
        self._waited = 0
        return answers

    def _at(self, number: int) -> int:
        """Return the first word of the row of a call, on rank 0's board."""
        return _ROWS + number % NOTES * _FIELDS * self._world_size

    def _note(self, number: int, digest: int, area: int) -> None:
        """Note the next call. A rank that sees the number also sees all earlier writes."""
        at, size, shared = self._at(number) + self._rank, self._world_size, self._shared
        shared.view[at + size] = digest
        shared.view[at + 2 * size] = area
        shared.release(at, number)
        self.number = number

    def _is_noted(self, number: int, peer: int) -> bool:
        return self._shared.acquired(self._at(number) + peer) >= number

    def _note_of(self, number: int, peer: int) -> tuple[int, int]:
        at, size = self._at(number) + peer, self._world_size
        view = self._shared.view
        assert view[at] == number, (peer, number, view[at])
        return view[at + size], view[at + 2 * size]

    def _row(self, number: int) -> memoryview:
        """Return numbers and digests of all ranks. Expected values were noted for this number."""
        at = self._at(number) * WORD
        return self._row_bytes[at : at + 2 * WORD * self._world_size]

    def _expected_message(self, number: int, known: _AgreedCall) -> bytes:
        return _word(number) * self._world_size + known.row

    def _written(self, text: bytes) -> int:
        """Return 1 + the area that has ``text`` from now on."""
        area = self._texts % AREAS
        self._texts += 1
        first = _TEXTS + area * _AREA_WORDS
        self._boards[self._rank].view[first] = len(text)
        at = (first + 1) * WORD
        self._bytes[self._rank][at : at + len(text)] = text
        return 1 + area

    def _make_room(self, number: int, doing: str) -> None:
        self.mismatch()  # allows the peers to continue
        oldest = number - NOTES
        for peer in self._peers:
            board = self._boards[peer]
            if board.acquired(_CHECKED) < oldest:
                self._processes.group.wait_until(
                    lambda board=board: board.acquired(_CHECKED) >= oldest, doing, (peer,)
                )
        if self.mismatch() is None and self._compared < oldest:
            self._processes.group.wait_until(
                lambda: self.mismatch() is not None or self._compared >= oldest, doing, self._peers
            )
        compared = [self._boards[peer].acquired(_CHECKED) for peer in self._peers]
        if self._problem is None:
            compared.append(self._compared)
        self._room = min(NOTES + min(compared), number + STEP)

    def _text(self, peer: int, digest: int, area: int, number: int) -> bytes:
        """Return the message that ``peer`` noted under ``number``, from its text or from earlier calls."""
        if area:
            first = _TEXTS + (area - 1) % AREAS * _AREA_WORDS
            at, length = (first + 1) * WORD, self._boards[peer].view[first]
            text = self._bytes[peer][at : at + length].tobytes()
            if _digest(text) == digest:
                return text
        if digest in self._heard[peer]:
            return self._heard[peer][digest]
        raise InterlaceError(
            f"rank {self._rank}: ranks call different ops: call {number} of rank {peer} differs from "
            f"the same call of rank {self._rank}"
        )

    def mismatch(self) -> Exception | None:
        """Compare the peers' new notes. Callable from any thread; never waits."""
        if self._compared == self.number or not self._boards:
            return self._problem
        with self._lock:
            before = number = self._compared
            while number < self.number and self._problem is None:
                entry = self._open[(number + 1) % NOTES]
                if entry is None:
                    if number + 1 == self._waited:
                        break  # the notes were not read completely
                elif self._row(number + 1) != self._expected_message(
                    number + 1, entry[0]
                ) and not self._equal(number + 1, *entry):
                    break
                number += 1
            if number > before:
                self._compared = number
                self._boards[self._rank].release(_CHECKED, number)
        return self._problem

    def _equal(self, number: int, known: _AgreedCall, call: Call) -> bool:
        """Return whether all peers have noted ``call`` under ``number``; record one that noted another."""
        ready = True
        for peer in self._peers:
            if not self._is_noted(number, peer):
                ready = False
            elif self._note_of(number, peer)[0] != known.digest:
                self.differs, self._problem = number, self._difference(peer, call, number)
                return False
        return ready

    def _difference(self, peer: int, call: Call, number: int) -> Exception:
        messages = [call.message] * self._world_size
        try:
            for other in self._peers:
                if other == peer or self._is_noted(number, other):
                    digest, area = self._note_of(number, other)
                    messages[other] = self._text(other, digest, area, number)
            compare(messages)
        except Exception as error:
            return error
        return InterlaceError(f"rank {self._rank}: call {number} of rank {peer} differs")


def _digest(message: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little", signed=True)

"""Calls: the facts that the ranks of a group must agree on before a collective touches a tensor."""

import hashlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from interlace.runtime.core import plain
from interlace.runtime.core.errors import DifferentOpsError, of_another_rank
from interlace.runtime.core.stream import Event, Outcome

T = TypeVar("T")
_log = logging.getLogger("interlace")

LONGEST = 32 << 10  # bytes of a message; places accept twice as many
CALLS = plain.dumps(("", None, None))[:6]  # the first bytes of the message of each call

Terms = tuple[tuple[str, Any], ...]
Match = Callable[[Sequence[Any]], object]
Start = Callable[[], Outcome | Event | None]
"""The launch side of an op, after ranks agree: returns its result, the event of its end, or None."""


NEEDED, UNTOLD, BESIDE = "the set of inputs that require a gradient", "?", "beside"
"""Names of terms that ``context.py`` adds, and the value that matches every set of gradients."""


@dataclass(eq=False, slots=True)
class Call:
    """A rank's request: the values that must be equal on all ranks, and the rank's own part.

    Immutable, so a repeated call is made once. ``fitting``: the last messages of all ranks that matched.

    Attributes
    ----------
    op : the collective's name.
    terms : pairs (name as error messages put it, value), equal on all ranks. Plain data.
    part : data that may differ between ranks, for instance the lengths a rank sends. Plain data.
    match : called with every rank's ``part``, by rank, when all terms are equal. Raises ValueError or
        TypeError if the parts do not match, and the same error on every rank.
    equal_fits : whether parts that all equal this one match; ``match`` is then not called.
    message : terms and part as bytes; a digest if the terms are very long.
    """

    op: str
    terms: Terms = ()
    part: Any = field(default=None, kw_only=True)
    match: Match | None = field(default=None, kw_only=True)
    equal_fits: bool = field(default=False, kw_only=True)
    message: bytes = field(init=False)
    fitting: Sequence[bytes] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        self.equal_fits = self.equal_fits or self.match is None
        self.message = plain.dumps((self.op, self.terms, self.part))
        if len(self.message) > LONGEST and self.part is None:
            terms = (("arguments, by digest,", hashlib.sha256(self.message).hexdigest()),)
            self.message = plain.dumps((self.op, terms, None))

    def verify(self, messages: Sequence[bytes]) -> None:
        """Raise an error, the same on every rank, unless all ranks' ``messages`` match."""
        if self.equal_fits and all(message == self.message for message in messages):
            return
        if messages != self.fitting:
            self.compared(messages)
            self.fitting = messages  # a repeated call is not parsed again

    def compared(self, messages: Sequence[bytes]) -> list[Any]:
        """Return every rank's part, by rank; raise as :meth:`verify` does."""
        equal = messages.count(self.message) == len(messages)  # then nothing has to be parsed
        parts = [self.part] * len(messages) if equal else compare(messages)
        if self.match is not None:
            self.match(parts)
        return parts


PreparedCall = tuple[Start, Sequence[torch.Tensor], Call | None]
"""The launch side of a call whose arguments were checked on this rank, the caller's tensors that it fills,
and the call that ranks agree on, if it is known."""


def take_first(waiting: list[T], fits: Callable[[T], bool]) -> T | None:
    found = next((each for each in waiting if fits(each)), None)
    if found is not None:
        waiting.remove(found)
    return found


def mismatch(
    tensor: torch.Tensor, rank: int, tag: int, source: int, dtype: torch.dtype, numel: int
) -> Exception | None:
    """Return the reason why ``tensor`` of ``rank`` cannot receive from ``source``; None if it can."""
    if tensor.dtype != dtype:
        return TypeError(
            f"recv: dtype of tensor differs between ranks: {dtype} was sent by rank {source}, "
            f"{tensor.dtype} is received on rank {rank} (tag {tag})"
        )
    if tensor.numel() != numel:
        return ValueError(
            f"recv: number of elements differs between ranks: {numel} were sent by rank {source}, "
            f"{tensor.numel()} are received on rank {rank} (tag {tag})"
        )
    return None


class MessageEnd(Future[Outcome]):
    """The end of a message on one rank.

    ``refused``: errors of receivers about earlier messages of this rank that had already been reported as
    complete. The next message without an error that is asked for its end raises such an error.

    ``settled``: whether the message has ended; reading it moves no data. Python's future creates a lock and
    a condition at once, which takes longer than a short message. This one has an event once a thread
    sleeps.
    """

    refused: deque[Exception]
    settled = False
    _outcome: Outcome
    _error: BaseException | None = None
    _event: threading.Event | None = None
    _callbacks: "list[_Callback] | None" = None

    def __init__(self) -> None:
        pass

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, {'done' if self.settled else 'under way'}>"

    def done(self) -> bool:
        return self.settled

    def result(self, timeout: float | None = None) -> Outcome:
        if (self.refused or self._error or not self.settled) and (error := self.exception(timeout)):
            raise error
        return self._outcome

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.sleep(timeout)
        if not self.settled:
            raise FutureTimeoutError
        if self._error is None and self.refused:
            with suppress(IndexError):  # another thread has just taken it
                self._error = self.refused.popleft()
        return self._error

    def sleep(self, seconds: float | None) -> None:
        """Sleep until another thread has ended the message, at most ``seconds``."""
        if not self.settled:
            event = vars(self).setdefault("_event", threading.Event())
            if not self.settled:  # otherwise ``tell`` may not have seen the event
                event.wait(seconds)

    def set_result(self, result: Outcome) -> None:
        self._outcome = result
        self.tell()

    def set_exception(self, exception: BaseException | None) -> None:
        self._error = exception
        self.tell()

    def tell(self) -> None:
        """Mark the message as ended and call the callbacks; again, those that an exception interrupted."""
        self.settled = True
        if self._event is not None:
            self._event.set()
        for callback in [*(self._callbacks or ())]:
            callback.call(self)

    def add_done_callback(self, fn: Callable[[Future[Outcome]], object]) -> None:
        callback = _Callback(fn)
        vars(self).setdefault("_callbacks", []).append(callback)
        if self.settled:
            callback.call(self)


class _Callback:
    """A callback at the end of a message, called until it has returned, by whichever threads end it.

    It never runs twice at once. It may be called again after an exception, such as a signal handler's.
    """

    def __init__(self, function: Callable[[Future[Outcome]], object]) -> None:
        self.function = function

    def call(self, end: MessageEnd) -> None:
        token = object()
        try:
            if vars(self).setdefault("caller", token) is token:
                self.function(end)
        except Exception:
            try:
                self.function(end)
            except Exception:  # the callback itself fails
                _log.exception("a callback at the end of a message failed")
                return
            raise  # an exception of a signal handler
        except BaseException:
            if vars(self).get("caller") is token:
                del vars(self)["caller"]
            raise


def _read(message: bytes, rank: int) -> tuple[str, Terms, Any]:
    """Return op, terms, part; or op, whether the rank's error is a TypeError, and the error's text."""
    found = plain.loads(message)
    if isinstance(found, tuple) and len(found) == 3 and isinstance(found[0], str):
        terms = found[1]
        if isinstance(terms, bool) or (
            isinstance(terms, tuple)
            and all(isinstance(term, tuple) and len(term) == 2 for term in terms)
            and all(isinstance(name, str) for name, _ in terms)
        ):
            return found
    raise plain.UnreadableError(f"rank {rank} sent {len(message)} bytes that are not a call")


def compare(messages: Sequence[bytes]) -> list[Any]:
    """Return every rank's part; raise if a rank refused, or if ops or terms differ."""
    answers = [_read(message, rank) for rank, message in enumerate(messages)]
    for rank, (op, refused, text) in enumerate(answers):
        if isinstance(refused, bool):
            kind = TypeError if refused else ValueError
            raise of_another_rank(kind(f"{op}: rank {rank} cannot take part: {text}"))
    op, terms, _ = answers[0]
    first: dict[str, tuple[int, object]] = {}  # the first rank and value of each term beside
    for rank, (other_op, other_terms, _) in enumerate(answers):
        if other_op != op:
            raise DifferentOpsError(
                f"ranks call different ops at the same time: rank 0 calls {op}, "
                f"rank {rank} calls {other_op}"
            )
        own_terms, their_terms = dict(terms), dict(other_terms)
        own_terms.pop(BESIDE, None)
        more = their_terms.pop(BESIDE, ())
        # A term that a rank lacks is None. The gradients come first: they may be why other terms differ.
        both = {NEEDED: (0, own_terms.get(NEEDED), their_terms.get(NEEDED))}
        for name, value in more:
            both[name] = (*first.setdefault(name, (rank, value)), value)
        both |= {
            name: (0, own_terms.get(name), their_terms.get(name))
            for name in {**own_terms, **their_terms}
        }
        for name, (to, value, other) in both.items():
            if value != other and not (name == NEEDED and UNTOLD in (value, other)):
                kind = TypeError if name.startswith("dtype") else ValueError
                raise kind(
                    f"{op}: {name} differs between ranks: {value} on rank {to}, {other} on rank {rank}"
                )
    return [answer[2] for answer in answers]

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

LONGEST = 32 << 10  # bytes of a message; places take twice as much
CALLS = plain.dumps(("", None, None))[:6]  # how the messages of calls begin

Terms = tuple[tuple[str, Any], ...]
Match = Callable[[Sequence[Any]], object]
Start = Callable[[], Outcome | Event | None]
"""The launch side of an op, from the ranks' agreement on: its result, the point where it ends, or None."""


NEEDED, UNTOLD, BESIDE = "what requires a gradient", "?", "beside"
"""Names of terms that ``context.py`` adds, and what fits to all other gradients."""


@dataclass(eq=False, slots=True)
class Call:
    """A rank's request: what must be equal on all ranks, and what every rank adds of its own.

    Immutable, so a call that comes again and again is made once. ``fitting`` are the messages of all ranks
    that fitted together last.

    Attributes
    ----------
    op : the collective's name.
    terms : pairs (name as error messages put it, value), equal on all ranks. Plain data.
    part : what may differ between ranks, for instance the lengths a rank sends. Plain data.
    match : called with every rank's ``part``, by rank, when all terms are equal. Raises ValueError or
        TypeError if they do not fit together, and the same on every rank.
    equal_fits : whether parts that are all equal to this one fit together; ``match`` is not called then.
    message : terms and part as bytes; of very many terms a digest.
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
        """Raise unless all ranks' ``messages`` fit together; the same error on every rank."""
        if self.equal_fits and all(message == self.message for message in messages):
            return
        if messages != self.fitting:
            self.compared(messages)
            self.fitting = messages  # a call that comes again is not read again

    def compared(self, messages: Sequence[bytes]) -> list[Any]:
        """Every rank's part, by rank; raises as :meth:`verify` does."""
        equal = messages.count(self.message) == len(messages)  # then there is nothing to read
        parts = [self.part] * len(messages) if equal else compare(messages)
        if self.match is not None:
            self.match(parts)
        return parts


PreparedCall = tuple[Start, Sequence[torch.Tensor], Call | None]
"""A call whose arguments were checked on this rank, the caller's tensors that it fills, and on what the
ranks agree, if that is known."""


def take_first(waiting: list[T], fits: Callable[[T], bool]) -> T | None:
    """The first of ``waiting`` that ``fits``, which then waits no more; None if none does."""
    found = next((each for each in waiting if fits(each)), None)
    if found is not None:
        waiting.remove(found)
    return found


def mismatch(
    tensor: torch.Tensor, rank: int, tag: int, source: int, dtype: torch.dtype, numel: int
) -> Exception | None:
    """Why ``tensor`` of ``rank`` cannot receive a message from ``source``; None if it can."""
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

    ``refused``: what receivers could not take of this rank's earlier messages, whose own ends were told
    before that was known. The next message that is asked for its end, and has not failed, fails with it.

    ``settled``: whether it is done; to look at it moves nothing. A future of Python's has a lock and a
    condition from the beginning, which take longer to make than a short message; this one has what a thread
    sleeps by once one does.
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
            with suppress(IndexError):  # another thread has just said it
                self._error = self.refused.popleft()
        return self._error

    def sleep(self, seconds: float | None) -> None:
        """Until it is done, which another thread sees to, ``seconds`` at most."""
        if not self.settled:
            event = vars(self).setdefault("_event", threading.Event())
            if not self.settled:  # else nobody may have seen the event
                event.wait(seconds)

    def set_result(self, result: Outcome) -> None:
        self._outcome = result
        self.tell()

    def set_exception(self, exception: BaseException | None) -> None:
        self._error = exception
        self.tell()

    def tell(self) -> None:
        """It is done: tell who waits for it; told again, those whom an exception has kept from hearing."""
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
    """What is called at the end of a message until it has returned, whichever threads tell that.

    Not twice at once; it bears to be called again after an exception, which may be a signal handler's.
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
            except Exception:  # its own, then
                _log.exception("what was to be called at the end of a message failed")
                return
            raise  # a signal handler's
        except BaseException:
            if vars(self).get("caller") is token:
                del vars(self)["caller"]
            raise


def _read(message: bytes, rank: int) -> tuple[str, Terms, Any]:
    """Op, terms, part; or op, whether it is a TypeError, and why the rank refuses."""
    found = plain.loads(message)
    if isinstance(found, tuple) and len(found) == 3 and isinstance(found[0], str):
        terms = found[1]
        if isinstance(terms, bool) or (
            isinstance(terms, tuple)
            and all(isinstance(each, tuple) and len(each) == 2 for each in terms)
            and all(isinstance(name, str) for name, _ in terms)
        ):
            return found
    raise plain.UnreadableError(f"rank {rank} sent {len(message)} bytes that are no call")


def compare(messages: Sequence[bytes]) -> list[Any]:
    """Every rank's part; raises if a rank refused, or if ops or terms differ."""
    answers = [_read(message, rank) for rank, message in enumerate(messages)]
    for rank, (op, refused, text) in enumerate(answers):
        if isinstance(refused, bool):
            kind = TypeError if refused else ValueError
            raise of_another_rank(kind(f"{op}: rank {rank} cannot take part: {text}"))
    op, terms, _ = answers[0]
    first: dict[str, tuple[int, object]] = {}  # of each term beside, who says it first
    for rank, (other_op, other_terms, _) in enumerate(answers):
        if other_op != op:
            raise DifferentOpsError(
                f"ranks call different ops at the same time: rank 0 calls {op}, "
                f"rank {rank} calls {other_op}"
            )
        said, others = dict(terms), dict(other_terms)
        said.pop(BESIDE, None)
        more = others.pop(BESIDE, ())
        # a term that a rank has not is None there; what is needed may be why others differ
        both = {NEEDED: (0, said.get(NEEDED), others.get(NEEDED))}
        for name, value in more:
            both[name] = (*first.setdefault(name, (rank, value)), value)
        both |= {name: (0, said.get(name), others.get(name)) for name in {**said, **others}}
        for name, (to, value, other) in both.items():
            if value != other and not (name == NEEDED and UNTOLD in (value, other)):
                kind = TypeError if name.startswith("dtype") else ValueError
                raise kind(
                    f"{op}: {name} differs between ranks: {value} on rank {to}, {other} on rank {rank}"
                )
    return [answer[2] for answer in answers]

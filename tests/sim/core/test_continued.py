"""A transfer that something is done after: who asks for its end asks the transfer's own."""

import threading
from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from interlace.runtime.core.call import MessageEnd
from interlace.runtime.core.stream import Continued, Outcome
from interlace.runtime.core.work import Work
from stand_ins.replaced import replaced


def test_what_a_peer_has_refused_of_an_earlier_message_is_raised() -> None:
    message = MessageEnd()
    message.refused = deque()
    whole = Continued(message, lambda outcome: outcome)
    message.set_result(Outcome(None, None))
    assert Future.exception(whole, 0) is None
    message.refused.append(ValueError("another length"))
    with pytest.raises(ValueError, match="another length"):
        whole.result(0)
    assert isinstance(whole.exception(0), ValueError)


def test_what_is_done_after_may_fail() -> None:
    message: Future[Outcome] = Future()
    whole = Continued(message, lambda outcome: Outcome(1 // outcome.result, None))
    message.set_result(Outcome(0, None))
    assert whole.done() and isinstance(whole.exception(0), ZeroDivisionError)


def test_an_end_calls_each_function_until_it_returns_though_an_exception_comes_meanwhile() -> None:
    """A signal handler may raise during the call; the next report of the end calls the function again."""
    message, called = MessageEnd(), []
    message.refused = deque()

    def interrupted(_: object) -> None:
        called.append("first")
        if len(called) == 1:
            raise KeyboardInterrupt

    message.add_done_callback(interrupted)
    message.add_done_callback(lambda _: called.append("second"))
    with pytest.raises(KeyboardInterrupt):
        message.set_result(Outcome(None, None))
    assert message.settled and called == ["first"]
    message.tell()
    message.add_done_callback(lambda _: called.append("third"))
    assert called == ["first", "first", "second", "third"]


def test_what_is_called_at_an_end_may_be_ended_by_a_signal_or_fail(
    caplog: pytest.LogCaptureFixture,
) -> None:
    message, called = MessageEnd(), []
    message.refused = deque()

    def interrupted(_: object) -> None:
        called.append("interrupted")
        if len(called) == 1:
            raise LookupError

    message.add_done_callback(interrupted)
    with pytest.raises(LookupError):
        message.set_result(Outcome(None, None))
    assert called == ["interrupted"] * 2 and not caplog.records
    message.add_done_callback(lambda _: called[9])
    assert "a callback at the end of a message failed" in caplog.text


def test_an_end_wakes_threads_that_wait_for_it() -> None:
    message, found = MessageEnd(), []
    message.refused = deque()
    with pytest.raises(TimeoutError):
        message.result(0)
    threads = [threading.Thread(target=lambda: found.append(message.result())) for _ in range(3)]
    for thread in threads:
        thread.start()
    message.set_result(Outcome(7, None))
    for thread in threads:
        thread.join()
    assert [outcome.result for outcome in found] == [7, 7, 7]


def test_a_future_is_done_though_an_exception_comes_meanwhile() -> None:
    """A signal handler may raise while the waiter reports the end of the message."""
    message = MessageEnd()
    message.refused = deque()
    future = Work("recv", cast(Any, SimpleNamespace(calls=1)), message).get_future()
    told = []

    def interrupted(self: object, value: object) -> None:
        told.append(self)
        if len(told) == 1:
            raise KeyboardInterrupt
        set_result(self, value)

    set_result = torch.futures.Future.set_result
    signal = replaced((torch.futures.Future, "set_result", interrupted))
    with signal, pytest.raises(KeyboardInterrupt):
        message.set_result(Outcome(None, None))
    assert future.done() and future.value() == []

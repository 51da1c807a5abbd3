"""A transfer that something is done after: who asks for its end asks the transfer's own."""

from collections import deque
from concurrent.futures import Future

import pytest

from interlace.runtime.core.call import MessageEnd
from interlace.runtime.core.stream import Continued, Outcome


def test_what_a_peer_has_refused_of_an_earlier_message_is_raised() -> None:
    """It became known after this one had ended well, so its own future says nothing of it."""
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

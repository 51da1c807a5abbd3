"""Errors that another process or another caller gets as copies."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from interlace.runtime.core import errors
from interlace.runtime.core.errors import BlockedWait, SourceText

LINE = SourceText("kernel.py:7", (("/kernel.py", 7),))
ERRORS = [
    errors.AbortedError("rank 1 aborted the group"),
    errors.PeerDiedError(1, 4321, "all_reduce", errors.REPLACED),
    errors.DeadlockError([BlockedWait(0, "user code", "rank 1", where=LINE)], 3, ["rank 1 ended"]),
    errors.MemoryAccessError("stores out of bounds", "out of bounds"),
    errors.KernelAssertionError("the epoch is 0"),
    errors.CollectiveTimeoutError("late", (1, 2)),
    errors.EndlessTaskError("endless"),
    errors.RankError(1, ValueError("rows"), "a traceback"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    "copied", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"]
)
def test_a_copy_has_the_text_and_all_that_its_class_adds(
    error: errors.InterlaceError, copied: Callable[[Any], Any]
) -> None:
    error.frames = LINE.frames
    found = copied(error)
    assert type(found) is type(error) and str(found) == str(error)
    assert repr(vars(found)) == repr(vars(error))

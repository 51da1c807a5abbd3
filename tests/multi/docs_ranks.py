"""What the ranks of test_docs_layers.py do: code of a document, as torchrun would start it."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any
from unittest import mock

import interlace


def called(code: str, function: str) -> Any:
    """What ``function`` of the code returns."""
    namespace: dict[str, Any] = {"__name__": "document"}
    exec(code, namespace)
    return namespace[function]()


def printed(code: str, port: int, argument: str) -> str:
    """What the script prints."""
    variables = {
        "RANK": str(interlace.get_rank()),
        "WORLD_SIZE": str(interlace.get_world_size()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    text = io.StringIO()
    with (
        mock.patch.dict(os.environ, variables),
        mock.patch.object(sys, "argv", ["script", argument]),
        contextlib.redirect_stdout(text),
    ):
        exec(code, {"__name__": "__main__"})
    return text.getvalue()

"""Arguments that a schema does not take: each is refused by its name, of every op."""

import re
from typing import Any

import pytest
import torch

import interlace
from interlace.ops import undispatched
from interlace.ops.library import OPS, WITH_OUT
from interlace.ops.undispatched import Op

TAKEN: dict[str, Any] = {
    "Tensor": torch.ones(1), "str": "", "bool": False, "float": 1.0, "int": 0, "SymInt": 0,
}  # fmt: skip


def taken(kind: str) -> Any:
    """What a schema takes for an argument of that kind."""
    return None if kind.endswith("?") else [] if kind.endswith("[]") else TAKEN[kind]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_argument_is_named(op: Op) -> None:
    arguments = [each.split(" ") for each in op.arguments.split(", ")]

    def on_rank() -> None:
        for at, (_, name) in enumerate(arguments):
            given = [taken(kind) for kind, _ in arguments]
            given[at] = object()
            with pytest.raises(TypeError, match=f"^{re.escape(name)} must be a.*, got object"):
                undispatched.call(op.name, *given, 1, "0")
            if op.name in WITH_OUT:
                with pytest.raises(TypeError, match=f"^{re.escape(name)} must be a.*, got object"):
                    undispatched.call_out(op.name, *given, 1, "0", out=torch.ones(1))

    interlace.run(on_rank, 1)

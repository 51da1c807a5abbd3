"""The ring of keys, and of their gradients: its order holds on four ranks, each of its waits is needed."""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

import interlace
from interlace import nn
from interlace.groups.groups import default_group
from interlace.ops.attention import key_transport
from interlace.tools.targets import TARGETS
from interlace.verify import races
from tiers import few, thorough

RING = TARGETS["attention"].variants["ring fused"]
BACK = TARGETS["attention_backward"].variants["ring fused"]


def changed(module: ModuleType, name: str, old: str, new: str) -> Callable[..., Any]:
    """Return a class of ``module`` with this line of its source replaced."""
    source = inspect.getsource(module)
    assert source.count(old) == 1
    names: dict[str, Any] = {"__name__": module.__name__}
    exec(compile(source.replace(old, new), str(module.__file__), "exec"), names)
    ring: Callable[..., Any] = names[name]
    return ring


@thorough
@pytest.mark.parametrize(
    "target", [pytest.param(RING, id="forward"), pytest.param(BACK, id="backward", marks=thorough)]
)
def test_four_ranks_have_no_race(target: Callable[[], Any]) -> None:
    report = races(target, 4, seeds=1)
    assert report.clean, report


def found(target: Callable[[], Any], world_size: int, kind: str = "") -> bool:
    """Return whether some schedule has a race of this kind."""
    for seed in range(6):
        report = races(target, world_size, seeds=[seed])
        if not report.clean:
            return any(kind in str(finding) for finding in report.findings)
    return False


@pytest.mark.parametrize(
    ("line", "world_size"),
    few([("self._taken + before)", 4), ("self._made + step)", 3)], ("self._made + step)", 3)),
)
def test_gradients_that_go_round_are_waited_for(line: str, world_size: int) -> None:
    source = inspect.getsource(key_transport)
    (wait,) = [each for each in source.splitlines() if "compute.wait(" in each and line in each]
    mutant = changed(key_transport, "RingSums", wait, wait.split("compute")[0] + "pass")
    with mock.patch.dict(key_transport.BACK, ring=mutant):
        assert found(BACK, world_size)


@pytest.mark.parametrize(
    ("line", "kind", "world_size"),
    [
        ("        copying.wait_credits(workspace)\n        for step", "read-write", 3),
        (
            "                    copying.wait(workspace, after, self._free + step - 1)",
            "read-write",
            4,
        ),
        pytest.param(
            "                copying.wait(workspace, before, self._arrived + step)",
            "write-read",
            3,
            marks=thorough,
        ),
    ],
    ids=["credits", "room", "arrival"],
)
def test_without_one_of_its_waits_there_is_a_race(line: str, kind: str, world_size: int) -> None:
    indent = line[: len(line) - len(line.lstrip())]
    rest = "\n        for step" if "for step" in line else ""
    mutant = changed(key_transport, "RingKeys", line, f"{indent}pass{rest}")
    with mock.patch.dict(key_transport.WAYS, ring=mutant):
        assert found(RING, world_size, kind)


def test_its_memory_does_not_grow_with_the_ranks() -> None:
    def on_rank(method: str) -> int:
        q = torch.zeros(1, 64, 2, 64, requires_grad=True)
        how: Any = {"method": method, "algorithm": "pipelined"}
        nn.functional.context_parallel_attention(q, q, q, **how).sum().backward()
        return default_group().workspace_bytes

    held = {
        (m, w): max(interlace.run(on_rank, w, m)) for m in ("ring", "all_gather") for w in (3, 8)
    }
    assert held["ring", 8] == held["ring", 3] and held["all_gather", 8] > held["all_gather", 3]

"""Orders that a fence of a kind of its own makes: between addresses of the same memory, between puts."""

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from interlace.verify import races, shims
from tiers import few


@pytest.fixture(scope="module")
def kernels() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch, shims.installed("torch", "triton_dist"):
        for folder in ("tests/peers", "tests/peers/orders"):
            patch.syspath_prepend(folder)
        yield importlib.import_module("order_kernels")


@pytest.mark.parametrize(
    ("name", "arch"),
    few(
        [("to_all", None), ("from_all", None), ("to_all", 90), ("from_all", 90)],
        *(("to_all", None), ("from_all", None)),
    ),
)
def test_accesses_by_two_addresses_need_a_fence(kernels: Any, name: str, arch: int | None) -> None:
    fn = getattr(kernels, name)
    assert races(fn, 2, True, seeds=2, arch=arch).clean
    (finding,) = races(fn, 2, False, seeds=1, arch=arch).findings
    assert finding.kind == "no proxy fence" and "fence.proxy.alias" in finding.hint


def test_one_thread_fences_for_those_whom_it_meets(kernels: Any) -> None:
    assert races(kernels.to_all, 2, "by one thread", seeds=2).clean


@pytest.mark.parametrize("kind", ["a block", "a word", "int_p", "one thread fences", "a meeting"])
def test_neither_a_signal_of_a_put_nor_a_meeting_stands_for_puts_before_it(
    kernels: Any, kind: str
) -> None:
    """As NVSHMEM says of a network; what the second one puts itself is ordered, and a barrier is quiet."""
    assert races(kernels.puts, 2, kind, True, seeds=2).clean
    (finding,) = races(kernels.puts, 2, kind, False, seeds=1).findings
    assert finding.kind == "weak order" and finding.second.what == "loads"
    second = "the later access" if kind == "a meeting" else "the signal"
    assert f"between the put and {second}, " in finding.hint

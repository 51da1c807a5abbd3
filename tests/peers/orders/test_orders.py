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
    (finding,) = races(fn, 2, False, seeds=2, arch=arch).findings
    assert finding.kind == "no proxy fence" and "fence.proxy.alias" in finding.hint


def test_a_put_with_a_signal_does_not_stand_for_puts_before_it(kernels: Any) -> None:
    """As NVSHMEM says of a network; what it puts itself is ordered."""
    assert races(kernels.puts, 2, True, seeds=2).clean
    (finding,) = races(kernels.puts, 2, False, seeds=2).findings
    assert finding.kind == "weak order" and finding.second.what == "loads"

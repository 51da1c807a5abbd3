"""The shim of Triton-distributed: each device function, and the rest of the package behind it."""

import functools
import importlib
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import interlace
from interlace_verify import shims
from interlace_verify.suite.jobs import load_function

FILE = pathlib.Path(__file__).with_name("device_functions.py")

KERNELS = """
import torch
import triton.language as tl
import triton_dist
from triton_dist.utils import nvshmem_create_tensor

from ..language.extra.cuda.language_extra import laneid, ntid, st
from .. import profiling, tune

@triton_dist.jit
def kernel(words, SIZE: tl.constexpr):
    if laneid() == SIZE:
        st(words, ntid(0) + profiling.ONE)

@tune.autotune([{"size": 50}, {"size": 3}, {"size": 4}], key_fn=None, prune_fn=lambda c: c["size"] < 32)
def run(size):
    words = nvshmem_create_tensor(1, torch.int32)
    kernel[(1,)](words, size, num_warps=1)
    return size, words.tolist()
"""


@functools.cache
def found(name: str) -> list[Any]:
    with shims.installed("triton_dist", "torch"):
        return interlace.run(load_function(f"{FILE}::{name}"), 2)


def test_threads_and_their_warps() -> None:
    threads = range(128)
    of_warps = {
        "tid": [1000 * n + n % 32 for n in threads],
        "shfl.idx": [n // 32 * 32 + 5 for n in threads],
        "shfl.up": [n - (n % 32 > 0) for n in threads],
        "shfl.down": [n + 2 * (n % 32 < 30) for n in threads],
        "shfl.bfly": [n ^ 3 for n in threads],
        "ballot": [0x55555555 for _ in threads],
    }
    for numbers in found("threads"):
        parts = [numbers[at : at + 128] for at in range(0, 768, 128)]
        assert dict(zip(of_warps, parts, strict=True)) == of_warps
        # all threads; 4 warps of 32; program 0; the two words of the clock that are not 0
        assert numbers[768:] == [128, 32 * 10000 + 4 * 1000 + 128, 0, 2]


def test_several_words_at_once_and_signals_of_warps() -> None:
    high = 1 << 40
    words = [1, 2, 3, 4, 4, 3, 2, 1, 14, 13, 12, 11, 14, 13, 12, 11, 2, 3]
    expected = words, [0, 2, 4, 6], [5, high, 5 + high, 1 + (4 << 32)], 4 * 2 + 100
    assert found("words") == [expected] * 2


def test_vectors_of_a_thread() -> None:
    sums = [2.0 * sum(16 * row + i for row in range(3)) for i in range(16)]
    assert found("vectors") == [[*sums, *[0.0] * 4, sums[8] + 128]] * 2


def test_sums_and_stores_at_all_ranks() -> None:
    halves = [2.0 * i + 1 for i in range(8)]
    floats = [2 * i + 0.5 for i in range(4)]
    # by four words, by two, by one, by a pair in one
    expected = [*halves, *halves, *halves[:4]], floats, 2 * 10 + 1
    assert found("multicast") == [expected] * 2


def test_copies_and_signals_on_a_stream() -> None:
    assert found("copies") == [([*range(10 * r, 10 * r + 4)] * 2, 2) for r in (1, 0)]


def test_what_is_not_simulated_says_so_when_it_is_called() -> None:
    with shims.installed("triton_dist", "torch"):
        from triton_dist.language.smem_ops import allocate_smem
        from triton_dist.language.tma import TmaPipeline

        with pytest.raises(NotImplementedError, match="the shim of triton_dist has no TmaPipeline"):
            TmaPipeline(allocate_smem)
    with pytest.raises(NotImplementedError, match=re.escape("libshmem_device has no broadcast")):
        found("missing")


@pytest.fixture
def package(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """The folder of a package, which is no place for modules until somebody adds it to ``sys.path``."""
    real = tmp_path / "triton_dist"
    (real / "kernels").mkdir(parents=True)
    (real / "__init__.py").write_text("raise ImportError('it needs its own compiler')\n")
    (real / "profiling.py").write_text("import triton.language as tl\nONE = tl.constexpr(1)\n")
    (real / "kernels" / "__init__.py").write_text("")
    (real / "kernels" / "some.py").write_text(KERNELS)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path


def test_modules_of_the_package_are_found_behind_the_shim(package: pathlib.Path) -> None:
    names = (
        "triton_dist",
        "triton_dist.profiling",
        "triton_dist.kernels",
        "triton_dist.kernels.some",
    )
    assert not {*names} & {*sys.modules}
    with shims.installed("triton_dist", "torch"):
        with pytest.raises(ModuleNotFoundError, match=r"No module named 'triton_dist\.kernels'"):
            importlib.import_module("triton_dist.kernels")
        sys.path.insert(0, str(package))
        some = importlib.import_module("triton_dist.kernels.some")
        assert some.__file__ == str(package / "triton_dist" / "kernels" / "some.py")
        assert some.profiling.__name__ == "triton_dist.profiling"
        assert some.st.fn.__module__ == "interlace_verify.shims.triton_dist.language_extra"
        assert shims.imports.calls_a_shim(some.kernel)
        # the kernel is compiled, so the module is imported in another process, too
        assert interlace.run(some.run, 2) == [(3, [33])] * 2
    assert not {*names} & {*sys.modules}


def test_modules_that_were_there_before_are_there_again(package: pathlib.Path) -> None:
    sys.path.insert(0, str(package))
    (package / "triton_dist" / "__init__.py").write_text("")
    before = importlib.import_module("triton_dist.profiling")
    try:
        with shims.installed("triton_dist"):
            within = importlib.import_module("triton_dist.profiling")
            assert within is not before and within.__file__ == before.__file__
        assert sys.modules["triton_dist.profiling"] is before
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "triton_dist"]:
            del sys.modules[name]


def test_what_a_file_asks_of_the_gpu_when_it_is_imported(package: pathlib.Path) -> None:
    (package / "asks.py").write_text(
        "import torch\nimport triton\nimport triton.language as tl\n"
        "SMS = tl.constexpr(torch.cuda.get_device_properties(0).multi_processor_count)\n"
        "ARCH = tl.constexpr(torch.cuda.get_device_capability()[0])\n"
        "@triton.jit\ndef kernel(words):\n"
        "    tl.inline_asm_elementwise('bar.warp.sync -1; mov.u32 $0, 0;', '=r', [], tl.int32, False, 1)\n"
        "    tl.store(words, SMS * 100 + ARCH)\n"
        "def fn():\n    words = torch.zeros(1).int()\n    kernel[(1,)](words)\n    return words.item()\n"
    )
    with shims.installed("torch"):
        fn = load_function(f"{package / 'asks.py'}::fn")
        assert interlace.run(fn, 1) == interlace.run(fn, 1, place="ptx", arch=90) == [809]

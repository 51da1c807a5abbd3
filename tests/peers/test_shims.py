"""The shims' functions do what they should, and refuse misuse; ``import`` finds them for a time."""

import functools
import importlib
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as of_torch
import triton
from torch._C._distributed_c10d import _SymmetricMemory

import interlace
from interlace.cli import main
from interlace.ops.op import sim_backward as simulated_backward
from interlace.verify import races, schedules, shims
from interlace_verify.suite.jobs import load_function
from tiers import few

FILE = pathlib.Path(__file__).with_name("shim_kernels.py")
GPU_CODE = pathlib.Path(__file__).with_name("gpu_code.py")


def run(name: str, place: str = "sim") -> Any:
    with shims.installed("iris", "triton_dist", "torch"):
        return interlace.run(load_function(f"{FILE}::{name}"), 2, place=place)


@pytest.mark.parametrize("place", ["sim", "ptx"])
def test_iris(place: str) -> None:
    zeros = [0.0, 0.0]
    assert run("by_iris", place) == [
        ([2.0] * 4 + [2.0, 2.0] + zeros + [2.0] * 4, [3, 6, 8]),
        ([1.0] * 4 + [1.0, 1.0] + zeros + [1.0] * 4, [3, 5, 7]),
    ]


def test_the_context_of_iris() -> None:
    assert run("by_context") == [
        ([1.0] * 4 + [2.0, 2.0, 0.0, 0.0], [3, 8]),
        ([2.0] * 4 + [1.0, 1.0, 0.0, 0.0], [3, 7]),
    ]


def test_nvshmem() -> None:
    low, high = [0, 1, 2, 3], [10, 11, 12, 13]
    # what a rank gets from its peer is what it has put there itself
    assert run("by_nvshmem") == [
        (low + high + [9, 0, 0, 0] + low + high, [2 + 3 * 128, 1]),
        (high + low + [10, 0, 0, 0] + high + low, [2 + 3 * 128, 1]),
    ]


def test_nvshmem_by_threads_and_warps() -> None:
    sent = [[300 * (1 + rank) + i for i in range(40)] for rank in range(2)]
    assert run("by_threads") == [
        ([42, 43, *sent[peer][:2], *sent[peer]], [*sent[peer][:2], 0], [3]) for peer in (1, 0)
    ]


def test_words_of_triton_distributed() -> None:
    assert run("by_words") == [([3, 4, 6, 3], 9)] * 2
    assert run("by_float_words") == [[4.0, 8.0]] * 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong_peer", "pe must be within 0..1, got 2 on rank"),
        ("wrong_memory", "pointer must be in symmetric memory that all ranks have"),
        (
            "wrong_operation",
            "sig_op must be NVSHMEM_SIGNAL_SET (9) or NVSHMEM_SIGNAL_ADD (10), got 0",
        ),
    ],
)
def test_misuse_names_argument_and_rank(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        run(name)


def test_a_heap_that_is_used_up() -> None:
    with pytest.raises(MemoryError, match="16384 more from byte 0 on do not fit"):
        run("heap_used_up")


def test_the_shims_go_when_the_block_ends() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("triton_dist")
    with shims.installed("torch", "triton_dist"):
        import torch.distributed._symmetric_memory as here
        from triton_dist.utils import get_nvshmem_home

        assert issubclass(here._SymmetricMemory, interlace.symmetric_memory.SymmetricMemory)
        with pytest.raises(
            NotImplementedError, match=r"shim of triton_dist\.utils has no get_nvshmem_home"
        ):
            get_nvshmem_home()
    import torch.distributed._symmetric_memory as after

    assert after is of_torch and "triton_dist" not in sys.modules
    assert after._SymmetricMemory is _SymmetricMemory and not torch.cuda.is_available()


def test_a_shim_that_is_not_there() -> None:
    with (
        pytest.raises(
            ValueError, match="there is no shim 'rccl'; there are iris, triton_dist, torch"
        ),
        shims.installed("rccl"),
    ):
        pass


def verified(*more: str, target: str = "iris_kernels.py::two_rounds") -> int:
    return main.run(["verify", str(FILE.with_name(target)), *more])


def test_the_command_installs_them(capsys: pytest.CaptureFixture[str]) -> None:
    little = ["--ranks", "2", "--seeds", "1", "--schedules", "2", "--json"]
    assert verified("--shims", "iris", *little) == 0
    checks = [each["check"] for each in json.loads(capsys.readouterr().out)["results"]]
    # what a shim compiles to is not what Iris does: no lint
    assert checks == ["races", "schedules", "late stores"] and "iris" not in sys.modules


def test_the_command_names_the_shim_that_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert verified() == 2
    assert "No module named 'iris'; --shims iris stands in for it" in capsys.readouterr().err
    # torch's functions are there, and refuse kernels that are interpreted
    assert verified(target="nvshmem_kernels.py::gather") == 2
    assert "--shims torch stands in for it" in capsys.readouterr().err


# -- code for a process and a GPU per rank ------------------------------------------------------------


@pytest.fixture
def function() -> Iterator[Callable[[str], Any]]:
    with shims.installed("torch"):
        yield lambda name: load_function(f"{GPU_CODE}::{name}")


def test_globals_are_each_ranks_own_and_end_with_the_run() -> None:
    for _ in range(2):  # the second time the file is there already
        with shims.installed("torch"):
            fn = load_function(f"{GPU_CODE}::caches_are_each_ranks_own")
            for _ in range(2):
                assert interlace.run(fn, 2) == [(2, [[0, 0]]), (4, [[1, 1]])]
            assert fn.__globals__["calls"] == 0 and not fn.__globals__["WORDS"]


def test_names_of_a_gpu_and_of_a_group(function: Any) -> None:
    assert interlace.run(function("names_of_a_gpu"), 2) == [[2.0] * 4] * 2
    assert not torch.cuda.is_available()


def test_the_host_waits_for_what_it_reads(function: Any) -> None:
    told = [
        [f"[tensor({n})]", f"[{n}]", f"[{n}]", f"[{n}]", f"tensor([{n}])"] for n in ("5.", "10.")
    ]
    assert interlace.run(function("read_by_the_host"), 2) == told


@pytest.mark.parametrize("name", few(["pipelined", "waits_for_values"], "waits_for_values"))
def test_streams_that_are_in_order(function: Any, name: str) -> None:
    fn = function(name)
    report = races(fn, 2, seeds=3)
    assert report.clean and report.events > 50, str(report)
    assert schedules(fn, 2, n=6, workers=1, shrink=False).clean


def total(x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """What ranks wait for within an op; the host waits, too."""
    y = factor * x
    torch.distributed.all_reduce(y)
    return y + y.sum().item()


def test_ranks_wait_within_ops_of_libraries() -> None:
    """Which in C++ would end the process."""

    def on_rank() -> Any:
        x = torch.full((2,), 1.0 + interlace.get_rank(), device="cuda", requires_grad=True)
        y = custom(x, factor=2.0)
        y.sum().backward()
        return torch.ops.interlace_test_shims.total(x).tolist(), y.tolist(), x.grad.tolist()  # type: ignore[union-attr]

    with shims.installed("torch"):
        library = torch.library.Library("interlace_test_shims", "DEF")
        library.define("total(Tensor x, float factor=1.0) -> Tensor")
        library.impl("total", total, "CUDA")
        custom = torch.library.custom_op(
            "interlace_test_shims::custom", total, mutates_args=(), device_types="cuda"
        )
        custom.register_autograd(lambda ctx, grad: (3 * grad, None))
        assert interlace.run(on_rank, 2) == [([9.0, 9.0], [18.0, 18.0], [3.0, 3.0])] * 2


@pytest.mark.parametrize("in_threads", [False, True])
def test_a_stream_waits_for_a_value_and_autograd_goes_through_streams(
    function: Any, in_threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = simulated_backward._run if in_threads else simulated_backward._run_here
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", run)
    found = interlace.run(function("waits_for_values"), 2)
    assert found == [([2.0, 2.0], [2.0, 2.0]), ([4.0, 4.0], [4.0, 4.0])]


def test_a_stream_that_waits_in_vain_is_a_deadlock(function: Any) -> None:
    fn = functools.partial(function("waits_for_values"), told=False)
    with pytest.raises(
        interlace.DeadlockError, match=r"rank 0 stream 2.* a value at .*int32 tensor"
    ):
        interlace.run(fn, 1)


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(
    "name", few(["progress_kernels", "tuple_kernels", "multimem_kernels"], "progress_kernels")
)
def test_code_for_a_gpu_as_compiled_code(name: str, arch: int) -> None:
    def step() -> Any:
        if torch.cuda.get_device_capability() >= (9, 0) or name != "multimem_kernels":
            two_rounds()
        driver, told = triton.runtime.driver.active, torch.cuda.get_device_properties()
        told_there = driver.utils.get_device_properties(driver.get_current_device())
        assert told.multi_processor_count == told_there["multiprocessor_count"]
        assert driver.get_active_torch_device().index == interlace.get_rank()
        support = of_torch._SymmetricMemory.has_multicast_support("cuda", 0)
        return 10 * told.major + told.minor, driver.get_current_target().arch, support

    with shims.installed("torch"):
        two_rounds = load_function(f"{FILE.with_name(name)}.py::two_rounds")
        assert interlace.run(step, 2, place="ptx", arch=arch) == [(arch, arch, arch == 90)] * 2

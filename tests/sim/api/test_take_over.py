"""torch's fused ops, taken over: called with the dispatch key of GPUs, on the fake one."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import interlace
from interlace.ops.matmul import torch_ops
from interlace.ops.op import op as pending
from interlace.ops.op.op import Started
from interlace.symmetric_memory.functions import TAKEN_OVER
from ranks import ranks
from stand_ins import fake_host
from stand_ins.fake_cuda import FakeGpu
from stand_ins.fake_driver import install
from tiers import thorough

GPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
GROUP, FP8 = "0", torch.float8_e4m3fn


@pytest.fixture
def taken_over() -> Iterator[None]:
    interlace.take_over_symm_mem()
    yield
    interlace.take_over_symm_mem(False)


def whose(device: str) -> set[str]:
    """Return the ops of the six whose kernel on ``device`` is interlace's."""
    found = set()
    for name in TAKEN_OVER:
        lines = torch._C._dispatch_dump(f"symm_mem::{name}").splitlines()
        active = next((line for line in lines if line.startswith(f"{device}:")), "")
        if "interlace/symmetric_memory/functions.py" in active:
            found.add(name)
    return found


def test_who_serves_which_device() -> None:
    assert hasattr(torch.ops.symm_mem, TAKEN_OVER[0])  # then torch has defined them all
    assert (whose("CUDA"), whose("CPU")) == (set(), set(TAKEN_OVER))
    for _ in range(2):
        for taken in (True, True, False, False):
            interlace.take_over_symm_mem(taken)
            assert whose("CUDA") == (set(TAKEN_OVER) if taken else set())
            assert whose("CPU") == set(TAKEN_OVER)
    with pytest.raises(TypeError, match="taken must be a bool, got 'yes'"):
        interlace.take_over_symm_mem("yes")  # type: ignore[arg-type]


def test_the_ops_are_named_as_others_of_torch() -> None:
    op, other = getattr(torch.ops.symm_mem, TAKEN_OVER[0]), torch.ops.aten.mm
    for one, like in ((op, other), (op.default, other.default)):
        assert one.__module__ == like.__module__.replace("aten", "symm_mem")


def test_all_to_which_compilers_lower_are_taken_over() -> None:
    assert hasattr(torch.ops.symm_mem, TAKEN_OVER[0])
    names = [name.removeprefix("symm_mem::") for name in torch._C._dispatch_get_all_op_names()]
    found = {name for name in names if name.startswith(("fused_", "_low_contention_"))}
    # torch has these as of 2.14, and keeps them: they are for a switch's multicast
    left = {name for name in found if "_ce_multicast" in name}
    assert found - left == set(TAKEN_OVER)


def on_gpu(name: str, *args: Any, **options: Any) -> Any:
    return getattr(torch.ops.symm_mem, name).default.redispatch(GPU, *args, **options)


def ops() -> dict[str, list[list[float]]]:
    """Return the result of each op on a rank, for matrices whose rows repeat one number."""
    rank, half = interlace.get_rank(), torch.tensor(0.5)
    x, w, w2 = torch.full((4, 16), rank + 1.0), torch.ones(16, 2), torch.full((16, 3), 2.0)
    fp8, fp8_w = x.to(FP8), torch.ones(16, 16).to(FP8).t()
    whole, products = on_gpu("fused_all_gather_matmul", x, [w, w2], 0, GROUP)
    options = [None], [None], [torch.float32], [False]
    arguments = (fp8, [fp8_w], half, [half], 0, GROUP, *options)
    fp8_whole, scaled = on_gpu("fused_all_gather_scaled_matmul", *arguments)
    arguments = (fp8, fp8_w, half, half, "sum", 0, 0, GROUP, [4, 16])
    wait = torch.ops._c10d_functional.wait_tensor
    started = on_gpu("_low_contention_all_gather", x, GROUP)
    scattered = on_gpu("_low_contention_reduce_scatter", x, "avg", GROUP)
    found = {
        "whole": whole,
        "product": products[0],
        "other product": products[1],
        "scattered": on_gpu("fused_matmul_reduce_scatter", x, w, "sum", 0, GROUP),
        "fp8": fp8_whole.float(),
        "scaled": scaled[0],
        "scaled, scattered": on_gpu(
            "fused_scaled_matmul_reduce_scatter", *arguments, out_dtype=torch.float32
        ),
        "low": wait(started),
        "low, scattered": wait(scattered),
    }
    torch.cuda.current_stream().synchronize()
    assert all((each == each[:, :1]).all() for each in found.values())
    return {name: each[:, 0].tolist() for name, each in found.items()}


@pytest.mark.usefixtures("taken_over")
def test_the_ops_on_a_fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = install(monkeypatch, FakeGpu(eager=0.0))

    def finish(started: Started) -> Any:
        """The next ops are torch's, which do not wait for the stream here."""
        outputs = pending.finish(started)
        gpu.synchronize(gpu.current)
        return outputs

    monkeypatch.setattr(torch_ops, "finish", finish)
    both = [1.0] * 4 + [2.0] * 4
    expected = {
        "whole": both,
        "product": [16 * each for each in both],
        "other product": [32 * each for each in both],
        "scattered": [48.0] * 2,
        "fp8": both,
        "scaled": [4 * each for each in both],
        "scaled, scattered": [12.0] * 2,
        "low": both,
        "low, scattered": [1.5] * 2,
    }
    assert fake_host.run(ops, 2) == [expected] * 2


@ranks(2, place="sim")
def test_simulated_ranks_wait_for_ops_in_flight() -> None:
    ops, wait = torch.ops.symm_mem, torch.ops._c10d_functional.wait_tensor
    x = torch.full((2, 2), interlace.get_rank() + 1.0)
    assert (
        wait(ops._low_contention_all_gather(x, "0")).tolist() == [[1.0] * 2] * 2 + [[2.0] * 2] * 2
    )
    assert wait(ops._low_contention_reduce_scatter(x, "sum", "0")).tolist() == [[3.0] * 2]


@thorough
def test_by_the_environment() -> None:
    program = """
import warnings; warnings.simplefilter("error")
from sim.api.test_take_over import TAKEN_OVER, whose
print(whose("CUDA") == whose("CPU") == set(TAKEN_OVER))
"""
    environment = {**os.environ, "INTERLACE_SYMM_MEM": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "True\n", done.stderr

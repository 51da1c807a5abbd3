"""A group that serves CPUs and GPUs, the driver's functions by ctypes, and the GPU tests' rank code."""

import contextlib
import ctypes
import shutil
import subprocess
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import interlace
from cases import device_ranks as ranks
from interlace.groups.groups import default_group
from interlace.process_group import group as process_group
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.places.gpu import driver as cuda_driver
from interlace.runtime.places.gpu.driver import Driver
from interlace.runtime.tuning import tuning as auto
from stand_ins import fake_host
from stand_ins.fake_cuda import FakeGpu, end_current_stream
from stand_ins.fake_host import gpu_ranks
from stand_ins.replaced import replaced


class Asked(Exception):
    """An exception that shows a request for the group's GPU communicator."""


class Refusing:
    """A stand-in for a process group."""

    @property
    def device_communicator(self) -> Communicator:
        raise Asked


CALLS: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "all_reduce": lambda x, g: interlace.all_reduce(x, group=g),
    "all_gather": lambda x, g: interlace.all_gather([x], x, group=g),
    "all_gather by torch's names": lambda x, g: interlace.all_gather(
        output_tensor=x, input_tensor=x, group=g
    ),
    "reduce_scatter": lambda x, g: interlace.reduce_scatter(x, [x], group=g),
    "broadcast": lambda x, g: interlace.broadcast(x, 0, group=g),
    "reduce": lambda x, g: interlace.reduce(x, 0, group=g),
    "gather": lambda x, g: interlace.gather(x, None, 0, group=g),
    "scatter": lambda x, g: interlace.scatter(x, None, 0, group=g),
    "all_to_all": lambda x, g: interlace.all_to_all([x], [x], group=g),
    "all_to_all_single": lambda x, g: interlace.all_to_all_single(x, x, group=g),
    "all_reduce_coalesced": lambda x, g: interlace.all_reduce_coalesced([x], group=g),
    "all_gather_v": lambda x, g: interlace.all_gather_v(x, x, [4], group=g),
    "reduce_scatter_v": lambda x, g: interlace.reduce_scatter_v(x, x, [4], group=g),
    "gather_v": lambda x, g: interlace.gather_v(x, None, None, 0, group=g),
    "scatter_v": lambda x, g: interlace.scatter_v(x, None, None, 0, group=g),
    "all_to_all_v": lambda x, g: interlace.all_to_all_v(x, x, group=g),
    "isend": lambda x, g: interlace.isend(x, 0, group=g),
    "irecv": lambda x, g: interlace.irecv(x, 0, group=g),
    "batch_isend_irecv": lambda x, g: interlace.batch_isend_irecv(
        [interlace.P2POp(interlace.isend, x, 0, group=g)]
    ),
    "all_gather_matmul": lambda x, g: interlace.all_gather_matmul(x, x, group=g),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_tensor_on_a_gpu_goes_to_the_communicator_for_gpus(name: str) -> None:
    def on_rank() -> None:
        whole = default_group()
        group = process_group.OnTwoDevices(whole.place, whole.ranks, Refusing())
        with FakeTensorMode():
            on_gpu = torch.empty(4, device="cuda")
        with pytest.raises(Asked):
            CALLS[name](on_gpu, group)
        x = torch.ones(4)
        interlace.all_reduce(x, group=group)  # a tensor on a CPU does not
        assert x.tolist() == [1.0] * 4

    interlace.run(on_rank, 1)


class OnGpu:
    """An array of another library, on a GPU."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **options: Any) -> Any:
        raise AssertionError


def test_where_a_value_lies() -> None:
    x = torch.ones(2)
    kinds = [
        process_group.kind_of(value) for value in (x, [[], [x]], OnGpu(), [OnGpu()], "x", None, [])
    ]
    assert kinds == ["cpu", "cpu", "cuda", "cuda", "", "", ""]


def _by_length(values: Any) -> str:
    return "cuda" if values[0].numel() == 8 else "cpu"


@gpu_ranks(
    2,
    (auto, "LARGEST_LOW_LATENCY_BYTES", 0),  # only ops in workspaces are counted
    (process_group, "kind_of", _by_length),
    seed=3,
)
def test_they_compute_there() -> None:
    """On the fake GPU each tensor of 8 elements counts as a tensor of the device."""
    whole, rank = default_group(), interlace.get_rank()
    second = Communicator(whole.place.subgroup((0, 1), 1), whole.ranks)
    both = SimpleNamespace(device_communicator=second)
    group = process_group.OnTwoDevices(whole.place, whole.ranks, both)
    for length in (4, 8, 8, 8):
        x = torch.full((length,), rank + 1.0)
        interlace.all_reduce(x, group=group)
        interlace.barrier(group)
        assert x.tolist() == [3.0] * length  # the barrier has waited for what was enqueued
    assert (group.arena.turn, second.arena.turn) == (1, 3)


SOURCE = """
typedef unsigned long long word;
int cuStreamWriteValue64_v2(void *stream, word address, word value, unsigned flags) {
  if (stream != (void *)(1ull << 40) || flags) return 1;
  *(word *)address = value; return 0;
}
int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
  if (flags != 1 || priority != -1) return 2;
  *stream = (void *)(1ull << 41); return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 122 && device == 3; return 0;
}
int cuStreamGetCaptureInfo_v2(void *stream, int *status, word *id, void **g, void **d, word *n) {
  if (g || d || n) return 1;
  *status = 1; *id = 1ull << 33; return 0;
}
static int relaxed;
int cuThreadExchangeStreamCaptureMode(int *mode) { relaxed = *mode == 2; *mode = 0; return 0; }
int exchanged(void) { return relaxed; }
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_what_the_driver_is_asked(tmp_path: Path) -> None:
    (tmp_path / "driver.c").write_text(SOURCE)
    made = tmp_path / "driver.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", str(made), str(tmp_path / "driver.c")], check=True
    )
    driver = Driver(ctypes.CDLL(str(made)))
    cell = ctypes.c_uint64(5)
    address, stream = ctypes.addressof(cell), 1 << 40
    driver.write(stream, address, 1 << 50)
    assert cell.value == 1 << 50
    assert driver.new_stream(-1) == 1 << 41
    with pytest.raises(RuntimeError, match="cuStreamCreateWithPriority: error 2"):
        driver.new_stream(5)
    with pytest.raises(RuntimeError, match="cuStreamWriteValue64: error 1"):
        driver.write(7, address, 1)
    assert driver.has_words(3) and not driver.has_words(0)
    assert driver.capture(stream) == 1 << 33
    driver.leave_captures_alone()
    assert ctypes.CDLL(str(made)).exchanged() == 1


def test_the_alarm_has_a_stream_of_its_own() -> None:
    """All groups share it, and it is not from torch's pool, whose streams groups use for copies."""
    made: list[int] = []
    library = SimpleNamespace(new_stream=lambda priority: made.append(priority) or 77)
    context = SimpleNamespace(synchronize=lambda: None)
    cuda_driver.alarm_stream.cache_clear()
    with replaced(
        (cuda_driver, "_load_driver", lambda: library),
        (torch.cuda, "device", contextlib.nullcontext),
        (torch.cuda, "current_stream", lambda: context),
        (torch.cuda, "ExternalStream", lambda handle: ("external", handle)),
        (torch.cuda, "Stream", lambda **how: ("of the pool", how)),
    ):
        assert [cuda_driver.alarm_stream(0) for _ in range(2)] == [("external", 77)] * 2
    cuda_driver.alarm_stream.cache_clear()
    assert made == [-1]


def test_an_old_driver_is_refused() -> None:
    with pytest.raises(AttributeError):
        Driver(ctypes.CDLL(None))


class Synchronized:
    """``interlace`` and its modules, with a synchronization of the current stream after every call."""

    def __init__(self, gpu: FakeGpu, module: Any = interlace) -> None:
        self._gpu, self._module = gpu, module

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._module, name)
        if isinstance(function, types.ModuleType):
            return Synchronized(self._gpu, function)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self._gpu.synchronize(self._gpu.current)
            return result

        return call


@pytest.mark.parametrize("name", sorted(ranks.OPS))
def test_operations(name: str) -> None:
    gpu, op = FakeGpu(eager=0.0), ranks.OPS[name]

    def synchronized(x: torch.Tensor, w: torch.Tensor) -> Any:
        output = op(x, w)
        end_current_stream()
        return output

    at_once = [
        (ranks, "interlace", Synchronized(gpu)),
        (ranks, "OPS", {**ranks.OPS, name: synchronized}),
    ]
    for world_size in (2, 4):
        wrong = fake_host.run(
            lambda: ranks.operations([name], 2, True, True), world_size, gpu, *at_once
        )
        assert wrong == [[]] * world_size


def test_layers() -> None:
    assert interlace.run(ranks.layers, 2, 2, place="shm") == [[], []]

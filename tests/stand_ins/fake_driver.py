"""Puts the fake GPU of ``fake_cuda`` in the place of the driver, ``torch.cuda`` and Triton's launcher."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from interlace.runtime.core.launch import KernelLaunch, leaves, outside
from interlace.runtime.places.gpu import driver, stream as cuda_stream, virtual_place
from interlace.runtime.places.gpu.launch import LaunchCache, PreparedLaunch
from interlace.runtime.places.gpu.plans import Plans
from interlace.runtime.processes import recorder
from stand_ins import fake_cuda
from stand_ins.fake_cuda import CPU, FakeEvent, FakeGpu, FakeGraph, FakeStream
from stand_ins.replaced import Replacement, replaced

MULTIPROCESSORS = 132
ORIGINALS = LaunchCache.prepare, PreparedLaunch.again, PreparedLaunch.run
REPEAT = Plans._repeat


class FakeKernel:
    """Triton's ``CompiledKernel`` with the used attributes."""

    metadata = SimpleNamespace(global_scratch_size=0, num_ctas=1)
    function = packed_metadata = None

    def __init__(self, launch: KernelLaunch) -> None:
        self._name, self._warps = launch.name, launch.num_warps
        parameters = inspect.signature(launch.kernel.fn).parameters
        given = {name: launch.arguments[name] for name in parameters}
        self._count, self._names = len(given), list(outside(given))
        fake_cuda.gpu().loads.append(launch.name)
        fake_cuda.gpu().first_use()

    def run(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        values = rest[5:]
        assert len(values) == self._count, (self._name, values)
        programs = x * y * z if self._warps > 1 else 0
        # a tuple comes without names, a constant as it was given
        single = leaves({str(index): value for index, value in enumerate(values)})
        arguments = dict(zip(self._names, single.values(), strict=True))
        fake_cuda.gpu().launch(self._name, stream, arguments, programs)


class FakeWords:
    """A stand-in for ``driver.Driver``."""

    def write(self, stream: int, address: int, value: int) -> None:
        fake_cuda.gpu().write_word(stream, address, value)


@contextmanager
def installed(gpu: FakeGpu, *replacements: Replacement) -> Iterator[FakeGpu]:
    """Install ``gpu`` and the values of ``replacements`` until the block ends."""
    with replaced(*_of(gpu)), replaced(*replacements):
        yield gpu


def install(monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu) -> FakeGpu:
    """Install ``gpu`` until ``monkeypatch`` ends."""
    for owner, name, value in _of(gpu):
        monkeypatch.setattr(owner, name, value)
    return gpu


def _of(gpu: FakeGpu) -> list[Replacement]:
    """Return the replacements that streams and events use of ``gpu``."""
    fake_cuda.installed = gpu
    cuda_stream._external.cache_clear()
    recorder._inside.cache_clear()  # no call site is here

    def capture_number(handle: int) -> int:
        capture = gpu.capture_of(handle)
        return 0 if capture is None else capture.number

    properties = SimpleNamespace(
        multi_processor_count=gpu.multiprocessors or MULTIPROCESSORS, uuid="fake"
    )
    of_torch = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: gpu.synchronize(),
        "current_stream": lambda device=None: FakeStream(handle=gpu.current),
        "default_stream": lambda device=None: FakeStream(handle=0),
        "stream": gpu.on,
        "Stream": FakeStream,
        "ExternalStream": lambda handle: FakeStream(handle=handle),
        "Event": FakeEvent,
        "CUDAGraph": FakeGraph,
        "is_current_stream_capturing": lambda: gpu.capture_of(gpu.current) is not None,
        "get_device_capability": lambda device: (9, 0),
        "get_device_properties": lambda device: properties,
    }
    of_driver = {
        "stream_words": lambda device: FakeWords() if gpu._has_words else None,
        "alarm_stream": lambda device: gpu.alarm_stream(),
        "current_stream": lambda device: gpu.current,
        "capture_of": capture_number,
        "leave_captures_alone": lambda: None,
        "pinned_tensor": lambda words: torch.tensor(words, dtype=torch.int64),
    }
    return [
        *[(torch.cuda, name, value) for name, value in of_torch.items()],
        *[(driver, name, value) for name, value in of_driver.items()],
        (cuda_stream, "run_on", gpu.torch_code),
        (virtual_place, "current_device", lambda: CPU),
        (triton.knobs.runtime, "interpret", False),
        (KernelLaunch, "compiled", lambda launch: FakeKernel(launch)),
        (recorder, "_INSIDE", (*recorder._INSIDE, "stand_ins")),
        *_noting_launches(gpu),
    ]


def _noting_launches(gpu: FakeGpu) -> list[Replacement]:
    """Tell ``gpu`` the tensors at the addresses of a launch."""
    prepare, again, run = ORIGINALS

    def preparing(
        self: LaunchCache, launch: KernelLaunch, stream: int, capture: int
    ) -> PreparedLaunch:
        given = launch.values()
        for value in given:
            if isinstance(value, torch.Tensor):
                gpu.know(value)
        prepared = prepare(self, launch, stream, capture)
        gpu.forms[prepared] = [
            (each.shape, each.stride(), each.dtype) if isinstance(each, torch.Tensor) else None
            for value in prepared.in_order(given)
            for each in (value if isinstance(value, tuple) else (value,))
        ]
        return prepared

    def running_again(self: PreparedLaunch, stream: int, capture: int, values: list[Any]) -> None:
        gpu.running = self
        again(self, stream, capture, values)
        gpu.running = None

    def running(self: PreparedLaunch, stream: int) -> None:
        gpu.running = self
        run(self, stream)
        gpu.running = None

    def repeating(self: Plans, step: Any, call: Any, results: Any, addresses: Any) -> None:
        for tensor in (*call.arguments, *results, *self.lasting_tensors()):
            gpu.know(tensor)
        REPEAT(self, step, call, results, addresses)

    return [
        (LaunchCache, "prepare", preparing),
        (PreparedLaunch, "again", running_again),
        (PreparedLaunch, "run", running),
        (Plans, "_repeat", repeating),
    ]

"""The GPU tests' code for a rank, on the fake GPU: it must not be what fails there."""

import types
from typing import Any

import pytest
import torch

import interlace
from cases import device_ranks as ranks
from stand_ins import fake_host
from stand_ins.fake_cuda import FakeGpu, end_current_stream


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

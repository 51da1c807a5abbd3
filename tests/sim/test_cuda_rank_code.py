"""What the GPU tests do on a rank, on the fake GPU: their own code must not be what fails there."""

from __future__ import annotations

import pytest

import fake_host
from fake_cuda import FakeGpu
from fake_driver import install
from gpu import device_ranks as ranks
from interlace.runtime import cuda_driver


@pytest.mark.parametrize("name", sorted(set(ranks.OPS) - {"gather_with_input"}))
def test_operations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch code of theirs runs at once, so the device does too."""
    gpu = install(monkeypatch, FakeGpu(eager=0.0))
    monkeypatch.setattr(cuda_driver, "stream_words", cuda_driver.stream_words)
    call = ranks.OPS[name]

    def synchronized(x, w):  # type: ignore[no-untyped-def]
        output = call(x, w)
        gpu.synchronize(gpu.current)
        return output

    monkeypatch.setitem(ranks.OPS, name, synchronized)
    for world_size in (2, 4):
        wrong = fake_host.run(lambda: ranks.operations([name], 2, True, True), world_size)
        assert wrong == [[]] * world_size

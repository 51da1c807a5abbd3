"""Processes on one GPU: memory by torch and by CUDA IPC, streams, lifetime, failures, the backend.

Ranks that share a GPU take turns on it, so every hand-over costs a time slice: few rounds.
"""

import functools
import re

import pytest
import torch

import interlace
from cases import device_ranks as ranks
from interlace import launcher
from interlace.runtime.core.errors import RankError
from interlace.runtime.places.pool import ProcessPool


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("words", [True, False], ids=["stream memory ops", "kernels"])
@pytest.mark.parametrize("torch_memory", [True, False], ids=["torch", "CUDA IPC"])
def test_operations(torch_memory: bool, words: bool, world_size: int) -> None:
    if not torch_memory:
        pytest.importorskip("cupy")
    names = list(ranks.OPS)  # some of them need equal parts
    names = (
        names if ranks.ROWS % world_size == 0 else ["fused_gather", "pipelined_gather", "broadcast"]
    )
    wrong = interlace.run(
        ranks.operations, world_size, names, 3, torch_memory, words, place="cuda", processes=True
    )
    assert wrong == [[]] * world_size


def test_memory_is_torchs_where_torch_can() -> None:
    kinds = interlace.run(ranks.memory_kind, 2, place="cuda", processes=True)
    assert len(set(kinds)) == 1 and kinds[0] in ("torch symmetric memory", "CUDA IPC")
    print("memory:", kinds[0])


@pytest.mark.parametrize("name", ranks.REPLAYED)
def test_replays_of_graphs(name: str) -> None:
    assert interlace.run(ranks.replays, 2, name, 100, place="cuda", processes=True) == [[], []]


def test_wait_does_not_block_the_host() -> None:
    answers = interlace.run(ranks.host_goes_on, 2, place="cuda", processes=True)
    assert answers == [(True, True)] * 2


def test_inputs_may_be_dropped_at_once() -> None:
    assert interlace.run(ranks.dropped_inputs, 2, 20, place="cuda", processes=True) == [[], []]


def test_layers_forward_and_backward() -> None:
    assert interlace.run(ranks.layers, 2, 3, place="cuda", processes=True) == [[], []]


def test_a_rank_that_does_not_come_is_named_within_the_timeout() -> None:
    with pytest.raises(RankError) as caught:
        answers = interlace.run(
            ranks.leaves_the_others, 2, "sleeps", place="cuda", processes=True, timeout=20.0
        )
        raise AssertionError(answers)
    assert "rank 1" in str(caught.value) or "ranks [1]" in str(caught.value)
    assert float((torch.ones(8, device="cuda") * 2).sum()) == 16.0


def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(RankError) as caught:
        interlace.run(ranks.leaves_the_others, 2, "dies", place="cuda", processes=True)
    assert re.search(r"rank 1\b", str(caught.value))
    assert interlace.run(ranks.memory_kind, 2, place="cuda", processes=True)


def test_a_mismatch_is_named_on_every_rank() -> None:
    for text in interlace.run(ranks.mismatch, 2, place="cuda", processes=True):
        assert "shape of tensor differs between ranks" in text


def test_messages() -> None:
    answers = interlace.run(ranks.messages, 2, place="cuda", processes=True)
    assert answers == [[1.0, 11.0, 21.0], [0.0, 10.0, 20.0]]


def test_futures_order_streams() -> None:
    assert interlace.run(ranks.futures, 2, place="cuda", processes=True) == [(4.0, 2.0)] * 2


def test_cupy_arrays() -> None:
    pytest.importorskip("cupy")
    expected = [3.0 * 16, 2.0 * 16**3]
    assert interlace.run(ranks.cupy_arrays, 2, place="cuda", processes=True) == [expected] * 2


def test_the_backend_of_torch_serves_both_devices(tmp_path) -> None:  # type: ignore[no-untyped-def]
    answers = interlace.run(ranks.process_group, 2, str(tmp_path / "store"), place="shm")
    for answer in answers:
        assert answer == {
            "gpu": 6.0,
            "cpu": 3.0,
            "gathered": [0.0, 1.0],
            "part": answer["part"],
            "product": True,
            "devices": ["cpu", "cuda"],
        }
    assert [answer["part"] for answer in answers] == [0.0, 2.0]


def test_one_hardware_queue_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron sets this variable; a process reads it only when it starts."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    setup = functools.partial(launcher._install_on_gpu, {}, 60.0)
    names = ["fused_gather", "pipelined_gather", "asynchronous_gather", "all_reduce_by_copies"]
    with ProcessPool(2) as pool:
        wrong = pool.run(ranks.operations, (names, 5, True, True), setup=setup, timeout=60.0)
    assert wrong == [[], []]

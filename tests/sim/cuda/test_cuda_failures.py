"""Ends of waits on a GPU that would not end by themselves: bounds, dead peers, aborts.

On the fake GPU; the watchdog looks when it is told to.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import pytest
import torch

import fake_host
import interlace
from fake_cuda import DeviceHang, FakeGpu
from fake_driver import install
from fake_host import look, own_place
from interlace.groups.groups import default_group
from interlace.kernels.signal import ABORT_WORD, CLAIMED_WORD, CREDIT_WORDS, EPOCH_WORD
from interlace.runtime.core.errors import AbortedError, CollectiveTimeoutError, PeerDiedError
from interlace.runtime.places.cuda import watchdog as cuda_watchdog
from interlace.runtime.places.cuda.stream import DeviceStream
from interlace.runtime.places.cuda.watchdog import LINGER_SECONDS, Watchdog


def warm_up() -> None:
    interlace.all_reduce(torch.ones(4), algorithm="copy")
    torch.cuda.synchronize()


def failing(function: Any) -> Exception:
    with pytest.raises(interlace.InterlaceError) as caught:
        function()
    return caught.value


def test_a_wait_of_a_stream_is_bounded_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = install(monkeypatch, FakeGpu(eager=0.0))

    def on_rank() -> Any:
        warm_up()
        place = own_place()
        if place.rank == 1:
            return None  # does not come
        workspace = default_group().arena.lease(_layout(), "an op")
        default_group().compute.wait(workspace, 1, 3)
        with pytest.raises(DeviceHang):
            gpu.synchronize(gpu.current)
        look()
        assert place.failure is None  # nobody is late yet
        look(place.timeout - 1)
        look(place.timeout + 1)
        torch.cuda.synchronize()  # the stream was let go
        return failing(lambda: interlace.all_reduce(torch.ones(4)))

    error = None
    try:
        error = fake_host.run(on_rank, 2)[0]
    except CollectiveTimeoutError as raised:
        error = raised
    assert error is not None
    assert "an op has waited 300 s for rank 1: slot at byte" in str(error)


def _layout(*, data: bool = False) -> Any:
    from interlace.runtime.core.memory import Layout

    layout = Layout()
    layout.add_slots(8)
    if data:
        layout.add_data(64)
    return layout


def test_time_that_a_stream_spends_before_a_wait_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = install(monkeypatch, FakeGpu(eager=0.0))

    def on_rank() -> None:
        warm_up()
        place = own_place()
        held = threading.Event()
        gpu.enqueue(gpu.current, "the caller's own work", lambda: iter([held.is_set]))
        interlace.all_reduce(torch.ones(4), algorithm="copy")
        look()
        look(10 * place.timeout)
        assert place.failure is None
        held.set()
        torch.cuda.synchronize()

    fake_host.run(on_rank, 2)


def test_a_kernel_that_gave_up_is_found_in_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeGpu())

    def on_rank() -> None:
        warm_up()
        place = own_place()
        if place.rank == 0:
            header = place.header(place.workspaces()[0], 0)
            header[CLAIMED_WORD : CLAIMED_WORD + 6] = torch.tensor([1, 1, 1064, 7, 6, 3])
        place.processes.exchange(b"", "a meeting")
        look()
        look()
        place.check()

    with pytest.raises(CollectiveTimeoutError, match="gave up waiting for rank 1: slot at byte"):
        fake_host.run(on_rank, 2)


def test_a_rank_learns_that_a_kernel_of_another_gave_up(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeGpu())

    def on_rank() -> str:
        warm_up()
        place = own_place()
        place.header(place.workspaces()[0], place.rank)[ABORT_WORD] = 7
        look()
        look()
        return str(failing(lambda: interlace.all_reduce(torch.ones(4))))

    with pytest.raises(AbortedError, match="a kernel of another rank of the group has given up"):
        fake_host.run(on_rank, 1)


def test_a_dead_peer_ends_what_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeGpu())

    def on_rank() -> None:
        warm_up()
        place = own_place()
        place.processes.dead = PeerDiedError(1, 4711, "work on the GPU")
        look()
        for buffer in place.workspaces():
            assert int(place.header(buffer, 0)[ABORT_WORD]) == 1
        interlace.all_reduce(torch.ones(4))

    with pytest.raises(PeerDiedError, match=r"rank 1 \(pid 4711\) died"):
        fake_host.run(on_rank, 1)


def test_the_thread_looks_by_itself_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeGpu())
    looks = threading.Semaphore(0)
    look_once = Watchdog.look

    def looking(self: Watchdog, place: Any, now: float) -> None:
        looks.release()
        look_once(self, place, now)

    monkeypatch.setattr(Watchdog, "look", looking)

    def on_rank() -> bool:
        warm_up()
        place = own_place()
        watchdog = Watchdog(place, 5.0)
        watchdog.look_after()
        seen = all(looks.acquire() for _ in range(2))
        thread = watchdog._thread
        watchdog.stop()
        assert thread is not None and not thread.is_alive()
        return seen

    assert fake_host.run(on_rank, 1) == [True]


def test_a_watchdog_does_not_keep_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    import gc
    import weakref

    install(monkeypatch, FakeGpu())

    def on_rank() -> Any:
        warm_up()
        place = own_place()
        assert place._watchdog is not None
        return weakref.ref(place)

    reference = fake_host.run(on_rank, 1)[0]
    gc.collect()
    assert reference() is None


def test_the_first_failure_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeGpu())

    def on_rank() -> None:
        place = own_place()
        place.fail(CollectiveTimeoutError("the first"))
        place.fail(CollectiveTimeoutError("the second"))
        place.check()

    with pytest.raises(CollectiveTimeoutError, match="the first"):
        fake_host.run(on_rank, 1)


def _waiting_for_credit(gpu: FakeGpu) -> tuple[Any, torch.Tensor]:
    """Rank 0 waits for rank 1's credit before it copies into its memory; and that memory."""
    warm_up()
    group, rank = default_group(), interlace.get_rank()
    workspace = group.arena.lease(_layout(data=True), "an op")
    theirs = workspace.data(1, 0, (4,), torch.float32)
    header = workspace.header(0)
    header[EPOCH_WORD] = header[CREDIT_WORDS + 1] = 6
    own_place()._epochs[workspace.buffer.addresses[rank]] = 7  # the credit of op 7 is missing
    if rank == 0:
        group.compute.wait_credits(workspace)
        group.compute.copy(theirs, torch.ones(4), "into a peer's memory")
    return workspace, theirs


def _released_by(monkeypatch: pytest.MonkeyPatch, release: Any, seconds: float) -> list[Any]:
    """Whether rank 0's copy has come through: after the abort, then ``seconds`` after ``release``."""
    gpu = install(monkeypatch, FakeGpu(eager=0.0))
    seen: list[bool] = []

    def on_rank() -> None:
        workspace, theirs = _waiting_for_credit(gpu)
        place = own_place()
        if place.rank == 0:
            place.failure = release(workspace) if seconds == 0 else None
            watchdog, begin = place._watched(), time.monotonic()
            with contextlib.suppress(DeviceHang):
                place.wake_kernels()
                watchdog.let_go(place, begin)
                torch.cuda.synchronize()
            seen.append(bool(theirs[0] == 1))
            release(workspace)
            for later in (0.0, seconds):
                watchdog._copy_headers(place)
                with contextlib.suppress(DeviceHang):
                    gpu.run_until(lambda: not any(gpu._queues.values()))
                watchdog.let_go(place, begin + later)
            gpu.run_until(lambda: bool(theirs[0] == 1))
            seen.append(bool(theirs[0] == 1))
        place.processes.exchange(b"", "a meeting")
        place.failure = None

    with contextlib.suppress(interlace.InterlaceError):
        fake_host.run(on_rank, 2)
    return seen


def _is_through(workspace: Any) -> None:
    workspace.header(0)[CREDIT_WORDS + 1] = -7


def _is_dead(workspace: Any) -> PeerDiedError:
    return PeerDiedError(1, 4711, "an op")


def _says_nothing(workspace: Any) -> None: ...


@pytest.mark.parametrize(
    ("release", "seconds", "expected"),
    [
        (_is_through, 0.1, [False, True]),
        (_says_nothing, LINGER_SECONDS + 0.1, [False, True]),
        (_is_dead, 0, [True, True]),
    ],
)
def test_a_copy_into_memory_that_a_peer_may_read_is_held_back(
    release: Any, seconds: float, expected: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the peer is through, or dead, or had its time: copies cannot look whether to run."""
    assert _released_by(monkeypatch, release, seconds) == expected


def test_letting_go_at_once_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_watchdog.Wait, "for_credit", False)
    assert _released_by(monkeypatch, _is_through, 0.1) == [True, True]


@pytest.mark.parametrize("stream_words", [True, False], ids=["streams wait", "kernels wait"])
@pytest.mark.parametrize("looks", [True, False], ids=["kernels signal", "streams signal"])
def test_what_was_not_received_is_not_passed_on(
    stream_words: bool, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal, the credit and the epoch behind a wait for data that was given up.

    A stream that signals by itself cannot look; that it is seen to is the negative control.
    """
    gpu = install(monkeypatch, FakeGpu(eager=0.0, stream_words=stream_words))
    if not looks:
        monkeypatch.setattr(DeviceStream, "_depends", None, raising=False)
        monkeypatch.setattr(DeviceStream, "__setattr__", _forgetful, raising=False)

    def on_rank() -> Any:
        warm_up()
        group, place = default_group(), own_place()
        workspace = group.arena.lease(_layout(), "an op")
        epoch = int(workspace.header(place.rank)[EPOCH_WORD])
        if place.rank == 0:
            group.compute.wait(workspace, 1, 3)
            group.compute.publish(workspace, 1, 5)
            group.compute.finish(workspace)
            place.wake_kernels()
            place._watched().let_go(place, time.monotonic())
            gpu.run_until(lambda: not any(gpu._queues.values()))
        place.processes.exchange(b"", "a meeting")
        slot = int(workspace.slots(place.rank, 5, 1)[0])
        header = workspace.header(place.rank)
        return slot, int(header[CREDIT_WORDS]) - epoch, int(header[EPOCH_WORD]) - epoch

    gave_up, other = fake_host.run(on_rank, 2)
    assert gave_up[2] == 0 and other[1] < 0
    assert (other[0] == 0) == (looks or not stream_words)


def _forgetful(self: Any, name: str, value: Any) -> None:
    if name != "_depends":
        object.__setattr__(self, name, value)


def test_an_alarm_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A future of an op that hangs holds a stream of the group's; not the one that ends the hang."""
    gpu = install(monkeypatch, FakeGpu(eager=0.0))

    def on_rank() -> None:
        warm_up()
        place = own_place()
        place.side_stream().wait_stream(torch.cuda.current_stream())
        gpu.enqueue(place.side_stream().cuda_stream, "a hang", lambda: iter([lambda: False]))
        place.wake_kernels()
        header = place.header(place.workspaces()[0], 0)
        gpu.run_until(lambda: bool(header[ABORT_WORD]))
        gpu._queues[place.side_stream().cuda_stream].clear()
        header[ABORT_WORD] = 0

    fake_host.run(on_rank, 1)

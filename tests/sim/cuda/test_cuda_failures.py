"""Ends of waits on a GPU that would not end by themselves: bounds, dead peers, aborts.

The GPU is the fake one, and its watchdog looks only when a test calls it.
"""

import contextlib
import gc
import itertools
import pathlib
import re
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import interlace
from interlace.groups.groups import default_group
from interlace.kernels.signal import (
    ABORT_WORD,
    CLAIMED_WORD,
    CREDIT_WORDS,
    EPOCH_WORD,
    SPIN_LIMIT_WORD,
)
from interlace.runtime.core.errors import AbortedError, CollectiveTimeoutError, PeerDiedError
from interlace.runtime.core.memory import Layout
from interlace.runtime.places.gpu import driver
from interlace.runtime.places.gpu.process_place import Watchdog
from interlace.runtime.places.gpu.stream import DeviceStream
from interlace.runtime.tuning import tuning as auto
from stand_ins import fake_host, fake_kernels, fake_queues
from stand_ins.fake_cuda import DeviceHang, FakeGpu, FakeStream
from stand_ins.fake_host import gpu_ranks, look, own_place
from stand_ins.replaced import Replacement, replaced

WITH_FEW_QUEUES_TOO = pytest.mark.usefixtures("connections")
DOCUMENT = pathlib.Path(__file__).parents[3] / "docs/how-to/gpu/first-run.md"


def warm_up() -> None:
    interlace.all_reduce(torch.ones(4), algorithm="copy")
    torch.cuda.synchronize()


def _limit_where_no_alarm_comes() -> None:
    """With one queue the alarm is behind the next wait, but the wait is bounded."""
    if fake_queues.CONNECTIONS == 1:
        _limit(20)


def _run(on_rank: Any, gpu: FakeGpu, *faults: Replacement) -> None:
    """Run on two ranks; without an alarm the wait itself reports its timeout."""
    with contextlib.ExitStack() as stack:
        if fake_queues.CONNECTIONS == 1:
            stack.enter_context(
                pytest.raises(CollectiveTimeoutError, match="timed out waiting for")
            )
        fake_host.run(on_rank, 2, gpu, *faults)


def _limit(polls: int) -> None:
    place = own_place()
    for buffer in place.workspaces():
        place.header(buffer, place.rank)[SPIN_LIMIT_WORD] = polls


def _layout(*, data: bool = False) -> Layout:
    layout = Layout()
    layout.add_slots(8)
    if data:
        layout.add_data(64)
    return layout


GAVE_UP = pytest.raises(CollectiveTimeoutError, match="timed out waiting for rank 1: slot at byte")


@WITH_FEW_QUEUES_TOO
@gpu_ranks(2, raises=GAVE_UP, eager=0.0)
def test_a_wait_of_a_stream_is_bounded_and_named() -> None:
    """With one hardware queue the alarm would be after the wait that it must end."""
    warm_up()
    place = own_place()
    if place.rank == 1:
        return  # does not come
    _limit(100)
    workspace = default_group().arena.lease(_layout(), "an op")
    default_group().compute.wait(workspace, 1, 3)
    assert place.failure is None
    torch.cuda.synchronize()
    look()  # brings the header over
    torch.cuda.synchronize()
    look()
    interlace.all_reduce(torch.ones(4))


@pytest.mark.parametrize("which", [0, 1], ids=["fast polls", "slow polls"])
def test_the_bound_is_the_timeout_times_a_poll(which: int) -> None:
    """docs/how-to/gpu/first-run.md has the factors; a poll takes 100 us here."""
    text = " ".join(DOCUMENT.read_text().split())
    said = re.search(
        r"([\d.]+) to ([\d.]+) microseconds .*? ten minutes takes (\d+) to (\d+) minutes", text
    )
    assert said is not None
    poll, minutes = float(said[1 + which]), float(said[3 + which])
    passed = [0.0]

    def polls(start: int) -> Iterator[int]:
        for number in itertools.count(start):
            passed[0] += poll
            yield number

    def on_rank() -> None:
        warm_up()
        own_place().set_timeout(1e-4)
        if interlace.get_rank() == 0:
            passed[0] = 0.0
            workspace = default_group().arena.lease(_layout(), "an op")
            default_group().compute.wait(workspace, 1, 3)
            torch.cuda.synchronize()

    counted = (fake_kernels, "itertools", SimpleNamespace(count=polls))
    with pytest.raises(CollectiveTimeoutError, match="timed out waiting for rank 1"):
        fake_host.run(on_rank, 2, FakeGpu(eager=0.0), counted)
    assert passed[0] == pytest.approx(100 * minutes / 10, rel=0.02)


@pytest.mark.parametrize("pooled", [False, True])
def test_the_alarm_is_no_stream_of_another_group(pooled: bool) -> None:
    """torch's pool has 32 streams per priority, so that another group soon gets the same stream: the
    control.
    """

    def on_rank() -> None:
        groups = [interlace.new_group([0]) for _ in range(40)]
        streams = {group.copying._own.cuda_stream for group in groups}  # type: ignore[union-attr]
        assert (own_place().alarm_stream().cuda_stream in streams) == pooled

    gpu = FakeGpu(eager=0.0, connections=32)
    of_the_pool = (driver, "alarm_stream", lambda device: FakeStream(priority=-1))
    fake_host.run(on_rank, 1, gpu, *[of_the_pool] * pooled)
    assert gpu.words_written == 0


@gpu_ranks(2, raises=pytest.raises(CollectiveTimeoutError, match="1064 was 6, expected 7"))
def test_a_kernel_that_gave_up_is_found_in_its_header() -> None:
    warm_up()
    place = own_place()
    if place.rank == 0:
        header = place.header(place.workspaces()[0], 0)
        header[CLAIMED_WORD : CLAIMED_WORD + 6] = torch.tensor([1, 1, 1064, 7, 6, 3])
    place.processes.exchange(b"", "a meeting")
    look()
    look()
    place.check()


OF_ANOTHER = pytest.raises(AbortedError, match="kernel of another rank of the group has timed out")


@gpu_ranks(raises=OF_ANOTHER)
def test_a_rank_learns_that_a_kernel_of_another_gave_up() -> None:
    warm_up()
    place = own_place()
    place.header(place.workspaces()[0], place.rank)[ABORT_WORD] = 7
    look()
    look()
    interlace.all_reduce(torch.ones(4))


@WITH_FEW_QUEUES_TOO
@gpu_ranks(raises=pytest.raises(PeerDiedError, match=r"rank 1 \(pid 4711\) died"))
def test_a_dead_peer_ends_what_waits_for_it() -> None:
    warm_up()
    place = own_place()
    place.processes.dead = PeerDiedError(1, 4711, "work on the GPU")
    look()
    torch.cuda.synchronize()
    for buffer in place.workspaces():
        assert int(place.header(buffer, 0)[ABORT_WORD]) == 1
    interlace.all_reduce(torch.ones(4))


@gpu_ranks()
def test_the_thread_looks_by_itself_and_ends() -> None:
    looks = threading.Semaphore(0)
    look_once = Watchdog.look

    def looking(self: Watchdog, place: Any) -> None:
        looks.release()
        look_once(self, place)

    warm_up()
    watchdog = Watchdog(own_place())
    with replaced((Watchdog, "look", looking)):
        watchdog.look_after()
        assert all(looks.acquire() for _ in range(2))
        thread = watchdog._thread
        watchdog.stop()
    assert thread is not None and not thread.is_alive()


def test_a_watchdog_does_not_keep_its_place() -> None:
    def on_rank() -> Any:
        warm_up()
        place = own_place()
        assert place._watchdog is not None
        return weakref.ref(place)

    reference = fake_host.run(on_rank, 1, FakeGpu())[0]
    gc.collect()
    assert reference() is None


@gpu_ranks(raises=pytest.raises(CollectiveTimeoutError, match="the first"))
def test_the_first_failure_is_kept() -> None:
    place = own_place()
    place.fail(CollectiveTimeoutError("the first"))
    place.fail(CollectiveTimeoutError("the second"))
    place.check()


def _let_run(gpu: FakeGpu, turns: int) -> None:
    """Continue even if only polls are left."""
    for _ in range(turns):
        gpu.run_some(1)


@WITH_FEW_QUEUES_TOO
@pytest.mark.parametrize(
    ("credit", "linger", "copied"),
    [(-7, fake_kernels.LINGER_POLLS, True), (6, fake_kernels.LINGER_POLLS, False), (6, 0, True)],
    ids=["given", "missing", "late"],
)
def test_a_copy_into_memory_that_a_peer_may_read_is_held_back(
    credit: int, linger: int, copied: bool
) -> None:
    """Copies cannot check for an abort, so the stream waits for the peer, or for a fixed time."""
    gpu = FakeGpu(eager=0.0)
    seen: list[bool] = []

    def on_rank() -> None:
        warm_up()
        group, place = default_group(), own_place()
        workspace = group.arena.lease(_layout(data=True), "an op")
        theirs = workspace.data(1, 0, (4,), torch.float32)
        if place.rank == 0:
            header = workspace.header(0)
            header[EPOCH_WORD] = header[CREDIT_WORDS] = 7
            header[CREDIT_WORDS + 1] = 6  # the credit of op 7 is missing
            _limit_where_no_alarm_comes()
            group.compute.wait_credits(workspace)
            group.compute.copy(theirs, torch.ones(4), "into a peer's memory")
            place.wake_kernels()
            _let_run(gpu, 30)
            header[CREDIT_WORDS + 1] = credit
            _let_run(gpu, 50)
            seen.append(bool(theirs[0] == 1))
            gpu.run_until(lambda: not any(gpu._queues.values()))
        place.processes.exchange(b"", "a meeting")

    _run(on_rank, gpu, (fake_kernels, "LINGER_POLLS", linger))
    assert seen == [copied]


def _forgetful(wait: Any) -> Any:
    """The mutant: the stream forgets the wait that the next work depends on."""

    def waiting(self: DeviceStream, *args: Any) -> None:
        wait(self, *args)
        self._depends = None

    return waiting


@WITH_FEW_QUEUES_TOO
@pytest.mark.parametrize("stream_words", [True, False], ids=["words", "kernels"])
@pytest.mark.parametrize("looks", [True, False], ids=["kernels signal", "streams signal"])
def test_what_was_not_received_is_not_passed_on(stream_words: bool, looks: bool) -> None:
    """After a timed-out wait for data no signal, credit and epoch may be stored. A stream that signals by
    itself cannot check this; it is the negative control.
    """
    gpu = FakeGpu(eager=0.0, stream_words=stream_words)
    fault = (DeviceStream, "wait", _forgetful(DeviceStream.wait))

    def on_rank() -> None:
        warm_up()
        group, place = default_group(), own_place()
        workspace = group.arena.lease(_layout(), "an op")
        epoch = int(workspace.header(place.rank)[EPOCH_WORD])
        if place.rank == 0:
            _limit_where_no_alarm_comes()
            group.compute.wait(workspace, 1, 3)
            group.compute.publish(workspace, 1, 5)
            group.compute.finish(workspace)
            place.wake_kernels()
            gpu.run_until(lambda: not any(gpu._queues.values()))
        place.processes.exchange(b"", "a meeting")
        slot = int(workspace.slots(place.rank, 5, 1)[0])
        header = workspace.header(place.rank)
        credit, now = int(header[CREDIT_WORDS]), int(header[EPOCH_WORD])
        seen[place.rank] = slot, credit - epoch, now - epoch

    seen: dict[int, Any] = {}
    _run(on_rank, gpu, *[fault] * (not looks))
    gave_up, other = seen[0], seen[1]
    assert gave_up[2] == 0 and other[1] < 0
    assert (other[0] == 0) == (looks or not stream_words)


@pytest.mark.parametrize(
    ("labels", "stands_behind"),
    [
        (["a kernel that waits"], False),
        (["wait for a word"], True),
        (["a kernel that waits", "what follows"], True),
    ],
    ids=["a kernel", "a wait", "what follows a kernel"],
)
def test_an_alarm_waits_for_nothing_but_a_queue(
    labels: list[str], stands_behind: bool, connections: int
) -> None:
    """A future of an op that hangs holds a stream of the group, but not the alarm's stream. With a single
    hardware queue, CUDA's waits would block the queue, so the waits are kernels with a bound.
    """
    gpu = FakeGpu(eager=0.0)

    def on_rank() -> None:
        warm_up()
        place = own_place()
        place.side_stream().wait_stream(torch.cuda.current_stream())
        for label in labels:
            gpu.enqueue(place.side_stream().cuda_stream, label, lambda: iter([lambda: False]))
        place.wake_kernels()
        header = place.header(place.workspaces()[0], 0)
        gpu.run_until(lambda: bool(header[ABORT_WORD]))
        gpu._queues[place.side_stream().cuda_stream].clear()
        header[ABORT_WORD] = 0

    hangs = connections == 1 and stands_behind
    with pytest.raises(DeviceHang, match=labels[0]) if hangs else contextlib.nullcontext():
        fake_host.run(on_rank, 1, gpu)


def reduce(length: int, dtype: torch.dtype = torch.float32) -> None:
    interlace.all_reduce(torch.ones(length, dtype=dtype))


DIFFERS = pytest.raises(ValueError, match="shape of tensor differs between ranks")


@WITH_FEW_QUEUES_TOO
@pytest.mark.parametrize("first", [0, 1], ids=["unknown call", "known call"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_mismatch_is_named_though_nobody_waited(first: int, rank: int) -> None:
    def on_rank() -> None:
        reduce(4)
        if first:
            reduce(5)
        torch.cuda.synchronize()
        reduce(4)
        reduce(5 if interlace.get_rank() == rank else 4)
        for _ in range(3):
            reduce(4)

    with DIFFERS as caught:
        fake_host.run(on_rank, 3, FakeGpu(eager=0.0))
    text = str(caught.value)
    assert f"rank {rank}" in text or "on rank 0" in text
    assert "(5,)" in text and "(4,)" in text


@gpu_ranks(2, raises=DIFFERS, eager=0.0)
def test_a_mismatch_is_found_by_the_watchdog_of_a_rank_that_waits() -> None:
    for length in (4, 5, 4):
        reduce(length)
    torch.cuda.synchronize()
    reduce(5 if interlace.get_rank() else 4)
    own_place().processes.exchange(b"", "all have called")
    look()
    own_place().check()


# Small messages would be found to differ before the ranks can meet.
IN_WORKSPACES = (auto, "LARGEST_LOW_LATENCY_BYTES", 0)


@pytest.mark.parametrize("known", [True, False], ids=["", "a plan"])
@gpu_ranks(
    2,
    IN_WORKSPACES,
    raises=pytest.raises(ValueError, match=r"shape of tensor differs.*, True, False\]"),
    eager=0.0,
)
def test_the_work_of_the_very_op_fails(known: bool) -> None:
    """No later call and no watchdog is needed: the work fails after the peer has noted its call."""
    place, rank = own_place(), interlace.get_rank()
    for length in (4, 5, 4, 5, 4, 5) if known else (4, 5):
        reduce(length)
    torch.cuda.synchronize()
    before = interlace.all_reduce(torch.ones(4), async_op=True)
    assert before is not None
    before.wait()
    torch.cuda.synchronize()
    assert before.is_success()
    if rank:
        place.processes.exchange(b"", "rank 0 has called")
    work = interlace.all_reduce(torch.ones(5 if rank else 4), async_op=True)
    assert work is not None
    early = work.exception()
    if rank == 0:
        assert early is None and not work.is_completed()
        place.processes.exchange(b"", "rank 0 has called")
    place.processes.meet(None, "both have called")
    found = [work.exception(), work.is_completed(), work.is_success()]
    for wait in (work.wait, work.synchronize):
        with pytest.raises(ValueError, match="shape of tensor differs"):
            wait()
    assert before.is_success() and before.exception() is None
    place.processes.meet(None, "both have looked")
    raise ValueError(repr(found))


@gpu_ranks(raises=pytest.raises(CollectiveTimeoutError, match="the group failed"), eager=0.0)
def test_works_fail_with_their_group() -> None:
    place = own_place()
    works = [interlace.all_reduce(torch.ones(4), async_op=True) for _ in range(2)]
    torch.cuda.synchronize()
    seen, other = works
    assert seen is not None and other is not None
    assert seen.is_completed()
    place.fail(CollectiveTimeoutError("the group failed"))
    assert seen.is_success() and seen.exception() is None
    assert isinstance(other.exception(), CollectiveTimeoutError)
    assert other.is_completed() and not other.is_success()


@gpu_ranks(2, seed=4)
def test_shards_may_change_their_length() -> None:
    """Every call asks for the terms that may differ between ranks."""
    rank = interlace.get_rank()
    for lengths in ((8, 8), (8, 8), (8, 24), (16, 8), (8, 8)):
        x = torch.full((lengths[rank], 8), rank + 1.0)
        out = interlace.all_gather_matmul(x, torch.eye(8), algorithm="fused")
        expected = torch.cat([torch.full((n, 8), r + 1.0) for r, n in enumerate(lengths)])
        torch.cuda.current_stream().synchronize()
        assert torch.equal(out, expected)


@gpu_ranks(2, raises=pytest.raises(TypeError, match="must be a tensor, got str"), eager=0.0)
def test_a_refused_call_is_told_to_those_who_went_on() -> None:
    reduce(4)
    reduce(4)
    if interlace.get_rank():
        interlace.all_reduce("no tensor")  # type: ignore[arg-type]
    else:
        reduce(4)
        reduce(4)

"""Words that carry their flag: sizes, flags that come round, who is slow, giving up, and who is chosen."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import interlace
from interlace import reference
from interlace.groups.groups import default_group
from interlace.kernels.signal import ABORT_WORD, EPOCH_WORD, HEADER_WORDS, SPIN_LIMIT_WORD
from interlace.ops.collectives import launch as low_latency
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.core.memory import WORD
from interlace.runtime.tuning import tuning
from ranks import ranks
from sim.norms.counted import launches
from support import POISON_BYTE, noise, payload, poison, poisoned, run_alone, slow_rank, starved

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
U8, I16, I32, I64 = torch.uint8, torch.int16, torch.int32, torch.int64
ANY = [U8, torch.bool, torch.float8_e4m3fn, I16, BF16, F32, I64, torch.complex64]
LOW = {"algorithm": "low_latency"}


def small_words(words: int = 8) -> Any:
    """Give programs few words, so that a few numbers need several programs."""
    return mock.patch.object(low_latency, "BLOCK_WORDS", words)


def compiled(launch: KernelLaunch) -> None:
    """Run a kernel as a GPU does: each thread sends and polls its own word."""
    launch.arguments["COMPILED"] = True


def check_three(dtype: torch.dtype, count: int) -> None:
    rank, world = interlace.get_rank(), interlace.get_world_size()
    gathered = poison(torch.zeros(world * count, dtype=dtype))
    interlace.all_gather(gathered, payload(rank, 1, (count,), dtype), **LOW)
    parts = [payload(each, 1, (count,), dtype) for each in range(world)]
    assert gathered.tolist() == torch.cat(parts).tolist()
    sent = payload(rank, 2, (count,), dtype)
    interlace.broadcast(sent, world - 1, **LOW)
    assert sent.tolist() == payload(world - 1, 2, (count,), dtype).tolist()
    if dtype in (F32, F16, BF16):
        inputs = [noise(each, 3, (count,), dtype) for each in range(world)]
        summed = inputs[rank].clone()
        interlace.all_reduce(summed, **LOW)
        assert reference.worst_ratio(summed, *reference.reduce(inputs)) <= 1
        every: list[Any] = [None] * world
        interlace.all_gather_object(every, summed)
        assert torch.equal(summed, every[0]), "bits differ between ranks"


@pytest.mark.parametrize("count", [1, 7, 33])
@pytest.mark.parametrize("dtype", ANY, ids=str)
def test_lengths_that_are_no_words(dtype: torch.dtype, count: int) -> None:
    with poisoned(), small_words():
        interlace.run(check_three, 3, dtype, count, seed=count)


@pytest.mark.parametrize("world", range(1, 9))
def test_worlds(world: int) -> None:
    with poisoned(), small_words(), launches() as seen:
        interlace.run(check_three, world, BF16, 21, seed=world)
    assert set(seen) == {
        f"low_latency_{op}_kernel" for op in ("all_gather", "all_reduce", "broadcast")
    }


@pytest.mark.parametrize("dtype", [U8, F16, F32], ids=str)
def test_the_instructions_of_a_gpu(dtype: torch.dtype) -> None:
    """The emulator runs the asm text that is compiled, also with late words."""
    for slow in range(2):
        with poisoned(), small_words(), launches(compiled), starved(slow_rank(slow)):
            interlace.run(check_three, 2, dtype, 35, seed=slow)


@ranks(2, place="sim")
def test_memory_that_begins_anywhere() -> None:
    for shift in (1, 2, 3, 4):
        output = torch.zeros(16 + shift, dtype=torch.int8)[shift:]
        own = torch.arange(9, dtype=torch.int8)[1:] + interlace.get_rank()
        interlace.all_gather(output, own, **LOW)
        assert output.tolist() == [*range(1, 9), *range(2, 10)]
        memory = bytearray(4 * 3 + shift)
        summed = torch.frombuffer(memory, dtype=F32, count=3, offset=shift)
        summed.copy_(torch.tensor([1.0, 2.0, 3.0]))
        interlace.all_reduce(summed, **LOW)
        assert summed.tolist() == [2.0, 4.0, 6.0]


# -- flags -----------------------------------------------------------------------------------------


def set_epochs(finished: int) -> None:
    """Set the number of finished ops of every program; collective."""
    group = default_group()
    group.barrier()
    words = group.arena.words
    own = words.buffer.view(group.rank, low_latency.EPOCHS_OFFSET, (words.blocks,), I64)
    own.fill_(finished)
    group.barrier()


WRAPS = [(1 << 32) - 3, (1 << 31) - 3, (1 << 33) - 3]


@pytest.mark.parametrize("finished", WRAPS)
def test_flags_come_round(finished: int) -> None:
    """The lower half of an epoch passes 0 and negative numbers."""

    def on_rank() -> None:
        world = interlace.get_world_size()
        interlace.all_gather(torch.zeros(world, dtype=I32), torch.zeros(1, dtype=I32), **LOW)
        set_epochs(finished)
        for call in range(5):
            rows = [[rank, call, finished + call & 0x7FFFFFFF] for rank in range(world)]
            output, right = torch.full((world, 3), -1, dtype=I32), torch.tensor(rows, dtype=I32)
            interlace.all_gather(output, right[interlace.get_rank()], **LOW)
            assert torch.equal(output, right)

    for slow in range(3):
        with starved(slow_rank(slow)):
            interlace.run(on_rank, 3, seed=slow)


def test_no_word_keeps_a_flag_until_it_comes_round() -> None:
    """A long message comes in epoch 1, then short ones until the flag is 1 again, then a long one. It runs
    on threads so that words arrive one by one.
    """

    def on_rank() -> None:
        interlace.all_reduce(torch.full((4,), 100.0), **LOW)
        set_epochs((1 << 32) - 2)
        for _ in range(2):
            interlace.all_reduce(torch.ones(1), **LOW)
        tensor = torch.full((4,), 1.0 + interlace.get_rank())
        interlace.all_reduce(tensor, **LOW)
        assert tensor.tolist() == [3.0] * 4

    for slow in range(2):
        with small_words(), launches(compiled), starved(slow_rank(slow)):
            interlace.run(on_rank, 2, seed=slow)


def test_data_that_looks_like_flags() -> None:
    """The data has the next, last and present epoch in either half of an int64."""

    def on_rank() -> None:
        rank, world = interlace.get_rank(), interlace.get_world_size()
        for epoch in range(1, 6):
            own = torch.tensor([(epoch + d) << 32 | epoch + e for d in (-1, 0, 1) for e in (0, 1)])
            output = torch.zeros(world, 6, dtype=I64)
            interlace.all_gather(output, own + rank, **LOW)
            assert torch.equal(output, own + torch.arange(world)[:, None])

    for slow in range(2):
        with starved(slow_rank(slow)):
            interlace.run(on_rank, 2, seed=slow)


@pytest.mark.parametrize("slow", range(3))
def test_growing_and_shrinking_with_a_slow_rank(slow: int) -> None:
    """Programs have missed ops, and buffers grow while ops are in flight."""
    counts = [3, 40, 5, 100, 3, 41, 100]

    def on_rank() -> None:
        tensors = [payload(interlace.get_rank(), call, (n,)) for call, n in enumerate(counts)]
        started = [interlace.all_reduce(tensor, async_op=True, **LOW) for tensor in tensors]
        for work in started:
            work.wait()
        for call, tensor in enumerate(tensors):
            assert torch.equal(tensor, sum(payload(r, call, tensor.shape) for r in range(3)))

    with poisoned(), small_words(), starved(slow_rank(slow)):
        interlace.run(on_rank, 3, seed=slow)


# -- giving up -------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["all_gather", "all_reduce", "broadcast"])
def test_after_giving_up_nothing_is_stored(op: str) -> None:
    """The op after an answered op may send; then it times out, leaves the output unchanged, and the next
    op sends nothing.
    """
    made: list[tuple[KernelLaunch, Any]] = []
    output = torch.zeros(8)

    def on_rank() -> None:
        tensor = output if interlace.get_rank() == 0 else torch.zeros(8)
        if op == "all_gather":
            interlace.all_gather(tensor, torch.ones(4), **LOW)
        elif op == "all_reduce":
            interlace.all_reduce(tensor, **LOW)
        else:
            interlace.broadcast(tensor, 1, **LOW)
        if interlace.get_rank() == 0:
            made[0] = made[0][0], default_group().arena.words

    def note(launch: KernelLaunch) -> None:
        if launch.arguments["peers"].rank == 0:
            made.append((launch, None))

    with small_words(4), launches(note):
        interlace.run(on_rank, 2)
    ((launch, words),) = made
    header = words.buffer.view(0, 0, (HEADER_WORDS,), I64)
    told = words.buffer.view(1, 0, (HEADER_WORDS,), I64)
    programs = launch.extents[0]
    assert header[EPOCH_WORD] == programs
    header[SPIN_LIMIT_WORD] = 100
    theirs = words.buffer.peer_bytes[1][low_latency.WORDS_OFFSET :]
    for number, sends in enumerate((True, False, False)):
        theirs.fill_(POISON_BYTE)
        output.fill_(-7)
        run_alone(launch)
        assert bool((theirs == POISON_BYTE).all()) is not sends
        own = output[:4] if op == "all_gather" else output[:0]
        assert (output[len(own) :] == -7).all()
        assert told[ABORT_WORD] != 0
        assert header[EPOCH_WORD] == programs * (2 + number)
    epochs = words.buffer.view(0, HEADER_WORDS * WORD, (programs,), I64)
    assert epochs.tolist() == [-2] * programs


# -- the choice ------------------------------------------------------------------------------------


def test_small_messages_go_this_way_by_themselves() -> None:
    most = tuning.LARGEST_LOW_LATENCY_BYTES
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("low_latency_all_reduce", lambda: interlace.all_reduce(torch.ones(most // 4))),
        ("all_reduce", lambda: interlace.all_reduce(torch.ones(most // 4 + 1))),
        ("low_latency_all_reduce", lambda: interlace.all_reduce(torch.ones(4), "avg")),
        ("", lambda: interlace.all_reduce(torch.ones(4), "max")),
        ("", lambda: interlace.all_reduce(torch.ones(4, dtype=I64))),
        ("all_reduce", lambda: interlace.all_reduce(torch.ones(4), algorithm="kernel")),
        ("low_latency_all_gather", lambda: interlace.all_gather(torch.ones(4), torch.ones(2))),
        ("low_latency_all_gather", lambda: gather(1, I64)),
        ("all_gather", lambda: gather(most // 4 + 1, F32)),
        ("", lambda: gather(most + 1, U8)),
        ("low_latency_broadcast", lambda: interlace.broadcast(torch.ones(most // 4), 0)),
        ("", lambda: interlace.broadcast(torch.ones(most // 4 + 1), 0)),
        ("", lambda: interlace.broadcast(torch.ones(4), 0, algorithm="copy")),
        ("reduce_scatter", lambda: interlace.reduce_scatter(torch.ones(1), torch.ones(2))),
        ("all_gather", uneven),
    ]
    for number, (kernel, call) in enumerate(cases):
        with launches() as seen:
            interlace.run(call, 2)
        assert dict(seen) == ({f"{kernel}_kernel": 2} if kernel else {}), number


def gather(count: int, dtype: torch.dtype) -> None:
    interlace.all_gather(torch.ones(2 * count, dtype=dtype), torch.ones(count, dtype=dtype))


def uneven() -> None:
    count = 2 + interlace.get_rank()
    interlace.all_gather([torch.ones(2), torch.ones(3)], torch.ones(count))


@ranks(2, place="sim")
def test_words_are_made_once_and_counted() -> None:
    held = [default_group().workspace_bytes]
    for count in (4, 8, 300, 4):
        interlace.all_reduce(torch.ones(count), **LOW)
        held.append(default_group().workspace_bytes)
    assert held[0] == 0 < held[1] == held[2] < held[3] == held[4]


REFUSED = [
    (lambda: interlace.all_reduce(torch.ones(1 << 15), **LOW),
     "all_reduce: algorithm=\"low_latency\" cannot do this: it is for at most 65536 bytes, got 131072"),
    (lambda: interlace.all_gather([torch.ones(2), torch.ones(4)],
                                  torch.ones(2 + 2 * interlace.get_rank()), **LOW),
     "it gathers equal shards only"),
    (lambda: interlace.reduce_scatter(torch.ones(2), torch.ones(4), **LOW), "use all_reduce"),
    (lambda: interlace.broadcast(torch.ones(4), 0, algorithm="kernel"),
     "algorithm must be one of auto, copy, low_latency, got 'kernel'"),
    (lambda: interlace.all_reduce(torch.ones(4), "max", **LOW), "reduces with op sum or avg, got 'max'"),
    (lambda: interlace.all_reduce(torch.ones(4).long(), **LOW),
     "TypeError: supports float32, float16 and bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED)
@ranks(2, place="sim")
def test_what_cannot_be_done_is_said(call: Any, message: str) -> None:
    with pytest.raises(TypeError if message.startswith("TypeError: ") else ValueError) as caught:
        call()
    assert message.removeprefix("TypeError: ") in str(caught.value)

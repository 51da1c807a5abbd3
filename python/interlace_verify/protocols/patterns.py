"""The signal patterns of ``kernels/signal.py`` as protocols that the explorer can visit completely.

Steps correspond to code as follows::

    ``Publish`` of a slot               ``publish``, ``publish_kernel``, ``publish_slots`` of several: an
                                        atomic exchange
    ``Wait`` for a slot                 ``wait``, ``wait_kernel``, ``wait_slots`` for several: only the poll
                                        that ends it is a step
    ``Wait`` for a credit, epoch - 1    ``wait_credit``; ``wait_credits_kernel`` for all ranks' credits
    ``Publish`` of all credits          ``finish_kernel``, the last item of an op on its stream
    ``BeginWrite`` ... ``EndRead``      stores and loads of a chunk, a tile or a staged tensor
    claim, check, record, abort         ``give_up``: compare-and-swap, acquire, stores, ``publish`` to all
    swap of a flag                      ``put_flag``, ``wait_flag``: only the swap that succeeds is a step

``slot 1 of rank 0`` lies in rank 0's memory, and rank 1 publishes it; likewise ``credit 1 of rank 0``.
``current_epoch`` is not a step: op k on a channel has epoch k, and only its own rank reads the epoch word.

Not covered:

- Weak memory: why ``publish`` releases after a barrier, and why ``wait`` acquires (see the race detector).
- More than one chunk per peer and op. Chunks share only the credit.
- Growth of a channel, and the lifetime of the epoch word, which stays until the copy stream has read it.
- Stores of a kernel after one of its waits has timed out.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from interlace_verify.protocols.explorer import (
    EMPTY,
    CompareAndSwap,
    Exploration,
    Process,
    Protocol,
    ProtocolStep,
    Publish,
    Wait,
    explore,
    read,
    write,
)


def slot(owner: int, source: int, where: str = "") -> str:
    """Return the signal slot in ``owner``'s memory that ``source`` publishes."""
    return f"slot {source} of rank {owner}{where}"


def credit(owner: int, peer: int, where: str = "") -> str:
    """Return the word in ``owner``'s header that counts the ops that ``peer`` has finished."""
    return f"credit {peer} of rank {owner}{where}"


def part(owner: int, source: int, where: str = "") -> str:
    """Return the region of ``owner``'s workspace that ``source`` pushes into."""
    return f"part {source} of rank {owner}{where}"


def data(rank: int, number: int) -> str:
    return f"rank {rank}'s data of round {number}"


def peers_of(rank: int, ranks: int) -> list[int]:
    """Return all other ranks, the next one first, as in ``tiling.send_order``."""
    return [(rank + step) % ranks for step in range(1, ranks)]


def _protocol(
    name: str, ranks: int, rounds: int, steps_of: Callable[[int, int], Iterable[ProtocolStep]]
) -> Protocol:
    """Return one process per rank. In round ``number`` = 1, 2, ... it takes ``steps_of(rank, number)``."""
    _check(ranks, rounds)
    numbers = range(1, rounds + 1)
    processes = [
        Process(f"rank {rank}", tuple(s for number in numbers for s in steps_of(rank, number)))
        for rank in range(ranks)
    ]
    return Protocol(name, ranks, rounds, tuple(processes))


def _check(ranks: int, rounds: int) -> None:
    if ranks < 2:
        raise ValueError(f"ranks: must be at least 2, got {ranks}")
    if rounds < 1:
        raise ValueError(f"rounds: must be at least 1, got {rounds}")


def _channel(number: int, channels: int) -> tuple[str, int]:
    """Return the suffix of op ``number``'s channel in names, and its epoch there; ops rotate channels."""
    where = f" on channel {(number - 1) % channels}" if channels > 1 else ""
    return where, (number - 1) // channels + 1


def _wait_credits(rank: int, ranks: int, epoch: int) -> list[ProtocolStep]:
    return [Wait(credit(rank, peer), epoch - 1) for peer in range(ranks)]


def _finish(rank: int, ranks: int, epoch: int, where: str = "") -> list[ProtocolStep]:
    return [Publish(credit(peer, rank, where), epoch) for peer in range(ranks)]


# -- pushing -----------------------------------------------------------------------------------


def _send(rank: int, ranks: int, number: int, channels: int = 1) -> list[ProtocolStep]:
    where, epoch = _channel(number, channels)
    steps: list[ProtocolStep] = []
    for peer in peers_of(rank, ranks):
        steps.append(Wait(credit(rank, peer, where), epoch - 1))
        steps += write([part(peer, rank, where)], data(rank, number))
        steps.append(Publish(slot(peer, rank, where), epoch))
    return steps


def _collect(rank: int, ranks: int, number: int, channels: int = 1) -> list[ProtocolStep]:
    where, epoch = _channel(number, channels)
    steps: list[ProtocolStep] = []
    for source in reversed(peers_of(rank, ranks)):
        steps.append(Wait(slot(rank, source, where), epoch))
        steps += read([part(rank, source, where)], data(source, number))
    return steps


def push(ranks: int, rounds: int) -> Protocol:
    """Every rank pushes to all, then collects: ``reduce_scatter_kernel``, ``all_reduce_kernel``.

    As in the fused kernels that sum: a program first stores what others need, then takes its own part.
    """

    def steps_of(rank: int, number: int) -> list[ProtocolStep]:
        steps = _send(rank, ranks, number) + _collect(rank, ranks, number)
        return steps + _finish(rank, ranks, number)

    return _protocol("push", ranks, rounds, steps_of)


def push_on_streams(ranks: int, rounds: int, channels: int = 2) -> Protocol:
    """A copy stream pushes and a compute stream collects, on channels in turn.

    ``all_gather_matmul`` uses the copy engine in this way. An op's copies wait for the end of the previous
    op on the *same* channel (``Communicator.enqueue``), so they may run ahead of the compute stream by one
    op. With ``channels=1`` these are the copiers and collectors of ``all_gather_kernel``. ``sent`` and
    ``ended`` are events between the streams of a rank.
    """
    _check(ranks, rounds)
    if channels < 1:
        raise ValueError(f"channels: must be at least 1, got {channels}")
    processes = []
    for rank in range(ranks):
        copying: list[ProtocolStep] = []
        computing: list[ProtocolStep] = []
        for number in range(1, rounds + 1):
            where, epoch = _channel(number, channels)
            copying.append(Wait(f"ended of rank {rank}", max(0, number - channels)))
            copying += _send(rank, ranks, number, channels)
            copying.append(Publish(f"sent of rank {rank}", number))
            computing += _collect(rank, ranks, number, channels)
            computing.append(Wait(f"sent of rank {rank}", number))
            computing += _finish(rank, ranks, epoch, where)
            computing.append(Publish(f"ended of rank {rank}", number))
        processes.append(Process(f"rank {rank} copying", tuple(copying)))
        processes.append(Process(f"rank {rank} computing", tuple(computing)))
    name = f"push on streams, {channels} channel{'s' if channels > 1 else ''}"
    return Protocol(name, ranks, rounds, tuple(processes))


# -- pulling -----------------------------------------------------------------------------------


def _memory(owner: int, ranks: int) -> list[str]:
    """Return the cells where ``owner`` stages: they overlap all parts that other ops push into."""
    return [part(owner, source) for source in peers_of(owner, ranks)]


def _pull(rank: int, ranks: int, number: int, sources: Sequence[int]) -> list[ProtocolStep]:
    steps = _wait_credits(rank, ranks, number)
    if rank in sources:
        steps += write(_memory(rank, ranks), data(rank, number))
        steps += [Publish(slot(peer, rank), number) for peer in peers_of(rank, ranks)]
    for source in reversed(peers_of(rank, ranks)):
        if source in sources:
            steps.append(Wait(slot(rank, source), number))
            steps += read(_memory(source, ranks), data(source, number))
    return steps


def pull(ranks: int, rounds: int, sources: Sequence[int] | None = None) -> Protocol:
    """Stage in own memory, signal all ranks, read theirs: ``all_gather_copy``, ``Layout.pulled``.

    ``sources`` are the ranks that stage, by default all. A single one makes it a broadcast, in which a rank
    that only reads may be a round ahead of another.
    """
    _check(ranks, rounds)
    staging = range(ranks) if sources is None else sources
    if not staging or not set(staging) <= set(range(ranks)):
        raise ValueError(f"sources: must be some of ranks 0 to {ranks - 1}, got {list(staging)}")

    def steps_of(rank: int, number: int) -> list[ProtocolStep]:
        return _pull(rank, ranks, number, staging) + _finish(rank, ranks, number)

    return _protocol("pull", ranks, rounds, steps_of)


def push_after_pull(ranks: int, rounds: int) -> Protocol:
    """Pull in odd rounds and push in even ones, over the same memory: ``Communicator.enqueue``.

    A push needs only the credit of its receiver. But other ranks may still read the data that the receiver
    staged before. So after a pull the host first waits for all credits.
    """

    def steps_of(rank: int, number: int) -> list[ProtocolStep]:
        if number % 2:
            steps = _pull(rank, ranks, number, range(ranks))
        else:
            steps = _wait_credits(rank, ranks, number)
            steps += _send(rank, ranks, number) + _collect(rank, ranks, number)
        return steps + _finish(rank, ranks, number)

    return _protocol("push after pull", ranks, rounds, steps_of)


def two_shot(ranks: int, rounds: int) -> Protocol:
    """Stage, sum one's segment of all inputs, signal all ranks, read their sums: ``all_reduce_copy``."""

    def steps_of(rank: int, number: int) -> list[ProtocolStep]:
        peers = peers_of(rank, ranks)
        inputs, sums = f"inputs of round {number}", f"sums of round {number}"
        steps = _wait_credits(rank, ranks, number)
        steps += write([f"input of rank {rank}"], inputs)
        steps += [Publish(slot(peer, rank, ", staged"), number) for peer in peers]
        steps += [Wait(slot(rank, peer, ", staged"), number) for peer in peers]
        begin, end = read([f"input of rank {peer}" for peer in range(ranks)], inputs)
        steps += [begin, *write([f"sums of rank {rank}"], sums), end]
        steps += [Publish(slot(peer, rank, ", summed"), number) for peer in peers]
        for peer in reversed(peers):
            steps.append(Wait(slot(rank, peer, ", summed"), number))
            steps += read([f"sums of rank {peer}"], sums)
        return steps + _finish(rank, ranks, number)

    return _protocol("two-shot", ranks, rounds, steps_of)


def flag_barrier(ranks: int, rounds: int) -> Protocol:
    """The barrier of torch's handle of symmetric memory, ``handle_barrier_kernel``: flags of 0 and 1.

    ``put_flag``: compare-and-swap the peer's flag from 0 to 1. ``wait_flag``: the own flag from 1 to 0.
    Around it, a round of data: write own memory, barrier, read all others', barrier.
    """

    def steps_of(rank: int, number: int) -> list[ProtocolStep]:
        peers = sorted(peers_of(rank, ranks))
        barrier: list[ProtocolStep] = []
        barrier += [CompareAndSwap(f"flag {rank} of rank {peer}", 0, 1) for peer in peers]
        barrier += [CompareAndSwap(f"flag {peer} of rank {rank}", 1, 0) for peer in peers]
        content = f"data of round {number}"
        steps = write([f"memory of rank {rank}"], content) + barrier
        return steps + read([f"memory of rank {peer}" for peer in peers], content) + barrier

    return _protocol("flag barrier", ranks, rounds, steps_of)


def giving_up(ranks: int, rounds: int) -> Protocol:
    """Waits that time out: the last rank publishes in every round but the last one, and then dies.

    Waits of the lower half of the ranks may reach their spin limit at any poll. The other ranks' waits end
    only if the group is aborted. Rank 0 has two programs, which may both try to claim its header. At the
    end all ranks are aborted, some rank has recorded which rank it waited for, and no header has two
    records.
    """
    _check(ranks, rounds)
    dead = ranks - 1
    processes = []
    published: list[ProtocolStep] = []
    for rank, program in [(0, 0), (0, 1), *((rank, 0) for rank in range(1, dead))]:
        record = [f"record of rank {rank}"]
        recording = read(record, EMPTY)  # it was not written before
        recording += write(record, f"the wait of program {program}")
        recording += [Publish(f"abort of rank {peer}", 1) for peer in range(ranks)]
        give_up = [
            CompareAndSwap(f"abort of rank {rank}", 0, 0, otherwise=len(recording)),
            *recording,
        ]
        give_up = [CompareAndSwap(f"claim of rank {rank}", 0, 1, otherwise=len(give_up)), *give_up]
        only_after = None if rank < ranks // 2 else f"abort of rank {rank}"
        word = f"slot {program} of rank {rank}"
        steps: list[ProtocolStep] = []
        for number in range(1, rounds + 1):
            steps.append(Wait(word, number, giving_up=len(give_up), only_after=only_after))
            steps += give_up
        published += [Publish(word, number) for number in range(1, rounds)]
        processes.append(Process(f"rank {rank} program {program}", tuple(steps)))
    published.sort(key=lambda step: step.value if isinstance(step, Publish) else 0)
    processes.append(Process(f"rank {dead}", tuple(published)))

    def at_end(values: Mapping[str, int | str]) -> str:
        if not all(values[f"abort of rank {rank}"] for rank in range(ranks)):
            return "at the end a rank is not aborted"
        if all(values[f"record of rank {rank}"] == EMPTY for rank in range(dead)):
            return "no rank has recorded which rank it waited for"
        return ""

    return Protocol("giving up", ranks, rounds, tuple(processes), at_end)


PATTERNS: Mapping[str, Callable[[int, int], Protocol]] = {
    "push": push,
    "push on streams": push_on_streams,
    "pull": pull,
    "push after pull": push_after_pull,
    "two-shot": two_shot,
    "flag barrier": flag_barrier,
    "giving up": giving_up,
}


def explore_pattern(name: str, ranks: int, rounds: int) -> Exploration:
    """Explore the pattern ``name``. All patterns take about 25 s for 4 ranks and 3 rounds."""
    # without reduction it would take minutes if a rank has several processes
    protocol = PATTERNS[name](ranks, rounds)
    return explore(protocol, reduced=len(protocol.processes) > ranks)

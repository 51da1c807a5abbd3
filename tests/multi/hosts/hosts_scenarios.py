"""The scenarios of hosts_ranks.py: every function runs on all ranks of a group and gives its problems back.

Payloads are such that sums and products are exact in every dtype, so the order of a reduction, which
depends on the hosts, does not matter; ``rounding`` is about the order.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cases import support_table
from interlace.runtime.core.call import Call
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.errors import PlaceUnavailableError
from interlace.runtime.core.memory import bytes_of
from interlace.runtime.numerics import reductions
from interlace.runtime.places.hosts.partials import Partial
from interlace.runtime.places.hosts.place import HostsPlace
from multi.hosts.agreeing_scenarios import fitting, leaving_nothing, refused
from multi.hosts.unfused_scenarios import attending, norming, routing, scaling

# ranks of the default group, of which 0, 1, 2 are on one host and 3, 4 on another
GROUPS = {
    "two and two, interleaved": [3, 0, 4, 1],
    "three and one": [0, 1, 2, 3],
    "one and two": [4, 2, 1],
    "one host": [2, 0],
}
SIZES = (0, 1, 257, 70_001)


@functools.cache
def _line() -> torch.Tensor:
    """Random numbers, made once; every payload is a stretch of them that begins elsewhere."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 6, (1 << 20,), generator=generator, dtype=torch.uint8)


def payload(rank: int, case: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of 0.5, 1 and 2 and their negatives (1 and 2 for whole numbers), per rank and case."""
    first = (
        int.from_bytes(hashlib.sha256(f"{rank} {case}".encode()).digest()[:4], "little") % 100_003
    )
    picks = _line()[first : first + numel].int()
    assert len(picks) == numel
    if dtype == torch.bool:
        return picks < 4
    if dtype.is_floating_point or dtype.is_complex:
        unsigned = dtype == torch.float8_e8m0fnu
        values = [0.5, 1.0, 2.0, 1.0, 2.0, 0.5] if unsigned else [-2.0, -1.0, -0.5, 0.5, 1.0, 2.0]
        real = torch.tensor(values)[picks]
        if dtype.is_complex:
            whole = torch.complex(real, real.flip(0))
            if dtype != torch.complex32:
                return whole.to(dtype)
            halves = torch.view_as_real(whole).half()  # torch warns of casts to complex32
            return torch.view_as_complex(halves)
        return real.to(dtype)
    return (picks % 2 + 1).to(torch.int64).to(dtype)


def poisoned(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like).view(-1).view(torch.uint8).fill_(0x5A).view(like.dtype)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(bytes_of(found), bytes_of(expected))


def run(group: Communicator, op: str, *arguments: Any, **terms: Any) -> None:
    """One op of the engine; ``terms`` are what the ranks have to agree on."""
    call = Call(op, tuple(terms.items()))
    group.run(call.op, lambda: getattr(group.engine, op)(call, *arguments), async_op=False)


def _check(
    wrong: list[str], case: str, op: str, found: torch.Tensor, expected: torch.Tensor
) -> None:
    if not same(found, expected):
        wrong.append(f"{op} {case}")


# each dtype and each size with some of the others: what is moved is bytes
MOVED = {
    torch.float32: (257, 70_001),
    torch.int8: (1,),
    torch.complex64: (0, 257),
    torch.bool: (70_001,),
}


def moving(group: Communicator) -> list[str]:
    """Everything that only moves bytes."""
    wrong = []
    rank, world_size = group.rank, group.world_size
    everyone = range(world_size)
    for dtype, sizes in MOVED.items():
        for n in sizes:
            case = f"{dtype} {n}"

            check = functools.partial(_check, wrong, f"{case} rank {rank}")
            # lengths differ between ranks: n, 2 n, 3 n ...
            mine = payload(rank, case, n * (rank + 1), dtype)
            expected = [payload(r, case, n * (r + 1), dtype) for r in everyone]
            outputs = [poisoned(each) for each in expected]
            run(group, "all_gather", outputs, mine)
            for r in everyone:
                check("all_gather", outputs[r], expected[r])
            outputs = [poisoned(each) for each in expected]
            outputs[rank].copy_(mine)
            run(group, "all_gather", outputs, outputs[rank])
            for r in everyone:
                check("all_gather in place", outputs[r], expected[r])
            for root in everyone:
                into = [poisoned(each) for each in expected] if rank == root else None
                run(group, "gather", into, mine, root)
                for r in everyone if into is not None else ():
                    check(f"gather {root}", into[r], expected[r])
                parts = [payload(r, case + "s", n * (r + 1), dtype) for r in everyone]
                output = poisoned(parts[rank])
                given = parts if rank == root else None
                run(group, "scatter", output, given, root)
                check(f"scatter {root}", output, parts[rank])
                tensor = payload(rank, case + "b", n, dtype)
                run(group, "broadcast", tensor, root)
                check(f"broadcast {root}", tensor, payload(root, case + "b", n, dtype))
            inputs = [payload(rank, f"{case} to {r}", n * (r + 1) + rank, dtype) for r in everyone]
            expected = [
                payload(r, f"{case} to {rank}", n * (rank + 1) + r, dtype) for r in everyone
            ]
            outputs = [poisoned(each) for each in expected]
            run(group, "all_to_all", outputs, inputs)
            for r in everyone:
                check("all_to_all", outputs[r], expected[r])
    return wrong


# what is widened on the way, what wraps, what is neither
LONG = (
    ("sum", torch.bfloat16),
    ("avg", torch.bfloat16),
    ("product", torch.int64),
    ("max", torch.bool),
    ("avg", torch.uint8),
    ("avg", torch.float8_e5m2),
    ("sum", torch.complex32),
)


def reducing(group: Communicator) -> list[str]:
    """Every dtype and op; of some, sizes on both sides of what counts as small, and the ops like it."""
    wrong = []
    rank, world_size = group.rank, group.world_size
    everyone = range(world_size)
    for dtype in reductions.DTYPES:
        for op in reductions.REDUCE_OPS:
            if not support_table.defined(op, dtype):
                continue
            long = (op, dtype) in LONG
            for n in SIZES if long else (257,):
                case = f"{dtype} {op} {n}"
                parts = [payload(r, case, n, dtype) for r in everyone]
                expected = torch.empty_like(parts[0])
                reductions.fold(op, parts, expected)
                tensor = parts[rank].clone()
                run(group, "all_reduce", tensor, op)
                if not same(tensor, expected):
                    wrong.append(f"all_reduce {case}")
                if not long:
                    continue
                root = n % world_size
                tensor = parts[rank].clone()
                run(group, "reduce_to", tensor, root, op)
                if not same(tensor, expected if rank == root else parts[rank]):
                    wrong.append(f"reduce {case}")
                # parts of different lengths
                inputs = [
                    payload(rank, f"{case} for {r}", n // world_size + r, dtype) for r in everyone
                ]
                mine = [
                    payload(r, f"{case} for {rank}", n // world_size + rank, dtype)
                    for r in everyone
                ]
                expected = torch.empty_like(mine[0])
                reductions.fold(op, mine, expected)
                output = poisoned(expected)
                run(group, "reduce_scatter", output, inputs, op)
                if not same(output, expected):
                    wrong.append(f"reduce_scatter {case}")
                own = inputs[rank]
                run(group, "reduce_scatter", own, inputs, op)
                if not same(own, expected):
                    wrong.append(f"reduce_scatter in place {case}")
    return wrong


def in_two_steps(partial: Partial, by_host: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """The reduction of tensors, given by host and rank, in the order that ``HostsEngine`` promises."""
    steps = []
    for parts in by_host:
        wide = [partial.widened(part) for part in parts]
        steps.append(torch.empty_like(wide[0]))
        reductions.fold(partial.step, wide, steps[-1])
    output = torch.empty_like(by_host[0][0])
    partial.finish(steps, output, sum(map(len, by_host)))
    return output


def rounding(group: Communicator) -> list[str]:
    """Numbers that must be rounded: the bits that the promised order gives, on all ranks, every time.

    A half is rounded once, at the end, so it is as close as a half can be.
    """
    assert isinstance(group.place, HostsPlace)
    wrong = []
    everyone = range(group.world_size)
    for dtype, unit in ((torch.float32, 2**-24), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)):
        for n in (999, 100_003):
            parts = [
                torch.randn(n, generator=torch.Generator().manual_seed(r)).to(dtype)
                for r in everyone
            ]
            by_host = [[parts[rank] for rank in ranks] for ranks in group.place.map.hosts]
            expected = in_two_steps(Partial.of("sum", dtype), by_host)
            for attempt in range(2):
                tensor = parts[group.rank].clone()
                run(group, "all_reduce", tensor, "sum")
                if not same(tensor, expected):
                    wrong.append(f"{dtype} {n} {attempt}")
            exact = torch.stack([part.double() for part in parts])
            error = (expected.double() - exact.sum(0)).abs()
            # one rounding of the result, and those of fp32 on the way
            bound = unit * exact.sum(0).abs() * 1.01 + 1e-6 * exact.abs().sum(0)
            if (error > bound).any():
                wrong.append(f"{dtype} {n}: off by {error.max():g}")
    return wrong


def agreeing(group: Communicator) -> list[str]:
    """Messages of up to 64 KiB arrive as they are; so do parts."""
    wrong = []
    for length in (0, 1, 1000, 5000, 65_536):
        mine = bytes([group.rank + 1]) * (length if group.rank != 1 else length // 2)
        answers = group.place.exchange(mine, "a message")
        for rank, answer in enumerate(answers):
            if answer != bytes([rank + 1]) * (length if rank != 1 else length // 2):
                wrong.append(f"exchange of {length} from {rank}: {len(answer)} bytes")
    call = Call("parts", part=("of", group.rank))
    found: list[Any] = []
    group.run(call.op, lambda: found.extend(group.engine.agree(call)), async_op=False)
    if found != [("of", rank) for rank in range(group.world_size)]:
        wrong.append(f"parts: {found}")
    run(group, "barrier")
    return wrong


def mismatching(group: Communicator) -> list[str]:
    """The same error on every rank, no tensor touched, and the group goes on."""
    last = group.world_size - 1
    tensor = torch.full((5,), float(group.rank))
    texts = []
    for name, kind in (("length of tensor", ValueError), ("dtype of tensor", TypeError)):
        value = 6 if group.rank == last else 5
        try:
            run(group, "all_reduce", tensor, "sum", **{name: value})
        except kind as error:
            texts.append(str(error))
    run(group, "all_reduce", tensor, "sum")
    total = float(sum(range(group.world_size)))
    if not torch.equal(tensor, torch.full((5,), total)):
        texts.append(f"afterwards {tensor}")
    return texts


def asynchronous(group: Communicator) -> list[str]:
    """Works finish in the background, in order."""
    works, tensors = [], []
    for number in range(10):
        tensor = torch.full((1 << (2 * number % 18),), group.rank + number, dtype=torch.int64)
        call = Call("all_reduce", (("number", number),))
        start = functools.partial(_reduced, group, call=call, tensor=tensor)
        works.append(group.run(call.op, start, [tensor], async_op=True))
        tensors.append(tensor)
    for work in reversed(works):
        assert work is not None
        work.wait()
    ranks = sum(range(group.world_size))
    return [
        f"async {number}"
        for number, tensor in enumerate(tensors)
        if not (tensor == ranks + group.world_size * number).all()
    ]


def _reduced(group: Communicator, *, call: Call, tensor: torch.Tensor) -> None:
    group.engine.all_reduce(call, tensor, "sum")


def sending(group: Communicator) -> list[str]:
    """Everyone to everyone, itself included, before anything is received; tags out of order."""
    wrong = []
    rank, everyone = group.rank, list(range(group.world_size))
    if group.place.name == "shm":
        everyone.remove(rank)  # there a message to oneself does not come to the engine
    engine, call = group.engine, Call("send")
    sends = []
    for n in (0, 3, 50_000):
        for tag in (0, 7):
            for peer in everyone:
                tensor = payload(rank, f"{n} {tag} {peer}", n, torch.float32)
                sends.append(engine.send(call, tensor, peer, tag))
    for n in (0, 3, 50_000):
        for peer in reversed(everyone):
            for tag in (7, 0):
                expected = payload(peer, f"{n} {tag} {rank}", n, torch.float32)
                tensor = poisoned(expected)
                outcome = engine.recv(call, tensor, peer, tag).result(300)
                if not same(tensor, expected) or outcome.source is None or outcome.source() != peer:
                    wrong.append(f"recv {n} {tag} from {peer}")
    for send in sends:
        send.result(300)
    return wrong


def receiving_from_anybody(group: Communicator) -> list[str]:
    """One receiver takes two messages of each rank, in the order that each has sent them."""
    wrong = []
    engine, call = group.engine, Call("send")
    if group.rank:
        sends = [engine.send(call, torch.tensor([group.rank, number]), 0, 5) for number in range(2)]
        for send in sends:
            send.result(300)
        return []
    seen: dict[int, int] = {}
    for _ in range(2 * (group.world_size - 1)):
        tensor = torch.zeros(2, dtype=torch.int64)
        outcome = engine.recv(call, tensor, None, 5).result(300)
        assert outcome.source is not None
        source, number = tensor.tolist()
        if source != outcome.source() or seen.get(source, 0) != number:
            wrong.append(f"{tensor} from {outcome.source()}, seen {seen}")
        seen[source] = number + 1
    return wrong


def answering(group: Communicator) -> list[str]:
    """What follows on the end of a send, and of a receive, waits for the next message: near and far."""
    engine, call, x, peers = group.engine, Call("send"), torch.zeros(1), (1, group.world_size - 1)
    for peer in peers if group.rank == 0 else ():

        def answer(_: Any, peer: int = peer) -> None:
            engine.recv(call, x.clone(), peer, 6).result(60)
            follow = engine.recv(call, x.clone(), peer, 6).add_done_callback
            follow(lambda _: engine.send(call, x, peer, 6).result(60))

        engine.send(call, x, peer, 6).add_done_callback(answer)
    if group.rank in peers:
        engine.recv(call, x, 0, 6).result(60)
        for _ in range(2):
            engine.send(call, x, 0, 6).result(60)
        engine.recv(call, x, 0, 6).result(60)
    return []


def receiving_what_does_not_fit(group: Communicator) -> list[str]:
    """Receiver and sender are told, who hears of it with its next messages, and the next one arrives."""
    engine, call, last = group.engine, Call("send"), group.world_size - 1
    texts, tensor = [], torch.full((3,), -1.0)
    source = last if group.rank == 0 else 0

    def finish(end: Any) -> None:
        try:
            end.result(300)
        except (TypeError, ValueError) as error:
            texts.append(f"{type(error).__name__}: {error}")

    if (
        group.rank == 0
    ):  # it hears of a refusal with a later send already, or not before it receives
        for each in torch.arange(4.0), torch.arange(4), torch.arange(3.0):
            finish(engine.send(call, each, last, 0))
    for _ in range(3 if group.rank in (0, last) else 0):
        finish(engine.recv(call, tensor, source, 0))
    texts.append(str(tensor.tolist()))
    if group.rank == last:
        for _ in range(3):
            engine.send(call, tensor, 0, 0).result(300)
    return texts


def no_symmetric_memory(group: Communicator) -> str:
    try:
        group.place.allocate(8)
    except PlaceUnavailableError as error:
        return str(error)
    return "it was there"


ON_EACH_GROUP: tuple[Callable[[Communicator], Any], ...] = (
    moving,
    agreeing,
    sending,
    fitting,
    refused,
)
ON_THREE_HOSTS: tuple[Callable[[Communicator], Any], ...] = (
    moving,
    rounding,
    agreeing,
    fitting,
    refused,
)
ON_WORLD: tuple[Callable[[Communicator], Any], ...] = (
    moving,
    reducing,
    rounding,
    agreeing,
    mismatching,
    asynchronous,
    fitting,
    leaving_nothing,
    refused,
    sending,
    receiving_from_anybody,
    answering,
    receiving_what_does_not_fit,
    attending,
    routing,
    norming,
    scaling,
    no_symmetric_memory,
)

"""Scenarios of test_hosts.py: functions that run on all ranks of a group, on two hosts, and assert there.

A process starts five ranks in two network namespaces (``two_networks.py``). If the kernel refuses
namespaces, ranks get names of hosts instead, and the output has the reason.

Sums and products are of whole numbers, so the order of a reduction, which depends on the hosts, does not
matter; ``rounding`` is about the order.
"""

import atexit
import contextlib
import gc
import itertools
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import interlace
from interlace.groups import groups
from interlace.runtime.core.call import Call
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.errors import InterlaceError, PlaceUnavailableError
from interlace.runtime.numerics import reductions
from interlace.runtime.places.connect import connect_place
from interlace.runtime.places.hosts import host_map, pieces
from interlace.runtime.places.hosts.engine import Partial
from interlace.runtime.places.hosts.place import HostsPlace
from multi.hosts.two_networks import ADDRESSES, die_with_parent, enter, two_networks
from multi.shm.host_ops import MOVED_PARTS, MOVED_WHOLE, REDUCED, check, check_lengths, data, same
from ops.contracts import last_has_none
from ops.test_block_scaled import every_op as on_every_rank
from ops.test_contract import BY_NAME, cells, check_values
from ranks import SECRET, of_rank_0

Tensor = torch.Tensor


def call_of(group: Communicator, call: Call, *arguments: Any) -> None:
    """One op of the engine."""
    group.run(call.op, lambda: getattr(group.engine, call.op)(call, *arguments), async_op=False)


def run(group: Communicator, op: str, *arguments: Any, **terms: Any) -> None:
    """One op of the engine; ``terms`` are what the ranks have to agree on."""
    call_of(group, Call(op, tuple(terms.items())), *arguments)


# -- ops of the library ----------------------------------------------------------------------------


def every_op(group: Communicator) -> None:
    """Check the values of the contract matrix on three ranks, also with a rank without rows."""
    for op in cells("values"):
        check_values(op, group=group)
        if "algorithm" in BY_NAME[op].kinds:
            check_values(op, group=group, algorithm="unfused")
    for op in cells("empty_on_one"):
        check_values(op, group=group, rows=last_has_none)


def gradients(group: Communicator) -> None:
    """Compare gradients of a scattered sum with a norm; a backward gathers in the default group."""
    torch.manual_seed(0)
    rows, gain = torch.randn(group.world_size, 7, 5), torch.rand(5)
    own, whole = rows[group.rank].clone().requires_grad_(), rows.sum(0).requires_grad_()
    norm = interlace.RMSNorm(gain, 1e-6)
    made, _ = interlace.reduce_scatter_norm(own, norm=norm, gather_normed=True)
    made.square().sum().backward()
    right = group.world_size * F.rms_norm(whole, (5,), gain, 1e-6).square().sum()
    right.backward()
    torch.testing.assert_close(own.grad, whole.grad, atol=1e-5, rtol=0)


def block_scaled(group: Communicator) -> None:
    """Products and refusals of block-scaled operands are as on one host."""
    assert group.world_size == interlace.get_world_size()
    on_every_rank(("nvfp4",))


def no_symmetric_memory(group: Communicator) -> None:
    text = rf"^rank {group.rank}: symmetric memory.* ranks \[3, 4\]"
    with pytest.raises(PlaceUnavailableError, match=text):
        group.place.allocate(8)


# -- collectives of the engine ---------------------------------------------------------------------


def moving(group: Communicator) -> None:
    """Run all ops that only move bytes, from every root, and with parts of other lengths on each rank."""
    for dtype, nbytes in ((torch.float32, 1028), (torch.uint8, 0), (torch.int64, 280_000)):
        for op, key in itertools.product((*MOVED_WHOLE, *MOVED_PARTS), range(group.world_size)):
            check(group.engine, op, nbytes, key, dtype)
    check_lengths(group.engine, [0, 1, 70_000])


SUMS = (
    ("sum", torch.bfloat16),
    ("avg", torch.bfloat16),
    ("product", torch.int64),
    ("max", torch.int16),
    ("avg", torch.uint8),
    ("avg", torch.float8_e5m2),
)
"""What is widened on the way, what wraps, what is neither."""


def reducing(group: Communicator) -> None:
    """Sizes are on both sides of the limit of small messages. ``test_two_steps`` has all ops and dtypes."""
    for (reduction, dtype), n, op in itertools.product(SUMS, (0, 1, 257, 70_001), REDUCED):
        key = (n + 1) % group.world_size
        check(group.engine, op, n * dtype.itemsize, key, dtype, reduction)


def in_two_steps(partial: Partial, by_host: Sequence[Sequence[Tensor]]) -> Tensor:
    """Reduce tensors, which are given by host and rank, in the order that ``HostsEngine`` promises."""
    steps = []
    for parts in by_host:
        wide = [partial.widened(part) for part in parts]
        steps.append(torch.empty_like(wide[0]))
        reductions.fold(partial.step, wide, steps[-1])
    output = torch.empty_like(by_host[0][0])
    partial.finish(steps, output, sum(map(len, by_host)))
    return output


def rounding(group: Communicator) -> None:
    """Numbers that must be rounded have the bits of the promised order, on all ranks, every time.

    A half is rounded once, at the end, so it is as close as a half can be.
    """
    assert isinstance(group.place, HostsPlace)
    units = ((torch.float32, 2**-24), (torch.bfloat16, 2**-8), (torch.float16, 2**-11))
    for (dtype, unit), n in itertools.product(units, (999, 100_003)):
        generators = [torch.Generator().manual_seed(r) for r in range(group.world_size)]
        parts = [torch.randn(n, generator=each).to(dtype) for each in generators]
        by_host = [[parts[rank] for rank in ranks] for ranks in group.place.map.hosts]
        expected = in_two_steps(Partial.of("sum", dtype), by_host)
        for _ in range(2):
            tensor = parts[group.rank].clone()
            run(group, "all_reduce", tensor, "sum")
            assert same(tensor, expected), f"{dtype} {n}"
        exact = torch.stack([part.double() for part in parts])
        error = (expected.double() - exact.sum(0)).abs()
        # one rounding of the result, and roundings of fp32 on the way
        bound = unit * exact.sum(0).abs() * 1.01 + 1e-6 * exact.abs().sum(0)
        assert (error <= bound).all(), f"{dtype} {n}: off by {error.max():g}"


# -- agreement -------------------------------------------------------------------------------------


def agreeing(group: Communicator) -> None:
    """Messages of up to 64 KiB arrive unchanged; so do parts."""
    for length in (0, 1, 1000, 5000, 65_536):
        expected = [
            bytes([rank + 1]) * (length // 2 if rank == 1 else length)
            for rank in range(group.world_size)
        ]
        assert group.place.exchange(expected[group.rank], "a message") == expected
    call = Call("parts", part=("of", group.rank))
    found: list[Any] = []
    group.run(call.op, lambda: found.extend(group.engine.agree(call)), async_op=False)
    assert found == [("of", rank) for rank in range(group.world_size)]
    run(group, "barrier")


@contextlib.contextmanager
def small_pieces(nbytes: int) -> Iterator[None]:
    """Ops of more bytes than these are done in pieces of this size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "MIDDLE_BYTES", nbytes)
        patch.setattr(pieces, "PIECE_BYTES", nbytes)
        yield


def fitting(group: Communicator) -> None:
    """Calls that are equal, and calls that differ and fit, have the same results.

    They use every speed: with the call, with frames, and in pieces (``runtime/places/hosts/pieces.py``).
    """
    ops = (*REDUCED, *MOVED_WHOLE, *MOVED_PARTS)
    for count, nbytes, alike in itertools.product((3, 30_001), (1 << 14, 4 << 20), (True, False)):
        with small_pieces(nbytes):
            for op, key in itertools.product(
                ops, (0, 1, group.world_size - 1)
            ):  # roots; lists or not
                part = 0 if alike else group.rank
                check(group.engine, op, 4 * count, key, torch.float32, part=part)


def leaving_nothing(group: Communicator) -> None:
    """Reference counts free each op. The garbage collector would free the caller's tensors much later."""
    gc.collect()
    gc.disable()
    try:
        with small_pieces(1 << 14):
            for op in (*REDUCED, *MOVED_WHOLE, *MOVED_PARTS):
                check(group.engine, op, 4 * 30_001, 1, torch.float32)
        assert not [each for each in gc.get_objects() if type(each) is pieces.OpPiece]
    finally:
        gc.enable()


def refused(group: Communicator) -> None:
    """One rank calls with another size: all ranks raise, no tensor changes, and all continue.

    Before that all sizes are equal, so that data leaves before a rank refuses it.
    """
    rank, world_size = group.rank, group.world_size

    def call(op: str, count: int, tensors: Sequence[Tensor]) -> None:
        tensor, parts = tensors[0], tensors[1:] or None
        arguments: dict[str, tuple[Any, ...]] = {
            "all_reduce": (tensor, "sum"),
            "broadcast": (tensor, 0),
            "all_to_all": (tensor, tensor.clone()),
            "gather": (parts, tensor, 0),
            "scatter": (tensor, parts, 0),
        }
        terms = (("size", count),)
        call_of(group, Call(op, terms, match=lambda parts: None, equal_fits=True), *arguments[op])

    def made(op: str, count: int) -> list[Tensor]:
        of_root = world_size if op in ("gather", "scatter") and rank == 0 else 0
        return [torch.full((count * world_size,), float(rank)) for _ in range(1 + of_root)]

    sizes = itertools.permutations((3, 30_001, 60_001), 2)  # with the call, with frames, in pieces
    for odd, (of_odd, of_others) in itertools.product((0, world_size - 1), sizes):
        for op in ("all_reduce", "broadcast", "all_to_all", "gather", "scatter"):
            case = f"{op}: rank {odd} with {of_odd}, others with {of_others}"
            with small_pieces(200_000 * world_size):
                call(op, of_others, made(op, of_others))
                count = of_odd if rank == odd else of_others
                tensors = made(op, count)
                shown = (of_odd, of_others) if odd == 0 else (of_others, of_odd)
                said = f"{op}: size differs between ranks: {shown[0]} on rank 0, {shown[1]} on rank"
                with pytest.raises(ValueError, match=f"^{said} {odd or 1}"):
                    call(op, count, tensors)
            assert all((tensor == rank).all() for tensor in tensors), case
        ranks = torch.tensor([float(rank)])
        run(group, "all_reduce", ranks, "sum")
        assert ranks.item() == sum(range(world_size)), case


# -- messages --------------------------------------------------------------------------------------


def sending(group: Communicator) -> None:
    """Every rank sends to every rank, itself included, before any receive; tags are out of order."""
    rank, everyone = group.rank, list(range(group.world_size))
    if group.place.name == "shm":
        everyone.remove(rank)  # there a message to oneself does not come to the engine
    engine, call = group.engine, Call("send")
    sends = [
        engine.send(call, data(rank, n, 10 * tag + peer), peer, tag)
        for n, tag, peer in itertools.product((0, 3, 200_000), (0, 7), everyone)
    ]
    for n, peer, tag in itertools.product((0, 3, 200_000), reversed(everyone), (7, 0)):
        expected = data(peer, n, 10 * tag + rank)
        tensor = torch.full_like(expected, 9)
        outcome = engine.recv(call, tensor, peer, tag).result(300)
        assert same(tensor, expected), f"recv {n} {tag} from {peer}"
        assert outcome.source is not None and outcome.source() == peer
    for send in sends:
        send.result(300)


def answering(group: Communicator) -> None:
    """The callback of a send, and of a receive, waits for the next message, near and far."""
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


# -- failing: each in a new group ------------------------------------------------------------------


def ended(group: Communicator) -> str:
    """Return the error of this rank's first failing barrier; the next barrier has the same reason."""
    texts: list[str] = []
    while len(texts) < 2:
        try:
            run(group, "barrier")
        except InterlaceError as error:
            texts.append(f"{type(error).__name__}: {error}")
    assert texts[0].startswith(texts[1])  # the first may have a note on numbers
    return texts[0]


def aborting(group: Communicator) -> None:
    if group.rank == 0:
        run(group, "barrier")
        group.place.abort("enough")
    assert ended(group) == "AbortedError: rank 0 aborted the group: enough"


def leaving(group: Communicator) -> None:
    """Rank 0 closes its group while the others still need it."""
    run(group, "barrier")
    if group.rank == 0:
        group.close()
    else:
        assert "rank 0 has left the group" in ended(group)


def dying(group: Communicator) -> None:
    run(group, "barrier")
    if group.rank == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    text = ended(group)
    assert "rank 4 (pid " in text and "died" in text


# -- the ranks -------------------------------------------------------------------------------------

HOSTS = (0, 0, 0, 1, 1)
"""The host of each rank."""

RANKS, DIES = range(len(HOSTS)), 4
GROUPS: dict[str, tuple[Sequence[Callable[[Any], None]], Sequence[int]]] = {
    "five ranks": ((gradients, moving, reducing, rounding, agreeing, leaving_nothing, refused, sending,
                    answering, no_symmetric_memory, block_scaled), RANKS),
    "two and two, interleaved": ((agreeing, sending, fitting), [3, 0, 4, 1]),
    "three and one": ((agreeing, sending), [0, 1, 2, 3]),
    "one and two": ((every_op, agreeing), [4, 2, 1]),
    "one host": ((moving, agreeing, sending), [2, 0]),
    # the order of a sum of two cannot be told, so rank 1 says here that it is on a third host
    "three hosts": ((moving, rounding, agreeing), RANKS),
}  # fmt: skip


def main(rank: int, world_size: int, folder: str, end: Any) -> None:
    """Make the hosts, run :func:`rank_main` on every rank, and report the ends and errors."""
    holder, problem = 0, ""
    try:
        holder = two_networks()
    except OSError as error:
        problem = f"{type(error).__name__}: {error}"
    die_with_parent()
    os.environ.update(SECRET)
    gc.freeze()  # no rank needs to collect, and so copy, the shared objects at its end
    children = []
    for rank, host in enumerate(HOSTS):
        child = os.fork()
        if child == 0:
            die_with_parent()
            if holder and host:
                enter(holder)
            try:
                rank_main(rank, not problem, Path(folder))
            except BaseException:
                Path(folder, f"failed {rank}").write_text(traceback.format_exc())
                os._exit(1)
            atexit._run_exitfuncs()  # with the default group still open
            os._exit(0)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if holder:
        os.kill(holder, signal.SIGKILL)
    hosts = [Path(folder, f"host {rank}").read_text() for rank in RANKS]
    end.send((problem, hosts, codes, [path.read_text() for path in Path(folder).glob("failed *")]))


def rank_main(rank: int, separated: bool, folder: Path) -> None:
    torch.set_num_threads(1)
    (folder / f"host {rank}").write_text(host_map.this_host())
    store = of_rank_0(rank, folder, ADDRESSES[0] if separated else "127.0.0.1")

    def connected(name: str, host: str | None = None) -> Communicator:
        host = host or (None if separated else f"host {HOSTS[rank]}")
        place = connect_place(store, rank, len(RANKS), timeout=300.0, name=name, host=host)
        return Communicator(place, RANKS)

    def play(scenario: Callable[[Any], None], group: Any, name: str) -> None:
        try:
            scenario(group)
        except BaseException as error:
            raise AssertionError(f"rank {rank}: {scenario.__name__} of {name}") from error

    # by the default group a backward finds its group
    world = groups.install(connected("world").place)
    assert str(world.place.map) == "host 0: ranks [0, 1, 2]; host 1: ranks [3, 4]"
    three_hosts = connected("three hosts", "a third host" if rank == 1 else None)
    for name, (scenarios, ranks) in GROUPS.items():
        group = {"five ranks": world, "three hosts": three_hosts}.get(name) or world.split(ranks)
        if group is not None:
            for scenario in scenarios:
                play(scenario, group, name)
        if group is not None and group is not world:
            group.close()
        world.barrier()
    for scenario in (aborting, leaving, dying):  # each in a new group of all ranks
        group = connected(scenario.__name__)
        play(scenario, group, "five ranks")
        group.close()
    # the store's server must outlive its clients
    store.add("ended", 1)
    while rank == 0 and store.add("ended", 0) < DIES:
        time.sleep(0.01)
